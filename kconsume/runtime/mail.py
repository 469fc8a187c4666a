"""What leaves with the records of one handler: what it sends, and the dead letters about those that failed.

Where the store has an outbox, both are rows of the transaction, which the relay sends after the COMMIT: they leave if
and only if it commits. Elsewhere they are confirmed before the transaction ends, or the offset passes: should that
fail then, they leave again (at least once). Letters to a table are rows of the transaction. Letters about records that
no transaction undoes may be handed over, and confirmed while the next records are run (`under_way.py`).

What a letter says is `failures/letters.py`'s, and when one is written `course.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol, cast

from kconsume.backends.abc import AsyncLetterTx, AsyncOutboxTx, AsyncTx, LetterTx, NumberedTx, OutboxTx, Tx
from kconsume.backends.outbox_table import Posted
from kconsume.errors import KconsumeError, LetterFailed, SendFailed
from kconsume.failures.dead_letter import DeadLetter
from kconsume.failures.letters import Draft, Letter
from kconsume.output import Outgoing, check_size
from kconsume.records import Partition

_MARKS = 10
"""So many headers a letter has at least; with more, some may be the record's own."""
_MARKS_AT_MOST = 200_000
"""Bytes: ten for each character of message and trace, the name of the group twice, and the rest."""


class Delivers(Protocol):
    """Takes what handlers send, and says when all of it is confirmed."""

    def deliver(self, outgoing: Sequence[Outgoing]) -> Future[None]: ...


class Relays(Protocol):
    """Sends what transactions have left in the outbox."""

    def wrote(self, partition: Partition, rows: int, posted: Sequence[Posted] = ()) -> None: ...

    def is_full(self, partition: Partition) -> bool: ...


class Mail:
    """Where it goes. `keep` is for inside the transaction, `post` for right before its end, `left` for after it; each
    does its part of both kinds."""

    def __init__(
        self,
        outlet: Delivers,
        dead_letter: DeadLetter | None,
        letters_to: Delivers,
        most_bytes: int,
        *,
        relay: Relays | None = None,
        holds: bool = True,
    ) -> None:
        """`holds`: a letter that cannot be sent is tried until it can; else that is the end, as of all that is sent."""
        self._outlet = outlet
        self._letters_to = letters_to
        self._topic = None if dead_letter is None else dead_letter.topic
        self._table = None if dead_letter is None else dead_letter.table
        self._most = most_bytes
        self._surely_fits = most_bytes - _MARKS_AT_MOST
        self._relay = relay
        self._holds = holds

    # Inside the transaction

    def keep(self, sent: Sequence[Outgoing], letters: Sequence[Letter], tx: Tx) -> Sequence[Outgoing]:
        """Answers with the rows that it left in the outbox."""
        if self._table is not None and (dead := [letter.as_it_stood() for letter in letters if letter.rung is None]):
            assert isinstance(tx, LetterTx)  # checked when the handler was decorated
            tx.keep(self._table, dead)
        if rows := self._rows(sent, letters):
            cast(OutboxTx, tx).post(rows)  # its store has an outbox, and to ask for the protocol takes long
        return rows

    async def keep_async(self, sent: Sequence[Outgoing], letters: Sequence[Letter], tx: AsyncTx) -> Sequence[Outgoing]:
        if self._table is not None and (dead := [letter.as_it_stood() for letter in letters if letter.rung is None]):
            assert isinstance(tx, AsyncLetterTx)
            await tx.keep(self._table, dead)
        if rows := self._rows(sent, letters):
            await cast(AsyncOutboxTx, tx).post(rows)
        return rows

    def left(self, partition: Partition, rows: Sequence[Outgoing], tx: Tx | AsyncTx) -> None:
        """The transaction has committed."""
        if self._relay is not None and rows:
            numbers = tx.numbers() if isinstance(tx, NumberedTx) else ()
            self._relay.wrote(partition, len(rows), list(map(Posted, numbers, rows)))

    def _rows(self, sent: Sequence[Outgoing], letters: Sequence[Letter]) -> Sequence[Outgoing]:
        if self._relay is None:
            return ()
        try:
            return [*sent, *self._outgoing(letters)] if letters else sent
        except SendFailed as error:
            raise self._meaning(error) from error

    # Without an outbox

    def posts(self, sent: Sequence[Outgoing], letters: Sequence[Letter]) -> bool:
        """Whether `post` would do something."""
        return self._relay is None and bool(sent or letters)

    def post(self, sent: Sequence[Outgoing], letters: Sequence[Letter]) -> None:
        if self._relay is not None:
            return
        if sent:
            self._outlet.deliver(sent).result()
        try:
            if outgoing := self._outgoing(letters):
                self._letters_to.deliver(outgoing).result()
        except SendFailed as error:
            raise self._meaning(error) from error

    def hand_over(self, drafts: Sequence[Draft]) -> Future[None]:
        """Have letters written without waiting for it. The future ends when all are confirmed, or with `SendFailed`;
        what is known at once to have failed is raised, as by `post`."""
        try:
            delivery = self._letters_to.deliver([self._sealed(draft) for draft in drafts])
            if delivery.done():
                delivery.result()
        except SendFailed as error:
            raise self._meaning(error) from error
        return delivery

    async def post_async(self, sent: Sequence[Outgoing], letters: Sequence[Letter]) -> None:
        if self._relay is not None:
            return
        if sent:
            await asyncio.wrap_future(self._outlet.deliver(sent))
        try:
            if outgoing := self._outgoing(letters):
                await asyncio.wrap_future(self._letters_to.deliver(outgoing))
        except SendFailed as error:
            raise self._meaning(error) from error

    def _meaning(self, error: SendFailed) -> KconsumeError:
        return LetterFailed(str(error)) if self._holds else SendFailed(f"its dead letter cannot be sent: {error}")

    def _outgoing(self, letters: Sequence[Letter]) -> list[Outgoing]:
        """Those that leave by a topic: dead ones, if theirs is one, and those that are tried again later."""
        return [self._sealed(letter) for letter in letters if letter.rung is not None or self._topic is not None]

    def _sealed(self, letter: Letter | Draft) -> Outgoing:
        """What `encoded` would make of it: all of a letter is bytes already, and only its size is in question."""
        outgoing = letter.outgoing(self._topic)
        value: Any = outgoing.value  # of a letter it is bytes, or None
        key: Any = outgoing.key
        headers: Any = outgoing.headers
        # What is added is bounded, so the size is in question only near the bound.
        if len(headers) > _MARKS or len(value or b"") + len(key or b"") > self._surely_fits:
            check_size(outgoing.topic, value, key, headers, self._most)
        return outgoing


def outgoing_of(letter: Letter) -> Outgoing:
    """A letter as a record of a topic."""
    return letter.outgoing(None)
