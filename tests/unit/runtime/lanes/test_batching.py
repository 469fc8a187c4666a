"""Batches by size, time or memory: exact sizes, nothing lost, nothing twice, and nobody waits longer than was said."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kconsume import Batching
from kconsume._runtime.lanes.backpressure import RECORD_OVERHEAD
from kconsume._runtime.lanes.batching import BatchBuffer
from kconsume._runtime.lanes.lane import Chunk
from kconsume.records import Message
from tests.unit.fakes import FakeMessage, messages_at

PLENTY = 1 << 40
TICK = 1 / 1024


def run_of(offsets: range, value: bytes = b"") -> list[Message]:
    return [FakeMessage(value, offset=offset) for offset in offsets]


def drained(gathering: BatchBuffer, now: float, most_bytes: int = PLENTY) -> list[Chunk]:
    chunks = []
    while (chunk := gathering.take_ready(now, most_bytes)) is not None:
        chunks.append(chunk)
    return chunks


def offsets_of(chunks: list[Chunk]) -> list[int]:
    return [message.offset() for chunk in chunks for message in chunk.messages]


# Size


@pytest.mark.parametrize("fetched", [1, 3, 499, 500, 501, 1000, 1499])
def test_batches_are_full_whatever_the_fetches_were(fetched: int) -> None:
    gathering, sizes, at = BatchBuffer(Batching(500, wait=60.0)), list[int](), 0
    while at < 3000:
        gathering.add(run_of(range(at, at + fetched)), now=0.0)
        sizes += [len(chunk.messages) for chunk in drained(gathering, 0.0)]
        at += fetched
    assert set(sizes) == {500}
    assert len(sizes) == at // 500
    assert len(gathering) == at % 500


def test_a_batch_knows_its_first_and_last_offset_over_gaps() -> None:
    gathering = BatchBuffer(Batching(3, wait=60.0))
    gathering.add([*messages_at([4, 9, 10, 20])], 0.0)
    (chunk,) = drained(gathering, 0.0)
    assert (chunk.first, chunk.last) == (4, 10)
    gathering.add([*messages_at([31, 40])], 0.0)
    (chunk,) = drained(gathering, 0.0)
    assert (chunk.first, chunk.last) == (20, 40)


def test_a_batch_that_was_handed_over_does_not_change_any_more() -> None:
    gathering = BatchBuffer(Batching(4, wait=0.0))
    gathering.add(run_of(range(3)), 0.0)
    (chunk,) = drained(gathering, 0.0)
    gathering.add(run_of(range(3, 9)), 0.0)
    drained(gathering, 0.0)
    assert offsets_of([chunk]) == [0, 1, 2]


# Time


def test_it_is_due_so_long_after_its_first_record_and_not_after_its_last() -> None:
    gathering = BatchBuffer(Batching(100, wait=10.0))
    for second in range(10):
        gathering.add(run_of(range(second, second + 1)), now=float(second))
        assert gathering.take_ready(float(second), PLENTY) is None
    assert gathering.due_at == 10.0
    assert gathering.take_ready(9.999, PLENTY) is None
    (chunk,) = drained(gathering, 10.0)
    assert len(chunk.messages) == 10


def test_what_is_left_of_a_full_batch_waits_from_when_it_came() -> None:
    gathering = BatchBuffer(Batching(10, wait=5.0))
    gathering.add(run_of(range(9)), now=0.0)
    gathering.add(run_of(range(9, 12)), now=4.0)
    assert [len(chunk.messages) for chunk in drained(gathering, 4.0)] == [10]
    assert (len(gathering), gathering.due_at) == (2, 9.0)


def test_without_a_wait_what_is_there_is_a_batch() -> None:
    gathering = BatchBuffer(Batching(10, wait=0.0))
    gathering.add(run_of(range(23)), now=7.0)
    assert [len(chunk.messages) for chunk in drained(gathering, 7.0)] == [10, 10, 3]


# Memory


def test_records_that_are_huge_are_not_gathered_without_end() -> None:
    gathering, huge = BatchBuffer(Batching(1_000_000, wait=60.0)), b"x" * 100_000
    handed_over = 0
    for offset in range(100):
        gathering.add(run_of(range(offset, offset + 1), huge), now=0.0)
        handed_over += len(offsets_of(drained(gathering, 0.0, 1_000_000)))
        assert len(gathering) <= 10
    assert handed_over >= 90


@pytest.mark.parametrize("value", [b"", b"x"])
def test_nor_are_many_that_are_tiny_or_tombstones_because_each_costs_python_something(value: bytes) -> None:
    gathering, most = BatchBuffer(Batching(1_000_000, wait=60.0)), 100 * (RECORD_OVERHEAD + 1)
    for offset in range(1000):
        gathering.add(run_of(range(offset, offset + 1), value), now=0.0)
        drained(gathering, 0.0, most)
        assert len(gathering) <= 101


def test_the_bound_is_the_one_that_holds_now() -> None:
    """Partitions come, and each has a smaller share."""
    gathering = BatchBuffer(Batching(1_000_000, wait=60.0))
    gathering.add(run_of(range(100)), now=0.0)
    assert gathering.take_ready(0.0, PLENTY) is None
    assert len(offsets_of(drained(gathering, 0.0, 10 * RECORD_OVERHEAD))) == 100


def test_a_long_wait_for_single_records_does_not_copy_all_of_them_each_time() -> None:
    """The list is the same one: copied for each record, a hundred thousand would take minutes."""
    gathering = BatchBuffer(Batching(1_000_000, wait=60.0))
    first = run_of(range(1))
    gathering.add(first, now=0.0)
    gathering.add(run_of(range(1, 2)), now=0.0)
    assert gathering._messages is first


# Everything


@settings(max_examples=400, deadline=None)
@given(
    records=st.integers(1, 12),
    wait=st.integers(0, 30).map(lambda ticks: ticks * TICK),
    most_bytes=st.sampled_from([PLENTY, 5 * RECORD_OVERHEAD]),
    fetches=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 25)), max_size=30),
)
def test_nothing_is_lost_nothing_twice_and_no_batch_is_too_large_or_too_late(
    records: int, wait: float, most_bytes: int, fetches: list[tuple[int, int]]
) -> None:
    """Each fetch: so many ticks later, so many records; the loop looks at every tick."""
    gathering, now, at = BatchBuffer(Batching(records, wait)), 0.0, 0
    came: dict[int, float] = {}
    chunks: list[Chunk] = []
    for ticks, count in fetches:
        for _ in range(ticks):
            now += TICK
            ready = drained(gathering, now, most_bytes)
            for chunk in ready:
                assert now - came[chunk.first] <= wait, "handed over when its first record had waited so long"
            chunks += ready
        if count:
            gathering.add(run_of(range(at, at + count)), now)
            came.update(dict.fromkeys(range(at, at + count), now))
            at += count
            for chunk in drained(gathering, now, most_bytes):
                full = len(chunk.messages) == records
                assert full or wait == 0 or most_bytes < PLENTY or now - came[chunk.first] >= wait, "too early"
                chunks.append(chunk)
    chunks += drained(gathering, now + wait, most_bytes)
    assert offsets_of(chunks) == list(range(at))
    assert all(1 <= len(chunk.messages) <= records for chunk in chunks)
    assert all(before.last < after.first for before, after in itertools.pairwise(chunks))
    assert len(gathering) == 0


def test_control_a_wait_from_the_last_record_would_be_found_out() -> None:
    class FromTheLast(BatchBuffer):
        def add(self, messages: list[Message], now: float) -> None:
            super().add(messages, now)
            self._due_at = now + 10.0

    gathering = FromTheLast(Batching(100, wait=10.0))
    gathering.add(run_of(range(1)), 0.0)
    gathering.add(run_of(range(1, 2)), 9.0)
    assert drained(gathering, 10.0) == []


@pytest.mark.parametrize(
    ("records", "waiting", "fetched"),
    [(1000, 0, 1000), (1000, 300, 700), (500, 0, 1000), (500, 200, 800), (300, 0, 900), (7, 3, 998)],
)
def test_as_many_are_fetched_as_fill_batches(records: int, waiting: int, fetched: int) -> None:
    gathering = BatchBuffer(Batching(records, 1.0))
    if waiting:
        gathering.add(run_of(range(waiting)), 0.0)
    assert gathering.fetch_size(1000) == fetched
    assert (waiting + fetched) % records == 0


def test_a_batch_that_is_larger_than_a_fetch_is_filled_by_several() -> None:
    assert BatchBuffer(Batching(5000, 1.0)).fetch_size(1000) == 1000
