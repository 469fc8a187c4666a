"""The steps that `ChunkRules` asks a driver for, and the result that the driver sends back. Values only."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias

from kconsume._handlers.compiled import Passes
from kconsume.failures.letter_headers import Letter, LetterDraft
from kconsume.records import Message


class CallHandler(NamedTuple):
    """Run the handler on `records`. After that, all records of `part` are finished."""

    part: Sequence[Message]
    """All records that this step finishes."""
    records: Sequence[Message]
    """The records with which the handler is called."""
    attempt: int = 1
    """The number of this attempt, counted from 1."""
    letters: Sequence[Letter] = ()
    """Letters about the other records of `part`, to be written first."""
    passes: Passes | None = None
    """Called for a record that fails: True if the record counts as finished, and the handler continues with the
    next."""


class SkipRecords(NamedTuple):
    """Advance past records without running the handler, after the letters about these records are written."""

    part: Sequence[Message]
    letters: Sequence[Letter] = ()
    drafts: Sequence[LetterDraft] = ()
    """Letters that are handed to the producer without waiting. `StepResult.delivery` is their delivery."""


class MoveToLogEnd(NamedTuple):
    """Advance the stored offset to the end of the log. There is no record in between."""

    offset: int


class SaveAttempts(NamedTuple):
    """Save in the store how often a record was tried, for the next owner of its partition."""

    offset: int
    attempts: int


class LogRetry(NamedTuple):
    """Log that a record failed and is tried again."""

    message: Message
    attempt: int
    again_in: float
    """Seconds until the next attempt."""
    error: BaseException


class LogUnwritten(NamedTuple):
    """Log that the dead letter about a record could not be written and that the partition waits for it."""

    message: Message
    error: BaseException | None


class Wait(NamedTuple):
    """Continue after this many seconds."""

    seconds: float
    code: str
    """What the partition waits for, as in `_runtime/observation/causes`."""


SliceStep: TypeAlias = CallHandler | SkipRecords
"""A step that finishes records."""

LogStep: TypeAlias = LogRetry | LogUnwritten

Step: TypeAlias = CallHandler | SkipRecords | MoveToLogEnd | SaveAttempts | LogStep | Wait


class StepResult(NamedTuple):
    """The result of a step."""

    done: int
    """How many records, from the first on, are finished."""
    culprit: Message | None = None
    """The record that failed after the finished records, if there is an error."""
    error: BaseException | None = None
    certain: bool = True
    """True if the culprit itself failed; False if it may be any record from the culprit on."""
    delivery: Future[None] | None = None
    """The delivery of letters for which the step did not wait."""


Steps: TypeAlias = Generator[Step, StepResult, None]
