"""Writes the source of a test that feeds the record of a dead letter to the app's handler.

The test fails as long as the handler fails on the record. The source is returned as text: this module
writes no file and runs nothing.
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from kconsume._handlers.annotations import text_of
from kconsume._handlers.registration import Registration
from kconsume.app import App
from kconsume.backends import SqliteStore
from kconsume.backends.capabilities import capabilities_of
from kconsume.errors import ConfigurationError
from kconsume.failures.letter_headers import Letter

_LINE = 80
_LONGEST = 200
_ROLLBACK = "rollback"
"""The value of `feed(tx=)` for a transaction of the store that is rolled back."""

_SCHEMA = """
    select sql from sqlite_master
    where sql is not null and tbl_name != ? and tbl_name not glob 'kconsume_*' and tbl_name not glob 'sqlite_*'
      and tbl_name not in (select name from pragma_table_list where type = 'shadow')
    order by type = 'trigger', type = 'view', type = 'index', rowid
"""

_TEST = """\
# {place} failed in group {group}: {error}
# Written by: kconsume dlq show {name} {written} --as-test
# The test fails until {handler} handles the record. It has the record's value, key and headers, not its time,
# partition and offset.

{imports}from kconsume.testing import feed
from {module} import {attribute}

VALUE = {value}
KEY = {key}
HEADERS: list[tuple[str, bytes]] = {headers}


def test_{function}_is_handled() -> None:
{body}
    assert fed.outcome == "handled", fed
"""


def handler_of_letter(app: App, letter: Letter) -> Registration:
    """The handler that failed on the letter's record."""
    topic, group = letter.partition.topic, letter.group
    found = [r for r in app.registrations if r.wanted.takes(topic)]
    for registration in found:
        if registration.group == group:
            return registration
    others = " and ".join(f"{r.name} of group {r.group}" for r in found)
    raise ConfigurationError(
        f"the app has no handler for topic {topic!r} in group {group!r}, in which the record failed"
        f"{f', only {others}' if others else ''}: name the app that has this handler"
    )


def file_name(letter: Letter) -> str:
    return f"test_{_identifier(letter)}.py"


def source_of(app: App, name: str, letter: Letter, written: str) -> str:
    """The source of the test.

    Args:
        name: the app's name, as in shop:app.
        written: the place of the letter, as the user wrote it.
    """
    handler = handler_of_letter(app, letter)
    module, _, attribute = name.partition(":")
    return _TEST.format(
        place=_one_line(f"{letter.partition}@{letter.offset}"),
        group=_one_line(letter.group),
        error=_one_line(f"{letter.exception}: {letter.message}"),
        name=name,
        written=written,
        handler=handler.name,
        imports="import sqlite3\nfrom contextlib import closing\n\n" if _is_sqlite(handler) else "",
        module=module,
        attribute="app" if attribute == "app" else f"{attribute} as app",
        value=_literal(letter.value),
        key=_literal(letter.key),
        headers=_headers(letter),
        function=_identifier(letter),
        body=_body(app, handler, letter),
    )


def _body(app: App, handler: Registration, letter: Letter) -> str:
    several = sum(r.wanted.takes(letter.partition.topic) for r in app.registrations) > 1
    which = f", group={letter.group!r}" if several else ""
    call = f"feed(app, {letter.partition.topic!r}, VALUE, key=KEY, headers=HEADERS{which}"
    about = _about_resources(handler)
    if handler.binding.transaction is None:
        return _lines(4, *about, f"fed = {call})")
    if not _is_sqlite(handler):
        return _lines(4, *about, *_about_transaction(handler), f"fed = {call}, tx={_ROLLBACK!r})")
    # An async handler runs on another thread, with its event loop.
    thread = ", check_same_thread=False" if handler.binding.is_async else ""
    return "\n".join(
        [
            _lines(4, f'with closing(sqlite3.connect(":memory:"{thread})) as tx:'),
            _lines(8, *_tables(handler), *about, f"fed = {call}, tx=tx)"),
        ]
    )


def _tables(handler: Registration) -> list[str]:
    """Statements that create the tables of the app's own SQLite file, without rows."""
    letter = handler.policy.dead_letter
    ours = None if letter is None else letter.table
    statements = _schema_of(handler.store.path, ours) if isinstance(handler.store, SqliteStore) else []
    if not statements:
        return [f"# The database is empty: make the tables here that {handler.name} uses."]
    found = [f"tx.execute({statement!r})" for statement in statements]
    return [f"# The tables of {handler.store.address} as they were, without their rows.", *found]


def _schema_of(path: Path, ours: str | None) -> list[str]:
    """The statements that create the user's tables of an SQLite file. Empty if the file cannot be read.

    Args:
        ours: the table of dead letters, which is left out.
    """
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=rw", timeout=1.0, uri=True)) as connection:
            return [row[0] for row in connection.execute(_SCHEMA, (ours or "",))]
    except sqlite3.Error:
        return []


def _is_sqlite(handler: Registration) -> bool:
    return handler.binding.transaction is sqlite3.Connection


def _about_transaction(handler: Registration) -> list[str]:
    wanted = handler.binding.transaction
    lines = [
        f"# {handler.name} takes a transaction: give tx= an open {text_of(wanted)} to a database for tests, with the",
        f"# tables that it uses. It is never committed. tx={_ROLLBACK!r} uses the app's own store, and rolls back.",
    ]
    if wanted in (capabilities_of(handler.store).async_connection_types or ()):
        lines.append(
            "# An async connection belongs to an event loop: make it there, and call afeed() instead of feed()."
        )
    return lines


def _about_resources(handler: Registration) -> list[str]:
    hints = ", ".join(map(text_of, handler.binding.resources.values()))
    if not hints:
        return []
    return [f"# {handler.name} also gets {hints}, built as in a run; resources={{...}} replaces them."]


def _lines(indent: int, *lines: str) -> str:
    return "\n".join(" " * indent + line for line in lines)


def _identifier(letter: Letter) -> str:
    topic = re.sub(r"\W", "_", letter.partition.topic, flags=re.ASCII)
    return f"{topic}_{letter.partition.number}_{letter.offset}"


def _headers(letter: Letter) -> str:
    pairs = "".join(f"    ({name!r}, {value!r}),\n" for name, value in letter.headers)
    return f"[\n{pairs}]" if pairs else "[]"


def _literal(data: bytes | None) -> str:
    if data is None or len(data) <= _LINE:
        return repr(data)
    pieces = "".join(f"    {data[at : at + _LINE]!r}\n" for at in range(0, len(data), _LINE))
    return f"(\n{pieces})"


def _one_line(text: str) -> str:
    """The text in one line, for a comment."""
    line = "".join(char if char.isprintable() else " " for char in text)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"
