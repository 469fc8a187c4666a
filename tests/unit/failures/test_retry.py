"""How often a record is tried again, how long after, and for which errors; and what is no policy at all."""

from __future__ import annotations

from typing import Any, cast

import pytest
import tenacity
from hypothesis import given
from hypothesis import strategies as st

from kconsume import ConfigurationError, DecodeError, Retry
from kconsume.errors import StoreUnavailable


def pauses(retry: Retry, error: BaseException | None = None, seconds: float = 0.0) -> list[float]:
    """Between the attempts on a record that never passes."""
    found: list[float] = []
    while (pause := retry.pause(len(found) + 1, error or LookupError("no"), seconds)) is not None:
        found.append(pause)
        assert len(found) < 1000, "it never ends"
    return found


@given(st.integers(1, 50))
def test_attempts_are_calls_in_all(attempts: int) -> None:
    assert len(pauses(Retry(attempts, wait=0))) == attempts - 1


def test_by_default_it_is_three_of_them_each_time_twice_as_long_after() -> None:
    first, second = pauses(Retry())
    assert 0.5 <= first <= 0.75
    assert 1.0 <= second <= 1.25


def test_by_default_no_pause_is_longer_than_half_a_minute() -> None:
    assert max(pauses(Retry(50))) <= 30.25


def test_a_number_of_seconds_is_the_pause() -> None:
    assert pauses(Retry(4, wait=2.5)) == [2.5, 2.5, 2.5]


def test_objects_of_tenacity_are_taken() -> None:
    retry = Retry(tenacity.stop_after_attempt(3), wait=tenacity.wait_incrementing(start=1, increment=2))
    assert pauses(retry) == [1, 3]
    assert pauses(Retry(9, wait=0, on=tenacity.retry_if_exception_message(match="later"))) == []
    assert len(pauses(Retry(9, wait=0, on=tenacity.retry_if_exception_message(match="no")))) == 8


def test_a_stop_by_time_sees_the_time_since_the_first_failure() -> None:
    retry = Retry(tenacity.stop_after_delay(10), wait=1)
    assert retry.pause(1, LookupError(), 9.0) == 1
    assert retry.pause(7, LookupError(), 10.5) is None


def test_a_stop_before_a_pause_that_is_too_long_sees_that_pause() -> None:
    retry = Retry(tenacity.stop_before_delay(10), wait=5)
    assert retry.pause(1, LookupError(), 4.0) == 5
    assert retry.pause(2, LookupError(), 6.0) is None


def test_only_the_named_errors_are_worth_it() -> None:
    retry = Retry(3, wait=0, on=(TimeoutError, LookupError), give_up_on=KeyError)
    assert retry.pause(1, TimeoutError(), 0) == 0
    assert retry.pause(1, IndexError(), 0) == 0
    assert retry.pause(1, KeyError(), 0) is None, "a LookupError, and named"
    assert retry.pause(1, ValueError(), 0) is None


@pytest.mark.parametrize("error", [DecodeError("bad"), ConfigurationError("bad"), StoreUnavailable("away")])
def test_what_would_be_the_same_again_is_not_tried_again(error: Exception) -> None:
    assert Retry(3).pause(1, error, 0) is None


def test_unless_it_is_asked_for() -> None:
    assert Retry(3, wait=0, on=DecodeError).pause(1, DecodeError("the registry was away"), 0) == 0


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
def test_who_asks_to_stop_is_not_called_again(error: BaseException) -> None:
    assert Retry(3, on=BaseException).pause(1, error, 0) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"attempts": 0}, "never calls the handler"),
        ({"attempts": -1}, "never calls the handler"),
        ({"attempts": True}, "never calls the handler"),
        ({"attempts": float("inf")}, "must be a whole number"),
        ({"attempts": tenacity.stop_never}, r"Retry\(stop_never\) never ends"),
        ({"attempts": tenacity.stop_never & tenacity.stop_after_attempt(3)}, r"Retry\(stop_all\) never ends"),
        ({"attempts": tenacity.stop_never | tenacity.stop_never}, "never ends"),
        ({"attempts": tenacity.stop_any(tenacity.stop_never, tenacity.stop_after_delay(float("inf")))}, "never ends"),
        ({"attempts": tenacity.stop_after_attempt(cast(int, float("inf")))}, "never ends"),
        ({"attempts": tenacity.stop_before_delay(float("nan"))}, "never ends"),
        ({"attempts": "5"}, "must be a whole number"),
        ({"wait": -1}, "must be a number of seconds, 0 or more"),
        ({"wait": float("inf")}, "must be a number of seconds, 0 or more"),
        ({"wait": "soon"}, "a wait of tenacity"),
        ({"on": "TimeoutError"}, "no class of errors"),
        ({"on": (TimeoutError, 5)}, "no class of errors"),
        ({"give_up_on": [KeyError]}, "no class of errors"),
    ],
)
def test_what_is_no_policy_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Retry(**arguments)


def test_what_ends_by_one_of_its_parts_is_a_policy() -> None:
    assert len(pauses(Retry(tenacity.stop_never | tenacity.stop_after_attempt(4), wait=0))) == 3
    assert len(pauses(Retry(tenacity.stop_after_attempt(2) & tenacity.stop_after_attempt(4), wait=0))) == 3


def test_it_says_what_it_does_in_words() -> None:
    assert str(Retry(5)) == "is tried up to 5 times, with pauses of 0.5 s, doubled each time, up to 30 s"
    assert str(Retry(2, wait=3)) == "is tried up to 2 times, 3 s apart"
    assert str(Retry(tenacity.stop_after_delay(9), wait=tenacity.wait_random())) == (
        "is tried again (stop_after_delay), with the pauses of wait_random"
    )
