"""Sends letters of a table back: inserts outbox rows in the transaction that marks the letters.

So a letter is marked if and only if it is sent. The outbox relay of an app sends the rows; nothing here uses Kafka.
This module has the contract of a sender. The senders are `sqlite.dead_letter_sender` and
`postgres.dead_letters.sender`.
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
"""Returns the record to send for a letter."""


class LetterSender(Protocol):
    """Sends letters of one table back. Blocks."""

    def prepare(self) -> None:
        """Add the columns that a table of an earlier version lacks."""
        ...

    def send_back(self, rows: Sequence[int], to_outgoing: ToOutgoing) -> int:
        """Send all letters of these rows, or none. Returns how many letters were sent.

        Args:
            rows: ids of rows. A letter that another process has sent back meanwhile is left out.
            to_outgoing: makes the record of a letter.
        """
        ...

    def waiting(self, topics: Collection[str]) -> int:
        """How many records to these topics are in the outbox, not yet confirmed by the broker."""
        ...

    def purge(self, selection: PurgeSelection) -> int:
        """Delete the letters that meet the selection for good, in one transaction. Returns how many."""
        ...

    def release_lease(self, owner: str) -> None:
        """End this owner's lease on the outbox rows now, so that other processes can send the rows at once."""
        ...


def sender_in(store: OffsetStore, table: str) -> LetterSender:
    """The sender for a table beside the store's offsets. store: a store that `reader.letters_in` accepts."""
    if isinstance(store, SqliteStore):
        from kconsume.backends.sqlite.dead_letter_sender import SqliteSender

        return SqliteSender(store, table)
    from kconsume.backends.postgres.dead_letters.sender import PostgresSender

    return PostgresSender(store, table)


def unsent_of(rows: Iterable[Sequence[Any]]) -> list[KeptLetter]:
    """The letters of these rows, without those that were sent back after their last failure."""
    return [kept for kept in map(numbered_letter_of, rows) if not kept.is_sent]
