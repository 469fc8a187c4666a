"""Take a service in the first way that is there, and say of every closed way why it was closed.

An address in the environment is a person's word: when it is set, nothing else is tried.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services.ready import Answers, wait_for_answer

_ANSWER_SECONDS = 30

_log = logging.getLogger(__name__)

Way = Callable[[], AbstractContextManager[str]]


@dataclass(frozen=True)
class Found:
    """`way` is "address", "docker" or "process"."""

    url: str
    way: str


@dataclass(frozen=True)
class Choice:
    """How one service can be had: the variable for its address, how to ask it, and the two ways to start it."""

    name: str
    variable: str
    answers: Answers
    docker: Way
    process: Way

    @property
    def given(self) -> str:
        return os.environ.get(self.variable, "")

    @contextmanager
    def take(self) -> Iterator[Found]:
        with ExitStack() as stack:
            yield self._first_there(stack)

    def ways(self) -> dict[str, Way]:
        if self.given:
            return {"address": self._at_address}
        return {"docker": self.docker, "process": self.process}

    def _first_there(self, stack: ExitStack) -> Found:
        refusals: list[str] = []
        for name, way in self.ways().items():
            try:
                found = Found(stack.enter_context(way()), name)
            except ServiceUnavailable as refusal:
                refusals.append(f"{name}: {refusal}")
            else:
                _log.info("%s for tests way=%s", self.name, found.way)  # not the URL: it may hold a password
                return found
        raise ServiceUnavailable(
            f"No {self.name} for the tests can be had; give its address in {self.variable}, or mend one of these: "
            + "; ".join(refusals)
        )

    @contextmanager
    def _at_address(self) -> Iterator[str]:
        wait_for_answer(self.answers, self.given, within=_ANSWER_SECONDS)
        yield self.given
