"""Which partitions are ours: what can be told without a broker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import TypeVar, cast, get_args

import pytest

from kconsume._kafka.consumer import KafkaConsumer, StartAt
from kconsume._runtime.assignment import claiming as implementation
from kconsume._runtime.assignment import held_watch
from kconsume._runtime.assignment.assignment import Assignment
from kconsume._runtime.assignment.claims import Answers, Claims, HeldRows
from kconsume._runtime.assignment.committer import Committer
from kconsume._runtime.assignment.listener_calls import ListenerCalls
from kconsume._runtime.assignment.partition import State
from kconsume._runtime.assignment.partition_trouble import PartitionTrouble
from kconsume._runtime.assignment.rebalance_recorder import RebalanceRecorder
from kconsume._runtime.assignment.topic_checks import TopicChecks
from kconsume._runtime.background import BackgroundThread
from kconsume._runtime.deadlines import Deadline
from kconsume._runtime.handler_loop import HandlerLoop
from kconsume._runtime.lanes.inline import InlineLanes
from kconsume._runtime.lanes.lane import Lane, Work
from kconsume._runtime.lanes.pacing import Pace
from kconsume._runtime.lanes.reports import LaneReports, Progress
from kconsume._runtime.observation.event_lines import log_events
from kconsume._runtime.observation.events import Events, RebalanceEnded
from kconsume.backends import Position
from kconsume.backends.base import Positions, Refused
from kconsume.errors import Fenced, OffsetOutOfRange, StoreUnavailable, TooManyFailures, Undecided
from kconsume.rebalance.events import History
from kconsume.rebalance.listeners import Event, Listener, read_listener
from kconsume.records import Partition
from tests.waiting import eventually

A, B, C = (Partition("orders", number) for number in range(3))
T = TypeVar("T")


class Store:
    """Answers claims by hand: errors first, then epochs that grow."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[Partition]]] = []
        self.errors: list[Exception] = []
        self.undecided: set[Partition] = set()
        self.added: set[Partition] = set()
        self.unpinned: set[Partition] = set()
        self.deleted: set[Partition] = set()
        self.taken: set[Partition] = set()
        """Claimed by another, under a later generation than ours."""
        self.generations: list[int] = []
        """Under which we were asked."""
        self.had: Positions | None = None
        """What the last claim said of rows that were held until then."""
        self.store_answered = True
        self.waits_for_topics = False
        self._epoch = 0

    def claim(self, partitions: list[Partition], generation: int, had: Positions | None = None) -> Answers:
        self.generations.append(generation)
        self.had = had
        return self._answer("claim", partitions)

    def reclaim(self, epochs: Mapping[Partition, int]) -> Answers:
        return self._answer("reclaim", list(epochs))

    def take_over(self, epochs: Mapping[Partition, int], generation: int) -> Answers:
        self.generations.append(generation)
        return self._answer("take over", list(epochs))

    def rows(self, partitions: list[Partition]) -> dict[Partition, Position]:
        return {p: Position(7, self._epoch) for p in partitions if p not in self.deleted}

    def read_held(self, partitions: Sequence[Partition], missing: Sequence[str]) -> HeldRows:
        self.asked.append(("look", list(partitions)))
        return HeldRows({p: Position(7, self._epoch) for p in partitions}, frozenset())

    def seek(self, offsets: Mapping[Partition, int], generation: int) -> Answers:
        self.generations.append(generation)
        return self._answer("restart", list(offsets))

    def _answer(self, question: str, partitions: list[Partition]) -> Answers:
        self.asked.append((question, partitions))
        if self.errors:
            raise self.errors.pop(0)
        self._epoch += 1
        return {p: self._answer_for(p) for p in partitions}

    def _answer_for(self, partition: Partition) -> Position | Refused | PartitionTrouble:
        row = Position(7, self._epoch)
        if partition in self.undecided:
            return PartitionTrouble(Undecided("half a record", {partition}), row, open_lane=False)
        return Refused(Fenced("a later generation")) if partition in self.taken else row

    def decide(self) -> None:
        """A user does, which gives the row another epoch."""
        self.undecided.clear()
        self._epoch += 1


class Queue:
    """Calls that are run when the test says so; `assigned` waits for those that run at once."""

    def __init__(self) -> None:
        self.at_once = True
        self._waiting: list[Callable[[], None]] = []

    def send(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001  (as BackgroundThread does)
                future.set_exception(error)

        self._waiting.append(run)
        if self.at_once:
            self.run()
        return future

    def run(self) -> None:
        waiting, self._waiting = self._waiting, []
        for run in waiting:
            run()


class Consumer:
    """What an assignment does to the Kafka consumer."""

    def __init__(self) -> None:
        self.paused: set[Partition] = set()
        self.placed: dict[Partition, StartAt] = {}
        self.main_joined = True
        self.current = 5
        """The group's generation."""

    def generations(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return dict.fromkeys(partitions, self.current)

    def pause(self, partitions: Iterable[Partition]) -> None:
        self.paused.update(partitions)

    def resume(self, partitions: Iterable[Partition]) -> None:
        self.paused.difference_update(partitions)

    def start_at(self, places: Mapping[Partition, StartAt]) -> None:
        self.placed.update(places)
        self.paused.difference_update(places)


class NoCommitter:
    """Has nothing to store: the lanes of these tests report what they have stored."""

    busy = False
    store_error = ""

    def settle(self, deadline: Deadline) -> None:
        """No save is under way."""

    def collect(self) -> None:
        """No answer is outstanding."""


class Bench:
    def __init__(self) -> None:
        self.store, self.queue, self.consumer = Store(), Queue(), Consumer()
        self.reports: LaneReports = SimpleQueue()
        self.told: list[tuple[str, list[Partition]]] = []
        self.events, self.history = Events(), History(datetime.now(UTC))
        log_events(self.events)
        self.events.subscribe(RebalanceEnded, lambda event: self.history.add(event.rebalance))
        self.recorder = RebalanceRecorder("cooperative", self.events)
        self.assignment = Assignment(
            cast(Claims, self.store),
            cast(TopicChecks, self.store),
            cast(BackgroundThread, self.queue),
            self.lane,
            ListenerCalls(
                [self.listener(event) for event in get_args(Event)], cast(HandlerLoop, None), "kconsume-listeners-test"
            ),
            self.recorder,
            self.reports,
            self.events,
            budget=1.0,
            shutdown=1.0,
            grouped=True,
        )
        self.assignment.attach(cast(KafkaConsumer, self.consumer), cast(Committer, NoCommitter()), None)

    def listener(self, event: Event) -> Listener:
        def hear(partitions: Sequence[Partition]) -> None:
            self.told.append((event, list(partitions)))

        return read_listener(hear, event)

    def lane(self, partition: Partition, position: Position, /) -> Lane:
        return Lane(
            partition, InlineLanes(SimpleQueue()), cast(Work, None), epoch=position.epoch, start=position.next_offset,
            scope="shop:A", pace=Pace(1), commits_itself=True,
        )  # fmt: skip

    def finishes(self, partition: Partition, records: int) -> None:
        """The lane of a partition has finished so many records, and nobody has taken its report yet."""
        owned = self.assignment.partitions[partition]
        first = owned.progress.watermark
        owned.progress.delivered(first, first + records - 1)
        assert owned.lane is not None
        self.reports.put(Progress(owned.lane, first, first + records, records, stored=True))

    @property
    def open(self) -> set[Partition]:
        return {p for p, h in self.assignment.partitions.items() if h.state is State.OPEN}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(implementation, "_BACKOFF_MOST", 0.0)
    monkeypatch.setattr(implementation, "CLAIM_PATIENCE", 0.5)
    return Bench()


def settle(bench: Bench, open_: set[Partition]) -> None:
    """Step until these are open: listeners are called by a thread of their own."""

    def stepped() -> bool:
        bench.assignment.step()
        return bench.open == open_

    eventually(stepped, what=f"{open_} open")


def test_a_member_that_was_put_out_has_not_caught_up(bench: Bench) -> None:
    """`catch_up` ends when everything that it has is read; after an eviction it has nothing, and has read nothing."""
    assignment = bench.assignment
    before = assignment.settled
    assignment.assigned([])
    with_nothing_to_read = assignment.settled
    assignment.lost([])
    assert (before, with_nothing_to_read, assignment.settled) == (False, True, False)


def test_a_claim_that_is_tried_again_leaves_out_what_was_revoked_meanwhile(bench: Bench) -> None:
    """Or it would fence the new owner."""
    bench.store.errors = [StoreUnavailable("away"), StoreUnavailable("away")]
    assert bench.assignment.assigned([A, B]) == {}
    bench.assignment.revoked([B])
    settle(bench, {A})
    assert bench.store.asked[0] == ("claim", [A, B])
    assert bench.store.asked[-1] == ("claim", [A])
    assert set(bench.consumer.placed) == {A}


def test_the_answer_to_a_claim_is_not_for_a_partition_that_went_and_came_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.queue.at_once = False
    monkeypatch.setattr(implementation, "CLAIM_PATIENCE", 0.0)
    bench.assignment.assigned([A])
    bench.queue.run()  # answered, and not looked at yet
    bench.assignment.revoked([A])
    bench.assignment.assigned([A])
    bench.queue.run()
    settle(bench, {A})
    assert bench.assignment.partitions[A].epoch == 2, "the second claim's"


def test_a_claim_that_waited_in_the_queue_asks_for_what_is_ours_when_its_turn_comes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call before it hung in a slow store, and one partition has gone to another member meanwhile."""
    bench.queue.at_once = False
    monkeypatch.setattr(implementation, "CLAIM_PATIENCE", 0.0)
    bench.assignment.assigned([A, B])
    bench.consumer.current = 6
    bench.assignment.revoked([B])
    bench.queue.run()
    settle(bench, {A})
    assert (bench.store.asked, bench.store.generations) == ([("claim", [A])], [6])


def test_a_claim_of_which_nothing_is_ours_any_more_is_not_made(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.queue.at_once = False
    monkeypatch.setattr(implementation, "CLAIM_PATIENCE", 0.0)
    bench.assignment.assigned([A])
    bench.assignment.lost([A])
    bench.queue.run()
    assert bench.store.asked == []


def test_the_generation_is_that_of_the_callback_and_not_of_the_moment_of_the_claim(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client learns of a new generation on a thread of its own, before it calls us: by then what we hold may be
    another member's."""
    bench.queue.at_once = False
    monkeypatch.setattr(implementation, "CLAIM_PATIENCE", 0.0)
    bench.assignment.assigned([A])
    bench.consumer.current = 7
    bench.queue.run()
    settle(bench, {A})
    assert bench.store.generations == [5]
    bench.assignment.assigned([])  # a callback, also if it brings nothing
    bench.assignment.seek({A: 3})
    bench.queue.at_once = True
    settle(bench, {A})
    assert bench.store.generations == [5, 7]


def test_a_seek_beside_a_claim_on_its_way_is_the_one_that_counts(bench: Bench) -> None:
    """Two claims of one holding would fence the lane of the first, which is our own."""
    bench.assignment.assigned([A])
    bench.queue.at_once = False
    bench.assignment.claiming.store_refused(bench.assignment.partitions[A], StoreUnavailable("lost in COMMIT"))
    bench.assignment.step()
    bench.queue.run()  # asked and answered, and not looked at yet
    bench.assignment.seek({A: 3})
    bench.assignment.step()
    bench.queue.run()
    settle(bench, {A})
    assert [question for question, _ in bench.store.asked] == ["claim", "reclaim", "restart"]
    assert bench.assignment.partitions[A].epoch == 3
    bench.assignment.step()
    assert len(bench.store.asked) == 3


def test_a_seek_of_a_partition_that_is_not_here_is_said_and_so_is_one_that_went_on_the_way(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementation, "CLAIM_PATIENCE", 0.0)
    bench.assignment.assigned([A])
    settle(bench, {A})
    bench.assignment.seek({A: 3})
    settle(bench, {A})
    assert caplog.messages == [], "it was carried out"
    bench.queue.at_once = False
    bench.assignment.seek({A: 4, B: 9})
    assert caplog.messages == [caplog.messages[0]]
    assert caplog.messages[0].startswith("seek ignored partition=orders/1 offset=9")
    bench.assignment.revoked([A])
    bench.queue.run()
    assert caplog.messages[1].startswith("seek interrupted partition=orders/0 offset=4")
    assert [question for question, _ in bench.store.asked] == ["claim", "restart"], "the second seek asked nothing"


def test_it_has_not_started_before_the_topics_of_the_handlers_were_given_out(bench: Bench) -> None:
    """The member that reads the retry topics may be told first, and a user's first seek was lost then."""
    bench.consumer.main_joined = False
    bench.assignment.assigned([B])
    settle(bench, {B})
    before = bench.assignment.started
    bench.consumer.main_joined = True
    bench.assignment.assigned([A])
    settle(bench, {A, B})
    assert (before, bench.assignment.started) == (False, True)


def test_a_partition_that_waits_for_a_decision_does_not_keep_the_others_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_watch, "LOOK_EVERY", 0.0)
    bench.store.undecided = {B}
    bench.assignment.assigned([A, B, C])
    settle(bench, {A, C})
    assert [str(trouble.error) for trouble in bench.assignment.partitions.troubles.values()] == ["half a record"]
    bench.assignment.step()
    bench.assignment.step()
    assert B in bench.assignment.partitions.troubles, "a look finds it as it was"
    bench.store.decide()
    settle(bench, {A, B, C})  # taken up when it is decided


def test_a_record_that_fails_half_way_now_is_loud(bench: Bench) -> None:
    bench.assignment.assigned([A])
    with pytest.raises(Undecided):
        bench.assignment.claiming.store_refused(bench.assignment.partitions[A], Undecided("half a record", {A}))


def test_where_a_failure_holds_its_partition_it_is_held(bench: Bench) -> None:
    bench.assignment.assigned([A, B])
    bench.store.undecided = {A}
    bench.assignment.claiming.store_refused(bench.assignment.partitions[A], Undecided("half a record", {A}), holds=True)

    def held() -> bool:
        bench.assignment.step()
        return bench.assignment.partitions.troubles.keys() == {A}

    eventually(held, what="its claim finds it")
    assert bench.assignment.partitions[B].state is State.OPEN


def test_a_store_that_was_away_is_not_named_once_the_partition_that_waited_for_it_is_gone(bench: Bench) -> None:
    bench.assignment.assigned([A])
    settle(bench, {A})
    bench.store.errors.append(StoreUnavailable("no answer"))
    bench.assignment.assigned([B])
    assert bench.assignment.store_error == "no answer"
    bench.assignment.revoked([B])
    bench.assignment.step()
    assert bench.assignment.store_error == ""


def test_a_fenced_partition_is_claimed_again_only_when_the_broker_has_confirmed_us(bench: Bench) -> None:
    bench.assignment.assigned([A])
    bench.assignment.claiming.store_refused(bench.assignment.partitions[A], Fenced("a rival"))
    for _ in range(3):
        bench.assignment.step()
    assert len(bench.store.asked) == 1
    assert bench.assignment.partitions.commit_is_due, "its row is read, and its offset is to be committed"
    bench.assignment.claiming.confirmed([bench.assignment.partitions[A]], 5)
    settle(bench, {A})
    assert bench.store.asked[1:] == [("take over", [A])]


def test_a_partition_that_was_never_open_is_confirmed_too(bench: Bench) -> None:
    """Fenced in its first claim it has no offset that we have stored: the row's own is committed."""
    bench.store.taken = {B}
    bench.assignment.assigned([A, B])
    settle(bench, {A})  # one that is refused does not condemn the other
    owned = bench.assignment.partitions[B]
    assert owned.state is State.FENCED
    assert owned.stored is None
    bench.store.taken = set()

    def is_read() -> bool:
        bench.assignment.step()
        return bench.assignment.partitions.commit_is_due

    eventually(is_read, what="its row is read")
    bench.assignment.claiming.confirmed([owned], 5)
    settle(bench, {A, B})


def test_a_fenced_partition_whose_row_was_deleted_begins_anew(bench: Bench) -> None:
    bench.assignment.assigned([A])
    bench.store.deleted = {A}
    bench.assignment.claiming.store_refused(bench.assignment.partitions[A], Fenced("no row"))
    settle(bench, {A})
    assert bench.store.asked[1:] == [("claim", [A])]


def test_a_claim_says_what_was_known_of_the_row_that_is_gone(bench: Bench) -> None:
    bench.assignment.assigned([A])
    settle(bench, {A})
    assert bench.store.had is None
    owned = bench.assignment.partitions[A]
    owned.stored, epoch = 42, owned.epoch
    bench.store.deleted = {A}
    bench.assignment.claiming.store_refused(owned, Fenced("no row"))
    settle(bench, {A})
    assert bench.store.had == {A: Position(42, epoch)}


def test_what_answers_for_an_earlier_assignment_is_recognised(bench: Bench) -> None:
    """A lane or a confirmation of a partition that went and came back changes nothing."""
    assignment = bench.assignment
    assignment.assigned([A])
    settle(bench, {A})
    lane = assignment.partitions[A].lane
    assert assignment.partitions.current(A, lane) is assignment.partitions[A]
    assignment.claiming.store_refused(assignment.partitions[A], Fenced("a rival"))
    confirmation = assignment.partitions[A].confirmation
    assert assignment.partitions.current(A, lane) is None
    assert assignment.partitions.current(A, confirmation) is assignment.partitions[A]
    assignment.lost([A])
    assignment.assigned([A])
    settle(bench, {A})
    assert assignment.partitions.current(A, lane) is None
    assert assignment.partitions.current(A, confirmation) is None
    assert assignment.partitions.current(A, None) is None


def test_a_handler_that_never_returns_does_not_keep_its_partition_for_ever(bench: Bench) -> None:
    """It went with a call that hangs and came back. Once the call is given up, the fence keeps it out."""
    assignment = bench.assignment
    assignment.assigned([A])
    settle(bench, {A})
    hung = assignment.partitions[A].lane
    assert hung is not None
    hung.busy = True
    assignment.revoked([A])
    assignment.assigned([A])
    assignment.step()
    assert bench.open == set()
    assignment._late_lanes._waiting = [(hung, Deadline(0.0))]
    settle(bench, {A})
    assert assignment.abandoned == [A]


def test_where_nothing_fences_it_the_process_ends_and_says_why(bench: Bench) -> None:
    assignment = bench.assignment
    assignment._late_lanes._may_be_left = lambda _: False
    assignment.assigned([A])
    settle(bench, {A})
    hung = assignment.partitions[A].lane
    assert hung is not None
    hung.busy = True
    assignment.revoked([A])
    assignment.assigned([A])
    assignment._late_lanes._waiting = [(hung, Deadline(0.0))]
    with pytest.raises(TooManyFailures, match=r"orders/0 has not returned.*timeout="):
        assignment.step()


class TestListeners:
    def test_a_partition_is_told_of_when_it_is_claimed_and_when_it_goes(self, bench: Bench) -> None:
        bench.assignment.assigned([A, B])
        settle(bench, {A, B})
        bench.assignment.revoked([A])
        bench.assignment.lost([B])
        eventually(lambda: len(bench.told) == 3, what="all told")
        assert bench.told == [("assigned", [A, B]), ("revoked", [A]), ("lost", [B])]

    def test_one_that_was_never_claimed_is_not_told_of(self, bench: Bench) -> None:
        bench.store.errors = [StoreUnavailable("away")]
        bench.assignment.assigned([A])
        bench.assignment.revoked([A])
        bench.assignment.assigned([B])
        settle(bench, {B})
        assert bench.told == [("assigned", [B])]

    def test_a_store_that_was_away_is_no_news_and_a_rival_is(self, bench: Bench) -> None:
        bench.assignment.assigned([A])
        settle(bench, {A})
        bench.assignment.claiming.store_refused(bench.assignment.partitions[A], StoreUnavailable("lost in COMMIT"))
        settle(bench, {A})
        bench.assignment.claiming.store_refused(bench.assignment.partitions[A], Fenced("a rival"))
        bench.assignment.step()
        bench.assignment.claiming.confirmed([bench.assignment.partitions[A]], 5)
        settle(bench, {A})
        assert bench.told == [("assigned", [A]), ("lost", [A]), ("assigned", [A])]


class TestTheRecord:
    def test_a_rebalance_is_one_record_from_the_first_callback_until_what_is_new_flows(self, bench: Bench) -> None:
        bench.assignment.assigned([A, B])
        settle(bench, {A, B})
        bench.finishes(B, 3)
        bench.assignment.revoked([B])
        bench.queue.at_once = False
        bench.assignment.assigned([C])
        assert [r.reason for r in bench.history.recent] == ["joined"], "C waits for its claim"
        bench.queue.run()
        settle(bench, {A, C})
        first, second = bench.history.recent
        assert (first.reason, first.gained, first.success) == ("joined", (A, B), True)
        assert (second.reason, second.gained, second.gone, second.kept) == ("members", (C,), (B,), (A,))
        assert (second.drained, second.success) == (3, True)

    @pytest.mark.parametrize("how", ["revoked", "lost"])
    def test_it_does_not_wait_for_what_went_before_its_claim_was_in(self, bench: Bench, how: str) -> None:
        bench.store.errors = [StoreUnavailable("away")]
        bench.assignment.assigned([A, B])
        getattr(bench.assignment, how)([B])
        bench.assignment.assigned([])
        settle(bench, {A})
        (record,) = bench.history.recent
        assert (record.gained, record.gone) == ((A, B), (B,))
        assert not record.success, "the claim of B has failed, and B never flowed here"

    def test_the_reason_is_what_can_be_told_from_here(self, bench: Bench) -> None:
        bench.assignment.assigned([A])
        settle(bench, {A})
        bench.assignment.lost([A])
        bench.assignment.assigned([A])
        settle(bench, {A})
        bench.recorder.expect("subscription")
        bench.assignment.assigned([])
        bench.store.added = {B}
        bench.assignment.assigned([B])
        settle(bench, {A, B})
        bench.assignment.leave(Deadline(1.0))
        bench.assignment.revoked([A, B])
        recent = bench.history.recent
        assert [r.reason for r in recent] == ["joined", "lost", "subscription", "partitions", "left"]
        assert [r.success for r in recent] == [True, False, True, True, True]


@pytest.mark.parametrize("how", ["revoked", "lost"])
def test_what_goes_wrong_while_partitions_go_keeps_none_of_them(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.assignment.assigned([A, B])
    lanes = [owned.lane for owned in bench.assignment.partitions.values()]

    def broken(*_: object) -> None:
        raise LookupError("a fault of ours")

    monkeypatch.setattr(bench.recorder, "gives_up", broken)
    monkeypatch.setattr(bench.recorder, "loses", broken)
    with pytest.raises(LookupError):
        getattr(bench.assignment, how)([A])
    assert set(bench.assignment.partitions) == {B}
    assert [bool(lane and lane.stop_reasons) for lane in lanes] == [True, False]


def test_a_look_says_nothing_of_a_partition_that_was_held_after_it_was_sent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row was not asked for: taken for a row that is gone, the record that failed would be run again."""
    monkeypatch.setattr(held_watch, "LOOK_EVERY", 0.0)
    bench.assignment.assigned([A, B])
    settle(bench, {A, B})
    first, second = (bench.assignment.partitions[p] for p in (A, B))
    bench.queue.at_once = False
    bench.assignment.holds.put_on_hold(first, OffsetOutOfRange("gone"))
    bench.assignment.step()
    bench.assignment.holds.put_on_hold(second, OffsetOutOfRange("gone"))
    bench.queue.run()
    bench.assignment.step()
    assert [question for question, _ in bench.store.asked] == ["claim", "look"]
    assert {first.trouble is not None, second.trouble is not None} == {True}


def test_the_same_cause_of_failed_claims_is_logged_once_and_another_cause_at_once(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementation, "_BACKOFF_MOST", 0.0)
    away, other = StoreUnavailable("the store is away"), StoreUnavailable("the store refuses connections")
    bench.store.errors = [away, away, away, other]
    bench.assignment.assigned([A])
    settle(bench, {A})
    causes = [
        vars(record)["fields"]["cause"] for record in caplog.records if record.getMessage().startswith("claim failed")
    ]
    assert causes == [str(away), str(other)]


def test_each_partition_is_named_with_its_cause_though_another_has_the_same(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementation, "_BACKOFF_MOST", 0.0)
    away = StoreUnavailable("the store is away")
    bench.store.errors = [away, away]
    bench.assignment.assigned([A])
    settle(bench, {A})
    bench.store.errors = [away, away]
    bench.assignment.assigned([B])
    settle(bench, {A, B})
    named = [vars(record)["fields"]["partitions"] for record in caplog.records if "claim failed" in record.getMessage()]
    assert named == [[str(A)], [str(B)]]


def test_the_cause_of_a_partition_that_comes_back_is_logged_again(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementation, "_BACKOFF_MOST", 0.0)
    for _ in range(2):
        bench.store.errors = [StoreUnavailable("the store is away")]
        bench.assignment.assigned([A])
        settle(bench, {A})
        bench.assignment.revoked([A])
    assert sum(message.startswith("claim failed") for message in caplog.messages) == 2
