"""The statements around a transaction, of a handler or of kconsume, and how several statements are sent as one text.

This module only makes the texts; `transaction` and `database` send them to the server.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kconsume.backends.postgres.statements import Statements

LOCKED_AT_MOST = "10s"
"""The longest time that a statement of kconsume waits for a locked row."""

BEGIN = "begin isolation level read committed, read write"
# `set local`, because behind a pooler no setting may outlive the transaction. If the process freezes between two
# statements, the server ends the backend after the idle limit.
BEGIN_OWN = f"""{BEGIN};
    set local lock_timeout = '{LOCKED_AT_MOST}';
    set local statement_timeout = '20s';
    set local idle_in_transaction_session_timeout = '10s'"""
BEGIN_SCHEMA = f"""{BEGIN};
    set local lock_timeout = '{LOCKED_AT_MOST}';
    set local idle_in_transaction_session_timeout = '10s'"""

_LOCK = """select pg_advisory_xact_lock_shared(%(lock)s), set_config('kconsume.tx', %(mark)s, true),
    set_config('idle_in_transaction_session_timeout', %(idle)s, true)"""
_LIMIT_LOCK_WAIT = f"""select set_config('kconsume.lock_timeout', current_setting('lock_timeout'), true),
    set_config('lock_timeout', '{LOCKED_AT_MOST}', true)"""
_BY_INDEX = "set_config('enable_seqscan', 'off', true)"


@dataclass(frozen=True, slots=True)
class TxStatements:
    """The statements of a handler's transaction, in the order of their execution."""

    begin: str
    lock: str
    check: str
    limit_lock_wait: str
    """Sent right before the offset moves, so that the limit applies to kconsume's statements, not to the handler's."""
    advance: str
    read_row: str
    post: str
    record_origins: str

    @classmethod
    def of(cls, statements: Statements, isolation: str) -> TxStatements:
        begin = f"begin isolation level {isolation}, read write"
        lock, check, limit_lock_wait = _LOCK, statements.check, _LIMIT_LOCK_WAIT
        if isolation == "serializable":
            # PostgreSQL scans a small table such as kconsume_offsets completely, unless a setting forbids it. Then each
            # transaction has read the rows of all partitions, and the transactions conflict. The handler's statements
            # run with the previous value of the setting.
            lock += f", set_config('kconsume.seqscan', current_setting('enable_seqscan'), true), {_BY_INDEX}"
            restored = "set_config('enable_seqscan', current_setting('kconsume.seqscan'), true)"
            check = check.replace("select next_offset", f"select next_offset, {restored}", 1)
            limit_lock_wait += f", {_BY_INDEX}"
        outbox = (statements.post, statements.record_origins)
        return cls(begin, lock, check, limit_lock_wait, statements.advance, statements.read_row, *outbox)


Statement: TypeAlias = tuple[str, Mapping[str, str | int | None] | None]
"""A text, and the values of its parameters."""


def one_text(statements: Iterable[Statement]) -> str:
    """All statements in one text, for the simple protocol: one message. After an error, the server does not execute the
    remaining statements."""
    texts = (
        text if values is None else text % {name: _literal(value) for name, value in values.items()}
        for text, values in statements
    )
    return ";".join(texts)


def _literal(value: str | int | None) -> str:
    if value is None:
        return "null"
    return str(value) if isinstance(value, int) else _quoted_text(value)


@functools.lru_cache(1024)
def _quoted_text(text: str) -> str:
    """The text as an SQL literal that has the same meaning under all settings and encodings of the session."""
    plain = text.replace("\\", "\\\\").replace("'", "''")
    return "E'" + "".join(c if c.isascii() else f"\\U{ord(c):08x}" for c in plain) + "'"
