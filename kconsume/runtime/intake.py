"""Which records of a slice are new to the group, by where they came from: those that it has not taken in before.

What an outbox sent may come twice, after a kill of whoever sent it. A record on a rung of the retry topics is taken in
once for each rung, one that a person has sent back once for each time; any other once, if the handler was asked to
(`repeats="drop"`); a letter of others once for each topic, because it keeps its origin on its way through several.
Noted in the handler's transaction: one that is rolled back has taken nothing in.

A reset, a seek or a delete asks for records to be handled again: what was taken in before it is no repeat afterwards. A
record on the handler's own topics (rungs, records sent back) carries the reset of the partition that it came from. A
reset of those topics themselves does not count: the record there was taken in under its source's reset, and a group
that is reset as a whole has it again from there. For all other records the reset of their own partition counts too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from kconsume.backends.abc import AsyncOutboxTx, AsyncTx, OutboxTx, Tx
from kconsume.errors import BatchError
from kconsume.failures.letters import PREFIX, place_of
from kconsume.output import ORIGIN, RESET
from kconsume.records import Message
from kconsume.runtime.steps import PassOver, Try

_TOPIC, _REDRIVEN, _RUNG = f"{PREFIX}topic", f"{PREFIX}redriven", f"{PREFIX}rung"
_MOST_KEY = 1_000
"""Bytes: an index entry of PostgreSQL holds 2,704."""


class Intake:
    """What a handler takes in."""

    def __init__(self, own: Collection[str], drops_repeats: bool) -> None:
        """`own`: the topics by which the handler's own records come back to it."""
        self._own = frozenset(own)
        self._drops_repeats = drops_repeats

    def concerns(self, topic: str) -> bool:
        """Whether records of this topic may have been taken in before."""
        return self._drops_repeats or topic in self._own

    def admit(self, step: Try | PassOver, tx: Tx, reset_epoch: int = 0) -> Try | PassOver:
        """The same step without repeats, and with no letter about one. All of its part is taken in: a record that
        failed is done with as well, and its repeat would pass where it did not. `reset_epoch`: that of the partition's
        row."""
        keys = self._keys(step.part, reset_epoch)
        if not any(keys):
            return step
        assert isinstance(tx, OutboxTx)  # checked when the handler was decorated
        return self._without_repeats(step, keys, tx.take_in([key for key in keys if key is not None]))

    async def admit_async(self, step: Try | PassOver, tx: AsyncTx, reset_epoch: int = 0) -> Try | PassOver:
        keys = self._keys(step.part, reset_epoch)
        if not any(keys):
            return step
        assert isinstance(tx, AsyncOutboxTx)
        return self._without_repeats(step, keys, await tx.take_in([key for key in keys if key is not None]))

    def _keys(self, records: Sequence[Message], reset_epoch: int) -> list[str | None]:
        """What each is known by; None for those that are always taken."""
        if not records or not self.concerns(records[0].topic()):
            return []
        comes_back = records[0].topic() in self._own  # a slice is of one partition
        return [_key(message, comes_back, reset_epoch) for message in records]

    def _without_repeats(self, step: Try | PassOver, keys: Sequence[str | None], new: set[str]) -> Try | PassOver:
        known, repeats = set[str](), set[int]()
        for message, key in zip(step.part, keys, strict=True):
            if key is not None and (key not in new or key in known):
                repeats.add(id(message))
            known.add(key or "")
        if not repeats:
            return step
        run = () if isinstance(step, PassOver) else step.records
        passed = {id(message) for message in step.part} - {id(message) for message in run}
        comes_back = step.part[0].topic() in self._own
        places = {place_of(m, comes_back=comes_back) for m in step.part if id(m) in passed & repeats}
        stood = [(letter, letter.as_it_stood()) for letter in step.letters]
        letters = [letter for letter, each in stood if (each.partition, each.offset) not in places]
        if isinstance(step, PassOver):
            return step._replace(letters=letters)
        return step._replace(records=[message for message in run if id(message) not in repeats], letters=letters)


def _key(message: Message, comes_back: bool, reset_epoch: int) -> str | None:
    marks = {name: value or b"" for name, value in message.headers() or () if name.startswith(PREFIX)}
    origin = marks.get(ORIGIN)
    if not origin:
        return None
    sender, reader = marks.get(RESET, b""), b"" if comes_back or not reset_epoch else b"%d" % reset_epoch
    # Without a reset the key is that of earlier versions, which remember it, and which may run beside this one.
    resets = b"~%b~%b" % (sender, reader) if sender or reader else b""
    is_letter = _TOPIC in marks
    if not comes_back and not is_letter:
        return _text(origin + resets)
    place = b"" if comes_back else b"@" + message.topic().encode()
    return _text(b"%b/%b/%b%b%b" % (origin, marks.get(_REDRIVEN, b"0"), marks.get(_RUNG, b"0"), place, resets))


def _text(key: bytes) -> str:
    """One that every database takes, and has an index for: anybody can write such headers."""
    text = key.decode(errors="replace")
    is_plain = len(key) <= _MOST_KEY and "\ufffd" not in text and text.isprintable()
    return text if is_plain else f"sha256:{hashlib.sha256(key).hexdigest()}"


def named_in(part: Sequence[Message], records: Sequence[Message], error: BatchError) -> BatchError:
    """What a handler that was given `records` says of them, by their indexes in `part`."""
    at = {id(message): index for index, message in enumerate(part)}
    indexes = {index: at[id(message)] for index, message in enumerate(records)}
    named = BatchError({indexes.get(index, len(part)): cause for index, cause in error.errors.items()})
    return named.with_traceback(error.__traceback__)
