"""Which range is applied, skipped or refused: pure, over all places where a store can stand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconsume.errors import OffsetError, TopicRecreated
from kconsume.records import Partition
from kconsume.spark._batch.ranges import Decision, OffsetRange, Plan, offsets_json, parse_offsets

ORDERS = Partition("orders", 3)
offsets = st.integers(0, 50)


@st.composite
def ranges(draw: st.DrawFn) -> OffsetRange:
    first = draw(offsets)
    return OffsetRange(ORDERS, first, first + draw(offsets))


@pytest.mark.parametrize(
    ("stored", "decision"),
    [
        (9, Decision.GAP),
        (10, Decision.APPLY),
        (11, Decision.FENCED),
        (19, Decision.FENCED),
        (20, Decision.SKIP),
        (21, Decision.SKIP),
    ],
)
def test_a_range_is_applied_only_where_the_store_stands_at_its_beginning(stored: int, decision: Decision) -> None:
    assert OffsetRange(ORDERS, 10, 20).decide(stored) is decision


@given(ranges(), offsets)
def test_what_is_applied_moves_the_store_to_the_end_and_is_skipped_from_then_on(each: OffsetRange, stored: int) -> None:
    if each.decide(stored) is Decision.APPLY:
        assert stored == each.first
        assert each.decide(each.end) is Decision.SKIP


@given(ranges(), offsets)
def test_a_range_with_records_before_the_store_is_never_applied_whole(each: OffsetRange, stored: int) -> None:
    if stored > each.first:
        assert each.decide(stored) in (Decision.SKIP, Decision.FENCED)
    if stored < each.first:
        assert each.decide(stored) is Decision.GAP


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_whole_runs_from_any_place_apply_each_offset_once(sizes: list[int], crash_at: int, again_from: int) -> None:
    """Batches run in order, stop somewhere, and begin again somewhere before: as after a crash, or with an old log."""
    bounds = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    batches = [OffsetRange(ORDERS, *pair) for pair in itertools.pairwise(bounds)]
    stored = 0
    applied: list[int] = []
    for each in [*batches[:crash_at], *batches[min(again_from, crash_at) :]]:
        decision = each.decide(stored)
        assert decision in (Decision.APPLY, Decision.SKIP)
        if decision is Decision.APPLY:
            applied += range(each.first, each.end)
            stored = each.end
    assert applied == list(range(stored))


@given(ranges(), offsets)
def test_the_part_behind_the_store_begins_where_the_store_stands(each: OffsetRange, stored: int) -> None:
    left = each.since(stored)
    assert left.end == each.end
    assert left.first == min(max(each.first, stored), each.end)


@given(ranges())
def test_halves_are_the_whole_and_smaller(each: OffsetRange) -> None:
    low, high = each.halves()
    assert (low.first, low.end, high.end) == (each.first, high.first, each.end)
    if len(each) > 1:
        assert max(len(low), len(high)) < len(each)


def test_a_partition_that_was_added_begins_at_zero() -> None:
    plan = Plan.between({Partition("a", 0): 5}, {Partition("a", 0): 9, Partition("a", 1): 4})
    assert plan.ranges == (OffsetRange(Partition("a", 0), 5, 9), OffsetRange(Partition("a", 1), 0, 4))


def test_a_log_that_ends_before_it_was_read_is_refused() -> None:
    with pytest.raises(TopicRecreated, match="orders/3 ends at offset 4, and was read up to 9"):
        Plan.between({ORDERS: 9}, {ORDERS: 4})


def test_empty_ranges_are_planned_and_ask_for_nothing() -> None:
    plan = Plan.between({ORDERS: 7, Partition("orders", 4): 1}, {ORDERS: 7, Partition("orders", 4): 2})
    assert [str(each) for each in plan.filled] == ["orders/4@1..2"]
    assert plan.finished({Partition("orders", 4): 2})
    assert not plan.finished({Partition("orders", 4): 1, ORDERS: 7})


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), offsets, offsets), max_size=6))
def test_a_plan_comes_back_from_the_store_as_it_was(rows: list[tuple[str, int, int, int]]) -> None:
    plan = Plan(tuple(OffsetRange(Partition(topic, n), first, first + more) for topic, n, first, more in rows))
    assert Plan.from_json(plan.to_json()) == plan


def test_offsets_are_written_as_spark_reads_them() -> None:
    text = offsets_json({Partition("b", 1): 2, Partition("a", 0): 7, Partition("a", 10): 1})
    assert text == '{"a":{"0":7,"10":1},"b":{"1":2}}'
    assert parse_offsets(text) == {Partition("a", 0): 7, Partition("a", 10): 1, Partition("b", 1): 2}


@pytest.mark.parametrize("text", ["", "3", '{"a":1}', '{"a":{"x":1}}', "[]"])
def test_what_are_no_offsets_of_kafka_is_refused(text: str) -> None:
    with pytest.raises(OffsetError, match="are no offsets of a Kafka source"):
        parse_offsets(text)
