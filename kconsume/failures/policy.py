"""Decides what happens to a record whose handler failed. Pure: the runtime carries the decision out.

First the record is tried again in its place, as long as the `Retry` of `retry=` allows. Then it is tried again later,
as long as the `RetryTopics` of `retry=` allow. Then the terminal action of `on_error=` applies.
"""

from __future__ import annotations

import enum
from typing import Literal, TypeAlias

from kconsume.errors import ConfigurationError
from kconsume.failures.dead_letter import DeadLetter
from kconsume.failures.retry import Retry
from kconsume.failures.retry_topics import RetryChain, RetryTopics

Retries: TypeAlias = Retry | RetryTopics | tuple[Retry | RetryTopics, ...]
OnError: TypeAlias = Literal["stop", "hold", "skip"] | DeadLetter


class Verdict(enum.Enum):
    """What happens to a record that is not tried again in its place."""

    STOP = "stop"
    HOLD = "hold"
    SKIP = "skip"
    DEAD_LETTER = "dead letter"
    RETRY_LATER = "retry topic"


class Policy:
    """What one handler does with failed records: its `on_error=` and its `retry=`."""

    def __init__(self, on_error: OnError = "stop", retry: Retries | None = None) -> None:
        """
        Args:
            on_error: the terminal action.
            retry: a `Retry`, `RetryTopics`, or one of each in a tuple.
        """
        if not isinstance(on_error, DeadLetter) and on_error not in ("stop", "hold", "skip"):
            raise ConfigurationError(
                f"on_error={on_error!r} is unknown: choose 'stop', 'hold', 'skip' or DeadLetter('orders.dlq')"
            )
        self.dead_letter = on_error if isinstance(on_error, DeadLetter) else None
        self.retry, self.retry_topics = _retry_and_topics(retry)
        self._terminal = Verdict.DEAD_LETTER if self.dead_letter is not None else Verdict(on_error)
        self.skips_failures = self._terminal in (Verdict.SKIP, Verdict.DEAD_LETTER)
        """True if a record that fails is skipped in the end, with or without a dead letter."""
        self.holds_partition = self._terminal is Verdict.HOLD
        """True if a record that fails stops only its partition."""

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
        """Return the seconds to wait before the next attempt in place; None if there is no next attempt.

        The parameters are those of `Retry.pause`.
        """
        return None if self.retry is None else self.retry.pause(attempt, error, seconds)

    def retry_chain(self, topics: tuple[str, ...], group: str) -> RetryChain | None:
        """Return the retry topics of a handler that reads `topics`; None if records are not tried again later."""
        if self.retry_topics is None:
            return None
        takes = (lambda _: True) if self.retry is None else self.retry.takes
        return RetryChain(topics, group, self.retry_topics.delays, takes)

    def verdict(self, error: BaseException) -> Verdict:
        """Return what to do with a record whose handler raised `error` and that is not tried again."""
        return self._terminal if is_record_failure(error) else Verdict.STOP


def is_record_failure(error: BaseException) -> bool:
    """Return True if the record may be the cause of an error.

    `sys.exit()` is a request to stop under every policy. A configuration error is never caused by a record.
    """
    return isinstance(error, Exception) and not isinstance(error, ConfigurationError)


def _retry_and_topics(retry: object) -> tuple[Retry | None, RetryTopics | None]:
    given = retry if isinstance(retry, tuple) else () if retry is None else (retry,)
    here = [each for each in given if isinstance(each, Retry)]
    later = [each for each in given if isinstance(each, RetryTopics)]
    if len(here) > 1 or len(later) > 1 or len(here) + len(later) < len(given) or retry == ():
        raise ConfigurationError(
            f"retry= takes a Retry, RetryTopics, or one of each in a tuple, and got {retry!r}: write "
            f"retry=Retry(attempts=5), or retry=(Retry(attempts=3), RetryTopics(delays=(5, 60)))"
        )
    return next(iter(here), None), next(iter(later), None)
