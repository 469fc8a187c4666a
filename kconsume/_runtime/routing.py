"""Which handler gets the records of a topic, and what the consumer subscribes to.

`Routes` is changed on the owner thread (`app.subscribe`) and read by other threads. No lock is needed, because a change
replaces each list as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

H = TypeVar("H")


class Wanted(NamedTuple):
    """The topics of one handler."""

    topics: tuple[str, ...]
    pattern: str | None = None
    """A regular expression that matches whole topic names."""
    retries: tuple[str, ...] = ()
    """The retry topics of the handler. They are made at start and must exist afterwards."""
    redrives: tuple[str, ...] = ()
    """Topics to which its dead letters were sent back. They may be deleted at any time; this is no fault."""

    def takes(self, topic: str) -> bool:
        """Whether the handler gets the records of this topic, by name or by pattern."""
        return self.names(topic) or (self.pattern is not None and re.fullmatch(self.pattern, topic) is not None)

    def names(self, topic: str) -> bool:
        return topic in self.topics or topic in self.retries or topic in self.redrives


class Routes(Generic[H]):
    """The handlers of one consumer, and the topics of each."""

    def __init__(self, handlers: Iterable[tuple[H, Wanted]]) -> None:
        self._wanted = list(handlers)
        self._former: list[tuple[H, Wanted]] = []
        """Topics that `change` has removed. Their records arrive until their partitions are revoked."""

    @property
    def topics(self) -> list[str]:
        """The topics that are named and must exist."""
        return sorted({topic for _, wanted in self._wanted for topic in (*wanted.topics, *wanted.retries)})

    @property
    def subscription(self) -> list[str]:
        """The topics and patterns of the main consumer. For the client, a name that begins with ^ is a pattern.
        Patterns are anchored at both ends, because in classic groups the client also matches a part of the name."""
        named = sorted({topic for _, wanted in self._wanted for topic in wanted.topics})
        return [*named, *(f"^({wanted.pattern})$" for _, wanted in self._wanted if wanted.pattern is not None)]

    @property
    def side_subscription(self) -> list[str]:
        """The topics of records that failed. Redrive topics are subscribed by patterns, because a topic that is
        subscribed by name must exist."""
        retries = {topic for _, wanted in self._wanted for topic in wanted.retries}
        redrives = {topic for _, wanted in self._wanted for topic in wanted.redrives}
        return [*sorted(retries), *(f"^({topic.replace('.', '[.]')})$" for topic in sorted(redrives))]

    def handler_of(self, topic: str) -> H | None:
        """The handler of a topic. A handler that names the topic wins over one whose pattern matches it."""
        by_name = [handler for handler, wanted in self._wanted if wanted.names(topic)]
        by_pattern = [handler for handler, wanted in (*self._wanted, *self._former) if wanted.takes(topic)]
        return next(iter((*by_name, *by_pattern)), None)

    def takers(self, topic: str) -> list[H]:
        """All handlers that want the topic now. There may be two: that their patterns match the same name shows only
        when a topic with such a name appears."""
        return [handler for handler, wanted in self._wanted if wanted.takes(topic)]

    def change(self, handler: H, wanted: Wanted) -> None:
        """Give a handler other topics. On the owner thread."""
        self._former = [(one, old) for one, old in self._wanted if one is handler] + self._former
        self._wanted = [(one, wanted if one is handler else old) for one, old in self._wanted]
