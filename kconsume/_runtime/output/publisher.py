"""Publishes the output of one handler, and the dead letters about its failed records.

If the store has an outbox, output and letters are rows of the transaction, and the relay sends them after the COMMIT.
So they are sent if and only if the transaction commits. Without an outbox, the brokers confirm output and letters
before the transaction ends or the offset is stored. If the commit then fails, they are sent again (at least once).
Letters to a table are rows of the transaction. Letters about records that no transaction rolls back may be handed to
the producer, and are confirmed while the next records are handled (`_runtime/output/letters_in_flight.py`).

`failures/letter_headers.py` defines what a letter contains; `_runtime/processing/rules.py` decides when one is
written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol, cast

from kconsume._kafka.outgoing import Outgoing, check_size
from kconsume.backends.base import Tx
from kconsume.backends.capabilities import AsyncLetterTx, AsyncOutboxTx, AsyncTx, LetterTx, OutboxTx
from kconsume.errors import KconsumeError, LetterFailed, SendFailed
from kconsume.failures.dead_letter import DeadLetter
from kconsume.failures.letter_headers import Letter, LetterDraft
from kconsume.records import Partition

_ADDED_HEADERS = 10
"""Number of headers that every letter has. If there are more, some may come from the record."""
_ADDED_BYTES = 200_000
"""Most bytes that a letter adds to its record: ten for each character of message and trace, the group's name twice, and
the rest."""


class Delivers(Protocol):
    """Sends records to Kafka."""

    def deliver(self, outgoing: Sequence[Outgoing]) -> Future[None]:
        """Send records. The future ends when all of them are confirmed, or with `SendFailed`."""
        ...


class Relays(Protocol):
    """Sends the rows that transactions left in the outbox."""

    def rows_committed(self, partition: Partition, count: int) -> None:
        """Note that a transaction with `count` rows has committed."""
        ...

    def is_full(self, partition: Partition) -> bool:
        """True if the handler of the partition should not write more rows, because too many wait."""
        ...


class Publisher:
    """Publishes output and dead letters: `keep` in the transaction, `post` before its end, `committed` after it.

    Each method handles both output and letters, as far as they apply. Without a transaction
    only `post` or `hand_over` is called. The object has no state: any worker may call it.
    """

    def __init__(
        self,
        producer: Delivers,
        dead_letter: DeadLetter | None,
        letters_to: Delivers,
        most_bytes: int,
        *,
        relay: Relays | None = None,
        retries_letters: bool = True,
    ) -> None:
        """
        Args:
            producer: sends the output of the handler.
            dead_letter: where dead letters go, if the policy writes any.
            letters_to: sends letters that go to a topic.
            most_bytes: how large a record may be.
            relay: sends the rows of the outbox; None if the store has no outbox.
            retries_letters: what happens if a letter cannot be sent. True: `LetterFailed` is raised, and the letter is
                sent again until it is written. False: `SendFailed` is raised, and the letter is not sent again.
        """
        self._producer = producer
        self._letters_to = letters_to
        self._topic = None if dead_letter is None else dead_letter.topic
        self._table = None if dead_letter is None else dead_letter.table
        self._most = most_bytes
        self._surely_fits = most_bytes - _ADDED_BYTES
        self._relay = relay
        self._retries_letters = retries_letters

    # Inside the transaction

    def keep(self, sent: Sequence[Outgoing], letters: Sequence[Letter], tx: Tx) -> Sequence[Outgoing]:
        """Write letters to their table, and records for topics to the outbox. Returns the rows of the outbox."""
        if self._table is not None and (
            dead := [letter.with_own_origin() for letter in letters if letter.retry is None]
        ):
            cast(LetterTx, tx).keep(self._table, dead)  # checked when the handler was decorated
        if rows := self._rows(sent, letters):
            cast(OutboxTx, tx).post(rows)  # a relay exists only if the store has an outbox
        return rows

    async def keep_async(self, sent: Sequence[Outgoing], letters: Sequence[Letter], tx: AsyncTx) -> Sequence[Outgoing]:
        if self._table is not None and (
            dead := [letter.with_own_origin() for letter in letters if letter.retry is None]
        ):
            await cast(AsyncLetterTx, tx).keep(self._table, dead)
        if rows := self._rows(sent, letters):
            await cast(AsyncOutboxTx, tx).post(rows)
        return rows

    def committed(self, partition: Partition, rows: Sequence[Outgoing]) -> None:
        """Note that the transaction has committed, so that the relay reads and sends its rows."""
        if self._relay is not None and rows:
            self._relay.rows_committed(partition, len(rows))

    def _rows(self, sent: Sequence[Outgoing], letters: Sequence[Letter]) -> Sequence[Outgoing]:
        if self._relay is None:
            return ()
        try:
            return [*sent, *self._outgoing(letters)] if letters else sent
        except SendFailed as error:
            raise self._letter_error(error) from error

    # Without an outbox

    def posts(self, sent: Sequence[Outgoing], letters: Sequence[Letter]) -> bool:
        """True if `post` would send something."""
        return self._relay is None and bool(sent or letters)

    def post(self, sent: Sequence[Outgoing], letters: Sequence[Letter]) -> None:
        """Send all records and letters that go to a topic, and wait until the brokers have confirmed them."""
        if self._relay is not None:
            return
        if sent:
            self._producer.deliver(sent).result()
        try:
            if outgoing := self._outgoing(letters):
                self._letters_to.deliver(outgoing).result()
        except SendFailed as error:
            raise self._letter_error(error) from error

    def hand_over(self, drafts: Sequence[LetterDraft]) -> Future[None]:
        """Send letters without waiting. The future ends when all are confirmed, or with `SendFailed`. An error that is
        known at once is raised, as in `post`."""
        try:
            delivery = self._letters_to.deliver([self._checked(draft) for draft in drafts])
            if delivery.done():
                delivery.result()
        except SendFailed as error:
            raise self._letter_error(error) from error
        return delivery

    async def post_async(self, sent: Sequence[Outgoing], letters: Sequence[Letter]) -> None:
        if self._relay is not None:
            return
        if sent:
            await asyncio.wrap_future(self._producer.deliver(sent))
        try:
            if outgoing := self._outgoing(letters):
                await asyncio.wrap_future(self._letters_to.deliver(outgoing))
        except SendFailed as error:
            raise self._letter_error(error) from error

    def _letter_error(self, error: SendFailed) -> KconsumeError:
        return (
            LetterFailed(str(error))
            if self._retries_letters
            else SendFailed(f"its dead letter cannot be sent: {error}")
        )

    def _outgoing(self, letters: Sequence[Letter]) -> list[Outgoing]:
        """The letters that go to a topic: records that are tried again later, and dead letters unless they go to a
        table."""
        return [self._checked(letter) for letter in letters if letter.retry is not None or self._topic is not None]

    def _checked(self, letter: Letter | LetterDraft) -> Outgoing:
        """The letter as a record. A letter consists of bytes already, so only its size has to be checked."""
        outgoing = letter.outgoing(self._topic)
        value: Any = outgoing.value  # bytes or None
        key: Any = outgoing.key
        headers: Any = outgoing.headers
        # The bytes that a letter adds are limited, so only a record near the limit has to be measured.
        if len(headers) > _ADDED_HEADERS or len(value or b"") + len(key or b"") > self._surely_fits:
            check_size(outgoing.topic, value, key, headers, self._most)
        return outgoing


def outgoing_of(letter: Letter) -> Outgoing:
    """A letter as a record, with no topic yet unless it is tried again later."""
    return letter.outgoing(None)
