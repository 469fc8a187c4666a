"""Order and concurrency on real threads: one worker a lane, chunks in order, nothing started after the brake."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from kconsume._runtime.lanes.inline import InlineLanes
from kconsume._runtime.lanes.lane import Chunk, Lane, Lanes, Work
from kconsume._runtime.lanes.pacing import Pace
from kconsume._runtime.lanes.reports import LaneReport, Progress, SendReport
from kconsume._runtime.lanes.threads import ThreadLanes
from kconsume.records import Partition
from tests.unit.fakes import messages_at
from tests.waiting import eventually


class Room:
    """Thread lanes, and what was run in them."""

    def __init__(self, most: int) -> None:
        self.outcomes: SimpleQueue[LaneReport] = SimpleQueue()
        self.lanes = ThreadLanes(self.outcomes, f"room-{id(self):x}", most)
        self.ran: dict[Partition, list[int]] = {}
        self.at_once = 0
        self.most_at_once = 0
        self.clashes = 0
        self._lock = threading.Lock()
        self._inside: set[Lane] = set()

    def lane(self, number: int, work: Work | None = None) -> Lane:
        self.lanes.lane_opened()
        return make_lane(self.lanes, work or self.note, number)

    def note(self, lane: Lane, chunk: Chunk, report: SendReport) -> None:
        """Work that notes what runs, and whether two workers were in one lane."""
        with self._lock:
            self.clashes += lane in self._inside
            self._inside.add(lane)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        for message in chunk.messages:
            self.ran.setdefault(lane.partition, []).append(message.offset())
        report(Progress(lane, chunk.first, chunk.last + 1, len(chunk.messages)))
        with self._lock:
            self._inside.discard(lane)
            self.at_once -= 1

    def count(self) -> int:
        return sum(map(len, self.ran.values()))

    def threads(self) -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith(f"room-{id(self):x}-")]


def make_lane(lanes: Lanes, work: Work, number: int = 0) -> Lane:
    return Lane(Partition("orders", number), lanes, work, epoch=1, start=0, scope="shop:A", pace=Pace(1000))


def chunk(first: int, records: int = 1) -> Chunk:
    return Chunk([*messages_at(range(first, first + records))], first, first + records - 1)


@pytest.fixture
def room() -> Iterator[Callable[[int], Room]]:
    rooms: list[Room] = []

    def make(most: int) -> Room:
        rooms.append(Room(most))
        return rooms[-1]

    yield make
    for made in rooms:
        made.lanes.close()
        eventually(lambda made=made: not made.threads(), what="the end of the workers")  # type: ignore[misc]


MakeRoom = Callable[[int], Room]


class Gate:
    """Work that waits in the middle of a chunk until the test lets it go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.leave = threading.Event()
        self.runs: list[int] = []

    def __call__(self, lane: Lane, chunk: Chunk, report: SendReport) -> None:
        self.runs.append(chunk.first)
        self.entered.set()
        assert self.leave.wait(20)


class TestOrder:
    @pytest.mark.parametrize("most", [1, 3, 8])
    def test_each_lane_keeps_its_order_whatever_the_number_of_workers(self, room: MakeRoom, most: int) -> None:
        here = room(most)
        lanes = [here.lane(number) for number in range(6)]
        for first in range(0, 900, 3):
            for lane in lanes:
                here.lanes.submit(lane, chunk(first, 3))
        eventually(lambda: here.count() == 6 * 900, what="all chunks")
        assert all(ran == list(range(900)) for ran in here.ran.values())

    def test_a_lane_is_run_by_one_worker_at_a_time(self, room: MakeRoom) -> None:
        here = room(8)
        lanes = [here.lane(number) for number in range(8)]
        for first in range(500):
            here.lanes.submit(lanes[0], chunk(first))
        eventually(lambda: here.count() == 500, what="all chunks")
        assert here.clashes == 0
        assert here.ran[lanes[0].partition] == list(range(500))

    def test_chunks_from_several_submitters_to_several_lanes_are_all_run(self, room: MakeRoom) -> None:
        here = room(4)
        lanes = [here.lane(number) for number in range(4)]

        def fill(lane: Lane) -> None:
            for first in range(300):
                here.lanes.submit(lane, chunk(first))

        fillers = [threading.Thread(target=fill, args=(lane,)) for lane in lanes]
        for filler in fillers:
            filler.start()
        for filler in fillers:
            filler.join(20)
        eventually(lambda: here.count() == 1200, what="all chunks")
        assert here.clashes == 0
        eventually(lambda: not any(lane.busy for lane in lanes), what="lanes at rest")

    def test_control_two_workers_in_one_lane_are_noticed(self, room: MakeRoom) -> None:
        here = room(8)
        lane = here.lane(0)
        both_in = threading.Barrier(2, timeout=60)

        def unguarded() -> None:
            with here._lock:
                here.clashes += lane in here._inside
                here._inside.add(lane)
            both_in.wait()

        threads = [threading.Thread(target=unguarded) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert here.clashes == 1


class TestConcurrency:
    def test_there_is_a_worker_for_each_open_lane_up_to_the_most(self, room: MakeRoom) -> None:
        here = room(3)
        gates = [Gate() for _ in range(4)]
        lanes = [here.lane(number, gate) for number, gate in enumerate(gates)]
        for lane in lanes:
            here.lanes.submit(lane, chunk(0))
        for gate in gates[:3]:
            assert gate.entered.wait(20)
        assert len(here.threads()) == 3
        assert not gates[3].entered.is_set()
        for gate in gates:
            gate.leave.set()
        assert gates[3].entered.wait(20)

    def test_no_thread_is_started_for_a_lane_that_is_not_there(self, room: MakeRoom) -> None:
        assert room(8).threads() == []

    def test_a_lane_that_comes_back_needs_no_new_thread(self, room: MakeRoom) -> None:
        here = room(8)
        for _ in range(50):
            here.lane(0)
            here.lanes.lane_closed()
        assert len(here.threads()) == 1

    def test_the_workers_end_when_no_chunk_will_follow(self, room: MakeRoom) -> None:
        here = room(4)
        for number in range(4):
            here.lanes.submit(here.lane(number), chunk(0))
        here.lanes.close()
        eventually(lambda: not here.threads(), what="the end of the workers")
        assert here.count() == 4


class TestBrake:
    def test_what_has_not_started_is_dropped_and_counted(self, room: MakeRoom) -> None:
        here, gate = room(2), Gate()
        lane = here.lane(0, gate)
        here.lanes.submit(lane, chunk(0, 5))
        assert gate.entered.wait(20)
        here.lanes.submit(lane, chunk(5, 3))
        here.lanes.submit(lane, chunk(8, 4))
        assert lane.request_stop("revoked") == 7
        assert lane.busy, "its worker has not ended yet"
        gate.leave.set()
        eventually(lambda: not lane.busy, what="the lane at rest")
        assert gate.runs == [0]
        assert lane.stop_reasons == ["revoked"]

    def test_nothing_is_taken_after_the_brake(self, room: MakeRoom) -> None:
        here = room(2)
        lane = here.lane(0)
        lane.request_stop("revoked")
        here.lanes.submit(lane, chunk(0))
        assert not lane.busy
        assert not lane.chunks

    def test_other_lanes_go_on(self, room: MakeRoom) -> None:
        here = room(2)
        braked, other = here.lane(0), here.lane(1)
        braked.request_stop("revoked")
        here.lanes.submit(other, chunk(0))
        eventually(lambda: here.ran.get(other.partition) == [0], what="the other lane's record")

    def test_a_brake_between_being_queued_and_being_run_leaves_the_lane_at_rest(self, room: MakeRoom) -> None:
        here, gate = room(1), Gate()
        occupied, queued = here.lane(0, gate), here.lane(1)
        here.lanes.submit(occupied, chunk(0))
        assert gate.entered.wait(20)
        here.lanes.submit(queued, chunk(0))
        assert queued.busy
        assert queued.request_stop("revoked") == 1
        gate.leave.set()
        eventually(lambda: not queued.busy, what="the lane at rest")
        assert here.count() == 0


class TestAbandoned:
    def test_an_abandoned_worker_is_replaced(self, room: MakeRoom) -> None:
        here, gate = room(1), Gate()
        stuck, other = here.lane(0, gate), here.lane(1)
        here.lanes.submit(stuck, chunk(0))
        assert gate.entered.wait(20)
        here.lanes.submit(other, chunk(0))
        assert here.count() == 0
        here.lanes.abandon(stuck)
        eventually(lambda: here.count() == 1, what="the other lane's record")
        gate.leave.set()

    def test_an_abandoned_worker_that_comes_back_does_not_stay_as_one_too_many(self, room: MakeRoom) -> None:
        """`concurrency=1` must mean one handler at a time again, once the late one has ended."""
        here, late = room(1), Gate()
        lane = here.lane(0, late)
        here.lanes.submit(lane, chunk(0))
        assert late.entered.wait(20)
        here.lanes.abandon(lane)
        late.leave.set()
        eventually(lambda: len(here.threads()) == 1, what="the late worker gone, its replacement left")


class TestFaults:
    def test_work_that_raises_is_reported_and_does_not_take_its_worker_along(
        self, room: MakeRoom, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`Work` should not raise; if it does all the same, a partition must not stop without a word."""
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        here = room(1)

        def broken(lane: Lane, chunk: Chunk, report: SendReport) -> None:
            raise LookupError("a bug of ours")

        lane, other = here.lane(0, broken), here.lane(1)
        here.lanes.submit(lane, chunk(0))
        eventually(lambda: not here.outcomes.empty(), what="an outcome that tells of it")
        here.lanes.submit(other, chunk(0))
        eventually(lambda: here.count() == 1, what="the other lane's record")


class TestInline:
    def test_a_chunk_is_run_at_once_on_this_thread(self) -> None:
        threads: list[threading.Thread] = []

        def work(lane: Lane, chunk: Chunk, report: SendReport) -> None:
            threads.append(threading.current_thread())
            report(Progress(lane, chunk.first, chunk.last + 1, 1))

        outcomes: SimpleQueue[LaneReport] = SimpleQueue()
        lanes = InlineLanes(outcomes)
        lane = make_lane(lanes, work)
        lanes.lane_opened()
        lanes.submit(lane, chunk(0))
        assert threads == [threading.current_thread()]
        assert outcomes.get_nowait() == Progress(lane, 0, 1, 1)
        assert not lane.busy

    def test_nothing_is_run_after_the_brake(self) -> None:
        lanes = InlineLanes(SimpleQueue())
        lane = make_lane(lanes, lambda *_: pytest.fail("it was run"))
        lane.request_stop("revoked")
        lanes.submit(lane, chunk(0))
