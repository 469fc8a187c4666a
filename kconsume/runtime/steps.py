"""What a course asks for, and what it is told: the words between `course.py` and `work.py`. Values only."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias

from kconsume.failures.letters import Draft, Letter
from kconsume.records import Message
from kconsume.runner import Passes


class Try(NamedTuple):
    """Run the handler on `records`, and with the others of `part` they are done. Of some of these others, letters are
    written first."""

    part: Sequence[Message]
    records: Sequence[Message]
    attempt: int = 1
    letters: Sequence[Letter] = ()
    passes: Passes | None = None
    """Of a record that fails, whether the next ones are run all the same; then it is done, too."""


class PassOver(NamedTuple):
    """Advance past records without running them, once letters about them are written."""

    part: Sequence[Message]
    letters: Sequence[Letter] = ()
    drafts: Sequence[Draft] = ()
    """Of letters that are handed over, and not waited for: the outcome has their delivery."""


class MoveTo(NamedTuple):
    """Advance to the end of the log: no record lies between."""

    offset: int


class Note(NamedTuple):
    """Have the store remember how often a record was tried, for whoever has it next."""

    offset: int
    attempts: int


class Rest(NamedTuple):
    """Wait."""

    seconds: float


Step: TypeAlias = Try | PassOver | MoveTo | Note | Rest


class Outcome(NamedTuple):
    """How a step went: `done` records are finished; after them `culprit` failed, if there is an error."""

    done: int
    culprit: Message | None = None
    error: BaseException | None = None
    certain: bool = True
    """Whether it was the culprit that failed, or something in the slice that begins with it."""
    waited: float = 0.0
    """Seconds before it began, for others."""
    delivery: Future[None] | None = None
    """Of letters that were not waited for."""


Steps: TypeAlias = Generator[Step, Outcome, None]
