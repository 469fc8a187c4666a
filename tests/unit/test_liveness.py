"""The helper that looks for partitions that stand still, without any."""

from __future__ import annotations

from itertools import count

import pytest

from kconsume import Partition
from tests.liveness import assert_liveness

ONE, TWO = Partition("orders", 1), Partition("orders", 2)


def test_offsets_that_pass_the_new_records_are_awaited() -> None:
    looks = count()
    assert_liveness(lambda: {ONE: 6, TWO: 9}, lambda: {ONE: 6 if next(looks) > 3 else 5, TWO: 10}, dict, within=20)


def test_each_partition_that_stands_still_is_named_with_offset_end_and_cause_and_no_other() -> None:
    with pytest.raises(AssertionError, match=r"1 of 2 .*\norders/2 stored=8 end=9 cause=paused$") as failed:
        assert_liveness(lambda: {ONE: 6, TWO: 9}, lambda: {ONE: 6, TWO: 8}, lambda: {TWO: "paused"}, within=0.05)
    assert "orders/1" not in str(failed.value)


def test_one_that_nobody_has_and_that_was_never_stored_is_named_too() -> None:
    with pytest.raises(AssertionError, match=r"orders/2 stored=None end=1 cause=nobody has it"):
        assert_liveness(lambda: {TWO: 1}, dict, dict, within=0.05)
