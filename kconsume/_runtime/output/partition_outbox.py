"""The state of one partition's rows in the outbox: how many there are, which are in flight, which are next.

    written … │ in flight │ confirmed │ deleted
      tail    │           │           │

The *tail* is the last rows that this process wrote, kept in memory. The store returned the numbers of these rows, so
they need not be read back. The tail is always the end of the rows in the table, without a gap. Nothing depends on the
tail: if it is dropped, only time is lost. Rows are taken from the tail under two conditions: the tail has all pending
rows, and the table was read under this epoch less than `_TRUSTED` seconds ago. An owner that was frozen for longer must
read the table again, and that read shows whether the partition has a new owner.

Rows to different topics are sent independently. When a row is refused, the rows to its topic are *held* (`TopicHold`).
The first of them is tried again, alone, from time to time, and all others wait behind it. Rows to other topics are sent
during the hold. The hold ends when the first row was written, or is no longer in the table.

This module must neither read the table nor send: `_runtime/output/outbox_relay.py` does both.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any, cast

from kconsume._kafka.delivery import DeliveryResult
from kconsume._kafka.topic_limits import NO_LIMITS, TopicLimit, first_sendable
from kconsume.backends.outbox.tables import Posted, Targets

MAX_ROWS = 1000
"""Most rows of a partition that are sent at once. Fewer are sent until the size of the rows is known."""
_FIRST_ROWS = 100
MAX_BYTES = 8_000_000
"""Most bytes that are sent together. These rows are in memory and in the producer's queue, of which each partition
should get a part."""
_TAIL_BYTES = 8_000_000
_TRUSTED = 1.0
"""Seconds after a read of the table in which rows of the tail are sent without another read."""
_LONGEST_PAUSE = 30.0
_LOG_EVERY = 30.0
_LOG_BLOCKED_EVERY = 60.0
SLOW = 2.0
"""Seconds. If rows to a topic take longer, they no longer delay rows to other topics."""
clock = time.monotonic


class TopicRows:
    """Rows to one topic that are in flight together."""

    __slots__ = ("delivery", "rows", "sent_at", "topic")

    def __init__(self, topic: str, rows: Sequence[Posted], delivery: Future[DeliveryResult] | None = None) -> None:
        """
        Args:
            topic: where the rows go.
            rows: the rows, in their order.
            delivery: the answer of the brokers; None until the rows were handed to the producer.
        """
        self.topic = topic
        self.rows = rows
        self.delivery = delivery
        self.sent_at = clock()

    @property
    def is_answered(self) -> bool:
        return self.delivery is not None and self.delivery.done()

    def confirmed_numbers(self) -> list[int]:
        """The numbers of the rows that the brokers have confirmed."""
        assert self.delivery is not None
        return [row.number for row, done in zip(self.rows, self.delivery.result().confirmed, strict=True) if done]

    @property
    def error(self) -> str | None:
        """The error because of which some rows were not confirmed; None if all were confirmed."""
        assert self.delivery is not None
        return self.delivery.result().why


class TopicHold:
    """The held rows of a partition to one topic: the first row was refused, or the brokers take long."""

    def __init__(self, in_flight: TopicRows | None = None) -> None:
        self.in_flight = in_flight
        """The rows to this topic that the brokers have not answered."""
        self.due_at = 0.0
        """The time at which the first row is tried again."""
        self.tries = 0
        """How often in succession the first row was refused alone."""
        self.number = 0
        """The number of the row that was refused."""
        self.cause = ""
        self.since = 0.0
        self.reading = False
        """True while the relay reads the first row from the table."""
        self._logged_at = -_LOG_BLOCKED_EVERY

    def is_due(self, now: float) -> bool:
        return self.in_flight is None and now >= self.due_at

    def refused(self, number: int, cause: str) -> None:
        """Note that the first row was sent alone and refused."""
        now = clock()
        if number != self.number:
            self.tries, self.since = 0, now
        self.number, self.cause = number, cause
        self.tries += 1
        self.due_at = now + _pause_after(self.tries)

    def should_log(self) -> bool:
        """True if the log should name the blocked row now. After that, the row counts as logged."""
        now = clock()
        if now - self._logged_at < _LOG_BLOCKED_EVERY:
            return False
        self._logged_at = now
        return True


class PartitionOutbox:
    """The rows of one partition.

    Other threads call `open`, `leave` and `rows_committed`, under the relay's lock. The relay's own thread calls all
    other methods. It takes the lock for fields that these three methods also change, except in `split`, `delay_holds`
    and `back_off`: a tail that loses rows there is shorter than `pending`, and is not used. Workers read `pending`
    without the lock (`OutboxRelay.is_full`) and accept an old value.
    """

    def __init__(self, epoch: int) -> None:
        """
        Args:
            epoch: the fencing epoch under which this process owns the partition.
        """
        self.epoch = epoch
        self.pending = 0
        """How many rows were written here and are not deleted yet."""
        self.unread = True
        """True if the table may have more rows, of an earlier owner."""
        self.reading = False
        """True while the relay reads the table."""
        self.in_flight: Sequence[Posted] = ()
        """Rows that are being sent, except held rows."""
        self.by_topic: Sequence[TopicRows] = ()
        """The rows of `in_flight` by topic, once they were handed to the producer."""
        self.holds: dict[str, TopicHold] = {}
        """The holds, by topic."""
        self.confirmed: list[int] = []
        """The numbers of rows that must be deleted before more rows are read."""
        self.read_size = _FIRST_ROWS
        """How many rows are read and sent at once."""
        self.due_at = 0.0
        """The time at which the table may be read again after an error."""
        self.tries = 0
        """How many errors occurred in succession."""
        self.progress = 0
        """A counter that grows each time rows are sent, and with each deleted row."""
        self.leaving = False
        """True once the partition belongs to another owner. Then rows in flight are awaited, and no other row is
        sent."""
        self.read_at = 0.0
        """The time at which the table was last read under this epoch."""
        self._tail: deque[Posted] = deque()
        self._tail_bytes = 0
        self._reached = 0
        """The highest row number that was in flight."""
        self._logged: str | None = None
        self._logged_at = 0.0

    @property
    def is_done(self) -> bool:
        """True if there is nothing left to send, to delete or to read."""
        return not (self.pending or self.unread or self.reading or self.is_in_flight or self.holds)

    @property
    def is_stuck(self) -> bool:
        """True if all remaining rows are held and wait to be tried again."""
        idle = not (self.unread or self.reading or self.is_in_flight) and bool(self.holds)
        return idle and all(hold.tries > 0 and not hold.reading for hold in self.holds.values())

    @property
    def is_in_flight(self) -> bool:
        """True if rows are being sent, or are confirmed and not deleted."""
        return bool(self.in_flight or self.confirmed) or any(h.in_flight is not None for h in self.holds.values())

    @property
    def is_unanswered(self) -> bool:
        """True if the brokers have not answered for rows that are not held."""
        return any(not rows.is_answered for rows in self.by_topic)

    def has_slow_topic(self, now: float) -> bool:
        return any(not rows.is_answered and now - rows.sent_at > SLOW for rows in self.by_topic)

    @property
    def is_answered(self) -> bool:
        """True if there is an answer to collect."""
        if self.by_topic and all(rows.is_answered for rows in self.by_topic):
            return True
        return any(hold.in_flight is not None and hold.in_flight.is_answered for hold in self.holds.values())

    def is_ready(self, now: float) -> bool:
        """True if more rows can be sent now."""
        # If there are holds, all pending rows may be held. Then only new rows are a reason to read.
        has_more = self.unread or (self.pending > 0 and not self.holds) or bool(self.confirmed)
        return not self.in_flight and has_more and now >= self.due_at

    def is_slow(self, now: float, seconds: float) -> bool:
        """True if the brokers have not answered for this long."""
        waiting = [hold.in_flight for hold in self.holds.values() if hold.in_flight is not None] + [*self.by_topic]
        return any(not rows.is_answered and now - rows.sent_at > seconds for rows in waiting)

    def due_holds(self, now: float) -> list[str]:
        """The held topics whose first row is due to be tried again."""
        return [topic for topic, hold in self.holds.items() if hold.is_due(now)] if not self.leaving else []

    @property
    def targets(self) -> Targets | None:
        """Which rows to read: None for all rows, else only rows to topics that are not held."""
        return Targets(tuple(self.holds), others=True) if self.holds else None

    # The rows in the table and in memory

    def open(self, epoch: int) -> None:
        """Note that this process owns the partition under `epoch`."""
        self.epoch, self.unread, self.leaving = epoch, True, False
        self._drop_tail()
        self._forget_idle_holds()

    def leave(self) -> None:
        """Note that another process owns the partition."""
        self.leaving, self.pending, self.unread = True, 0, False
        self._drop_tail()
        self._forget_idle_holds()

    def _forget_idle_holds(self) -> None:
        """Forget holds without rows in flight, because a hold belongs to one owner and one epoch."""
        self.holds = {topic: hold for topic, hold in self.holds.items() if hold.in_flight is not None}

    def rows_committed(self, count: int, rows: Sequence[Posted]) -> None:
        """Note that a transaction with `count` rows has committed. `rows` are these rows, if the store returned their
        numbers."""
        self.pending += count
        if self.holds:
            self.unread = True  # the rows may be to a held topic, so all rows are read from the table
            return
        if len(rows) != count:
            self._drop_tail()
            return
        new = [row for row in rows if row.number > self._reached]  # the other rows were read before this call
        self._tail.extend(new)
        self._tail_bytes += sum(map(_bytes_of, new))
        if self._tail_bytes > _TAIL_BYTES:
            self._drop_tail()

    @property
    def is_in_memory(self) -> bool:
        """True if the tail has all rows that are to be sent. Called while nothing is in flight."""
        return bool(self._tail) and not self.unread and len(self._tail) == self.pending

    def topics_in_memory(self) -> set[str]:
        """The topics of the rows that `take_tail` may take."""
        return {cast(str, row.outgoing.topic) for row in islice(self._tail, self.read_size)}

    def is_trusted(self, now: float) -> bool:
        """True if rows of the tail may be sent without another read."""
        return now - self.read_at < _TRUSTED

    def begins_with(self, rows: Sequence[Posted]) -> bool:
        """True if the table and the tail have the same first row. Otherwise the tail is dropped and the table is
        read."""
        if rows and self._tail and rows[0].number == self._tail[0].number:
            return True
        self._drop_tail()
        self.unread = True
        return False

    def take_tail(self, limits: Mapping[str, TopicLimit] = NO_LIMITS) -> None:
        """Choose the next rows to send from the tail."""
        rows = [self._tail.popleft() for _ in range(min(self.read_size, len(self._tail)))]
        self._tail_bytes = self._tail_bytes - sum(map(_bytes_of, rows)) if self._tail else 0
        self._take(rows, limits)

    def take(self, rows: Sequence[Posted], known: int, limits: Mapping[str, TopicLimit] = NO_LIMITS) -> None:
        """Choose the next rows to send from rows that were read.

        Args:
            rows: the rows that were read.
            known: how many rows were pending when the read began.
            limits: what the topics accept.
        """
        chosen = _light_enough(rows)
        has_more = len(rows) == self.read_size or len(chosen) < len(rows)
        joins = bool(chosen and self._tail) and self._tail[0].number <= chosen[-1].number
        while self._tail and chosen and self._tail[0].number <= chosen[-1].number:
            self._tail_bytes -= _bytes_of(self._tail.popleft())
        if self.holds:
            # It is not known how many pending rows are held. The count is corrected when all rows are read again.
            self.pending, self.unread = max(self.pending, len(rows)), self.unread or has_more
        elif not has_more:
            # The read has all rows that were committed before it. Rows that were written later stand behind them. If
            # rows were committed before the read and `rows_committed` was called after it, one more read finds nothing.
            self.pending += len(rows) - known
        elif joins:
            self.pending = len(chosen) + len(self._tail)  # the rest of the table is the rest of the tail
        else:
            self.pending, self.unread = max(self.pending, len(rows)), True
        if len(chosen) < len(rows):
            self.read_size = len(chosen)
        self._take(chosen, limits)

    def _take(self, rows: Sequence[Posted], limits: Mapping[str, TopicLimit]) -> None:
        chosen, doubtful = first_sendable(rows, limits)
        if len(chosen) < len(rows):
            self.unread = True
            self._drop_tail()
            if not doubtful:
                self.read_size = max(1, len(chosen))
        for topic in doubtful:
            self.holds.setdefault(topic, TopicHold())
        self.in_flight, self.by_topic = chosen, ()
        self.progress += 1
        if chosen:
            self._reached = chosen[-1].number
        else:
            self.tries, self._logged = 0, None

    def _drop_tail(self) -> None:
        self._tail.clear()
        self._tail_bytes = 0

    # Sending, and its results

    def split(self) -> Sequence[TopicRows]:
        """Divide the chosen rows by topic, to be sent."""
        topics = {row.outgoing.topic for row in self.in_flight}
        if len(topics) == 1:
            self.by_topic = [TopicRows(cast(str, topics.pop()), self.in_flight)]
        else:
            by_topic: dict[str, list[Posted]] = {}
            for row in self.in_flight:
                by_topic.setdefault(cast(str, row.outgoing.topic), []).append(row)
            self.by_topic = [TopicRows(topic, rows) for topic, rows in by_topic.items()]
        return self.by_topic

    def unsent(self) -> None:
        """Note that the chosen rows could not be sent. They are read again. Rows that the producer already has are
        awaited."""
        for rows in self.by_topic:
            if rows.delivery is not None:
                self._hold(rows.topic, rows)
        self.in_flight, self.by_topic = (), ()

    def collect(self) -> list[TopicRows]:
        """Process the answers for the rows in flight. Returns the topics of which not all rows were confirmed."""
        refused: list[TopicRows] = []
        if self.by_topic and all(rows.is_answered for rows in self.by_topic):
            by_topic, count = self.by_topic, len(self.in_flight)
            self.by_topic, self.in_flight = (), ()
            refused = [rows for rows in by_topic if rows.error is not None]
            for rows in by_topic:
                self.confirmed += rows.confirmed_numbers()
            for rows in refused:
                self._hold(rows.topic)
            if refused:
                self.unread = not self.leaving
                self.read_size = max(1, count // 2)  # the rows together may be too large
            else:
                self.tries, self._logged = 0, None
                self.read_size = min(2 * self.read_size, MAX_ROWS)
        return refused

    def collect_held(self) -> list[str]:
        """Process the answers for held rows. Returns the topics whose first row was sent alone and refused."""
        refused = []
        for topic, hold in [*self.holds.items()]:
            if (rows := hold.in_flight) is None or not rows.is_answered:
                continue
            hold.in_flight, error = None, rows.error
            self.confirmed += rows.confirmed_numbers()
            if error is None or self.leaving:
                self.release(topic)
            elif len(rows.rows) == 1:
                hold.refused(rows.rows[0].number, error)
                refused.append(topic)
        return refused

    def hold_unanswered(self) -> None:
        """Hold the topics for which the brokers have not answered, so that rows to other topics are sent."""
        for rows in self.by_topic:
            if not rows.is_answered:
                self._hold(rows.topic, rows)
        self.by_topic = [rows for rows in self.by_topic if rows.is_answered]
        self.in_flight = [row for rows in self.by_topic for row in rows.rows]
        self.unread = not self.leaving

    def release(self, topic: str) -> None:
        """End a hold, because its first row was written or is gone. The rows behind that row are read with all
        others."""
        del self.holds[topic]
        self.unread = not self.leaving
        self._drop_tail()

    def _hold(self, topic: str, rows: TopicRows | None = None) -> None:
        if self.leaving and rows is None:
            return
        self.holds[topic] = TopicHold(rows)
        self._drop_tail()

    def deleted(self) -> None:
        """Note that the confirmed rows were deleted from the table."""
        self.pending = max(0, self.pending - len(self.confirmed))
        self.progress += len(self.confirmed)
        self.confirmed = []

    def back_off(self) -> float:
        """Wait before the next try after an error, longer each time. Returns the seconds."""
        self.tries += 1
        seconds = _pause_after(self.tries)
        self.due_at = clock() + seconds
        self.delay_holds(seconds)
        self._drop_tail()  # a user may delete rows during the pause, which may be long
        return seconds

    def delay_holds(self, seconds: float) -> None:
        for hold in self.holds.values():
            hold.due_at = max(hold.due_at, clock() + seconds)

    def should_log(self, why: str) -> bool:
        """True if the reason should be logged. The same reason is logged at most every 30 s."""
        now = clock()
        if why == self._logged and now - self._logged_at < _LOG_EVERY:
            return False
        self._logged, self._logged_at = why, now
        return True


def _pause_after(tries: int) -> float:
    return min(_LONGEST_PAUSE, 0.5 * 2.0 ** min(tries, 20))


def _light_enough(rows: Sequence[Posted]) -> Sequence[Posted]:
    """The first rows that may be sent at once; at least one row."""
    size = 0
    for index, row in enumerate(rows):
        size += _bytes_of(row)
        if index and size > MAX_BYTES:
            return rows[:index]
    return rows


def _bytes_of(row: Posted) -> int:
    value: Any = row.outgoing.value  # bytes or None, because every row was encoded before it was written
    return 0 if value is None else len(value)
