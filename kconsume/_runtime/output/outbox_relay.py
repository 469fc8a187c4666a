"""Sends the rows that handlers left in the outbox, in order within each partition, and deletes confirmed rows.

    COMMIT ─► rows_committed ─► read ─► sent ─► confirmed ─► deleted ─► read …

A transaction with output wakes the relay when it has committed. The relay reads the rows of the table, under the epoch
of the partition, and sends what it has read. `_runtime/output/partition_outbox.py` says where a read begins.

A consumer has one relay, with one thread. A partition has one set of rows in flight at a time; later rows wait until
that set is confirmed. So when a row reaches its topic for the first time, all earlier rows to that topic have reached
it, sent by this process or by an earlier owner. Rows that a killed owner had sent and not deleted are sent again by the
next owner.

Later rows of a partition never pass a refused row to the same topic. Rows that the brokers could refuse are sent one by
one (`_kafka/topic_limits.py`), and the producer stops at an unexpected refusal (`RelayProducer`). After a refusal the
rows of that partition to that topic are held. The first of them is read from the table again and tried alone, with
growing pauses of at most 30 s. If this row is refused alone, it is *blocked*: the log (`outbox_blocked`) and
`OutboxRelay.blocked` name it. The hold ends when the row was written or deleted (`kconsume outbox drop`). During a
hold, rows to other topics are sent. When `FULL` rows of the partition wait, its handler waits too.

Rows from `Outbox.send` have no partition (`UNOWNED`). The one app that holds the lease polls for these rows every
second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, cast

from kconsume._event_log import EventLog
from kconsume._kafka.delivery import DeliveryResult
from kconsume._kafka.producer import RelayProducer
from kconsume._kafka.topic_limits import NO_LIMITS, TopicLimit, TopicLimits, divided
from kconsume._runtime.deadlines import OUTBOX_CLOSE_SHARE, Deadline
from kconsume._runtime.output.partition_outbox import PartitionOutbox, TopicHold, TopicRows, clock
from kconsume.backends.capabilities import OutboxStore
from kconsume.backends.outbox.tables import ALL_TARGETS, LEASE, UNOWNED, Posted, Targets
from kconsume.errors import KconsumeError
from kconsume.records import Partition

_log = EventLog("outbox")

FULL = 10_000
"""Limit of unconfirmed rows of a partition. At this limit, the handler of the partition waits."""
_TICK = 0.1
"""Seconds between two ticks. A read or a deletion costs as much as many rows, so partitions share reads and deletions:
a partition with few rows left is read again at the next tick, which is the same for all partitions."""
_ANSWERS_TOGETHER = 0.01
"""Seconds between the first answer and the deletion. Partitions that were sent together are answered at about the same
time, and their rows are deleted together."""
_POLL_EVERY = 1.0
"""Seconds between two reads of the rows without a partition."""
_LOG_EVERY = 30.0
_PATIENCE = 2.0
"""Seconds without a confirmation, after which the relay no longer waits for the rows of a partition that leaves."""
_FORGET_EVERY = 3600.0
_FORGET_MORE_EVERY = 1.0


class BlockedRow(NamedTuple):
    """A row that the brokers refuse. It holds back the later rows of its partition to the same topic."""

    partition: Partition
    """`UNOWNED` for a row of `Outbox.send`."""
    topic: str
    """The topic that refuses the row."""
    number: int
    """The id of the row in the outbox."""
    cause: str
    since: float
    """The time of the first refusal, on the clock `time.monotonic`."""


class OutboxRelay:
    """Sends the outbox of one consumer.

    Threads: `start`, `open`, `finish` and `close` are called by the threads that run the consumer, `rows_committed` and
    `is_full` by workers. All other methods run on the relay's own thread. `_outboxes` with its `PartitionOutbox`
    objects, `_closing` and `_over` are written under `_lock`. `is_full` and the relay's own thread read them without
    the lock and accept an old value. `_logged_at`, `_renew_at` and `_forget_at` belong to the relay's own thread.
    `_changed` is notified after each change.
    """

    def __init__(
        self, store: OutboxStore, group: str, producer: RelayProducer, owner: str, limits: TopicLimits | None = None
    ) -> None:
        """
        Args:
            store: keeps the outbox.
            group: the consumer group.
            producer: sends the rows.
            owner: names this process in the lease of rows without a partition.
            limits: knows what topics accept. Without it, a row is sent alone only after a refusal.
        """
        self._store = store
        self._group = group
        self._producer = producer
        self._owner = owner
        self._limits = limits
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._outboxes: dict[Partition, PartitionOutbox] = {UNOWNED: PartitionOutbox(0)}
        self._closing = self._over = False
        self._logged_at = 0.0
        """The time at which slow brokers were logged last."""
        self._renew_at = 0.0
        """The time at which the lease of rows without a partition is renewed."""
        self._forget_at = clock() + _FORGET_EVERY
        """The time at which origins that are too old are deleted."""
        self._thread = threading.Thread(target=self._run, name=f"kconsume-relay-{group}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # From any thread

    def rows_committed(self, partition: Partition, count: int) -> None:
        """Note that a transaction with `count` rows has committed."""
        with self._lock:
            if (outbox := self._outboxes.get(partition)) is not None and not outbox.leaving:
                outbox.rows_committed(count)
                self._changed.notify_all()

    def is_full(self, partition: Partition) -> bool:
        """True if the handler should not write more rows, because too many wait."""
        outbox = self._outboxes.get(partition)
        return outbox is not None and outbox.pending >= FULL

    @property
    def blocked(self) -> tuple[BlockedRow, ...]:
        """The rows that are currently refused."""
        with self._lock:
            return tuple(
                BlockedRow(partition, topic, hold.number, hold.cause, hold.since)
                for partition, outbox in self._outboxes.items()
                for topic, hold in outbox.holds.items()
                if hold.tries and not outbox.leaving
            )

    def open(self, partition: Partition, epoch: int) -> None:
        """Send the rows of a partition that this process now owns under `epoch`. Rows of an earlier owner are sent
        first."""
        with self._lock:
            self._outboxes.setdefault(partition, PartitionOutbox(epoch)).open(epoch)
            self._changed.notify_all()

    def finish(self, partitions: Iterable[Partition], budget: Deadline) -> int:
        """Send the remaining rows of partitions that go to other owners. Stops when no row is confirmed for a time or
        the budget is over.

        Returns how many rows stay in the outbox. The next owners of the partitions send them.
        """
        with self._lock:
            leaving = {p: outbox for p in partitions if (outbox := self._outboxes.get(p)) is not None}
            while not budget.passed and not all(outbox.is_done or outbox.is_stuck for outbox in leaving.values()):
                if not self._await_progress(leaving.values(), min(_PATIENCE, budget.left)):
                    break
            kept = {p: outbox.pending for p, outbox in leaving.items() if outbox.pending}
            for outbox in leaving.values():
                outbox.leave()
            self._forget_left()
        rows = sum(kept.values())
        if kept:
            _log.warning("outbox rows kept", **_named([*kept]), rows=rows, hint="the next owner sends them")
        return rows

    def _forget_left(self) -> None:
        for partition in [p for p, o in self._outboxes.items() if o.leaving and not o.is_in_flight]:
            del self._outboxes[partition]

    def _await_progress(self, outboxes: Collection[PartitionOutbox], seconds: float) -> bool:
        """True if a row of these outboxes was sent or deleted within `seconds`."""
        before = sum(outbox.progress for outbox in outboxes)
        return self._changed.wait_for(lambda: sum(outbox.progress for outbox in outboxes) != before, seconds)

    def close(self, deadline: Deadline) -> int:
        """Send the remaining rows, then end the relay. Returns how many rows of its partitions stay in the outbox."""
        if self._thread.ident is None:
            return 0
        with self._lock:
            self._closing = True
            partitions, unowned = [p for p in self._outboxes if p != UNOWNED], self._outboxes[UNOWNED]
        kept = self.finish(partitions, deadline.part(OUTBOX_CLOSE_SHARE))
        with self._lock:
            patience = min(_PATIENCE, deadline.part(OUTBOX_CLOSE_SHARE).left)
            self._changed.wait_for(lambda: not unowned.is_in_flight, patience)
            self._over = True
            self._changed.notify_all()
        self._thread.join(min(_PATIENCE, deadline.left))
        return kept

    # The relay's own thread

    def _run(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(self._has_work, self._idle_seconds())
                if any(outbox.is_answered for outbox in self._outboxes.values()):
                    self._changed.wait_for(self._is_all_answered, _ANSWERS_TOGETHER)
                if self._over:
                    return
                outboxes = dict(self._outboxes)
            try:
                self._step(outboxes, clock())
            except Exception as error:  # noqa: BLE001  (logged; the rows are still there)
                _log.error(
                    "outbox relay failed",
                    group=self._group,
                    exc_info=error,
                    hint="the relay continues; please report this error",
                )
                time.sleep(_POLL_EVERY)

    def _step(self, outboxes: Mapping[Partition, PartitionOutbox], now: float) -> None:
        answered = {p: o for p, o in outboxes.items() if o.is_answered}
        self._collect(answered)
        self._hold_slow_topics(outboxes, now)
        ready = {p: o for p, o in outboxes.items() if o.is_ready(now)}
        held = {p: o for p, o in outboxes.items() if o.due_holds(now)}
        try:
            self._delete({**answered, **ready, **held})
            self._send(ready)
            self._try_held(held, now)
            self._maintain(outboxes, now)
        except KconsumeError as error:
            self._back_off({**answered, **ready, **held}, str(error))

    def _has_work(self) -> bool:
        now = clock()
        outboxes = self._outboxes.values()
        return self._over or any(o.is_answered or o.is_ready(now) or o.due_holds(now) for o in outboxes)

    def _is_all_answered(self) -> bool:
        return self._over or not any(o.is_unanswered for o in self._outboxes.values())

    def _idle_seconds(self) -> float:
        """Seconds until a waiting partition or hold is due, or rows without a partition are read."""
        now = clock()
        dues = [o.due_at for o in self._outboxes.values()]
        dues += [hold.due_at for o in self._outboxes.values() for hold in o.holds.values() if hold.in_flight is None]
        return min([_POLL_EVERY, *(due_at - now for due_at in dues if due_at > now)])

    def _collect(self, answered: Mapping[Partition, PartitionOutbox]) -> None:
        for partition, outbox in answered.items():
            with self._lock:
                outbox.collect()
                blocked = [(topic, outbox.holds[topic]) for topic in outbox.collect_held()]
                self._changed.notify_all()
            for topic, hold in blocked:
                if hold.should_log():
                    self._log_blocked(partition, topic, hold, outbox.pending)

    def _log_blocked(self, partition: Partition, topic: str, hold: TopicHold, rows: int) -> None:
        _log.warning(
            "outbox blocked",
            **_named([partition]),
            group="" if partition == UNOWNED else self._group,
            topic=topic,
            row=hold.number,
            rows=rows,
            cause=hold.cause,
            code="outbox_blocked",
            hint="kconsume tries the row again and holds later rows to this topic; to decide: "
            f"kconsume outbox drop {hold.number} --yes, or kconsume outbox dead-letter {hold.number} --to TOPIC --yes",
        )

    def _hold_slow_topics(self, outboxes: Mapping[Partition, PartitionOutbox], now: float) -> None:
        """Hold topics whose brokers do not answer, or for which the client waits, so that they delay only their own
        rows."""
        for outbox in outboxes.values():
            if outbox.has_slow_topic(now):
                with self._lock:
                    outbox.hold_unanswered()

    def _delete(self, outboxes: Mapping[Partition, PartitionOutbox]) -> None:
        """Delete the confirmed rows of all partitions at once."""
        done = {p: o for p, o in outboxes.items() if o.confirmed}
        for group, chosen in ((self._group, done.keys() - {UNOWNED}), ("", done.keys() & {UNOWNED})):
            if chosen:
                self._store.delivered(group, {p: done[p].confirmed for p in chosen})
        with self._lock:
            for outbox in done.values():
                outbox.deleted()
                if outbox.pending < outbox.read_size:
                    outbox.due_at = max(outbox.due_at, _next_tick(clock()))
            self._forget_left()
            if done:
                self._changed.notify_all()

    def _send(self, ready: Mapping[Partition, PartitionOutbox]) -> None:
        now = clock()
        with self._lock:
            asked = {p: o for p, o in ready.items() if not o.leaving and o.unread}
            if self._closing and (unowned := asked.pop(UNOWNED, None)) is not None:
                unowned.unread = False
            for outbox in asked.values():
                outbox.begin_read(now)
        try:
            found = self._read(asked)
            limits = divided(self._limits_of(found), self._sending_beside(found))
            for partition, outbox in asked.items():
                with self._lock:
                    if not outbox.reading or (self._closing and partition == UNOWNED):
                        outbox.reading = False
                        continue
                    rows = found.get(partition, ())
                    is_full = len(rows) == outbox.read_size
                    outbox.take(rows, limits)
                    if partition == UNOWNED:
                        outbox.unread = True
                        outbox.due_at = outbox.due_at if is_full else now + _POLL_EVERY
                    self._changed.notify_all()
                self._deliver(outbox)
        except BaseException:
            with self._lock:
                for outbox in asked.values():
                    outbox.fail_read()
            raise

    def _read(self, asked: Mapping[Partition, PartitionOutbox]) -> dict[Partition, list[Posted]]:
        """Read the next rows, in one statement for all partitions of which equally many are read."""
        found: dict[Partition, list[Posted]] = {}
        for size in {o.read_size for p, o in asked.items() if p != UNOWNED}:
            outboxes = {p: o for p, o in asked.items() if p != UNOWNED and o.read_size == size}
            epochs = {p: o.epoch for p, o in outboxes.items()}
            found.update(self._store.posted(self._group, epochs, size, {p: o.targets for p, o in outboxes.items()}))
        if (unowned := asked.get(UNOWNED)) is not None:
            found[UNOWNED] = self._read_unowned(unowned.read_size, unowned.targets)
        return found

    def _sending_beside(self, found: Mapping[Partition, Sequence[Posted]]) -> int:
        """How many partitions may have rows in flight at once. The producer puts their rows into the same batches."""
        return sum(bool(found.get(p) or o.by_topic) for p, o in [*self._outboxes.items()])

    def _read_unowned(self, most: int, targets: Targets) -> list[Posted]:
        """Read rows without a partition, if this process gets or has the lease."""
        self._renew_at = clock() + LEASE / 3
        return self._store.unowned_rows(self._owner, most, targets)

    def _limits_of(self, found: Mapping[Partition, Sequence[Posted]]) -> Mapping[str, TopicLimit]:
        if self._limits is None:
            return NO_LIMITS
        return self._limits.of({cast(str, row.outgoing.topic) for rows in found.values() for row in rows})

    def _deliver(self, outbox: PartitionOutbox) -> None:
        if not outbox.in_flight:
            return
        try:
            for rows in outbox.split():
                rows.delivery = self._producer.deliver_each([row.outgoing for row in rows.rows])
                rows.delivery.add_done_callback(lambda _: self._wake())
        except BaseException:
            with self._lock:
                outbox.unsent()
            raise

    def _try_held(self, outboxes: Mapping[Partition, PartitionOutbox], now: float) -> None:
        """Send the first row of each due hold again, alone. The row is first read again, because it may have been
        deleted."""
        for partition, outbox in outboxes.items():
            if partition == UNOWNED and self._closing:
                continue
            for topic in outbox.due_holds(now):
                hold = outbox.holds[topic]
                hold.reading = True
                try:
                    rows = self._read_first(partition, outbox, topic)
                    with self._lock:
                        if outbox.leaving or outbox.holds.get(topic) is not hold:
                            continue
                        if not rows:
                            outbox.release(topic)
                            self._changed.notify_all()
                            continue
                        hold.in_flight = TopicRows(topic, rows)
                    self._deliver_alone(hold.in_flight)
                finally:
                    hold.reading = False

    def _read_first(self, partition: Partition, outbox: PartitionOutbox, topic: str) -> Sequence[Posted]:
        targets = Targets((topic,))
        if partition == UNOWNED:
            return self._read_unowned(1, targets)
        return self._store.posted(self._group, {partition: outbox.epoch}, 1, {partition: targets}).get(partition, [])

    def _deliver_alone(self, rows: TopicRows) -> None:
        delivery: Future[DeliveryResult]
        try:
            delivery = self._producer.deliver_alone(rows.rows[0].outgoing)
        except KconsumeError as error:
            delivery = Future()
            delivery.set_result(DeliveryResult([False], str(error)))
        rows.delivery = delivery
        delivery.add_done_callback(lambda _: self._wake())

    def _wake(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def _back_off(self, outboxes: Mapping[Partition, PartitionOutbox], why: str) -> None:
        """Delay the next try of partitions whose store or producer failed."""
        waiting = {p: o for p, o in outboxes.items() if not o.in_flight}
        for outbox in outboxes.values():
            outbox.delay_holds(_POLL_EVERY)
        seconds = max((outbox.back_off() for outbox in waiting.values()), default=0.0)
        named = [p for p, o in waiting.items() if (p != UNOWNED or o.pending) and o.should_log(why)]
        if named:
            rows = sum(waiting[p].pending for p in named)
            _log.warning("outbox waits", **_named(named), rows=rows, again_in=seconds, cause=why)

    def _maintain(self, outboxes: Mapping[Partition, PartitionOutbox], now: float) -> None:
        """Log slow brokers, renew the lease of rows without a partition, and delete origins that are too old."""
        slow = [p for p, o in outboxes.items() if o.is_slow(now, _LOG_EVERY)]
        if slow and now - self._logged_at > _LOG_EVERY:
            self._logged_at = now
            rows = sum(outboxes[p].pending for p in slow)
            _log.warning("outbox waits", partitions=len(slow), rows=rows, cause="the brokers do not confirm the rows")
        if outboxes[UNOWNED].is_in_flight and now >= self._renew_at:
            self._read_unowned(1, ALL_TARGETS)  # renews the lease: no other app sends rows that are in flight
        if now >= self._forget_at:
            more = self._store.forget_origins()
            self._forget_at = now + (_FORGET_MORE_EVERY if more else _FORGET_EVERY)


def _next_tick(now: float) -> float:
    return (now // _TICK + 1) * _TICK


def _named(partitions: Sequence[Partition]) -> dict[str, Any]:
    """The fields of a log event that name its partitions: the one partition, or how many."""
    if len(partitions) > 1:
        return {"partitions": len(partitions)}
    return {"source": "Outbox.send"} if partitions[0] == UNOWNED else {"partition": partitions[0]}
