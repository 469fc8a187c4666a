"""Finds the records of a slice that the group has not handled before. A record is recognised by its origin.

An outbox may send a record twice, after its sender was killed. Three kinds of records are handled once:

- a record of a retry topic: once for each retry topic that it passes; a record that a user sent back
  (`kconsume dlq redrive`): once for each time that it was sent back;
- a dead letter of another group: once for each topic, because it keeps its origin while it passes several topics;
- any other record with an origin: once, if the handler asks for it (`repeats="drop"`).

The origins are noted in the handler's transaction, so a transaction that is rolled back notes nothing.

After a reset, a seek or a delete, records are to be handled again, so earlier handled records do not count as repeats.
A record on the handler's own topics (retry topics, records sent back) carries the reset of its source partition. A
reset of the own topics does not count: the record was handled under the reset of its source, and a group that is reset
as a whole gets the record again from the source. For all other records the reset of their own partition counts too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import cast

from kconsume._kafka.outgoing import ORIGIN, RESET
from kconsume._runtime.processing.steps import SkipRecords, SliceStep
from kconsume.backends.base import Tx
from kconsume.backends.capabilities import AsyncOutboxTx, AsyncTx, OutboxTx
from kconsume.errors import BatchError
from kconsume.failures.letter_headers import PREFIX, original_place
from kconsume.records import Message

_TOPIC, _REDRIVEN, _RUNG = f"{PREFIX}topic", f"{PREFIX}redriven", f"{PREFIX}rung"
_MOST_KEY = 1_000
"""Most bytes of a key. An index entry of PostgreSQL holds 2,704 bytes."""


class Deduplication:
    """Drops the repeats from the slices of one handler."""

    def __init__(self, own: Collection[str], drops_repeats: bool) -> None:
        """
        Args:
            own: the topics on which the handler's own records return: its retry topics, and the topics for records
                that were sent back.
            drops_repeats: True if the handler asks for any repeat to be dropped.
        """
        self._own = frozenset(own)
        self._drops_repeats = drops_repeats

    def applies_to(self, topic: str) -> bool:
        """True if records of this topic may have been handled before."""
        return self._drops_repeats or topic in self._own

    def without_repeats(self, step: SliceStep, tx: Tx, reset_epoch: int = 0) -> SliceStep:
        """Return `step` without repeats and without letters about repeats. Notes all records of the part as handled. A
        failed record is also noted, because it is finished too; otherwise its repeat would be handled.

        Args:
            step: the step that is about to run.
            tx: the handler's transaction.
            reset_epoch: the reset epoch of the partition's row.
        """
        keys = self._keys(step.part, reset_epoch)
        if not any(keys):
            return step
        new = cast(OutboxTx, tx).record_origins([key for key in keys if key is not None])  # the store has an outbox
        return self._drop_repeats(step, keys, new)

    async def without_repeats_async(self, step: SliceStep, tx: AsyncTx, reset_epoch: int = 0) -> SliceStep:
        keys = self._keys(step.part, reset_epoch)
        if not any(keys):
            return step
        new = await cast(AsyncOutboxTx, tx).record_origins([key for key in keys if key is not None])
        return self._drop_repeats(step, keys, new)

    def _keys(self, records: Sequence[Message], reset_epoch: int) -> list[str | None]:
        """The key of each record; None for a record that is always handled."""
        if not records or not self.applies_to(records[0].topic()):
            return []
        comes_back = records[0].topic() in self._own  # all records of a slice are from one partition
        return [_key(message, comes_back, reset_epoch) for message in records]

    def _drop_repeats(self, step: SliceStep, keys: Sequence[str | None], new: set[str]) -> SliceStep:
        known, repeats = set[str](), set[int]()
        for message, key in zip(step.part, keys, strict=True):
            if key is not None and (key not in new or key in known):
                repeats.add(id(message))
            known.add(key or "")
        if not repeats:
            return step
        run = () if isinstance(step, SkipRecords) else step.records
        skipped = {id(message) for message in step.part} - {id(message) for message in run}
        comes_back = step.part[0].topic() in self._own
        places = {original_place(m, comes_back=comes_back) for m in step.part if id(m) in skipped & repeats}
        own = [(letter, letter.with_own_origin()) for letter in step.letters]
        letters = [letter for letter, each in own if (each.partition, each.offset) not in places]
        if isinstance(step, SkipRecords):
            return step._replace(letters=letters)
        return step._replace(records=[message for message in run if id(message) not in repeats], letters=letters)


def _key(message: Message, comes_back: bool, reset_epoch: int) -> str | None:
    marks = {name: value or b"" for name, value in message.headers() or () if name.startswith(PREFIX)}
    origin = marks.get(ORIGIN)
    if not origin:
        return None
    sender, reader = marks.get(RESET, b""), b"" if comes_back or not reset_epoch else b"%d" % reset_epoch
    # Without a reset, the key is that of earlier versions. They have stored such keys, and may still run beside
    # this one.
    resets = b"~%b~%b" % (sender, reader) if sender or reader else b""
    is_letter = _TOPIC in marks
    if not comes_back and not is_letter:
        return _text(origin + resets)
    place = b"" if comes_back else b"@" + message.topic().encode()
    return _text(b"%b/%b/%b%b%b" % (origin, marks.get(_REDRIVEN, b"0"), marks.get(_RUNG, b"0"), place, resets))


def _text(key: bytes) -> str:
    """The key in a form that every database accepts and can index. Any sender can write any header."""
    text = key.decode(errors="replace")
    is_plain = len(key) <= _MOST_KEY and "\ufffd" not in text and text.isprintable()
    return text if is_plain else f"sha256:{hashlib.sha256(key).hexdigest()}"


def named_in(part: Sequence[Message], records: Sequence[Message], error: BatchError) -> BatchError:
    """Return a copy of `error` whose indexes count in `part`. The indexes of `error` count in `records`, which the
    handler was called with."""
    at = {id(message): index for index, message in enumerate(part)}
    indexes = {index: at[id(message)] for index, message in enumerate(records)}
    named = BatchError({indexes.get(index, len(part)): cause for index, cause in error.errors.items()})
    return named.with_traceback(error.__traceback__)
