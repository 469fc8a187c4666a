"""The state of one partition's rows in the outbox: how many there are, which are in flight, which are next.

    committed ─► read ─► in flight ─► confirmed ─► deleted

A read begins above the last row that was chosen to be sent, because a database scans deleted rows until it has cleaned
them up. It begins at the first row of the table after a claim, an error or a hold, if rows that were committed may be
missing above, and once a second. So a row that becomes visible after rows with higher numbers is found too. The rows of
a partition become visible in the order of their numbers, because its transactions commit one after the other. The
number is only where to begin: no row is taken for sent because of it.

Rows to different topics are sent independently. When a row is refused, the rows to its topic are *held* (`TopicHold`).
The first of them is tried again, alone, from time to time, and all others wait behind it. Rows to other topics are sent
during the hold. The hold ends when the first row was written, or is no longer in the table.

This module must neither read the table nor send: `_runtime/output/outbox_relay.py` does both.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
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
FROM_THE_START_EVERY = 1.0
"""Seconds after which a read begins at the first row of the table again."""
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
    other methods, and takes the lock to change fields that these three methods also change. Workers read `pending`
    without the lock (`OutboxRelay.is_full`) and accept an old value.
    """

    def __init__(self, epoch: int) -> None:
        """
        Args:
            epoch: the fencing epoch under which this process owns the partition.
        """
        self.epoch = epoch
        self.pending = 0
        """How many rows were written here, or read, and are not deleted yet."""
        self.unread = True
        """True if the table may have rows that were not read."""
        self.reading = False
        """True while the relay reads the table. False if the partition was claimed again, or left, meanwhile: then the
        relay drops what it has read."""
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
        self.above = 0
        """The next read returns rows above this number. All rows up to it that were visible were sent, or are held."""
        self._from_start_at = 0.0
        """The time at which the table was last read from its first row."""
        self._known = 0
        """The value of `pending` when the last read began."""
        self._is_counted = True
        """False after a read that did not show how many rows there are. Then `pending` cannot show that a row is
        missing above, so the last read of these rows begins at the first row."""
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
        return not self.in_flight and (self.unread or bool(self.confirmed)) and now >= self.due_at

    def is_slow(self, now: float, seconds: float) -> bool:
        """True if the brokers have not answered for this long."""
        waiting = [hold.in_flight for hold in self.holds.values() if hold.in_flight is not None] + [*self.by_topic]
        return any(not rows.is_answered and now - rows.sent_at > seconds for rows in waiting)

    def due_holds(self, now: float) -> list[str]:
        """The held topics whose first row is due to be tried again."""
        return [topic for topic, hold in self.holds.items() if hold.is_due(now)] if not self.leaving else []

    @property
    def targets(self) -> Targets:
        """Which rows to read: those above the last row that was read, to topics that are not held."""
        return Targets(tuple(self.holds), others=True, above=self.above)

    # The rows in the table and in memory

    def open(self, epoch: int) -> None:
        """Note that this process owns the partition under `epoch`."""
        self.epoch, self.leaving, self.reading = epoch, False, False
        self._read_from_start()
        self._forget_idle_holds()

    def leave(self) -> None:
        """Note that another process owns the partition."""
        self.leaving, self.pending, self.unread, self.reading = True, 0, False, False
        self._forget_idle_holds()

    def _forget_idle_holds(self) -> None:
        """Forget holds without rows in flight, because a hold belongs to one owner and one epoch."""
        self.holds = {topic: hold for topic, hold in self.holds.items() if hold.in_flight is not None}

    def rows_committed(self, count: int) -> None:
        """Note that a transaction with `count` rows has committed."""
        self.pending += count
        self.unread = True

    def begin_read(self, now: float) -> None:
        """Note that the table is going to be read. If `unread` is set again, there may be rows that this read does not
        see."""
        if now - self._from_start_at >= FROM_THE_START_EVERY:
            self.above = 0
        if self.above == 0:
            self._from_start_at = now
        self.reading, self.unread, self._known = True, False, self.pending

    def fail_read(self) -> None:
        """Note that the read failed. The next read begins at the first row."""
        self.reading = False
        self._read_from_start()

    def take(self, rows: Sequence[Posted], limits: Mapping[str, TopicLimit] = NO_LIMITS) -> None:
        """Choose the next rows to send.

        Args:
            rows: the rows that were read.
            limits: what the topics accept.
        """
        self.reading = False
        light = _light_enough(rows)
        has_more = len(rows) == self.read_size or len(light) < len(rows)
        if has_more or self.holds:
            # It is not known how many rows there are behind these, or how many are held.
            self.pending = max(self.pending, len(rows))
            self.unread = self.unread or has_more
            self._is_counted = False
        elif self.above and (len(rows) < self._known or not self._is_counted):
            self._read_from_start()  # a row may have become visible late
            self._is_counted = True
            return
        else:
            # The read has all rows that were committed before it. If rows were committed before it, and
            # `rows_committed` was called after it began, one more read finds nothing.
            self.pending += len(rows) - self._known
        if len(light) < len(rows):
            self.read_size = len(light)
        self._choose(light, limits)

    def _choose(self, rows: Sequence[Posted], limits: Mapping[str, TopicLimit]) -> None:
        chosen, doubtful = first_sendable(rows, limits)
        if len(chosen) < len(rows):
            self.unread = True
            if not doubtful:
                self.read_size = max(1, len(chosen))
        for topic in doubtful:
            self.holds.setdefault(topic, TopicHold())
        self.in_flight, self.by_topic = chosen, ()
        self.progress += 1
        if chosen:
            self.above = chosen[-1].number
        else:
            self.tries, self._logged = 0, None

    def _read_from_start(self) -> None:
        """Read the table again, from its first row."""
        self.unread, self.above = not self.leaving, 0

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
        self._read_from_start()

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

    def release(self, topic: str) -> None:
        """End a hold, because its first row was written or is gone. The rows behind that row are read with all
        others."""
        del self.holds[topic]
        self._read_from_start()

    def _hold(self, topic: str, rows: TopicRows | None = None) -> None:
        if self.leaving and rows is None:
            return
        self.holds[topic] = TopicHold(rows)
        self._read_from_start()

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
