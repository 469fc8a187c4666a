"""Records that are tried again later, by way of topics of their own: `RetryTopics`, and the ladder of one handler.

    orders ──► orders.inventory.retry.1 ──► orders.inventory.retry.2 ──► … ──► the terminal action

A record that fails goes to the next rung with the time before which it must not be tried; the group's own handler reads
the rungs as well, and waits there. Values and names: sending is `runtime/mail.py`'s, waiting is `runtime/course.py`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kconsume.errors import ConfigurationError, DecodeError, StoreError
from kconsume.failures.letters import Rung, is_number, read_marks, redrive_topic
from kconsume.output import is_topic_name
from kconsume.records import Message

_HOPELESS = (ConfigurationError, DecodeError, StoreError)
"""The same record gives the same error again, however late it is."""
_LONGEST = 7 * 24 * 3600.0
_LATEST = 2 * _LONGEST
"""Seconds from now: what is due later was not written by a ladder, however wrong its clock was."""
_MOST_NAME = 249


class RetryTopics:
    """Try a record that failed again after a while, and let those behind it go on: `RetryTopics(delays=(5, 60, 600))`.

    One topic for each delay, in seconds: `<topic>.<group>.retry.<n>`. The record loses its place in the order.
    """

    __slots__ = ("delays",)

    def __init__(self, delays: Sequence[float] = (5, 60, 600)) -> None:
        given = tuple(delays) if isinstance(delays, tuple | list) else ()
        if not given or not all(_is_delay(delay) for delay in given):
            raise ConfigurationError(
                f"RetryTopics(delays={delays!r}) says not when: give seconds above 0, at most a week each, as in "
                f"delays=(5, 60, 600)"
            )
        self.delays = tuple(map(float, given))

    def __repr__(self) -> str:
        return f"RetryTopics(delays={self.delays!r})"

    def __str__(self) -> str:
        apart = ", ".join(f"{delay:g} s" for delay in self.delays)
        topics = "a topic" if len(self.delays) == 1 else f"{len(self.delays)} topics"
        return f"is tried again after {apart}, by way of {topics}, while others go on"


def _is_delay(delay: object) -> bool:
    return isinstance(delay, int | float) and not isinstance(delay, bool) and 0 < delay <= _LONGEST


def retry_topic(topic: str, group: str, number: int) -> str:
    return f"{topic}.{group}.retry.{number}"


@dataclass(frozen=True, slots=True)
class Ladder:
    """The rungs of one handler in its group."""

    topics: tuple[str, ...]
    """Those that the handler reads by itself."""
    group: str
    delays: tuple[float, ...]
    is_worth_it: Callable[[BaseException], bool] = lambda _: True
    """What the handler's `Retry` says of an error, if it has one."""

    def __post_init__(self) -> None:
        for name, topic in self.rungs.items():
            if not is_topic_name(name):
                room = _MOST_NAME - len(name) + len(self.group)
                fix = f"give the handler a group= of at most {room} of a-z A-Z 0-9 . _ -"
                if room < 1 or not is_topic_name(topic):
                    fix = f"{topic!r} leaves no room for one, so use Retry(...)"
                raise ConfigurationError(f"{name!r} would be the name of a retry topic, and is none: {fix}")
        if twice := set(self.rungs) & set(self.topics):
            raise ConfigurationError(
                f"the handler reads {sorted(twice)[0]!r}, which is one of its own retry topics, so a record would go "
                f"round for ever: leave it out, it is read anyway"
            )

    @property
    def rungs(self) -> dict[str, str]:
        """The names of all, each with the topic that it belongs to."""
        numbers = range(1, len(self.delays) + 1)
        return {retry_topic(topic, self.group, number): topic for topic in self.topics for number in numbers}

    def number_of(self, topic: str) -> int:
        """Of a rung; 0 for the topics themselves."""
        return 0 if topic not in self.rungs else int(topic.rpartition(".")[2])

    def next(self, topic: str, error: BaseException) -> Rung | None:
        """Where a record of this topic goes that failed with `error`; None if nowhere."""
        number = self.number_of(topic)
        if number == len(self.delays) or not isinstance(error, Exception) or isinstance(error, _HOPELESS):
            return None
        if not self.is_worth_it(error):
            return None
        due = time.time() + self.delays[number]
        return Rung(retry_topic(self._home(topic), self.group, number + 1), number + 1, due)

    def _home(self, topic: str) -> str:
        """The topic that a rung belongs to, or that a record was sent back for."""
        sent_back = {redrive_topic(each, self.group): each for each in self.topics}
        return self.rungs.get(topic) or sent_back.get(topic, topic)

    def seconds_left(self, message: Message) -> float:
        """Until a record on a rung may be tried; 0 if it may."""
        due = read_marks(tuple((name, value or b"") for name, value in message.headers() or ())).get("due", "")
        # Anybody can write such a header, and what is no time, or one in a thousand years, must not hold the partition.
        left = int(due) / 1000 - time.time() if is_number(due, 2**63) else 0.0
        return left if 0.0 < left <= _LATEST else 0.0
