"""examples/migration: the loop loses payments or books them twice where it is killed, and kconsume does neither."""

from __future__ import annotations

import re

import pytest

from examples.migration.__main__ import Count
from tests.integration.test_example_orders import run


@pytest.mark.timeout(400)
def test_the_loop_is_wrong_after_kills_and_the_service_is_not() -> None:
    code, said = run("migration", "--payments", "3000", "--kills", "2", "--session", "2")
    assert code == 0, said
    (loop, ours) = (
        [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", line.partition("│")[2].partition("│")[2])]
        for line in said.splitlines()
        if "poll()" in line or "kconsume" in line
    )
    assert ours == [3000, 2, 3000, 0, 0]
    payments, kills, rows, lost, twice = loop
    assert (payments, kills) == (3000, 2)
    assert lost + twice > 0, "the control: the same kills do harm"
    assert rows == payments - lost + twice


def test_what_is_lost_and_what_is_there_twice_are_counted_apart() -> None:
    count = Count("either", kills=1, rows=10, distinct=7)
    assert (count.lost(8), count.twice) == (1, 3)
