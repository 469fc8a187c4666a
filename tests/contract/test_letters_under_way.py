"""Dead letters that are not confirmed yet when the app is stopped or its partition is taken away: what is confirmed in
time is passed and comes once, and what is not comes again."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from kconsume import App, DeadLetter
from kconsume._embedded.controls import KafkaControls
from kconsume._kafka.outgoing import Outgoing
from kconsume._kafka.producer import Producer
from kconsume._runtime.assignment.committer import CommitEntries, GroupCommitter
from kconsume._runtime.assignment.completion import Completion
from kconsume._runtime.deadlines import Deadline
from kconsume._runtime.lanes.backpressure import Backpressure
from kconsume._runtime.lanes.lane import Lane
from kconsume.failures.skip_log import SkipLog
from kconsume.testing.services import KafkaService
from tests.contract.test_output import stored, texts
from tests.contract.test_rebalance import assigned
from tests.fix_arena import QUICK, Arena
from tests.waiting import eventually

FORMS = ["thread", "async"]
MANY = Backpressure.MOST_RECORDS * 5 // 4


@pytest.fixture
def arena(embedded: KafkaControls) -> Arena:
    return Arena("embedded", embedded.bootstrap, embedded)


@pytest.fixture
def real(kafka: KafkaService) -> Iterator[Arena]:
    """Its rebalances end when all have joined, so sessions can be long."""
    arena = Arena("real", kafka.bootstrap, None)
    yield arena
    arena.clean_up()


class Gate:
    """Letters are written, and their app is told when it is opened: by hand, or as soon as somebody waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opens_when_waited_for = False
        self.letters = 0
        self._open = threading.Event()
        deliver, wait = Producer.deliver, Completion.wait

        def held_up(outlet: Producer, outgoing: list[Outgoing]) -> Future[None]:
            written, told = deliver(outlet, outgoing), Future[None]()
            if "letters" not in outlet.name:
                return written
            self.letters += len(outgoing)
            threading.Thread(target=self._pass_on, args=(written, told), daemon=True).start()
            return told

        def waited(completion: Completion, seconds: float) -> None:
            if self.opens_when_waited_for:
                self._open.set()
            wait(completion, seconds)

        monkeypatch.setattr(Producer, "deliver", held_up)
        monkeypatch.setattr(Completion, "wait", waited)

    def open(self) -> None:
        self._open.set()

    def _pass_on(self, written: Future[None], told: Future[None]) -> None:
        written.result(30)
        self._open.wait()
        told.set_result(None)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()  # nobody is left behind


def member(arena: Arena, group: str, topic: str, dead: str, seen: list[str], form: str, shutdown: float = 20.0) -> App:
    app = App(arena.bootstrap, group=group, kafka={} if arena.embedded is None else QUICK, shutdown=shutdown)

    def handle(value: str) -> None:
        seen.append(value)
        if "bad" in value:
            raise LookupError(value)

    async def handle_async(value: str) -> None:
        handle(value)

    app.consume(topic, on_error=DeadLetter(dead))(handle if form == "thread" else handle_async)
    return app


@pytest.mark.dense
@pytest.mark.parametrize("form", FORMS)
def test_an_app_that_is_stopped_waits_for_its_letters_and_none_comes_twice(
    arena: Arena, group: str, gate: Gate, form: str
) -> None:
    source, dead, seen = arena.topic(1), arena.topic(1), list[str]()
    arena.produce(source, ["good", "bad", "after", "last"], 0)
    with member(arena, group, source, dead, seen, form).running():
        eventually(lambda: gate.letters and "last" in seen, what="records behind the letter are run")
        assert stored(arena, group, source) in (None, 0, 1), "and not passed"
        gate.opens_when_waited_for = True
    assert seen == ["good", "bad", "after", "last"]
    assert stored(arena, group, source) == 4
    assert texts(arena, dead) == ["bad"]


def test_control_a_drain_that_waits_for_handlers_alone_is_noticed(
    arena: Arena, group: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lane, "unfinished", property(lambda lane: lane.busy))
    with pytest.raises(AssertionError, match="== 4"):
        test_an_app_that_is_stopped_waits_for_its_letters_and_none_comes_twice(arena, group, gate, "thread")


@pytest.mark.dense
def test_letters_that_are_not_confirmed_by_the_deadline_are_said_and_their_records_come_again(
    arena: Arena, group: str, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    source, dead, seen = arena.topic(1), arena.topic(1), list[str]()
    arena.produce(source, ["good", "bad", "after"], 0)
    with member(arena, group, source, dead, seen, "thread", shutdown=2.0).running():
        eventually(lambda: gate.letters and "after" in seen, what="records behind the letter are run")
        eventually(lambda: stored(arena, group, source) == 1, what="those before it are passed")
    assert f"abandoned partition={source}/0" in caplog.text
    assert stored(arena, group, source) == 1
    gate.open()
    again = list[str]()
    member(arena, group, source, dead, again, "thread").catch_up(idle=0.2)
    assert again == ["bad", "after"]
    assert stored(arena, group, source) == 3
    assert texts(arena, dead) == ["bad", "bad"], "at least once"


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The offsets that were committed for partitions that left, by their numbers."""
    hand_over, offsets = GroupCommitter.hand_over, dict[int, int]()

    def watched(committer: GroupCommitter, marks: CommitEntries, deadline: Deadline) -> None:
        offsets.update({partition.number: offset for partition, (_, offset, _) in marks.items()})
        hand_over(committer, marks, deadline)

    monkeypatch.setattr(GroupCommitter, "hand_over", watched)
    return offsets


@pytest.mark.dense
@pytest.mark.parametrize("form", FORMS)
def test_a_partition_that_is_taken_away_waits_for_its_letters_and_is_handed_over_behind_them(
    real: Arena, group: str, gate: Gate, handed_over: dict[int, int], form: str
) -> None:
    source, dead = real.topic(2), real.topic(1)
    for partition in range(2):
        real.produce(source, [f"{partition}:bad", f"{partition}:after"], partition)
    ones, twos = list[str](), list[str]()
    with member(real, group, source, dead, ones, form).running():
        eventually(lambda: gate.letters == 2 and len(ones) == 4, what="both have letters under way")
        assert handed_over == {}
        gate.opens_when_waited_for = True
        with member(real, group, source, dead, twos, form).running() as two:
            (moved,) = eventually(lambda: assigned(two), what="one is handed over")
            assert handed_over.get(moved) == 2, "behind its letter"
            real.produce(source, [f"{moved}:new"], moved)
            eventually(lambda: f"{moved}:new" in twos, what="it goes on there")
    assert twos == [f"{moved}:new"], "nothing comes again"
    assert sorted(texts(real, dead)) == ["0:bad", "1:bad"]


def test_control_a_partition_that_is_handed_over_without_waiting_is_noticed(
    real: Arena, group: str, gate: Gate, handed_over: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lane, "unfinished", property(lambda lane: lane.busy))
    with pytest.raises(AssertionError, match="behind its letter"):
        test_a_partition_that_is_taken_away_waits_for_its_letters_and_is_handed_over_behind_them(
            real, group, gate, handed_over, "thread"
        )


@pytest.mark.dense
@pytest.mark.parametrize("form", FORMS)
def test_records_go_on_coming_while_a_letter_is_on_its_way(arena: Arena, group: str, gate: Gate, form: str) -> None:
    """More of them than a partition has at once: those that are done do not take the room of others."""
    source, dead, seen = arena.topic(1), arena.topic(1), list[str]()
    arena.produce(source, ["bad", *["good"] * MANY], 0)
    with member(arena, group, source, dead, seen, form).running():
        eventually(lambda: len(seen) == 1 + MANY, what="all are run")
        assert stored(arena, group, source) in (None, 0), "and none is passed"
        gate.opens_when_waited_for = True
    assert stored(arena, group, source) == 1 + MANY
    assert texts(arena, dead) == ["bad"]


# The log


def told_of(caplog: pytest.LogCaptureFixture) -> int:
    """How many records the log has told of."""
    lines = [r.getMessage() for r in caplog.records if r.name == "kconsume.failures"]
    more = [re.search(r" more=(\d+) ", line) for line in lines]
    return sum(1 + (int(found[1]) if found else 0) for found in more)


def fail_one_by_one(arena: Arena, source: str, dead: str, seen: list[str]) -> None:
    """Within less than a second, if the machine is not busy: the log tells of the first at once."""
    for number in range(1, 6):
        arena.produce(source, ["bad"], 0)
        eventually(lambda: len(seen) == number, what="it has failed")  # noqa: B023
    eventually(lambda: len(texts(arena, dead)) == 5, what="and has its letter")


@pytest.mark.parametrize("form", FORMS)
def test_the_log_tells_of_the_last_that_failed_though_nothing_follows(
    arena: Arena, group: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, dead, seen = arena.topic(1), arena.topic(1), list[str]()
    with member(arena, group, source, dead, seen, form).running():
        fail_one_by_one(arena, source, dead, seen)
        eventually(lambda: told_of(caplog) == 5, what="the log tells of all, while the app runs on")


@pytest.mark.dense
def test_control_without_a_turn_of_the_owner_only_the_end_of_the_lane_tells_of_them(
    arena: Arena, group: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SkipLog, "EVERY", math.inf)
    source, dead, seen = arena.topic(1), arena.topic(1), list[str]()
    with member(arena, group, source, dead, seen, "thread").running():
        fail_one_by_one(arena, source, dead, seen)
        eventually(lambda: stored(arena, group, source) == 5, what="a second has gone by: offsets are committed")
        assert told_of(caplog) == 1
    assert told_of(caplog) == 5
