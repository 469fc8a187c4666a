"""The owner thread: poll → dispatch → complete → commit, and nothing else.

It alone touches the consumer. Other threads reach it by `request` (a callable, run between polls) and read
`snapshot`; they never call into it. Handlers do not hold it up: they run on workers; a swift one runs on the owner
thread, and if it takes long after all, another thread becomes the owner (`ownership.py`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from confluent_kafka import KafkaError

from kconsume.errors import HandlerFailed, KconsumeError, NotAuthorized, TopicNotFound
from kconsume.records import Message, Partition
from kconsume.runtime.arrivals import Runs
from kconsume.runtime.budget import Deadline
from kconsume.runtime.commits import Entry, GroupLedger, Ledger, Marks
from kconsume.runtime.holding import Holding, State
from kconsume.runtime.home import Home
from kconsume.runtime.lanes import (
    Chunk,
    Crashed,
    Ejected,
    Ended,
    Failure,
    Lane,
    Outcome,
    Outcomes,
    Progress,
    Undelivered,
    Worked,
)
from kconsume.runtime.lending import Lending
from kconsume.runtime.ownership import Deposed
from kconsume.runtime.pressure import Advice, Window
from kconsume.runtime.refusals import TurnedAway
from kconsume.runtime.split_source import AnySource
from kconsume.runtime.tenancy import SAY_EVERY, Tenancy
from kconsume.runtime.trouble import Trouble
from kconsume.runtime.waits import flows, waits_for

_log = logging.getLogger("kconsume.loop")

T = TypeVar("T")

COMMIT_EVERY = 1.0
CHECKUP_EVERY = 15.0
ASK_AGAIN_EVERY = 2.0
EMPTY_AFTER = 8.0
"""Seconds after which a member whose broker has assigned it nothing yet counts as one that has nothing. Longer than the
heartbeat that brokers ask for (5 s by default): a pattern that they have still to resolve may be answered then."""
POLL = 0.1
_MOMENT = 0.005
_ROOM_POLL = 0.05


def _ignore(_: object) -> None:
    """Nothing is done with the answer."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What other threads may know of the loop."""

    state: str = "starting"
    assigned: tuple[Partition, ...] = ()
    stored: Mapping[Partition, int] = field(default_factory=dict)
    handled: int = 0
    skipped: int = 0
    abandoned: tuple[Partition, ...] = ()
    held: Mapping[Partition, Trouble] = field(default_factory=dict)
    """Partitions that are held, and why."""
    waits: Mapping[Partition, tuple[str, ...]] = field(default_factory=dict)
    """Partitions that do not flow, and the causes for which they wait."""


class Loop:
    """One consumer of one group, from subscribe to close."""

    def __init__(
        self,
        source: AnySource,
        tenancy: Tenancy,
        outcomes: Outcomes,
        ledger: Ledger,
        mirror: GroupLedger | None,
        *,
        memory: int,
        shutdown: float,
        checkup: Callable[[Mapping[str, str]], Future[dict[str, KconsumeError]]],
        has_had: Callable[[str], bool],
        explain: Callable[[KafkaError], Future[None]],
        home: Home | None = None,
    ) -> None:
        self.snapshot = Snapshot()
        self.failure: BaseException | None = None
        self.started = threading.Event()
        """Set when the first claim was answered."""
        self.last_trouble: str | None = None
        """What the client said last of its connections and of its group. Read by other threads."""
        self._source = source
        self._tenancy = tenancy
        self._outcomes = outcomes
        self._ledger = ledger
        self._mirror = mirror
        self._memory = memory
        self._shutdown = shutdown
        self._checkup = checkup
        self._has_had = has_had
        self._explain = explain
        self._turned_away = TurnedAway()
        self._lending = None if home is None else Lending(home, self)
        self._checkup_at = time.monotonic() + CHECKUP_EVERY
        self._asked_again_at = 0.0
        self._member_since = time.monotonic()
        self._polled_at = 0.0
        self._requests: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stop: Deadline | None = None
        self._idle_for: float | None = None
        self._last_record = time.monotonic()
        self._commit_at = 0.0
        self._crowded: dict[Holding, float] = {}
        self._appetite: int | None = None
        """How many records to fetch, to fill batches of the partition that they came from last."""
        self._gathering: set[Holding] = set()
        """Those with records that wait for their batch."""
        self._handled = 0
        self._skipped = 0
        self._trouble_at = -60.0
        self._told_of: dict[str, float] = {}
        """Topics of which the log was told that something is wrong, and when it may be told again."""
        self._watched: list[tuple[Future[Any], Callable[[Any], None]]] = []
        self._undispatched: deque[tuple[Partition, list[Message]]] = deque()
        """Fetched and not yet with a lane; not empty only while an owner is held up on the way."""

    # From other threads

    def request(self, action: Callable[[], None]) -> None:
        """Run `action` on the owner thread, between polls."""
        self._requests.put(action)

    def stop(self, deadline: Deadline) -> None:
        """Drain, commit and leave by the deadline. The first call counts."""
        self.request(lambda: self._set_stop(deadline))

    def stop_when_idle(self, seconds: float) -> None:
        """Stop by itself once everything is read to its end and nothing came for `seconds`."""
        self.request(lambda: self._set_idle(seconds))

    # On the owner thread

    @property
    def waits(self) -> dict[Partition, tuple[str, ...]]:
        """The partitions that do not flow, and what each waits for."""
        tenancy = self._tenancy
        return {
            p: waits_for(h, is_claimed=tenancy.claims_it(h), can_be_confirmed=self._can_be_confirmed(h))
            for p, h in tenancy.holdings.items()
            if not flows(h)
        }

    def _can_be_confirmed(self, holding: Holding) -> bool:
        if self._mirror is None or not self._tenancy.reads_row_of(holding):
            return False
        row = None if holding.confirmation is None else holding.confirmation.row
        return row is None or _to_mirror(holding) is not None

    def watch(self, check: Future[T], then: Callable[[T], None] = _ignore) -> None:
        """A check on its way; if it fails, the loop fails with it. `then` gets its answer."""
        self._watched.append((check, then))

    def hold_topics(self, faults: Mapping[str, KconsumeError]) -> None:
        """Something is wrong with whole topics. One that was never there, or could never be read, is an error of the
        configuration."""
        for topic, fault in faults.items():
            if isinstance(fault, TopicNotFound) and not self._has_had(topic):
                raise fault
            if isinstance(fault, NotAuthorized) and not self._handled and not self._source.ends:
                raise fault  # nothing was ever read
            concerned = [h for h in self._tenancy.holdings.values() if h.partition.topic == topic]
            if not concerned:
                self._tell_of_topic(topic, fault)
            for holding in concerned:
                self._tenancy.put_on_hold(holding, fault, drains=isinstance(fault, NotAuthorized))

    def run(self, begin: Callable[[], None]) -> None:
        """Consume until stopped or failed; what went wrong is in `failure`. Raises nothing but `Deposed`: then another
        thread goes on, with `resume`."""
        try:
            begin()
            while self._stop is None:
                self._turn()
        except Deposed:
            raise
        except BaseException as error:  # noqa: BLE001  (kept in `failure`, raised by the supervisor)
            self._fail(error)
        self._end()

    def resume(self) -> None:
        """Go on in the place of an owner that a handler holds up."""
        _log.warning("a handler that is usually swift takes long: another thread polls on")
        self.run(lambda: self._dispatch([], time.monotonic()))

    def _end(self) -> None:
        deadline = self._stop or Deadline(self._shutdown)
        try:
            self._drain(deadline)
        except BaseException as error:  # noqa: BLE001  (as above; the group is left all the same)
            self._fail(error)
        self._tenancy.leave(deadline)
        try:
            self._source.close(deadline.left)
        except BaseException as error:  # noqa: BLE001  (as above)
            self._fail(error)
        self._publish("stopped")

    def _turn(self) -> None:
        self._take_requests()
        if self._watched:
            self._see_checks()
        self._complete()
        if self._source.has_faults:
            self._hold_faulty()
        self._tenancy.step()
        now = time.monotonic()
        if not (self._tenancy.joined and self._source.joined):
            self._see_membership(now)
        if not self.started.is_set():
            self._see_start(now)
        if now >= self._commit_at or self._tenancy.asks_for_commit:
            self._commit(now)
        self._collect()
        self._report_trouble(now)
        if now >= self._checkup_at:
            self._check_topics(now)
        if self._gathering:
            self._hand_over_batches(now)
        if self._lending is not None and self._lending.burst():
            return
        crowded = self._crowded and self._relieve(now)
        runs = self._await_room() if crowded else self._source.fetch(self._patience(), self._appetite)
        if runs:
            self._last_record = time.monotonic()  # again, for it may have waited for them
            self._dispatch(runs, self._last_record)
        elif self._idle_for is not None and self._nothing_comes(now):
            if self._gathering:
                self._hand_over_batches(math.inf)  # what they wait for does not come
            elif all(_is_done(h) for h in self._tenancy.holdings.values()):
                self._fail_for_the_held()
                self._set_stop(Deadline(self._shutdown))

    def _see_membership(self, now: float) -> None:
        if not self._source.is_member:
            self._member_since = now
        elif now - self._member_since >= EMPTY_AFTER:
            self._source.admitted()
            self._tenancy.admitted()

    def _see_start(self, now: float) -> None:
        tenancy = self._tenancy
        if tenancy.started:
            self.started.set()
        elif tenancy.joined and not tenancy.holdings and now >= self._asked_again_at:
            self._asked_again_at = now + ASK_AGAIN_EVERY
            self.watch(self._checkup({}), self.hold_topics)  # no claim will tell whether the store answers

    def fetch_now(self) -> bool:
        """Also on the event loop, in a burst (`lending.py`)."""
        self._complete()
        runs = self._source.fetch(0)
        if runs:
            self._last_record = time.monotonic()
            self._dispatch(runs, self._last_record)
        return bool(runs)

    def at_rest(self) -> bool:
        lanes = [h.lane for h in self._tenancy.holdings.values()]
        return bool(lanes) and all(lane is not None and lane.pace.swift and not lane.busy for lane in lanes)

    def _patience(self) -> float:
        if not self._settled:
            return 0.005
        if not self._gathering:
            return POLL
        gatherings = [h.lane.gathering for h in self._gathering if h.lane is not None]
        due = min((gathering.due for gathering in gatherings if gathering is not None), default=0.0)
        return min(POLL, max(0.0, due - time.monotonic()))

    def _dispatch(self, runs: Runs, now: float) -> None:
        holdings = self._tenancy.holdings
        window = Window(self._memory, len(holdings))
        waiting = self._undispatched
        waiting.extend(runs)
        while waiting:
            partition, run = waiting.popleft()
            holding = holdings.get(partition)
            if holding is None or holding.lane is None:
                continue  # not ours (any more): never delivered, so never passed
            gathering = holding.lane.gathering
            if gathering is None:
                self._deliver(holding, holding.lane, Chunk(run, run[0].offset(), run[-1].offset()), window)
            elif not holding.lane.stop:
                self._gathering.add(holding)
                gathering.add(run, now)
                self._hand_over(holding, window, now)
                self._appetite = gathering.appetite(self._source.batch)

    def _deliver(self, holding: Holding, lane: Lane, chunk: Chunk, window: Window) -> None:
        holding.tracker.delivered(chunk.first, chunk.last)
        lane.lanes.submit(lane, chunk)
        pace, batch = lane.pace, lane.batch
        if window.share(lane.records, lane.bytes, pace.seconds_each, waits=pace.waits, batch=batch) >= 1.0:
            self._crowded.setdefault(holding, time.monotonic())

    def _hand_over_batches(self, now: float) -> None:
        """Of the records that wait for their batch, those whose batch is full or due."""
        window = Window(self._memory, len(self._tenancy.holdings))
        for holding in list(self._gathering):
            self._hand_over(holding, window, now)

    def _hand_over(self, holding: Holding, window: Window, now: float) -> None:
        lane = holding.lane
        if lane is None or lane.gathering is None or lane.stop:
            self._gathering.discard(holding)
            return
        while (chunk := lane.gathering.ready(now, window.bytes // 2)) is not None:
            self._deliver(holding, lane, chunk, window)
        if not len(lane.gathering):
            self._gathering.discard(holding)

    def _complete(self) -> None:
        outcomes = self._outcomes
        while not outcomes.empty():
            self._settle(outcomes.get())

    def _settle(self, outcome: Outcome) -> None:
        holding = self._tenancy.current(outcome.lane.partition, outcome.lane)
        if holding is None:
            return
        if isinstance(outcome, Progress):
            self._advance(holding, outcome)
        elif isinstance(outcome, Worked):
            outcome.lane.worked_off(outcome.records)
        elif isinstance(outcome, Ended):
            holding.tracker.ended(outcome.offset)
            holding.stored = outcome.offset
        elif isinstance(outcome, Ejected):
            self._tenancy.eject(holding, outcome.error, holds=outcome.holds)
        elif isinstance(outcome, Undelivered):
            # Not here: this may be inside the client's callback, and its lane's work may be run by this thread.
            self.request(partial(outcome.lane.lanes.submit, outcome.lane, Chunk([], 0, -1)))
        elif isinstance(outcome, Crashed):
            raise outcome.error
        else:
            self._failed(holding, outcome)

    def _failed(self, holding: Holding, failure: Failure) -> None:
        place = f"{failure.lane.partition}@{failure.message.offset()}"
        error = HandlerFailed(failure.handler, place, failure.error)
        if failure.holds:
            return self._tenancy.put_on_hold(holding, error, drains=False)
        self._fail(error)
        return self._set_stop(Deadline(self._shutdown))

    def _advance(self, holding: Holding, progress: Progress) -> None:
        lane, count = progress.lane, progress.handled + progress.skipped
        holding.tracker.finished(progress.first, progress.upto)
        holding.leader_epoch = progress.leader_epoch
        holding.tries = 0
        holding.handled += count
        if holding.trouble is not None:
            self._tenancy.passed(holding)
        if progress.stored:
            holding.stored = progress.upto
        elif progress.upto - (holding.stored or 0) > Window.MOST_RECORDS:
            self._commit_at = 0.0  # a crash repeats a window at most, also of a handler that is faster than the clock
        if not progress.held:
            lane.worked_off(count)
        self._handled += progress.handled
        self._skipped += progress.skipped

    # Commits

    def _commit(self, now: float) -> None:
        self._commit_at = now + COMMIT_EVERY
        self._tenancy.asks_for_commit = False
        holdings = list(self._tenancy.holdings.values())
        for lane in [h.lane for h in holdings if h.lane is not None]:
            lane.tally.tell()
        for partition in self._source.ends:
            self._pass_the_end(partition)
        if not self._ledger.busy and (marks := _unsaved(holdings)):
            self._ledger.send(marks)
        if self._mirror is not None and not self._mirror.busy:
            behind = {h.partition: Entry(h, offset, h.token) for h in holdings if (offset := _to_mirror(h)) is not None}
            if behind:
                self._mirror.send(behind)
        self._publish("running" if self._stop is None else "stopping")

    def _collect(self) -> None:
        self._collect_saved()
        self._collect_mirrored()

    def _collect_saved(self) -> None:
        receipt = self._ledger.collect()
        if receipt is not None:
            for partition, entry in receipt.kept.items():
                if (holding := self._tenancy.current(partition, entry.token)) is not None:
                    self._tenancy.stored(holding, entry.offset)
            for partition, (entry, error) in receipt.fenced.items():
                if (holding := self._tenancy.current(partition, entry.token)) is not None:
                    self._tenancy.eject(holding, error)
            for partition, (entry, fault) in receipt.faults.items():
                if (holding := self._tenancy.current(partition, entry.token)) is not None:
                    self._tenancy.put_on_hold(holding, fault)

    def _collect_mirrored(self) -> None:
        if self._mirror is not None and (mirrored := self._mirror.collect()) is not None:
            generation, confirmed = mirrored.generation or 0, list[Holding]()
            for partition, entry in mirrored.kept.items():
                if (holding := self._tenancy.current(partition, entry.token)) is None:
                    continue
                if holding.state is not State.EJECTED:
                    holding.mirrored = entry.offset
                elif generation > 0:
                    confirmed.append(holding)
            if confirmed:
                self._tenancy.confirm(confirmed, generation)

    def _pass_the_end(self, partition: Partition) -> None:
        """Where everything delivered is finished, the offset goes to the end of the log: a transaction marker behind
        the last record would else be lag for ever. A lane that moves its own offset does so itself."""
        holding = self._tenancy.holdings.get(partition)
        if holding is None or holding.lane is None or holding.lane.stop or holding in self._gathering:
            return
        if holding.trouble is not None:
            self._tenancy.passed(holding)
        tracker, lane, end = holding.tracker, holding.lane, self._source.end_of(partition)
        if not tracker.idle or end <= tracker.watermark or any(p == partition for p, _ in self._undispatched):
            return
        if not lane.commits_itself:
            tracker.ended(end)
        elif not lane.busy:
            lane.lanes.submit(lane, Chunk([], end, end - 1, end))

    def see_off(self, leaving: list[Holding], budget: Deadline) -> int:
        """Partitions were revoked, their lanes braked: give what runs its part of the budget, then send the last
        offsets. Answers how many records were finished meanwhile.

        Inside the client's callback: it does not poll.
        """
        before = sum(h.handled for h in leaving)
        running = budget.part(0.5)
        while not running.passed and any(h.lane is not None and h.lane.unfinished for h in leaving):
            # A moment at a time: a lane comes to rest just after its last report, and says nothing more.
            self._await_outcome(min(_MOMENT, running.left))
        self._complete()
        self._ledger.settle(budget)
        self._collect_saved()
        if marks := _unsaved(leaving):
            self._ledger.hand_over(marks, budget)
        return sum(h.handled for h in leaving) - before

    # Back-pressure

    def _relieve(self, now: float) -> bool:
        """Pause and resume crowded lanes as the window advises; whether to wait before the next fetch."""
        wait = False
        window = Window(self._memory, len(self._tenancy.holdings))
        for holding, since in list(self._crowded.items()):
            lane = holding.lane
            if lane is None or self._tenancy.holdings.get(holding.partition) is not holding:
                del self._crowded[holding]
                continue
            pace, crowded_for = lane.pace, now - since
            advice = window.advise(
                lane.records,
                lane.bytes,
                crowded_for=crowded_for,
                seconds_each=pace.seconds_each,
                waits=pace.waits,
                batch=lane.batch,
            )
            if advice is Advice.FLOW:
                del self._crowded[holding]
                self._tenancy.free(holding, "pressure")
            elif advice is Advice.PAUSE:
                self._tenancy.hold(holding, "pressure")
            wait = wait or (advice is Advice.WAIT and not holding.held)
        return wait

    def _await_room(self) -> Runs:
        """Leave records in the client's queue until a lane reports, but serve callbacks all the same."""
        self._await_outcome(_ROOM_POLL)
        now = time.monotonic()
        if now - self._polled_at < _ROOM_POLL:
            return []
        self._polled_at = now
        return self._source.poll()

    # Stopping

    def _drain(self, deadline: Deadline) -> None:
        """What runs finishes, what has not started is dropped, what is finished is committed."""
        self._publish("draining")
        tenancy = self._tenancy
        self._source.pause(list(tenancy.holdings))
        dropped = tenancy.brake_all("stop")
        running = deadline.part(0.7)
        while not running.passed and any(h.lane is not None and h.lane.unfinished for h in tenancy.holdings.values()):
            self._serve()
            self._await_outcome(min(_ROOM_POLL, running.left))
        self._complete()
        for holding in tenancy.holdings.values():
            if holding.lane is not None and holding.lane.unfinished:
                tenancy.abandoned.append(holding.partition)
        self._commit_last(deadline.part(0.5))
        self._publish("leaving")
        _log.info("drained dropped=%d abandoned=%d", dropped, len(tenancy.abandoned))

    def _await_outcome(self, seconds: float) -> None:
        try:
            self._settle(self._outcomes.get(timeout=seconds))
        except Empty:
            return

    def _commit_last(self, deadline: Deadline) -> None:
        """Commit until nothing is unsaved. With brokers that do not answer, give up and say so."""
        pause, courtesy = Deadline(0.0), deadline.part(0.1)
        while True:
            self._collect()
            unsaved = [h for h in self._tenancy.holdings.values() if h.unsaved]
            # Lag tools should see where we stopped; for a mirror that is refused nobody waits long.
            behind = not courtesy.passed and self._mirror is not None and self._mirror_is_behind
            busy = self._ledger.busy or (self._mirror is not None and self._mirror.busy)
            if not unsaved and not behind and not busy:
                break
            if deadline.passed:
                _log.error("not committed partitions=%s", ",".join(str(h.partition) for h in unsaved) or "-")
                break
            if (unsaved or behind) and not self._ledger.busy and pause.passed:
                pause = Deadline(_ROOM_POLL)
                self._commit(time.monotonic())
            self._serve()
            time.sleep(0.002)

    @property
    def _mirror_is_behind(self) -> bool:
        return any(h.state is State.OPEN and _to_mirror(h) is not None for h in self._tenancy.holdings.values())

    def _serve(self) -> None:
        """Have the client's callbacks called. What has gone wrong with it does not cut the drain short."""
        try:
            self._source.poll()
        except BaseException as error:  # noqa: BLE001  (kept in `failure`, raised by the supervisor)
            self._fail(error)

    @property
    def _settled(self) -> bool:
        """Whether we know what is ours, and every partition is open or held."""
        return self._source.joined and self._tenancy.settled

    def _nothing_comes(self, now: float) -> bool:
        tenancy = self._tenancy
        return (
            self._idle_for is not None
            and now - self._last_record >= self._idle_for
            and self._settled
            and self._source.ends.issuperset(
                p for p, h in tenancy.holdings.items() if p not in tenancy.paused and h.trouble is None
            )
        )

    def _hold_faulty(self) -> None:
        """What the client said of single partitions and topics."""
        partitions, topics = self._source.take_faults()
        for partition, fault in partitions.items():
            holding = self._tenancy.holdings.get(partition)
            if holding is not None:
                self._tenancy.put_on_hold(holding, fault)
        self.hold_topics(topics)

    def _fail_for_the_held(self) -> None:
        """All that can be read was read to its end, and this was not."""
        for _, trouble in sorted(self._tenancy.troubles.items()):
            self._fail(trouble.error)

    def _tell_of_topic(self, topic: str, fault: KconsumeError) -> None:
        now = time.monotonic()
        if now >= self._told_of.get(topic, 0.0):
            self._told_of[topic] = now + SAY_EVERY
            _log.error("topic trouble, no partition of it is ours topic=%s cause=%s", topic, fault)

    # Small steps

    def _check_topics(self, now: float) -> None:
        """A topic that was deleted and made again is not noticed by the client, which goes on in the new one."""
        self._checkup_at = now + CHECKUP_EVERY
        known = {h.partition.topic: h.topic_id for h in self._tenancy.holdings.values() if h.topic_id is not None}
        if known:
            self.watch(self._checkup(known), self.hold_topics)

    def _take_requests(self) -> None:
        while not self._requests.empty():
            self._requests.get()()

    def _see_checks(self) -> None:
        done = [watched for watched in self._watched if watched[0].done()]
        for check, then in done:
            self._watched.remove((check, then))
            then(check.result())

    def _set_stop(self, deadline: Deadline) -> None:
        self._stop = self._stop or deadline

    def _set_idle(self, seconds: float) -> None:
        self._idle_for = seconds

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error

    def _publish(self, state: str) -> None:
        holdings = self._tenancy.holdings
        self.snapshot = Snapshot(
            state,
            tuple(sorted(holdings)),
            {p: h.stored for p, h in holdings.items() if h.stored is not None} or self.snapshot.stored,
            self._handled,
            self._skipped,
            tuple(self._tenancy.abandoned),
            self._tenancy.troubles or (self.snapshot.held if state == "stopped" else {}),
            self.waits,
        )

    def _report_trouble(self, now: float) -> None:
        trouble = self._source.take_trouble()
        for error in trouble:
            if self._turned_away.lasts(error.code(), self._source.joins, now):
                self.watch(self._explain(error))
                break
        if trouble:
            self.last_trouble = trouble[-1].str()
        if trouble and now - self._trouble_at >= 10.0:
            self._trouble_at = now
            _log.warning("broker trouble, the client goes on trying times=%d last=%r", len(trouble), trouble[-1].str())


def _is_done(holding: Holding) -> bool:
    """Whether everything that was delivered is finished; of a partition that is held, all that still will be."""
    if holding.trouble is None:
        return holding.tracker.idle
    return holding.lane is None or not holding.lane.unfinished


def _unsaved(holdings: Iterable[Holding]) -> Marks:
    return {h.partition: Entry(h, h.tracker.watermark, h.token) for h in holdings if h.unsaved}


def _to_mirror(holding: Holding) -> int | None:
    """The offset to commit to the Kafka group: where the store is ahead of it, or to have our membership confirmed.

    Nothing while a claim is under way: what we saw of the row last may be behind what the group has by now.
    """
    if holding.state is State.EJECTED:
        row = None if holding.confirmation is None else holding.confirmation.row
        return None if row is None else row.next_offset
    if holding.state is not State.OPEN or holding.stored == holding.mirrored:
        return None
    return holding.stored
