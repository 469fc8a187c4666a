"""Which handler a topic's records go to, and what the consumer subscribes to: names, and patterns over whole names.

Changes while the consumer runs (`app.subscribe`), on the owner thread; looked up by others.
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
    retries: tuple[str, ...] = ()
    """Its retry topics. They are made when it starts, and must stay."""
    redrives: tuple[str, ...] = ()
    """Topics that its dead letters were sent back to. They may go: that is no fault."""

    def takes(self, topic: str) -> bool:
        return self.names(topic) or (self.pattern is not None and re.fullmatch(self.pattern, topic) is not None)

    def names(self, topic: str) -> bool:
        return topic in self.topics or topic in self.retries or topic in self.redrives


class Routes(Generic[H]):
    """The handlers of one consumer."""

    def __init__(self, handlers: Iterable[tuple[H, Wanted]]) -> None:
        self._wanted = list(handlers)
        self._former: list[tuple[H, Wanted]] = []
        """What was wanted before: its records come until it is revoked."""

    @property
    def topics(self) -> list[str]:
        """Those that are named and must be there."""
        return sorted({topic for _, wanted in self._wanted for topic in (*wanted.topics, *wanted.retries)})

    @property
    def subscription(self) -> list[str]:
        """As the client takes it: a pattern by its ^, and with both ends, for in classic groups it only searches."""
        named = sorted({topic for _, wanted in self._wanted for topic in wanted.topics})
        return [*named, *(f"^({wanted.pattern})$" for _, wanted in self._wanted if wanted.pattern is not None)]

    @property
    def side_subscription(self) -> list[str]:
        """The topics of records that failed. Re-drive topics by patterns: a name must be there."""
        retries = {topic for _, wanted in self._wanted for topic in wanted.retries}
        redrives = {topic for _, wanted in self._wanted for topic in wanted.redrives}
        return [*sorted(retries), *(f"^({topic.replace('.', '[.]')})$" for topic in sorted(redrives))]

    def handler_of(self, topic: str) -> H | None:
        """A handler that names the topic goes before one whose pattern matches it."""
        by_name = [handler for handler, wanted in self._wanted if wanted.names(topic)]
        by_pattern = [handler for handler, wanted in (*self._wanted, *self._former) if wanted.takes(topic)]
        return next(iter((*by_name, *by_pattern)), None)

    def takers(self, topic: str) -> list[H]:
        """All who want it now. Two patterns may match the same name, which shows when there is one."""
        return [handler for handler, wanted in self._wanted if wanted.takes(topic)]

    def change(self, handler: H, wanted: Wanted) -> None:
        self._former = [(one, old) for one, old in self._wanted if one is handler] + self._former
        self._wanted = [(one, wanted if one is handler else old) for one, old in self._wanted]
