"""Sends dead letters of a table back to Kafka, for `kconsume dlq redrive`.

A sender inserts outbox rows in the same transaction that marks the letters as sent back. So a letter is marked if and
only if it is sent. The outbox relay of a running app sends the rows; this module does not use Kafka. It has the
protocol of a sender. The senders are `sqlite.dead_letter_sender` and `postgres.dead_letters.sender`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends.base import OffsetStore
from kconsume.backends.dead_letters.reader import KeptLetter, PurgeSelection, numbered_letter_of
from kconsume.backends.sqlite.store import SqliteStore
from kconsume.failures.letter_headers import Letter

ToOutgoing: TypeAlias = Callable[[Letter], Outgoing]
"""A function that returns the record to send for a dead letter."""


class LetterSender(Protocol):
    """Sends dead letters of one table back to Kafka. All methods block."""

    def prepare(self) -> None:
        """Add the column `sent_back` if an earlier version of kconsume created the table without this column."""
        ...

    def send_back(self, rows: Sequence[int], to_outgoing: ToOutgoing) -> int:
        """Send the letters in these rows, all or none. Returns how many letters were sent.

        Args:
            rows: the ids of the rows. A letter that another process has sent back meanwhile is left out.
            to_outgoing: returns the record to send for a letter.
        """
        ...

    def waiting(self, topics: Collection[str]) -> int:
        """How many records to these topics are in the outbox because the broker has not confirmed them yet."""
        ...

    def purge(self, selection: PurgeSelection) -> int:
        """Delete the selected letters in one transaction. Returns how many letters were deleted."""
        ...

    def release_lease(self, owner: str) -> None:
        """End this owner's lease on the outbox rows now, so that other processes can send the rows at once."""
        ...


def sender_in(store: OffsetStore, table: str) -> LetterSender:
    """Return the sender for a table of dead letters in the store's database.

    Args:
        store: a store that `reader.letters_in` accepts.
        table: the name of the table.
    """
    if isinstance(store, SqliteStore):
        from kconsume.backends.sqlite.dead_letter_sender import SqliteSender

        return SqliteSender(store, table)
    from kconsume.backends.postgres.dead_letters.sender import PostgresSender

    return PostgresSender(store, table)


def unsent_of(rows: Iterable[Sequence[Any]]) -> list[KeptLetter]:
    """The letters of these rows, without those that were sent back after their last failure."""
    return [kept for kept in map(numbered_letter_of, rows) if not kept.is_sent]
