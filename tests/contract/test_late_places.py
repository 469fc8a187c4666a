"""Partitions that were assigned before it was known where they go on: they begin exactly there, whatever the broker
still has to say about where they waited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing

import pytest
from confluent_kafka import OFFSET_BEGINNING

from kconsume import Partition
from kconsume._config.client_settings import client_settings
from kconsume._embedded.controls import KafkaControls
from kconsume._kafka import consumer as module
from kconsume._kafka.consumer import KafkaConsumer, StartAt
from kconsume._runtime.deadlines import Deadline
from kconsume.errors import OffsetOutOfRange
from tests.fix_arena import PROTOCOLS, Arena

RECORDS, CLAIMED = 100, 50
SLOW = 400
"""Milliseconds that the broker takes to answer."""


@pytest.fixture
def arena(embedded: KafkaControls) -> Iterator[Arena]:
    yield Arena("embedded", embedded.bootstrap, embedded)
    embedded.round_trip(None, 0)


@pytest.fixture(params=["cooperative", "eager"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Undecided:
    """Knows nothing yet when partitions are assigned."""

    def __init__(self) -> None:
        self.partitions: list[Partition] = []

    def assigned(self, partitions: list[Partition]) -> Mapping[Partition, StartAt]:
        self.partitions += partitions
        return {}

    def revoked(self, partitions: list[Partition]) -> None: ...

    def lost(self, partitions: list[Partition]) -> None: ...


def offsets_after_a_late_place(arena: Arena, group: str, protocol: str, *, begins: int = 0, slow: int = 0) -> list[int]:
    """What comes of a topic whose log begins at `begins`, when its partition is placed at `CLAIMED` after a while."""
    topic, tenant = arena.topic(1), Undecided()
    arena.produce(topic, (b"x" for _ in range(RECORDS)), 0)
    assert arena.embedded is not None
    arena.embedded.round_trip(None, 0)
    if begins:
        arena.embedded.delete_records(topic, 0, begins)
    source = KafkaConsumer(client_settings(arena.bootstrap, group, arena.quick(PROTOCOLS[protocol])), tenant)
    start = source._start

    def start_slowly(starts: Mapping[Partition, StartAt]) -> None:
        """From here on the broker is slow: what is asked about the first place is answered after the second."""
        assert arena.embedded is not None
        arena.embedded.round_trip(None, slow)
        start(starts)

    source._start = start_slowly  # type: ignore[method-assign]
    with closing(source):
        source.subscribe([topic])
        deadline = Deadline(30.0)
        while not tenant.partitions:
            assert not deadline.passed
            source.fetch(0.05)
        source.start_at({Partition(topic, 0): StartAt(CLAIMED)})
        came: list[int] = []
        settled = Deadline(0.5 + 6 * slow / 1000)
        while not settled.passed or came[-1:] != [RECORDS - 1]:
            assert not deadline.passed
            came += [message.offset() for _, run in source.fetch(0.05) for message in run]
            for fault in source.take_faults()[0].values():
                raise fault
    return came


@pytest.mark.dense
def test_what_was_asked_about_the_place_before_changes_nothing(arena: Arena, group: str, protocol: str) -> None:
    assert offsets_after_a_late_place(arena, group, protocol, slow=SLOW) == [*range(CLAIMED, RECORDS)]


@pytest.mark.dense
def test_control_one_that_waits_at_the_beginning_goes_back_there(
    arena: Arena, group: str, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSED_AT_ZERO", StartAt(OFFSET_BEGINNING, paused=True))
    monkeypatch.setattr(
        KafkaConsumer, "_without_repeats", lambda source, runs: runs
    )  # else what it reads there would be dropped
    # On a busy machine it may be placed too late, when all is answered.
    assert any(0 in offsets_after_a_late_place(arena, f"{group}-{n}", protocol, slow=SLOW) for n in range(5))


@pytest.mark.dense
@pytest.mark.parametrize("attempt", range(3))  # it takes a fetch that leaves between two calls
def test_a_log_that_begins_later_is_no_fault_of_the_place(
    arena: Arena, group: str, protocol: str, attempt: int
) -> None:
    assert offsets_after_a_late_place(arena, group, protocol, begins=30) == [*range(CLAIMED, RECORDS)]


@pytest.mark.dense
def test_a_place_that_is_not_in_the_log_is_still_an_error(arena: Arena, group: str, protocol: str) -> None:
    with pytest.raises(OffsetOutOfRange, match="is not in its log"):
        offsets_after_a_late_place(arena, group, protocol, begins=CLAIMED + 10)
