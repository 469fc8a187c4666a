"""The course of a chunk: what is run next, and what its outcome means.

A generator without I/O. It yields a `Step`, is sent the `Outcome` that carrying it out had, and reports how far the
chunk came; `work.py` carries the steps out, on a thread or on an event loop. So both have one set of decisions.

Records are run in slices that `Pace` sizes by the handler's speed; a batch is run as it is. When something fails and it
is not known which record did it, the slice is halved until it is.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, SupportsIndex, TypeAlias

from kconsume.errors import BatchError, ConfigurationError, InvalidHandler, SendFailed
from kconsume.failures.policy import Policy, Verdict
from kconsume.handler import Binding
from kconsume.rate import Limiter
from kconsume.records import Message
from kconsume.runtime.lanes import Chunk, Ejected, Failure, Lane, Progress, Report

_log = logging.getLogger("kconsume.failures")
_clock = time.perf_counter
_LONGEST_REST = 0.05


class Try(NamedTuple):
    """Run the handler on `records`, and with the others of `part` they are done."""

    part: Sequence[Message]
    records: Sequence[Message]


class PassOver(NamedTuple):
    """Advance past records without running them."""

    part: Sequence[Message]


class Rest(NamedTuple):
    """Wait."""

    seconds: float


Step: TypeAlias = Try | PassOver | Rest


class Outcome(NamedTuple):
    """How a step went: `done` records are finished; after them `culprit` failed, if there is an error."""

    done: int
    culprit: Message | None = None
    error: BaseException | None = None
    certain: bool = True
    """Whether it was the culprit that failed, or something in the slice that begins with it."""


Steps: TypeAlias = Generator[Step, Outcome, None]


@dataclass(frozen=True, slots=True)
class Course:
    """How chunks of one handler are run."""

    binding: Binding
    policy: Policy
    limiter: Limiter | None = None
    stores: bool = False
    """Whether what is done is committed with the work, and undone as a whole when it fails."""

    @property
    def undoes(self) -> bool:
        """Whether something is undone when a call fails: what it wrote in its transaction, or what it sent."""
        return self.stores or self.binding.sends

    def steps(self, lane: Lane, chunk: Chunk, report: Report) -> Steps:
        return _Run(self, lane, chunk, report).steps()


class _Run:
    """One chunk on its way."""

    def __init__(self, course: Course, lane: Lane, chunk: Chunk, report: Report) -> None:
        self._course = course
        self._lane = lane
        self._first = chunk.first
        self._messages = chunk.messages
        self._report = report
        self._at = 0
        self._until = self._cap = 0
        """Up to `until`, at most `cap` records are run at once: something there has failed."""

    def steps(self) -> Steps:
        lane, messages = self._lane, self._messages
        while self._at < len(messages) and not lane.stop:
            size = self._size()
            if self._course.limiter is not None and not (size := (yield from self._permitted(size))):
                return
            part = messages if self._at == 0 and size >= len(messages) else messages[self._at : self._at + size]
            began = _clock()
            try:
                outcome = yield Try(part, part)
                if outcome.done:
                    lane.pace.took(outcome.done, _clock() - began)
                    self._passed(part if outcome.done == len(part) else part[: outcome.done])
                if outcome.error is not None and not (yield from self._failed(part[outcome.done :], outcome)):
                    return
            except SendFailed as error:
                return self._stop(part[0], error)
            except Exception as error:  # whatever the store raised; the claim finds out what it means
                if not self._course.stores:
                    raise  # there is no store in it, so no claim would ever find out
                lane.brake("store")
                return self._report(Ejected(lane, error))

    def _size(self) -> int:
        if self._at < self._until:
            return min(self._cap, self._until - self._at)
        return len(self._messages) - self._at if self._course.binding.batched else self._lane.pace.size

    def _permitted(self, size: int) -> Generator[Step, Outcome, int]:
        """How many records the rate lets run now: the batch, or one, so that each starts when it is granted. Waits."""
        limiter, batched = self._course.limiter, self._course.binding.batched
        assert limiter is not None
        wanted = min(size, len(self._messages) - self._at) if batched else 1
        while not self._lane.stop:
            granted, wait = limiter.take(wanted, wanted, self._lane if batched else None)
            if granted:
                return granted
            yield Rest(min(wait, _LONGEST_REST))
        return 0

    # What failed

    def _failed(self, part: Sequence[Message], outcome: Outcome) -> Generator[Step, Outcome, bool]:
        """Deal with the failure of a slice of which nothing is done. Whether to go on."""
        error, culprit = outcome.error, outcome.culprit
        assert error is not None
        assert culprit is not None
        if isinstance(error, BatchError) and self._course.binding.batched:
            return (yield from self._named(part, error))
        if not outcome.certain and not isinstance(error, Exception):
            self._stop(part[0], error)  # sys.exit() asks to stop, and not to be called again
            return False
        index = part.index(culprit)
        if not outcome.certain:
            self._narrow(len(part), max(1, len(part) // 2))
            return True
        if index:
            self._narrow(index, index)
            return True
        return (yield from self._settle(part[:1], {0: self._course.binding.explain(culprit, error)}))

    def _named(self, part: Sequence[Message], error: BatchError) -> Generator[Step, Outcome, bool]:
        """The handler has named the records that failed: the others are done, or, in a transaction, to be done."""
        if misnamed := _misnamed(error.errors.items(), len(part)):
            fault = InvalidHandler(f"{self._course.binding.name} raised {misnamed}")
            fault.__cause__ = error
            self._stop(part[0], fault)
            return False
        errors = {operator.index(given): cause for given, cause in error.errors.items()}
        stopping = [at for at in sorted(errors) if self._stops(errors[at])]
        if stopping and stopping[0] and self._course.undoes:
            self._narrow(stopping[0], stopping[0])
            return True
        reach = stopping[0] + 1 if stopping else len(part)
        return (yield from self._settle(part[:reach], {i: errors[i] for i in sorted(errors) if i < reach}))

    def _settle(self, part: Sequence[Message], errors: Mapping[int, BaseException]) -> Generator[Step, Outcome, bool]:
        """Finish with a part of which these records failed and the others are done, or can be."""
        *_, last = errors
        stops = self._stops(errors[last])
        good = [message for index, message in enumerate(part) if index not in errors]
        if stops:
            self._passed(part[:last], skipped=len(errors) - 1)
            self._stop(part[last], errors[last])
            return False
        if self._course.undoes:
            if good and self._course.limiter is not None and not (yield from self._permitted(len(good))):
                return True  # told to stop meanwhile
            outcome = yield (Try(part, good) if good else PassOver(part))
            if outcome.error is not None:
                self._narrow(len(part), max(1, len(part) // 2))
                return True
            if not outcome.done:
                return True  # told to stop before it began
        for index, cause in errors.items():
            _log_skip(part[index], cause)
        self._passed(part, skipped=len(errors))
        return True

    def _stops(self, error: BaseException) -> bool:
        """What cannot be run is no record's fault: it stops whatever the policy."""
        return isinstance(error, ConfigurationError) or self._course.policy.verdict(error) is not Verdict.SKIP

    def _narrow(self, length: int, cap: int) -> None:
        self._until, self._cap = self._at + length, cap

    def _stop(self, message: Message, error: BaseException) -> None:
        self._lane.brake("failed")
        self._report(Failure(self._lane, self._course.binding.name, message, error))

    # What is done

    def _passed(self, part: Sequence[Message], skipped: int = 0) -> None:
        if not part:
            return
        lane, last = self._lane, part[-1]
        self._at += len(part)
        if self._at < self._until:
            self._cap = max(1, (self._until - self._at) // 2)
        upto = lane.stored if self._course.stores else last.offset() + 1
        self._report(
            Progress(lane, self._first, upto, len(part) - skipped, skipped, last.leader_epoch(), self._course.stores)
        )


def _misnamed(errors: Collection[tuple[object, object]], records: int) -> str | None:
    """What is wrong with the names that a handler gave, if something is."""
    if not errors:
        return "BatchError({}): name the records that failed, or return"
    for index, cause in errors:
        if not isinstance(index, SupportsIndex) or index not in range(records):
            return (
                f"BatchError with {index!r}, and its batch has the indexes 0 to {records - 1}: name the records that "
                f"failed by their index in the batch"
            )
        if not isinstance(cause, BaseException):
            return f"BatchError with a {type(cause).__name__} for index {index!r}: give the exception that says why"
    return None


def _log_skip(message: Message, error: BaseException) -> None:
    place = (message.topic(), message.partition(), message.offset())
    _log.warning("skipped record=%s/%d@%d cause=%s: %s", *place, type(error).__name__, error)
