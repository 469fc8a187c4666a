"""Sending letters of a table back: rows of the outbox, in the transaction that marks the letters.

So a letter is marked if and only if it leaves. Who reads the outbox sends it (`runtime/relay.py`); nothing here talks
to Kafka. Beside the stores and not in them, as `letter_reading.py`. PostgreSQL is asked by
`postgres_letter_sending.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, cast

from kconsume.backends.abc import OffsetStore
from kconsume.backends.letter_reading import KeptLetter, paged_of, select_rows
from kconsume.backends.letter_table import add_sent_back, mark_sent_back, quoted
from kconsume.backends.sqlite import SqliteStore
from kconsume.failures.letters import Letter
from kconsume.output import Outgoing

Addressed: TypeAlias = Callable[[Letter], Outgoing]
"""Makes a letter the record that is sent back."""


class LetterSender(Protocol):
    """A table of dead letters that are sent back."""

    def prepare(self) -> None:
        """Add to a table of an earlier version what it needs."""
        ...

    def send_back(self, rows: Sequence[int], addressed: Addressed) -> int:
        """All of these, or none; how many. Those that another has sent back meanwhile are left out."""
        ...

    def waiting(self, topics: Collection[str]) -> int:
        """How many records to these topics are in the outbox, and not confirmed."""
        ...

    def let_go(self, owner: str) -> None:
        """Let others send what is in the outbox at once, and not when the lease of this owner has run out."""
        ...


def sender_in(store: OffsetStore, table: str) -> LetterSender:
    """Of a store that `letter_reading.letters_in` takes."""
    if isinstance(store, SqliteStore):
        return _SqliteSender(store, table)
    from kconsume.backends.postgres_letter_sending import PostgresSender

    return PostgresSender(store, table)


class _SqliteSender:
    def __init__(self, store: SqliteStore, table: str) -> None:
        self._store = store
        self._table = table

    def prepare(self) -> None:
        with self._store._changing() as connection:
            columns = connection.execute(f"pragma table_info({quoted(self._table)})").fetchall()
            if "sent_back" not in {column[1] for column in columns}:
                connection.execute(add_sent_back(self._table, "sqlite"))

    def send_back(self, rows: Sequence[int], addressed: Addressed) -> int:
        with self._store._changing() as connection:
            unsent = unsent_of(connection.execute(select_rows(self._table, rows)).fetchall())
            for each in unsent:
                connection.execute(*self._store.posting(addressed(each.letter)))
                connection.execute(mark_sent_back(self._table, "sqlite"), {"row": each.row})
        return len(unsent)

    def waiting(self, topics: Collection[str]) -> int:
        places = ", ".join("?" * len(topics))
        asked = f"select count(*) from kconsume_outbox where group_id = '' and target in ({places})"
        with self._store._door() as door:
            return cast(int, door.connection.execute(asked, list(topics)).fetchone()[0])

    def let_go(self, owner: str) -> None:
        with self._store._changing() as connection:
            connection.execute("update kconsume_schema set relay = null, relay_at = null where relay = ?", (owner,))


def unsent_of(rows: Iterable[Sequence[Any]]) -> list[KeptLetter]:
    return [kept for kept in map(paged_of, rows) if not kept.is_sent]
