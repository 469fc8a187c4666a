"""Records in a pipeline: run again without one when they fail, and the pipeline is given up if it was to blame."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

import pytest

from kconsume import Record
from kconsume._handlers.binding import bind
from kconsume._runtime.lanes.inline import InlineLanes
from kconsume._runtime.lanes.lane import Chunk, Lane
from kconsume._runtime.lanes.pacing import Pace
from kconsume._runtime.lanes.reports import Failure, LaneReport, Progress, StoreRefused
from kconsume._runtime.processing.driver import ThreadDriver
from kconsume._runtime.processing.rules import ChunkRules
from kconsume._runtime.processing.transactional import TransactionalAttempt
from kconsume.backends import Position
from kconsume.backends.capabilities import Capabilities
from kconsume.backends.claim import granted
from kconsume.errors import Conflict, Fenced, StoreUnavailable
from kconsume.failures.policy import OnError, Policy
from kconsume.failures.retry_topics import Moment
from kconsume.records import Partition
from tests.unit.fakes import ORDERS, ListStore, ListTx, Writes, messages_at

pytestmark = pytest.mark.usefixtures("no_time_passes")

GROUP = "shop"


class PipeliningListStore(ListStore):
    """What goes wrong in a pipeline shows at its end, without a word about which record it was."""

    def __init__(self) -> None:
        super().__init__()
        self.bad_in_a_pipeline: set[int] = set()
        self.bad: set[int] = set()
        self.modes: list[str] = []

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, pipelining=self)

    @contextmanager
    def pipelined(self, group: str, partition: Partition, epoch: int) -> Iterator[ListTx]:
        with super().transaction(group, partition, epoch) as tx:
            self.modes.append("pipelined")
            yield tx
            if (self.bad | self.bad_in_a_pipeline).intersection(tx.connection):
                raise ValueError("a statement failed")

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[ListTx]:
        with super().transaction(group, partition, epoch) as tx:
            self.modes.append("plain")
            yield tx


class Bench:
    def __init__(self, store: ListStore, on_error: OnError = "stop") -> None:
        self.store = store
        self.outcomes: list[LaneReport] = []
        self.raises: dict[int, list[Exception]] = {}
        """What the handler raises at an offset, one after the other."""
        epoch = granted(store.claim(GROUP, [ORDERS], "me", lambda ps: dict.fromkeys(ps, Position(0))))[ORDERS].epoch
        pace = Pace(1000)
        pace.size = 1000
        self.lane = Lane(
            ORDERS, InlineLanes(SimpleQueue()), lambda *_: None, epoch=epoch, start=0, scope="shop:A", pace=pace
        )

        def handle(value: bytes, record: Record, tx: Writes) -> None:
            tx.append(record.offset)
            if waiting := self.raises.get(record.offset):
                raise waiting.pop(0)
            if isinstance(store, PipeliningListStore) and store.modes[-1] == "plain" and record.offset in store.bad:
                raise ValueError("a statement failed")

        binding = bind(handle, [Writes])
        attempt = TransactionalAttempt(binding.runner(), False, store, GROUP)
        self.work = ThreadDriver(ChunkRules(binding, Policy(on_error), stores=True, clock=Moment.now), attempt)

    def run(self, offsets: Sequence[int]) -> None:
        chunk = Chunk([*messages_at(offsets)], offsets[0], offsets[-1])
        self.work(self.lane, chunk, self.outcomes.append)

    @property
    def handled(self) -> int:
        return sum(o.handled for o in self.outcomes if isinstance(o, Progress))


class TestPipeline:
    def test_records_go_through_one_and_a_single_record_does_not(self) -> None:
        bench = Bench(store := PipeliningListStore())
        bench.run(range(10))
        bench.run([10])
        assert store.modes == ["pipelined", "plain"]
        assert store.effects == list(range(11))

    def test_the_culprit_is_named_and_its_neighbours_have_their_effect_once(self) -> None:
        store = PipeliningListStore()
        store.bad = {4}
        bench = Bench(store, "skip")
        bench.run(range(10))
        assert store.effects == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert sum(o.skipped for o in bench.outcomes if isinstance(o, Progress)) == 1

    def test_a_handler_that_fails_is_stopped_before_its_record(self) -> None:
        store = PipeliningListStore()
        store.bad = {4}
        bench = Bench(store)
        bench.run(range(10))
        assert store.effects == [0, 1, 2, 3]
        failure = bench.outcomes[-1]
        assert isinstance(failure, Failure)
        assert failure.message.offset() == 4

    def test_it_is_given_up_when_only_it_fails_and_that_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        store = PipeliningListStore()
        store.bad_in_a_pipeline = {1, 11, 21, 31, 41}
        bench = Bench(store)
        with caplog.at_level(logging.WARNING, "kconsume.stores"):
            for first in range(0, 50, 10):
                bench.run(range(first, first + 10))
        assert store.effects == list(range(50))
        assert store.modes == ["pipelined", "plain"] * 3 + ["plain"] * 2
        assert [record.message.startswith("pipeline off") for record in caplog.records] == [True]

    def test_one_failure_may_be_chance(self) -> None:
        store = PipeliningListStore()
        store.bad_in_a_pipeline = {1}
        bench = Bench(store)
        bench.run(range(10))
        bench.run(range(10, 20))
        assert store.modes == ["pipelined", "plain", "pipelined"]

    def test_a_fence_in_a_pipeline_is_not_tried_again_without(self) -> None:
        store = PipeliningListStore()
        bench = Bench(store)

        def take_over() -> None:
            store.claim(GROUP, [ORDERS], "other", lambda ps: {})

        store.before_commit = take_over
        bench.run(range(10))
        assert store.modes == ["pipelined"]
        assert store.effects == []
        ejected = bench.outcomes[-1]
        assert isinstance(ejected, StoreRefused)
        assert isinstance(ejected.error, Fenced)


class TestFaults:
    def test_an_error_behind_which_the_store_is_stops_the_lane_and_fails_no_record(self) -> None:
        store = ListStore()
        store.faults[OSError] = StoreUnavailable("away")
        bench = Bench(store, "skip")
        bench.raises[3] = [OSError("connection reset")]
        bench.run(range(10))
        assert store.effects == []
        assert bench.handled == 0
        ejected = bench.outcomes[-1]
        assert isinstance(ejected, StoreRefused)
        assert isinstance(ejected.error, StoreUnavailable)
        assert isinstance(ejected.error.__cause__, OSError)

    def test_control_the_same_error_of_the_handler_s_own_is_its_failure(self) -> None:
        bench = Bench(store := ListStore(), "skip")
        bench.raises[3] = [OSError("connection reset")] * 2
        bench.run(range(10))
        assert store.effects == [0, 1, 2, 4, 5, 6, 7, 8, 9]


class TestConflicts:
    def test_records_that_met_another_transaction_are_run_again_fewer_at_once(self) -> None:
        store = ListStore()
        store.faults[TimeoutError] = Conflict("deadlock")
        bench = Bench(store)
        bench.raises[3] = [TimeoutError("deadlock detected")] * 2
        bench.run(range(10))
        assert store.effects == list(range(10))
        assert next(new - old for old, new in store.moves) < 5

    def test_a_single_record_is_tried_again_too(self) -> None:
        store = ListStore()
        store.faults[TimeoutError] = Conflict("deadlock")
        bench = Bench(store)
        bench.raises[0] = [TimeoutError("deadlock detected")] * 3
        bench.run([0])
        assert store.effects == [0]

    def test_one_that_never_ends_is_the_store_s_trouble_and_no_record_s(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kconsume._runtime.processing.transactional._PAUSES", (0.0, 0.0))
        store = ListStore()
        store.faults[TimeoutError] = Conflict("deadlock")
        bench = Bench(store, "skip")
        bench.raises[0] = [TimeoutError("deadlock detected")] * 9
        bench.run([0])
        assert store.effects == []
        assert isinstance(bench.outcomes[-1], StoreRefused)
