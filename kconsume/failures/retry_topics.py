"""Records that are tried again later, by way of retry topics: `RetryTopics`, and the retry chain of one handler.

    orders ──► orders.inventory.retry.1 ──► orders.inventory.retry.2 ──► … ──► the terminal action

A record that fails goes to the next topic of the chain, with the time before which it must not be tried. The group's
own handler reads the retry topics as well, and waits there. This module has the names, the times and the decision.
`_runtime/output/publisher.py` sends, and `_runtime/processing/rules.py` waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from kconsume._kafka.outgoing import is_topic_name
from kconsume.errors import ConfigurationError, DecodeError, StoreError
from kconsume.failures.letter_headers import RetryTarget, is_number, read_added_headers, redrive_topic
from kconsume.records import Message

_NOT_WORTH_A_RETRY = (ConfigurationError, DecodeError, StoreError)
"""Errors that the same record would raise again after any delay."""
_LONGEST = 7 * 24 * 3600.0
_LATEST = 2 * _LONGEST
"""Seconds from now. A later due time is ignored. The longest delay is `_LONGEST`; the rest allows for a wrong clock."""
_MARK_UNIT = 0.001
"""Seconds. The time in the header is rounded up to a multiple of this unit."""
_MOST_NAME = 249


class RetryTopics:
    """Try a failed record again later, and do not hold up the records behind it: `RetryTopics(delays=(5, 60, 600))`.

    There is one topic for each delay: `<topic>.<group>.retry.<n>`. The record loses its place in the order.

    Args:
        delays: seconds before each further attempt, above 0 and at most 7 days each.
    """

    __slots__ = ("delays",)

    def __init__(self, delays: Sequence[float] = (5, 60, 600)) -> None:
        given = tuple(delays) if isinstance(delays, tuple | list) else ()
        if not given or not all(_is_delay(delay) for delay in given):
            raise ConfigurationError(
                f"RetryTopics(delays={delays!r}): delays must be seconds, above 0 and at most 7 days each, as in "
                f"delays=(5, 60, 600)"
            )
        self.delays = tuple(map(float, given))

    def __repr__(self) -> str:
        return f"RetryTopics(delays={self.delays!r})"

    def __str__(self) -> str:
        apart = ", ".join(f"{delay:g} s" for delay in self.delays)
        topics = "a topic" if len(self.delays) == 1 else f"{len(self.delays)} topics"
        return f"is tried again after {apart}, by way of {topics}, while other records go on"


def _is_delay(delay: object) -> bool:
    return isinstance(delay, int | float) and not isinstance(delay, bool) and 0 < delay <= _LONGEST


def retry_topic(topic: str, group: str, number: int) -> str:
    """Return the name of a topic's retry topic for this group. `number` is counted from 1."""
    return f"{topic}.{group}.retry.{number}"


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment on the wall clock and on the monotonic clock. A wait that has begun uses the monotonic clock, because
    the wall clock may be set forward or back."""

    wall: float
    steady: float

    @classmethod
    def now(cls) -> Self:
        return cls(time.time(), time.monotonic())


@dataclass(frozen=True, slots=True)
class RetryChain:
    """The retry topics of one handler in its group, in the order in which a record passes them."""

    topics: tuple[str, ...]
    """The topics that the user named for the handler."""
    group: str
    delays: tuple[float, ...]
    is_worth_it: Callable[[BaseException], bool] = lambda _: True
    """Returns True if the handler's `Retry` accepts the error, or there is no `Retry`."""

    def __post_init__(self) -> None:
        for name, topic in self.retry_topics.items():
            if not is_topic_name(name):
                room = _MOST_NAME - len(name) + len(self.group)
                fix = f"give the handler a group= of at most {room} of a-z A-Z 0-9 . _ -"
                if room < 1 or not is_topic_name(topic):
                    fix = f"{topic!r} leaves no room for the name of a retry topic, so use Retry(...)"
                raise ConfigurationError(f"{name!r} would be the name of a retry topic, and is no topic name: {fix}")
        if twice := set(self.retry_topics) & set(self.topics):
            raise ConfigurationError(
                f"the handler reads {sorted(twice)[0]!r}, which is one of its own retry topics, so a failed record "
                f"would be retried without end: remove that topic, kconsume reads it anyway"
            )

    @property
    def retry_topics(self) -> dict[str, str]:
        """The names of all retry topics, each with the topic that it belongs to."""
        numbers = range(1, len(self.delays) + 1)
        return {retry_topic(topic, self.group, number): topic for topic in self.topics for number in numbers}

    def number_of(self, topic: str) -> int:
        """Return the place of a retry topic in the chain, counted from 1; 0 for any other topic."""
        return 0 if topic not in self.retry_topics else int(topic.rpartition(".")[2])

    def next(self, topic: str, error: BaseException) -> RetryTarget | None:
        """Return the next retry topic of a record of `topic` that failed with `error`; None if there is none."""
        number = self.number_of(topic)
        if number == len(self.delays) or not isinstance(error, Exception) or isinstance(error, _NOT_WORTH_A_RETRY):
            return None
        if not self.is_worth_it(error):
            return None
        due = time.time() + self.delays[number]
        return RetryTarget(retry_topic(self._source_of(topic), self.group, number + 1), number + 1, due)

    def _source_of(self, topic: str) -> str:
        """Return the topic that a retry topic or a re-drive topic belongs to; any other topic is returned unchanged."""
        sent_back = {redrive_topic(each, self.group): each for each in self.topics}
        return self.retry_topics.get(topic) or sent_back.get(topic, topic)

    def seconds_left(self, message: Message, since: Moment) -> float:
        """Return the seconds until a record of a retry topic may be tried; 0 if it may be tried now.

        Args:
            message: the record.
            since: a moment at which the record was already in the topic.
        """
        due = read_added_headers(tuple((name, value or b"") for name, value in message.headers() or ())).get("due", "")
        # Any producer can write such a header. A value that is not a time, or a time in a thousand years, must not hold
        # the partition.
        until = int(due) / 1000 if is_number(due, 2**63) else 0.0
        if not 0.0 < until - since.wall <= _LATEST:
            return 0.0
        # The record failed before `since`, so waiting for the topic's delay from then on is enough, even if the wall
        # clock was set back meanwhile.
        longest = self.delays[self.number_of(message.topic()) - 1] + _MARK_UNIT
        steady = min(until + (since.steady - since.wall), since.steady + longest)
        return max(0.0, steady - time.monotonic())
