"""How often Python looks for garbage while an app has the process to itself: `_runtime/gc_tuning.py`."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from kconsume import App
from kconsume._runtime.gc_tuning import LIMIT, seldom_collected

PYTHONS_OWN = (700, 10, 10)


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*PYTHONS_OWN)
    yield
    gc.set_threshold(*before)


def test_it_looks_less_often_in_the_block_and_as_before_after_it() -> None:
    with seldom_collected():
        assert gc.get_threshold() == (LIMIT, *PYTHONS_OWN[1:])
    assert gc.get_threshold() == PYTHONS_OWN


def test_it_is_as_before_after_a_block_that_failed() -> None:
    with pytest.raises(ValueError, match="boom"), seldom_collected():
        raise ValueError("boom")
    assert gc.get_threshold() == PYTHONS_OWN


def test_the_last_of_several_blocks_sets_it_back() -> None:
    first, second = seldom_collected(), seldom_collected()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] == LIMIT
    second.__exit__(None, None, None)
    assert gc.get_threshold() == PYTHONS_OWN


@pytest.mark.parametrize("chosen", [(0, 10, 10), (50_000, 5, 5), (2_001, 10, 10)])
def test_what_a_person_has_chosen_stays(chosen: tuple[int, int, int]) -> None:
    gc.set_threshold(*chosen)
    with seldom_collected():
        assert gc.get_threshold() == chosen
    assert gc.get_threshold() == chosen


def test_what_a_person_chooses_meanwhile_stays() -> None:
    with seldom_collected():
        gc.set_threshold(1_234, 5, 5)
    assert gc.get_threshold() == (1_234, 5, 5)


def test_handlers_of_an_app_that_catches_up_run_in_it() -> None:
    app, seen = App("embedded://", group="garbage", offsets="memory://"), list[int]()

    @app.consume("garbage", partitions=[0, 1, 2, 3])  # others of this process write orders
    def handle(value: bytes) -> None:
        seen.append(gc.get_threshold()[0])

    app.send("garbage", b"1")
    app.catch_up(idle=0.2)
    assert seen == [LIMIT]
    assert gc.get_threshold() == PYTHONS_OWN


def test_an_app_that_runs_beside_something_else_changes_nothing() -> None:
    app = App("embedded://", group="garbage", offsets="memory://")

    @app.consume("orders", partitions=[0])
    def handle(value: bytes) -> None: ...

    with app.running():
        assert gc.get_threshold() == PYTHONS_OWN
