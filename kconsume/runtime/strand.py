"""What the relay knows of one partition's rows in the outbox: how many there are, which are under way, which come next.

    written … │ under way │ confirmed │ deleted
      tail    │    lot    │           │

The *tail* are the last rows that were written here, as they were written: the store says their numbers, and so they
need not be read back. It is always an end of what is in the table, without a gap, and never all that is known of it:
dropping it loses nothing but time. Rows are taken from it while it is everything that is pending, and while the table
was looked at under our epoch a moment ago; whoever was frozen for longer has to look again, and learns that the
partition is another's.

Rows to different topics leave side by side. When a row is refused, the rows to its topic are *held* (`Hold`): the first
of them is tried again, alone, from time to time, and all others wait behind it. Rows to other topics go on. The hold
ends when that row was taken, or is gone from the table.

Neither reads nor sends: that is `relay.py`'s, under whose lock all of this is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any, cast

from kconsume.backends.outbox_table import Posted, Targets
from kconsume.line import Delivery
from kconsume.runtime.limits import NO_LIMITS, Limit, together

LOT = 1000
"""Rows of a partition that are sent at once, at most; fewer until it is known how large they are."""
_FIRST_LOT = 100
LOT_BYTES = 8_000_000
"""What is sent at once is in memory, and in the producer's queue, of which each partition should have a part."""
_TAIL_BYTES = 8_000_000
_TRUSTED = 1.0
"""Seconds after a look at the table for which rows are sent without another."""
_LONGEST_REST = 30.0
_SAID_EVERY = 30.0
_BLOCKED_SAID_EVERY = 60.0
SLOW = 2.0
"""Seconds: rows to a topic that take longer no longer hold up rows to other topics."""
clock = time.monotonic


class Part:
    """Rows to one topic that are under way together."""

    __slots__ = ("rows", "sending", "sent_at", "topic")

    def __init__(self, topic: str, rows: Sequence[Posted], sending: Future[Delivery] | None = None) -> None:
        self.topic = topic
        self.rows = rows
        self.sending = sending
        self.sent_at = clock()

    @property
    def is_answered(self) -> bool:
        return self.sending is not None and self.sending.done()

    def taken(self) -> list[int]:
        """The rows that the broker has confirmed."""
        assert self.sending is not None
        return [row.number for row, done in zip(self.rows, self.sending.result().confirmed, strict=True) if done]

    @property
    def why(self) -> str | None:
        """Why not all of them were confirmed."""
        assert self.sending is not None
        return self.sending.result().why


class Hold:
    """The rows of a partition to one topic, of which the first was refused, or takes long."""

    def __init__(self, part: Part | None = None) -> None:
        self.part = part
        """What is under way."""
        self.due_at = 0.0
        self.tries = 0
        """How often its first row was refused alone, one time after the other."""
        self.number = 0
        """Of the row that was refused."""
        self.cause = ""
        self.since = 0.0
        self.reading = False
        self._said_at = -_BLOCKED_SAID_EVERY

    def is_due(self, now: float) -> bool:
        return self.part is None and now >= self.due_at

    def refused(self, number: int, cause: str) -> None:
        """Its first row was refused, alone."""
        now = clock()
        if number != self.number:
            self.tries, self.since = 0, now
        self.number, self.cause = number, cause
        self.tries += 1
        self.due_at = now + _rest_after(self.tries)

    def is_to_be_said(self) -> bool:
        """Whether the log should name it now."""
        now = clock()
        if now - self._said_at < _BLOCKED_SAID_EVERY:
            return False
        self._said_at = now
        return True


class Strand:
    """The rows of one partition."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.pending = 0
        """Rows that were written here, and that are not deleted yet."""
        self.unread = True
        """Whether there may be others, of an earlier owner."""
        self.reading = False
        """Whether the table is asked now."""
        self.lot: Sequence[Posted] = ()
        """What is under way, but for what is held."""
        self.parts: Sequence[Part] = ()
        """The same by topic, once it was sent."""
        self.holds: dict[str, Hold] = {}
        """By topic."""
        self.confirmed: list[int] = []
        """Sent, and to be deleted before anything else is read."""
        self.width = _FIRST_LOT
        """Rows that are read and sent at once."""
        self.due_at = 0.0
        self.tries = 0
        self.progress = 0
        """Grows with each lot that is sent, and each row that is deleted."""
        self.leaving = False
        """It is another's now: what is under way is seen to its end, and nothing else is sent."""
        self.looked_at = 0.0
        """When the table was last asked, under this epoch."""
        self._tail: deque[Posted] = deque()
        self._tail_bytes = 0
        self._reached = 0
        """The last number that was under way."""
        self._said: str | None = None
        self._said_at = 0.0

    @property
    def clear(self) -> bool:
        return not (self.pending or self.unread or self.reading or self.is_under_way or self.holds)

    @property
    def is_stuck(self) -> bool:
        """Whether all that is left is held, and rests."""
        idle = not (self.unread or self.reading or self.is_under_way) and bool(self.holds)
        return idle and all(hold.tries > 0 and not hold.reading for hold in self.holds.values())

    @property
    def is_under_way(self) -> bool:
        return bool(self.lot or self.confirmed) or any(hold.part is not None for hold in self.holds.values())

    @property
    def is_sending(self) -> bool:
        """Whether the broker has not answered yet."""
        return any(not part.is_answered for part in self.parts)

    def may_be_set_aside(self, now: float) -> bool:
        return any(not part.is_answered and now - part.sent_at > SLOW for part in self.parts)

    @property
    def is_answered(self) -> bool:
        if self.parts and all(part.is_answered for part in self.parts):
            return True
        return any(hold.part is not None and hold.part.is_answered for hold in self.holds.values())

    def is_ready(self, now: float) -> bool:
        # What is pending may all be held: then only what is written anew is a reason to read.
        has_more = self.unread or (self.pending > 0 and not self.holds) or bool(self.confirmed)
        return not self.lot and has_more and now >= self.due_at

    def is_slow(self, now: float, seconds: float) -> bool:
        """Whether the broker has not answered for so long."""
        waiting = [hold.part for hold in self.holds.values() if hold.part is not None] + [*self.parts]
        return any(not part.is_answered and now - part.sent_at > seconds for part in waiting)

    def due_holds(self, now: float) -> list[str]:
        return [topic for topic, hold in self.holds.items() if hold.is_due(now)] if not self.leaving else []

    @property
    def targets(self) -> Targets | None:
        """What is to be read: all rows, or those to topics that are not held."""
        return Targets(tuple(self.holds), others=True) if self.holds else None

    # What is there

    def open(self, epoch: int) -> None:
        self.epoch, self.unread, self.leaving = epoch, True, False
        self._drop_tail()
        self._forget_idle_holds()

    def leave(self) -> None:
        self.leaving, self.pending, self.unread = True, 0, False
        self._drop_tail()
        self._forget_idle_holds()

    def _forget_idle_holds(self) -> None:
        """A hold is this owner's, of this epoch."""
        self.holds = {topic: hold for topic, hold in self.holds.items() if hold.part is not None}

    def wrote(self, rows: int, posted: Sequence[Posted]) -> None:
        """A transaction has committed, with so many rows: these, if the store told their numbers."""
        self.pending += rows
        if self.holds:
            self.unread = True  # what is in memory may be to a topic that is held: all is read from the table
            return
        if len(posted) != rows:
            self._drop_tail()
            return
        new = [row for row in posted if row.number > self._reached]  # the others were read before this was told
        self._tail.extend(new)
        self._tail_bytes += sum(map(_bytes_of, new))
        if self._tail_bytes > _TAIL_BYTES:
            self._drop_tail()

    @property
    def is_in_memory(self) -> bool:
        """Whether the tail is all that is to be sent. Asked while nothing is under way."""
        return bool(self._tail) and not self.unread and len(self._tail) == self.pending

    def topics_in_memory(self) -> set[str]:
        """Of the rows that `take_tail` may take."""
        return {cast(str, row.outgoing.topic) for row in islice(self._tail, self.width)}

    def is_trusted(self, now: float) -> bool:
        return now - self.looked_at < _TRUSTED

    def begins_with(self, rows: Sequence[Posted]) -> bool:
        """Whether the first row of the table is that of the tail; else the tail is dropped, and the table read."""
        if rows and self._tail and rows[0].number == self._tail[0].number:
            return True
        self._drop_tail()
        self.unread = True
        return False

    def take_tail(self, limits: Mapping[str, Limit] = NO_LIMITS) -> None:
        """Of what is in memory, the next lot."""
        lot = [self._tail.popleft() for _ in range(min(self.width, len(self._tail)))]
        self._tail_bytes = self._tail_bytes - sum(map(_bytes_of, lot)) if self._tail else 0
        self._take(lot, limits)

    def take(self, rows: Sequence[Posted], known: int, limits: Mapping[str, Limit] = NO_LIMITS) -> None:
        """Of what was read, the next lot. `known` was pending when the reading began."""
        lot = _light_enough(rows)
        has_more = len(rows) == self.width or len(lot) < len(rows)
        joins = bool(lot and self._tail) and self._tail[0].number <= lot[-1].number
        while self._tail and lot and self._tail[0].number <= lot[-1].number:
            self._tail_bytes -= _bytes_of(self._tail.popleft())
        if self.holds:
            # How many of those that are pending are held is not known; that is put right when all are read again.
            self.pending, self.unread = max(self.pending, len(rows)), self.unread or has_more
        elif not has_more:
            # All that was committed before the read is in it. What was written since stands behind it; or it was
            # committed before, and told after: then one look more finds nothing.
            self.pending += len(rows) - known
        elif joins:
            self.pending = len(lot) + len(self._tail)  # the rest of the table is the rest of the tail
        else:
            self.pending, self.unread = max(self.pending, len(rows)), True
        if len(lot) < len(rows):
            self.width = len(lot)
        self._take(lot, limits)

    def _take(self, rows: Sequence[Posted], limits: Mapping[str, Limit]) -> None:
        lot, doubtful = together(rows, limits)
        if len(lot) < len(rows):
            self.unread = True
            self._drop_tail()
            if not doubtful:
                self.width = max(1, len(lot))
        for topic in doubtful:
            self.holds.setdefault(topic, Hold())
        self.lot, self.parts = lot, ()
        self.progress += 1
        if lot:
            self._reached = lot[-1].number
        else:
            self.tries, self._said = 0, None

    def _drop_tail(self) -> None:
        self._tail.clear()
        self._tail_bytes = 0

    # How it went

    def split(self) -> Sequence[Part]:
        """What is under way, by topic, to be sent."""
        topics = {row.outgoing.topic for row in self.lot}
        if len(topics) == 1:
            self.parts = [Part(cast(str, topics.pop()), self.lot)]
        else:
            by_topic: dict[str, list[Posted]] = {}
            for row in self.lot:
                by_topic.setdefault(cast(str, row.outgoing.topic), []).append(row)
            self.parts = [Part(topic, rows) for topic, rows in by_topic.items()]
        return self.parts

    def unsent(self) -> None:
        """What was to be sent was not: it is read again. Parts that were handed over are seen to their end."""
        for part in self.parts:
            if part.sending is not None:
                self._hold(part.topic, part)
        self.lot, self.parts = (), ()

    def collect(self) -> list[Part]:
        """What is under way was answered. Returns the parts of which not all is confirmed."""
        refused: list[Part] = []
        if self.parts and all(part.is_answered for part in self.parts):
            parts, rows = self.parts, len(self.lot)
            self.parts, self.lot = (), ()
            refused = [part for part in parts if part.why is not None]
            for part in parts:
                self.confirmed += part.taken()
            for part in refused:
                self._hold(part.topic)
            if refused:
                self.unread = not self.leaving
                self.width = max(1, rows // 2)  # they may be too large together
            else:
                self.tries, self._said = 0, None
                self.width = min(2 * self.width, LOT)
        return refused

    def collect_held(self) -> list[str]:
        """The topics whose first row was refused, alone."""
        refused = []
        for topic, hold in [*self.holds.items()]:
            if (part := hold.part) is None or not part.is_answered:
                continue
            hold.part, why = None, part.why
            self.confirmed += part.taken()
            if why is None or self.leaving:
                self.release(topic)
            elif len(part.rows) == 1:
                hold.refused(part.rows[0].number, why)
                refused.append(topic)
        return refused

    def set_aside(self) -> None:
        """What the broker has not answered no longer holds up rows to other topics."""
        for part in self.parts:
            if not part.is_answered:
                self._hold(part.topic, part)
        self.parts = [part for part in self.parts if part.is_answered]
        self.lot = [row for part in self.parts for row in part.rows]
        self.unread = not self.leaving

    def release(self, topic: str) -> None:
        """Its first row was taken, or is gone: what is behind it is read with all others."""
        del self.holds[topic]
        self.unread = not self.leaving
        self._drop_tail()

    def _hold(self, topic: str, part: Part | None = None) -> None:
        if self.leaving and part is None:
            return
        self.holds[topic] = Hold(part)
        self._drop_tail()

    def deleted(self) -> None:
        """What was confirmed is."""
        self.pending = max(0, self.pending - len(self.confirmed))
        self.progress += len(self.confirmed)
        self.confirmed = []

    def rest(self) -> float:
        self.tries += 1
        seconds = _rest_after(self.tries)
        self.due_at = clock() + seconds
        self.delay_holds(seconds)
        self._drop_tail()  # it may be long, and meanwhile rows may be deleted by hand
        return seconds

    def delay_holds(self, seconds: float) -> None:
        for hold in self.holds.values():
            hold.due_at = max(hold.due_at, clock() + seconds)

    def is_news(self, why: str) -> bool:
        """Whether it is to be said: what was a moment ago is not said again."""
        now = clock()
        if why == self._said and now - self._said_at < _SAID_EVERY:
            return False
        self._said, self._said_at = why, now
        return True


def _rest_after(tries: int) -> float:
    return min(_LONGEST_REST, 0.5 * 2.0 ** min(tries, 20))


def _light_enough(rows: Sequence[Posted]) -> Sequence[Posted]:
    """As many of the first as are to be sent at once: one at least."""
    size = 0
    for index, row in enumerate(rows):
        size += _bytes_of(row)
        if index and size > LOT_BYTES:
            return rows[:index]
    return rows


def _bytes_of(row: Posted) -> int:
    value: Any = row.outgoing.value  # bytes or None, as all of it was `encoded`
    return 0 if value is None else len(value)
