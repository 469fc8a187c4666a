"""What the relay knows of one partition's rows in the outbox: how many there are, which are under way, which come next.

    written … │ under way │ confirmed │ deleted
      tail    │    lot    │           │

The *tail* are the last rows that were written here, as they were written: the store says their numbers, and so they
need not be read back. It is always an end of what is in the table, without a gap, and never all that is known of it:
dropping it loses nothing but time. Rows are taken from it while it is everything that is pending, and while the table
was looked at under our epoch a moment ago; whoever was frozen for longer has to look again, and learns that the
partition is another's.

Neither reads nor sends: that is `relay.py`'s, under whose lock all of this is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from kconsume.backends.outbox_table import Posted
from kconsume.line import Delivery

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
clock = time.monotonic


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
        """What is under way."""
        self.sending: Future[Delivery] | None = None
        self.sent_at = 0.0
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
        return not (self.pending or self.unread or self.reading or self.is_under_way)

    @property
    def is_under_way(self) -> bool:
        return bool(self.lot or self.confirmed)

    @property
    def is_answered(self) -> bool:
        return self.sending is not None and self.sending.done()

    def is_ready(self, now: float) -> bool:
        return not self.lot and (self.pending > 0 or self.unread or bool(self.confirmed)) and now >= self.due_at

    # What is there

    def open(self, epoch: int) -> None:
        self.epoch, self.unread, self.leaving = epoch, True, False
        self._drop_tail()

    def leave(self) -> None:
        self.leaving, self.pending, self.unread = True, 0, False
        self._drop_tail()

    def wrote(self, rows: int, posted: Sequence[Posted]) -> None:
        """A transaction has committed, with so many rows: these, if the store told their numbers."""
        self.pending += rows
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

    def is_trusted(self, now: float) -> bool:
        return now - self.looked_at < _TRUSTED

    def begins_with(self, rows: Sequence[Posted]) -> bool:
        """Whether the first row of the table is that of the tail; else the tail is dropped, and the table read."""
        if rows and self._tail and rows[0].number == self._tail[0].number:
            return True
        self._drop_tail()
        self.unread = True
        return False

    def take_tail(self) -> None:
        """Of what is in memory, the next lot."""
        lot = [self._tail.popleft() for _ in range(min(self.width, len(self._tail)))]
        self._tail_bytes = self._tail_bytes - sum(map(_bytes_of, lot)) if self._tail else 0
        self._take(lot)

    def take(self, rows: Sequence[Posted], known: int) -> None:
        """Of what was read, the next lot. `known` was pending when the reading began."""
        lot = _light_enough(rows)
        has_more = len(rows) == self.width or len(lot) < len(rows)
        joins = bool(lot and self._tail) and self._tail[0].number <= lot[-1].number
        while self._tail and lot and self._tail[0].number <= lot[-1].number:
            self._tail_bytes -= _bytes_of(self._tail.popleft())
        if not has_more:
            # All that was committed before the read is in it. What was written since stands behind it; or it was
            # committed before, and told after: then one look more finds nothing.
            self.pending += len(rows) - known
        elif joins:
            self.pending = len(lot) + len(self._tail)  # the rest of the table is the rest of the tail
        else:
            self.pending, self.unread = max(self.pending, len(rows)), True
        if len(lot) < len(rows):
            self.width = len(lot)
        self._take(lot)

    def _take(self, lot: Sequence[Posted]) -> None:
        self.lot = lot
        self.progress += 1
        if lot:
            self._reached = lot[-1].number
        else:
            self.tries, self._said = 0, None

    def _drop_tail(self) -> None:
        self._tail.clear()
        self._tail_bytes = 0

    # How it went

    def collect(self) -> str | None:
        """What is under way was answered; why not all of it is confirmed."""
        assert self.sending is not None
        delivery, lot = self.sending.result(), self.lot
        self.sending, self.lot = None, ()
        if delivery.why is None:
            self.confirmed += [row.number for row in lot]
            self.tries, self._said = 0, None
            self.width = min(2 * self.width, LOT)
        else:
            self.confirmed += [row.number for row, done in zip(lot, delivery.confirmed, strict=True) if done]
            self.unread = not self.leaving
            self.width = max(1, len(lot) // 2)
        return delivery.why

    def deleted(self) -> None:
        """What was confirmed is."""
        self.pending = max(0, self.pending - len(self.confirmed))
        self.progress += len(self.confirmed)
        self.confirmed = []

    def rest(self) -> float:
        self.tries += 1
        seconds = min(_LONGEST_REST, 0.5 * 2.0**self.tries)
        self.due_at = clock() + seconds
        return seconds

    def is_news(self, why: str) -> bool:
        """Whether it is to be said: what was a moment ago is not said again."""
        now = clock()
        if why == self._said and now - self._said_at < _SAID_EVERY:
            return False
        self._said, self._said_at = why, now
        return True


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
