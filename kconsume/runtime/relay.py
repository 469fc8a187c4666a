"""Sends what handlers have left in the outbox: partition by partition, in order, and deletes what is confirmed.

    COMMIT ─► wrote ─► read ─► sent ─► confirmed ─► deleted ─► read …

What was written here a moment ago is not read back, but sent as it was written (`strand.py`).

One thread a consumer. Of a partition one lot is under way at a time: what is read next stands behind it. So the first
time that a row reaches its topic, all rows before it to that topic have, whoever sent them; what a killed owner had
sent and not deleted is sent again by the next one.

A row that is refused is not passed by later rows of its partition to the same topic. Rows that could be refused leave
alone (`limits.py`), and the producer stops at a refusal that nobody could foresee (`outlet.RelayOutlet`). After a
refusal the rows of that partition to that topic are held: the first is read from the table again and tried alone, less
and less often, at least every 30 s. If it is refused alone it is *blocked*: the log names it (`outbox_blocked`), and so
does `Relay.blocked`. The hold ends by itself when the row was taken, or was deleted (`kconsume outbox drop`). Rows to
other topics go on meanwhile, until so many rows of the partition wait that its handler waits too (`FULL`).

What is nobody's (`outbox_table.NOBODYS`: a person's own rows) is looked for every second, and sent by one app.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, cast

from kconsume.backends.abc import OutboxStore
from kconsume.backends.outbox_table import LEASE, NOBODYS, Posted, Targets
from kconsume.errors import KconsumeError
from kconsume.line import Delivery
from kconsume.outlet import RelayOutlet
from kconsume.records import Partition
from kconsume.runtime.budget import Deadline
from kconsume.runtime.limits import NO_LIMITS, Limit, Limits, shared
from kconsume.runtime.strand import Hold, Part, Strand, clock

_log = logging.getLogger("kconsume.outbox")

FULL = 10_000
"""Rows of a partition that are not confirmed: its handler waits until there are fewer."""
_BEAT = 0.1
"""Seconds: after a lot that was not full, more rows are waited for until the next beat, which is the same for all
partitions. Each read and each deletion costs as much as many rows, and so they have them in common."""
_TOGETHER = 0.01
"""Seconds: when a lot is answered, those of other partitions that were sent with it are as well, and are deleted with
it."""
_EVERY = 1.0
"""Seconds between two looks for what is nobody's."""
_SAID_EVERY = 30.0
_PATIENCE = 2.0
"""Seconds without anything confirmed, after which who leaves does not wait any longer."""
_FORGET_EVERY = 3600.0
_FORGET_MORE_EVERY = 1.0


class Blocked(NamedTuple):
    """A row that is refused, and holds the rows of its partition to the same topic."""

    partition: Partition
    """`NOBODYS` for a row of `Outbox.send`."""
    topic: str
    """Where it should go."""
    number: int
    """Its id in the outbox."""
    cause: str
    since: float
    """Of `time.monotonic`."""


class Relay:
    """The outbox of one consumer."""

    def __init__(
        self, store: OutboxStore, group: str, outlet: RelayOutlet, owner: str, limits: Limits | None = None
    ) -> None:
        self._store = store
        self._group = group
        self._outlet = outlet
        self._owner = owner
        self._limits = limits
        self._guard = threading.Lock()
        self._news = threading.Condition(self._guard)
        self._strands: dict[Partition, Strand] = {NOBODYS: Strand(0)}
        self._closing = self._over = False
        self._said_at = 0.0
        self._renew_at = 0.0
        self._forget_at = clock() + _FORGET_EVERY
        self._thread = threading.Thread(target=self._run, name=f"kconsume-relay-{group}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # From any thread

    def wrote(self, partition: Partition, rows: int, posted: Sequence[Posted] = ()) -> None:
        """A transaction with so many rows has committed: these, if the store told their numbers."""
        with self._guard:
            if (strand := self._strands.get(partition)) is not None and not strand.leaving:
                strand.wrote(rows, posted)
                self._news.notify_all()

    def is_full(self, partition: Partition) -> bool:
        """Whether so much is unsent that no more should be written."""
        strand = self._strands.get(partition)
        return strand is not None and strand.pending >= FULL

    @property
    def blocked(self) -> tuple[Blocked, ...]:
        """The rows that are refused now. From any thread."""
        with self._guard:
            return tuple(
                Blocked(partition, topic, hold.number, hold.cause, hold.since)
                for partition, strand in self._strands.items()
                for topic, hold in strand.holds.items()
                if hold.tries and not strand.leaving
            )

    def open(self, partition: Partition, epoch: int) -> None:
        """It is ours under this epoch; an earlier owner may have left something."""
        with self._guard:
            self._strands.setdefault(partition, Strand(epoch)).open(epoch)
            self._news.notify_all()

    def finish(self, partitions: Iterable[Partition], budget: Deadline) -> int:
        """They go to others: send what is left, as long as that goes well and the budget lasts. Answers with how many
        rows stay in the outbox: whoever has the partitions next sends them."""
        with self._guard:
            leaving = {p: strand for p in partitions if (strand := self._strands.get(p)) is not None}
            while not budget.passed and not all(strand.clear or strand.is_stuck for strand in leaving.values()):
                if not self._goes_on(leaving.values(), min(_PATIENCE, budget.left)):
                    break
            kept = {p: strand.pending for p, strand in leaving.items() if strand.pending}
            for strand in leaving.values():
                strand.leave()
            self._forget_those_that_left()
        if kept:
            rows, where = sum(kept.values()), _places([*kept])
            _log.warning("outbox keeps %s rows=%d: the next owner sends them", where, rows)
        return sum(kept.values())

    def _forget_those_that_left(self) -> None:
        for partition in [p for p, s in self._strands.items() if s.leaving and not s.is_under_way]:
            del self._strands[partition]

    def _goes_on(self, strands: Collection[Strand], seconds: float) -> bool:
        """Whether something of them was confirmed within that time."""
        before = sum(strand.progress for strand in strands)
        return self._news.wait_for(lambda: sum(strand.progress for strand in strands) != before, seconds)

    def close(self, deadline: Deadline) -> int:
        """Answers with how many rows stay in the outbox, of the partitions that it still had."""
        if self._thread.ident is None:
            return 0
        with self._guard:
            self._closing = True
            partitions, strays = [p for p in self._strands if p != NOBODYS], self._strands[NOBODYS]
        kept = self.finish(partitions, deadline.part(0.5))
        with self._guard:
            self._news.wait_for(lambda: not strays.is_under_way, min(_PATIENCE, deadline.part(0.5).left))
            self._over = True
            self._news.notify_all()
        self._thread.join(min(_PATIENCE, deadline.left))
        return kept

    # The relay's own thread

    def _run(self) -> None:
        while True:
            with self._guard:
                self._news.wait_for(self._has_work, self._calm_for())
                if any(strand.is_answered for strand in self._strands.values()):
                    self._news.wait_for(self._is_all_answered, _TOGETHER)
                if self._over:
                    return
                strands = dict(self._strands)
            try:
                now = clock()
                answered = {p: s for p, s in strands.items() if s.is_answered}
                self._collect(answered)
                self._set_aside(strands, now)
                ready = {p: s for p, s in strands.items() if s.is_ready(now)}
                held = {p: s for p, s in strands.items() if s.due_holds(now)}
                try:
                    self._delete({**answered, **ready, **held})
                    self._send(ready)
                    self._try_held(held, now)
                    self._look_after(strands, now)
                except KconsumeError as error:
                    self._rest({**answered, **ready, **held}, str(error))
            except Exception:  # noqa: BLE001  (said; the rows are still there)
                _log.exception("the relay of group %s stumbled, and goes on", self._group)
                time.sleep(_EVERY)

    def _has_work(self) -> bool:
        now = clock()
        strands = self._strands.values()
        return self._over or any(s.is_answered or s.is_ready(now) or s.due_holds(now) for s in strands)

    def _is_all_answered(self) -> bool:
        return self._over or not any(s.is_sending for s in self._strands.values())

    def _calm_for(self) -> float:
        """Until a strand, or a hold, that rests is due; at most until the next look around."""
        now = clock()
        rests = [s.due_at for s in self._strands.values()]
        rests += [hold.due_at for s in self._strands.values() for hold in s.holds.values() if hold.part is None]
        return min([_EVERY, *(due_at - now for due_at in rests if due_at > now)])

    def _collect(self, answered: Mapping[Partition, Strand]) -> None:
        for partition, strand in answered.items():
            with self._guard:
                strand.collect()
                blocked = [(topic, strand.holds[topic]) for topic in strand.collect_held()]
                self._news.notify_all()
            for topic, hold in blocked:
                if hold.is_to_be_said():
                    self._say_blocked(partition, topic, hold, strand.pending)

    def _say_blocked(self, partition: Partition, topic: str, hold: Hold, rows: int) -> None:
        if partition == NOBODYS:
            where, group = "nobody's", '""'
        else:
            where, group = f"partition={partition}", self._group
        _log.warning(
            "outbox_blocked %s group=%s topic=%s row=%d rows=%d cause=%s; it is tried again by itself, and holds later "
            "rows to this topic; to decide: kconsume outbox list, then drop or dead-letter %d --to TOPIC",
            where, group, topic, hold.number, rows, hold.cause, hold.number,
        )  # fmt: skip

    def _set_aside(self, strands: Mapping[Partition, Strand], now: float) -> None:
        """A topic whose brokers do not answer, or that the client waits for, holds up its own rows alone."""
        for strand in strands.values():
            if strand.may_be_set_aside(now):
                with self._guard:
                    strand.set_aside()

    def _delete(self, strands: Mapping[Partition, Strand]) -> None:
        """What is confirmed, of all partitions at once."""
        done = {p: s for p, s in strands.items() if s.confirmed}
        for group, chosen in ((self._group, done.keys() - {NOBODYS}), ("", done.keys() & {NOBODYS})):
            if chosen:
                self._store.delivered(group, {p: done[p].confirmed for p in chosen})
        with self._guard:
            for strand in done.values():
                strand.deleted()
                if strand.pending < strand.width:
                    strand.due_at = max(strand.due_at, _next_beat(clock()))
            self._forget_those_that_left()
            if done:
                self._news.notify_all()

    def _send(self, ready: Mapping[Partition, Strand]) -> None:
        now = clock()
        with self._guard:
            asked = {p: s for p, s in ready.items() if not s.leaving and (s.pending or s.unread)}
            if self._closing and (strays := asked.pop(NOBODYS, None)) is not None:
                strays.unread = False
            in_memory = {p for p, s in asked.items() if s.is_in_memory}
            read = {p: s for p, s in asked.items() if p not in in_memory or not s.is_trusted(now)}
            known = {p: s.pending for p, s in read.items()}
            for strand in read.values():
                strand.reading = True
                strand.unread = False  # who opens it while we read means what is there after that
        try:
            lots = self._read({p: (s, 1 if p in in_memory else s.width) for p, s in read.items()})
            having = {p for p in asked if p in in_memory or lots.get(p)}
            limits = shared(self._limits_of(lots, [asked[p] for p in in_memory]), self._sending_beside(having))
            for partition, strand in asked.items():
                with self._guard:
                    strand.reading = False
                    if strand.leaving or (self._closing and partition == NOBODYS):
                        continue
                    rows = lots.get(partition, ())
                    is_full = len(rows) == strand.width
                    if partition not in in_memory:
                        strand.take(rows, known[partition], limits)
                    elif partition not in read or strand.begins_with(rows):
                        strand.take_tail(limits)
                    if partition in read:
                        strand.looked_at = now
                    if partition == NOBODYS:
                        strand.unread = True
                        strand.due_at = strand.due_at if is_full else now + _EVERY
                    self._news.notify_all()
                self._ship(strand)
        except BaseException:
            for strand in asked.values():
                strand.reading, strand.unread = False, True
            raise

    def _read(self, asked: Mapping[Partition, tuple[Strand, int]]) -> dict[Partition, list[Posted]]:
        lots: dict[Partition, list[Posted]] = {}
        for width in {most for p, (_, most) in asked.items() if p != NOBODYS}:
            strands = {p: s for p, (s, most) in asked.items() if p != NOBODYS and most == width}
            targets = {p: chosen for p, s in strands.items() if (chosen := s.targets) is not None}
            lots.update(self._posted({p: s.epoch for p, s in strands.items()}, width, targets))
        if NOBODYS in asked:
            strand, most = asked[NOBODYS]
            lots[NOBODYS] = self._strays(most, strand.targets)
        return lots

    def _sending_beside(self, asked: Collection[Partition]) -> int:
        """How many partitions may have rows under way at once: the producer puts them into the same batches."""
        return sum(p in asked or bool(strand.parts) for p, strand in [*self._strands.items()])

    def _posted(
        self, epochs: Mapping[Partition, int], most: int, targets: Mapping[Partition, Targets]
    ) -> dict[Partition, list[Posted]]:
        if not targets:
            return self._store.posted(self._group, epochs, most)
        return self._store.posted(self._group, epochs, most, targets)

    def _strays(self, most: int, targets: Targets | None) -> list[Posted]:
        self._renew_at = clock() + LEASE / 3
        if targets is None:
            return self._store.strays(self._owner, most)
        return self._store.strays(self._owner, most, targets)

    def _limits_of(
        self, lots: Mapping[Partition, Sequence[Posted]], in_memory: Sequence[Strand]
    ) -> Mapping[str, Limit]:
        if self._limits is None:
            return NO_LIMITS
        topics = {cast(str, row.outgoing.topic) for rows in lots.values() for row in rows}
        return self._limits.of(topics.union(*(strand.topics_in_memory() for strand in in_memory)))

    def _ship(self, strand: Strand) -> None:
        if not strand.lot:
            return
        try:
            for part in strand.split():
                part.sending = self._outlet.deliver_each([row.outgoing for row in part.rows])
                part.sending.add_done_callback(lambda _: self._wake())
        except BaseException:
            with self._guard:
                strand.unsent()
            raise

    def _try_held(self, strands: Mapping[Partition, Strand], now: float) -> None:
        """The first row of each hold that is due is read again, for it may have been deleted, and sent alone."""
        for partition, strand in strands.items():
            if partition == NOBODYS and self._closing:
                continue
            for topic in strand.due_holds(now):
                hold = strand.holds[topic]
                hold.reading = True
                try:
                    rows = self._first(partition, strand, topic)
                    with self._guard:
                        if strand.leaving or strand.holds.get(topic) is not hold:
                            continue
                        if not rows:
                            strand.release(topic)
                            self._news.notify_all()
                            continue
                        hold.part = Part(topic, rows)
                    self._ship_alone(hold.part)
                finally:
                    hold.reading = False

    def _first(self, partition: Partition, strand: Strand, topic: str) -> Sequence[Posted]:
        targets = Targets((topic,))
        if partition == NOBODYS:
            return self._strays(1, targets)
        return self._posted({partition: strand.epoch}, 1, {partition: targets}).get(partition, [])

    def _ship_alone(self, part: Part) -> None:
        sending: Future[Delivery]
        try:
            sending = self._outlet.deliver_alone(part.rows[0].outgoing)
        except KconsumeError as error:
            sending = Future()
            sending.set_result(Delivery([False], str(error)))
        part.sending = sending
        sending.add_done_callback(lambda _: self._wake())

    def _wake(self) -> None:
        with self._guard:
            self._news.notify_all()

    def _rest(self, strands: Mapping[Partition, Strand], why: str) -> None:
        resting = {p: s for p, s in strands.items() if not s.lot}
        for strand in strands.values():
            strand.delay_holds(_EVERY)
        seconds = max((strand.rest() for strand in resting.values()), default=0.0)
        news = [p for p, s in resting.items() if (p != NOBODYS or s.pending) and s.is_news(why)]
        if news:
            rows, where = sum(resting[p].pending for p in news), _places(news)
            _log.warning("outbox waits %s rows=%d again_in=%.1fs cause=%s", where, rows, seconds, why)

    def _look_after(self, strands: Mapping[Partition, Strand], now: float) -> None:
        """What takes long is said, and stays ours; what was taken in long ago is forgotten."""
        slow = [p for p, s in strands.items() if s.is_slow(now, _SAID_EVERY)]
        if slow and now - self._said_at > _SAID_EVERY:
            self._said_at = now
            rows = sum(strands[p].pending for p in slow)
            _log.warning("outbox waits partitions=%d rows=%d cause=the brokers do not confirm them", len(slow), rows)
        if strands[NOBODYS].is_under_way and now >= self._renew_at:
            self._strays(1, None)  # nobody else sends them while they are under way
        if now >= self._forget_at:
            more = self._store.forget_origins()
            self._forget_at = now + (_FORGET_MORE_EVERY if more else _FORGET_EVERY)


def _next_beat(now: float) -> float:
    return (now // _BEAT + 1) * _BEAT


def _places(partitions: Sequence[Partition]) -> str:
    """As the log has them: how many, or which."""
    if len(partitions) > 1:
        return f"partitions={len(partitions)}"
    return "nobody's" if partitions[0] == NOBODYS else f"partition={partitions[0]}"
