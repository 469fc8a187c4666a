"""Deadlines of tests are spent by the CPU that a test could have had."""

from __future__ import annotations

import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from tests.patience import Alarm, Patience, Ticks, read_runnable, read_ticks
from tests.waiting import eventually


def patience(seconds: float, *, stolen: int = 0, runnable: int = 1, cores: int = 2) -> Patience:
    """On a machine on which a second passes between two looks, with 100 ticks in which somebody wants a core."""
    looks, clock = count(), count()
    return Patience(
        seconds,
        clock=lambda: float(next(clock)),
        ticks=lambda: Ticks((100 - stolen) * (n := next(looks)), stolen * n),
        runnable=lambda: runnable,
        cores=cores,
    )


def test_on_a_quiet_machine_a_second_is_a_second() -> None:
    waits = patience(10.0)
    assert [waits.look() for _ in range(3)] == [9.0, 8.0, 7.0]


def test_what_the_host_takes_away_does_not_count() -> None:
    assert patience(10.0, stolen=90).look() == pytest.approx(9.9)


def test_what_others_take_does_not_count() -> None:
    assert patience(10.0, runnable=20).look() == pytest.approx(9.9)
    assert patience(10.0, runnable=2).look() == 9.0


def test_it_ends_on_a_machine_that_gives_nothing() -> None:
    waits = patience(1.0, stolen=100, runnable=500)
    assert any(waits.look() <= 0 for _ in range(25))


def test_a_machine_that_does_not_tell_counts_as_quiet(tmp_path: Path) -> None:
    assert read_ticks(tmp_path / "none") == Ticks(0, 0)
    assert read_runnable(tmp_path / "none") == 1
    (tmp_path / "odd").write_text("odd")
    assert read_runnable(tmp_path / "odd") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_sees_who_wants_to_run_here() -> None:
    before = read_ticks()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        eventually(lambda: read_runnable() > 8, what="eight busy loops beside us")
        eventually(lambda: read_ticks().used > before.used, what="that they use the cores")
    finally:
        for each in busy:
            each.kill()
            each.wait()


def test_a_wait_that_is_in_vain_fails() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.05 s: what does not come; last seen: 0"):
        eventually(lambda: 0, within=0.05, what="what does not come")


def test_a_test_that_hangs_is_ended_and_one_without_a_core_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Alarm, "LOOK_EVERY", 0.01)
    called: list[float] = []
    waits = patience(3.0)
    alarm = Alarm(waits, lambda: called.append(waits.left))
    try:
        eventually(lambda: called, what="the alarm of a test that hangs")
    finally:
        alarm.cancel()
    starved, looks = patience(1e6, stolen=90), 0.0
    alarm = Alarm(starved, lambda: called.append(starved.left))
    try:
        eventually(lambda: starved.left < 1e6 - looks - 1, what="that it is looked at")
    finally:
        alarm.cancel()
    assert called == [0.0]
