"""Carries out the steps that `ChunkRules` yields for a chunk.

`ThreadDriver` runs on a worker thread, for plain functions. `LoopDriver` runs on an event loop, for `async def`; calls
that may block run on other threads. Both only pass on steps and results: `rules` decides what to run next, `plain` and
`transactional` run the slices.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from functools import partial
from typing import Protocol

from kconsume._event_log import EventLog
from kconsume._runtime.lanes.lane import Chunk, Lane
from kconsume._runtime.lanes.reports import SendReport, Suspended
from kconsume._runtime.processing.rules import ChunkRules
from kconsume._runtime.processing.steps import (
    LogRetry,
    LogStep,
    LogUnwritten,
    MoveToLogEnd,
    SaveAttempts,
    SliceStep,
    Step,
    StepResult,
    Steps,
    Wait,
)
from kconsume.errors import KconsumeError
from kconsume.failures.skip_log import cause_text, place_text

_log = EventLog("failures")
_WAITED = StepResult(0)
"""The result of a step that finishes no record."""


class Attempt(Protocol):
    """Runs a handler over a slice. Errors of the store are raised; errors of the handler are in the result."""

    def __call__(self, lane: Lane, step: SliceStep, /) -> StepResult: ...

    def move_to(self, lane: Lane, offset: int, /) -> StepResult:
        """Move the lane's row in the store to the end of the log. Only for lanes that store their own offset."""
        ...


class SavesAttempts(Protocol):
    """Saves in the store how often a record was tried."""

    def __call__(self, lane: Lane, step: SaveAttempts, /) -> None: ...


class AsyncAttempt(Protocol):
    """Like `Attempt`, but awaited."""

    def __call__(self, lane: Lane, step: SliceStep, /) -> Awaitable[StepResult]: ...

    def move_to(self, lane: Lane, offset: int, /) -> Awaitable[StepResult]: ...


class ThreadDriver:
    """Drives the chunks of a plain function."""

    def __init__(self, rules: ChunkRules, attempt: Attempt, save_attempts: SavesAttempts | None = None) -> None:
        self._rules = rules
        self._attempt = attempt
        self._save_attempts = save_attempts

    def __call__(self, lane: Lane, chunk: Chunk, report: SendReport, /) -> Suspended | None:
        return self._go_on(lane, self._rules.steps(lane, chunk, report), None)

    def _go_on(self, lane: Lane, steps: Steps, result: StepResult | None) -> Suspended | None:
        step = _next(steps, result)
        while step is not None:
            if isinstance(step, Wait):
                return Suspended(step.seconds, partial(self._go_on, lane, steps, _WAITED), step.code)
            if isinstance(step, LogRetry | LogUnwritten):
                step = _next(steps, _logged(step))
            else:
                step = _next(steps, self._carry_out(lane, step))
        return None

    def _carry_out(self, lane: Lane, step: SliceStep | MoveToLogEnd | SaveAttempts) -> StepResult | BaseException:
        if isinstance(step, SaveAttempts):
            return _saved(self._save_attempts, lane, step)
        try:
            if isinstance(step, MoveToLogEnd):
                return self._attempt.move_to(lane, step.offset)
            return self._attempt(lane, step)
        except BaseException as error:  # noqa: BLE001  (raised in the rules, which decide)
            return error


class LoopDriver:
    """Drives the chunks of an `async def`."""

    def __init__(self, rules: ChunkRules, attempt: AsyncAttempt, save_attempts: SavesAttempts | None = None) -> None:
        self._rules = rules
        self._attempt = attempt
        self._save_attempts = save_attempts

    async def __call__(self, lane: Lane, chunk: Chunk, report: SendReport, /) -> Suspended | None:
        return await self._go_on(lane, self._rules.steps(lane, chunk, report), None)

    async def _go_on(self, lane: Lane, steps: Steps, result: StepResult | None) -> Suspended | None:
        step = _next(steps, result)
        while step is not None:
            if isinstance(step, Wait):
                return Suspended(step.seconds, partial(self._go_on, lane, steps, _WAITED), step.code)
            if isinstance(step, LogRetry | LogUnwritten):
                step = _next(steps, _logged(step))
                continue
            step = _next(steps, await self._carry_out(lane, step))
            # Without this pause, a handler that never waits would block the loop, slice after slice.
            await asyncio.sleep(0)
        return None

    async def _carry_out(self, lane: Lane, step: SliceStep | MoveToLogEnd | SaveAttempts) -> StepResult | BaseException:
        if isinstance(step, SaveAttempts):
            return await asyncio.to_thread(_saved, self._save_attempts, lane, step)
        try:
            if isinstance(step, MoveToLogEnd):
                return await self._attempt.move_to(lane, step.offset)
            return await self._attempt(lane, step)
        except asyncio.CancelledError:
            raise  # the lane was abandoned: nothing of the slice is known to be finished
        except BaseException as error:  # noqa: BLE001  (raised in the rules, which decide)
            return error


def _saved(save_attempts: SavesAttempts | None, lane: Lane, step: SaveAttempts) -> StepResult:
    """Save the attempts if the store answers. An error is ignored, because no record depends on them."""
    if save_attempts is not None:
        with contextlib.suppress(KconsumeError):
            save_attempts(lane, step)
    return StepResult(0)


def _logged(step: LogStep) -> StepResult:
    if isinstance(step, LogRetry):
        _log.info(
            "record failed",
            record=place_text(step.message),
            attempt=step.attempt,
            again_in=step.again_in,
            cause=cause_text(step.error),
        )
    else:
        _log.error(
            "dead letter unwritten",
            record=place_text(step.message),
            cause=step.error,
            hint="the partition is held until the letter is written",
        )
    return _WAITED


def _next(steps: Steps, result: StepResult | BaseException | None) -> Step | None:
    try:
        if isinstance(result, BaseException):
            return steps.throw(result)
        return next(steps) if result is None else steps.send(result)
    except StopIteration:
        return None
