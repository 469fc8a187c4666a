"""How far a group may commit: ten thousand random histories against a model that is two sets."""

from __future__ import annotations

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from kconsume._runtime.assignment.watermark import Watermark

Step = tuple[int, int]
"""(0, n): deliver a unit of n records after a gap. (k, n): finish n more records of the k-th open unit."""

History = tuple[int, list[Step]]

STEPS = [(kind, records) for kind in range(5) for records in range(7)]

# One choice a step and not two numbers: half of the test's time is in the making of histories.
histories = st.tuples(st.integers(0, 5), st.lists(st.sampled_from(STEPS), max_size=20))


class Model:
    """Delivered and finished offsets, as plainly as they can be kept."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.delivered: set[int] = set()
        self.finished: set[int] = set()
        self.open: list[list[int]] = []  # each unit's offsets
        self.next = start

    def deliver(self, records: int) -> list[int]:
        """Offsets of a new unit, with gaps before it and in it."""
        offsets = []
        for number in range(records):
            self.next += (0, 1, 0, 3)[(self.next + number) % 4]
            offsets.append(self.next)
            self.next += 1
        self.delivered.update(offsets)
        self.open.append(offsets)
        return offsets

    def finish(self, which: int, records: int) -> tuple[int, int] | None:
        """Of an open unit, finish so many more: the call that says so to the tracker."""
        if not self.open:
            return None
        unit = self.open[which % len(self.open)]
        left = [offset for offset in unit if offset not in self.finished]
        self.finished.update(left[:records])
        done = [offset for offset in unit if offset in self.finished]
        if len(done) == len(unit):
            self.open.remove(unit)
        return unit[0], done[-1] + 1 if done else unit[0]

    @property
    def unfinished(self) -> set[int]:
        return self.delivered - self.finished


def obeys(make: type[Watermark], history: History) -> None:
    """Replay a history; fail at the first step after which the tracker breaks a promise."""
    start, steps = history
    tracker, model, before = make(start), Model(start), start
    for kind, records in steps:
        if kind == 0 and records:
            unit = model.deliver(records)
            tracker.delivered(unit[0], unit[-1])
        elif (call := model.finish(kind, records)) is not None:
            tracker.finished(*call)
        mark = tracker.watermark
        assert mark >= before, "it went backwards"
        assert not [o for o in model.unfinished if o < mark], "it passed an offset that is not finished"
        if model.unfinished:
            settled = [o for o in model.delivered if o < min(model.unfinished)]
            assert mark > max(settled, default=-1), "it holds back what is finished"
        else:
            assert mark == max(model.delivered, default=start - 1) + 1, "all is done, and it is not at the end"
        assert tracker.idle == (not model.unfinished)
        before = mark


@settings(max_examples=10_000, deadline=None, print_blob=True)
@given(histories)
def test_the_watermark_passes_all_that_is_finished_and_nothing_else(history: History) -> None:
    obeys(Watermark, history)


class HighestFinished(Watermark):
    """Wrong: commits the highest finished offset, whatever is open below it."""

    __slots__ = ("_highest",)

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self._highest = start

    def finished(self, first: int, upto: int) -> None:
        super().finished(first, upto)
        self._highest = max(self._highest, upto)

    @property
    def watermark(self) -> int:
        return self._highest


class PreviousPlusOne(Watermark):
    """Wrong: goes forward only while each unit begins where the one before ended, so a gap stops it for good."""

    __slots__ = ("_ends", "_mark")

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self._mark = start
        self._ends: dict[int, int] = {}

    def finished(self, first: int, upto: int) -> None:
        super().finished(first, upto)
        self._ends[first] = upto
        while self._ends.get(self._mark, self._mark) > self._mark:
            self._mark = self._ends[self._mark]

    @property
    def watermark(self) -> int:
        return self._mark


@pytest.mark.parametrize("wrong", [HighestFinished, PreviousPlusOne])
def test_control_a_wrong_tracker_is_found_out(wrong: type[Watermark]) -> None:
    def breaks(history: History) -> bool:
        try:
            obeys(wrong, history)
        except AssertionError:
            return True
        return False

    find(histories, breaks, settings=settings(max_examples=10_000, database=None))


class TestWrongCalls:
    def test_nothing_is_delivered_twice_or_backwards(self) -> None:
        tracker = Watermark(10)
        tracker.delivered(10, 14)
        for first, last in [(9, 9), (10, 14), (14, 20), (20, 19)]:
            with pytest.raises(ValueError, match="out of order"):
                tracker.delivered(first, last)
        tracker.finished(10, 15)
        assert tracker.watermark == 15

    def test_nothing_is_delivered_below_the_start(self) -> None:
        with pytest.raises(ValueError, match="out of order"):
            Watermark(10).delivered(9, 12)

    def test_only_a_unit_that_was_delivered_and_is_open_can_finish(self) -> None:
        tracker = Watermark(0)
        tracker.delivered(0, 4)
        with pytest.raises(ValueError, match="unit 3"):
            tracker.finished(3, 5)
        tracker.finished(0, 5)
        with pytest.raises(ValueError, match="unit 0"):
            tracker.finished(0, 5)
        assert tracker.watermark == 5

    def test_a_unit_does_not_go_backwards(self) -> None:
        tracker = Watermark(0)
        tracker.delivered(0, 4)
        tracker.finished(0, 3)
        with pytest.raises(ValueError, match="unit 0 finished up to 2"):
            tracker.finished(0, 2)
        assert tracker.watermark == 3

    def test_a_unit_that_claims_more_than_it_was_given_passes_nothing_of_the_next(self) -> None:
        tracker = Watermark(0)
        tracker.delivered(0, 4)
        tracker.delivered(7, 9)
        tracker.finished(0, 9)
        assert tracker.watermark == 7


def test_a_long_history_leaves_nothing_behind() -> None:
    tracker = Watermark(0)
    for first in range(0, 100_000, 10):
        tracker.delivered(first, first + 9)
        tracker.finished(first, first + 10)
    assert tracker.idle
    assert (len(tracker._order), len(tracker._progress)) == (0, 0)


def test_the_end_of_the_log_is_passed_when_everything_delivered_is_finished() -> None:
    """A transaction marker behind the last record is nothing to wait for; a record that runs is."""
    tracker = Watermark(3)
    tracker.delivered(3, 5)
    tracker.ended(9)
    assert tracker.watermark == 3
    tracker.finished(3, 6)
    tracker.ended(9)
    assert (tracker.watermark, tracker.idle) == (9, True)
    tracker.ended(7)
    assert tracker.watermark == 9
