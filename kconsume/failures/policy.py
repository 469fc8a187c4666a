"""What becomes of a record whose handler failed: a decision, made from values only.

Tried again in its place as long as the `Retry` of `retry=` says, then later as long as its `RetryTopics` say, then
`on_error=`, the one terminal action. Carrying it out is the runtime's; writing anything anywhere is not done here.
"""

from __future__ import annotations

import enum
from typing import Literal, TypeAlias

from kconsume.errors import ConfigurationError
from kconsume.failures.dead_letter import DeadLetter
from kconsume.failures.retry import Retry
from kconsume.failures.retry_topics import Ladder, RetryTopics

Retries: TypeAlias = Retry | RetryTopics | tuple[Retry | RetryTopics, ...]
OnError: TypeAlias = Literal["stop", "hold", "skip"] | DeadLetter


class Verdict(enum.Enum):
    """The terminal action for a record."""

    STOP = "stop"
    HOLD = "hold"
    SKIP = "skip"
    BURY = "dead letter"
    LATER = "retry topic"


class Policy:
    """The person's choice for one handler."""

    def __init__(self, on_error: OnError = "stop", retry: Retries | None = None) -> None:
        if not isinstance(on_error, DeadLetter) and on_error not in ("stop", "hold", "skip"):
            raise ConfigurationError(
                f"on_error={on_error!r} is unknown: choose 'stop', 'hold', 'skip' or DeadLetter('orders.dlq')"
            )
        self.dead_letter = on_error if isinstance(on_error, DeadLetter) else None
        self.retry, self.retry_topics = _both(retry)
        self._terminal = Verdict.BURY if self.dead_letter is not None else Verdict(on_error)
        self.goes_on = self._terminal in (Verdict.SKIP, Verdict.BURY)
        """Whether a record that fails is passed over in the end."""
        self.holds = self._terminal is Verdict.HOLD
        """Whether a record that fails stops only its partition."""

    def __str__(self) -> str:
        if self._terminal is Verdict.STOP:
            end = "stops the process; its offset is not passed"
        elif self._terminal is Verdict.HOLD:
            end = "holds its partition; its offset is not passed, and the other partitions go on"
        elif self._terminal is Verdict.SKIP:
            end = "is logged, counted and skipped"
        else:
            end = str(self.dead_letter)
        first = "".join(f"{retry}; then it " for retry in (self.retry, self.retry_topics) if retry is not None)
        return f"a record that fails {first}{end}"

    def pause(self, attempt: int, error: BaseException, seconds: float) -> float | None:
        """How long to wait before the next attempt; None if there is none."""
        return None if self.retry is None else self.retry.pause(attempt, error, seconds)

    def ladder(self, topics: tuple[str, ...], group: str) -> Ladder | None:
        """Of a handler that reads these topics, if records are tried again later."""
        if self.retry_topics is None:
            return None
        takes = (lambda _: True) if self.retry is None else self.retry.takes
        return Ladder(topics, group, self.retry_topics.delays, takes)

    def verdict(self, error: BaseException) -> Verdict:
        """What to do with a record whose handler raised `error` and that is not tried again."""
        return self._terminal if is_of_a_record(error) else Verdict.STOP


def is_of_a_record(error: BaseException) -> bool:
    """Whether it may be a record's fault. `sys.exit()` asks to stop, whatever the policy; and what cannot be run is
    no record's."""
    return isinstance(error, Exception) and not isinstance(error, ConfigurationError)


def _both(retry: object) -> tuple[Retry | None, RetryTopics | None]:
    given = retry if isinstance(retry, tuple) else () if retry is None else (retry,)
    here = [each for each in given if isinstance(each, Retry)]
    later = [each for each in given if isinstance(each, RetryTopics)]
    if len(here) > 1 or len(later) > 1 or len(here) + len(later) < len(given) or retry == ():
        raise ConfigurationError(
            f"retry= takes a Retry, RetryTopics, or one of each in a tuple, and got {retry!r}: write "
            f"retry=Retry(attempts=5), or retry=(Retry(attempts=3), RetryTopics(delays=(5, 60)))"
        )
    return next(iter(here), None), next(iter(later), None)
