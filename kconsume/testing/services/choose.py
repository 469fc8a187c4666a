"""Get a service in the first way that works. If no way works, report for each way why it failed.

The ways are, in this order: the address in an environment variable, Docker, a local process. If the variable is set,
no other way is tried.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from kconsume._event_log import EventLog
from kconsume.errors import ServiceUnavailable
from kconsume.testing.services.ready import Answers, wait_for_answer

_ANSWER_SECONDS = 30

_log = EventLog("testing.services.choose")

Way = Callable[[], AbstractContextManager[str]]
"""Starts a service, yields its URL, and ends it. Raises ServiceUnavailable if that is not possible."""


@dataclass(frozen=True)
class FoundService:
    """A service that answers.

    Args:
        url: its address.
        way: "address", "docker" or "process".
    """

    url: str
    way: str


@dataclass(frozen=True)
class ServiceChoice:
    """The ways to get one service.

    Args:
        name: the name of the service, for errors.
        variable: the environment variable for its address.
        answers: asks the service at an address whether it is ready.
        docker, process: start the service.
    """

    name: str
    variable: str
    answers: Answers
    docker: Way
    process: Way

    @property
    def given(self) -> str:
        """The address in the environment, or an empty string."""
        return os.environ.get(self.variable, "")

    @contextmanager
    def take(self) -> Iterator[FoundService]:
        """The service for as long as the block lasts. Raises ServiceUnavailable with the reason for each way."""
        with ExitStack() as stack:
            yield self._first_available(stack)

    def ways(self) -> dict[str, Way]:
        """The ways that are tried, in this order."""
        if self.given:
            return {"address": self._at_address}
        return {"docker": self.docker, "process": self.process}

    def _first_available(self, stack: ExitStack) -> FoundService:
        refusals: list[str] = []
        for name, way in self.ways().items():
            try:
                found = FoundService(stack.enter_context(way()), name)
            except ServiceUnavailable as refusal:
                refusals.append(f"{name}: {refusal}")
            else:
                _log.info("test service found", service=self.name, way=found.way)  # the URL may hold a password
                return found
        raise ServiceUnavailable(
            f"No {self.name} is available for the tests; give its address in {self.variable}, or correct one of these: "
            + "; ".join(refusals)
        )

    @contextmanager
    def _at_address(self) -> Iterator[str]:
        wait_for_answer(self.answers, self.given, within=_ANSWER_SECONDS)
        yield self.given
