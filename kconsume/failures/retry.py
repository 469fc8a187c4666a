"""How often, after how long and for which errors a record is tried again in its place.

A `Retry` is a value: it returns what to do after a failed attempt, and does not wait itself. tenacity does the
arithmetic, and a user can give any of its `stop`, `wait` and `retry` objects. tenacity is imported when a `Retry` is
made, so that an app without a `Retry` does not pay for the import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from kconsume.errors import ConfigurationError, DecodeError, StoreError

if TYPE_CHECKING:
    from tenacity import RetryCallState

    State: TypeAlias = RetryCallState

Errors: TypeAlias = type[BaseException] | tuple[type[BaseException], ...]

_NOT_WORTH_A_RETRY = (ConfigurationError, DecodeError, StoreError)
"""Errors that the same record would raise again. (After a store error, the runtime itself tries again.)"""


class Retry:
    """Run the handler again on a record that failed: `Retry(attempts=5)`.

    While a record waits, the records behind it in its partition wait too. Nothing else waits.

    Args:
        attempts: the number of calls, including the first one, or a tenacity `stop`.
        wait: seconds between two calls, or a tenacity `wait`. By default half a second, then twice as long each time,
            up to 30 s, with jitter.
        on: the errors that are worth another attempt: a class, a tuple of classes, or a tenacity `retry`. By default
            all errors except decoding errors.
        give_up_on: the errors that are not worth another attempt: a class or a tuple of classes.
    """

    __slots__ = ("_give_up_on", "_given", "_is_worth_it", "_on", "_stop", "_wait")

    def __init__(
        self,
        attempts: int | Callable[[State], bool] = 3,
        *,
        wait: float | Callable[[State], float] | None = None,
        on: Errors | Callable[[State], bool] | None = None,
        give_up_on: Errors = (),
    ) -> None:
        self._given = (attempts, wait)
        self._stop = _stop(attempts)
        self._wait = _wait(wait)
        self._on = _errors(on, "on") if on is not None and not _is_object(on) else None
        self._is_worth_it: Any = on if on is not None and self._on is None else None
        self._give_up_on = _errors(give_up_on, "give_up_on")

    def __str__(self) -> str:
        attempts, wait = self._given
        times = f"up to {attempts} times" if isinstance(attempts, int) else f"again ({_name(attempts)})"
        if wait is None:
            apart = "with pauses of 0.5 s, doubled each time, up to 30 s"
        else:
            apart = f"{wait:g} s apart" if isinstance(wait, int | float) else f"with the pauses of {_name(wait)}"
        return f"is tried {times}, {apart}"

    def __repr__(self) -> str:
        return f"Retry({self._given[0]!r})"

    def pause(self, attempt: int, error: BaseException, seconds: float) -> float | None:
        """Return the seconds to wait before the next attempt; None if there is no next attempt.

        Args:
            attempt: the number of the attempt that failed, counted from 1.
            error: the error that it raised.
            seconds: how long ago the first attempt failed.
        """
        state = _state(attempt, error, seconds)
        if not self._worth_it(state, error):
            return None
        state.upcoming_sleep = pause = max(0.0, float(self._wait(state)))
        return None if self._stop(state) else pause

    def takes(self, error: BaseException) -> bool:
        """True if an error is worth another attempt."""
        return self._worth_it(_state(1, error, 0.0), error)

    def _worth_it(self, state: State, error: BaseException) -> bool:
        if not isinstance(error, Exception) or isinstance(error, self._give_up_on):
            return False
        if self._is_worth_it is not None:
            return bool(self._is_worth_it(state))
        if self._on is not None:
            return isinstance(error, self._on)
        return not isinstance(error, _NOT_WORTH_A_RETRY)


def _stop(attempts: object) -> Any:
    import tenacity

    if isinstance(attempts, bool) or (isinstance(attempts, int) and attempts < 1):
        raise ConfigurationError(f"Retry(attempts={attempts!r}) never calls the handler: use 1 or more")
    if isinstance(attempts, int):
        return tenacity.stop_after_attempt(attempts)
    if _never_ends(attempts):
        raise ConfigurationError(
            f"Retry({_name(attempts).removeprefix('_')}) never ends, so one bad record would hold its partition for "
            f"ever: give a number of attempts, or stop_after_delay(seconds)"
        )
    if not callable(attempts) or isinstance(attempts, type):
        raise ConfigurationError(f"Retry(attempts={attempts!r}) must be a whole number: write Retry(attempts=5)")
    return attempts


def _never_ends(stop: object) -> bool:
    """Return True if a stop condition never holds. Only tenacity's own objects are examined."""
    import tenacity

    if isinstance(stop, tenacity.stop_any | tenacity.stop_all):
        enough = all if isinstance(stop, tenacity.stop_any) else any
        return enough(map(_never_ends, stop.stops))
    if isinstance(stop, tenacity.stop_after_attempt):
        return not stop.max_attempt_number < float("inf")
    if isinstance(stop, tenacity.stop_after_delay | tenacity.stop_before_delay):
        return not stop.max_delay < float("inf")
    return stop is tenacity.stop_never


def _wait(wait: object) -> Any:
    import tenacity

    if wait is None:
        return tenacity.wait_exponential(multiplier=0.5, max=30.0) + tenacity.wait_random(0, 0.25)
    if isinstance(wait, int | float) and not isinstance(wait, bool):
        if not 0 <= wait < float("inf"):
            raise ConfigurationError(f"Retry(wait={wait!r}) must be a number of seconds, 0 or more: write wait=1.0")
        return tenacity.wait_fixed(wait)
    if not callable(wait) or isinstance(wait, type):
        raise ConfigurationError(
            f"Retry(wait={wait!r}) must be a number of seconds, or a wait of tenacity: write wait=1.0"
        )
    return wait


def _is_object(on: object) -> bool:
    return callable(on) and not isinstance(on, type)


def _errors(given: object, keyword: str) -> tuple[type[BaseException], ...]:
    errors = given if isinstance(given, tuple) else (given,)
    for each in errors:
        if not isinstance(each, type) or not issubclass(each, BaseException):
            raise ConfigurationError(
                f"Retry({keyword}={each!r}) is no class of errors: write {keyword}=TimeoutError, or a tuple of classes"
            )
    return errors


def _state(attempt: int, error: BaseException, seconds: float) -> State:
    import tenacity

    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    state.attempt_number = attempt
    state.set_exception((type(error), error, error.__traceback__))
    state.outcome_timestamp = state.start_time + seconds
    return state


def _name(given: object) -> str:
    return getattr(given, "__name__", type(given).__name__)
