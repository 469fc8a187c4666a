"""Calls a handler whose writes and offsets are stored separately: at least once.

Records are finished when their handler has returned and the brokers have confirmed its output. `PlainAttempt` runs
on a worker thread, `AsyncPlainAttempt` on an event loop. Neither stores an offset: the loop commits later.
"""

from __future__ import annotations

from kconsume._handlers.compiled import AsyncRunner, Passes, Runner
from kconsume._kafka.outgoing import Outgoing, stamp_reset
from kconsume._runtime.lanes.lane import Lane
from kconsume._runtime.output.publisher import Publisher
from kconsume._runtime.processing.slice_result import outcome_of, unless_cancelled
from kconsume._runtime.processing.steps import CallHandler, SkipRecords, SliceStep, StepResult
from kconsume.errors import KconsumeError


class PlainAttempt:
    """Runs a slice with a plain function."""

    def __init__(self, run: Runner, batched: bool, publisher: Publisher | None = None) -> None:
        self._run = run
        self._batched = batched
        self._publisher = publisher

    def __call__(self, lane: Lane, step: SliceStep, /) -> StepResult:
        if isinstance(step, SkipRecords) and self._publisher is not None and step.drafts:
            return StepResult(len(step.part), delivery=self._publisher.hand_over(step.drafts))
        sent: list[Outgoing] = []
        result = StepResult(len(step.part))
        if isinstance(step, CallHandler):
            halt = self._run(step.records, lane.stop_reasons, None, lane.scope, sent, step.attempt, *_passes(step))
            result = outcome_of(step, halt, self._batched)
        if self._publisher is not None and result.done and (sent or step.letters):
            stamp_reset(sent, lane.reset_epoch)
            self._publisher.post(sent, step.letters)
        return result

    def move_to(self, lane: Lane, offset: int, /) -> StepResult:
        raise KconsumeError(f"the lane of {lane.partition} cannot move to {offset}: the loop stores its offset")


class AsyncPlainAttempt:
    """Runs a slice with an `async def`."""

    def __init__(self, run: AsyncRunner, batched: bool, publisher: Publisher | None = None) -> None:
        self._run = run
        self._batched = batched
        self._publisher = publisher

    async def __call__(self, lane: Lane, step: SliceStep, /) -> StepResult:
        if isinstance(step, SkipRecords) and self._publisher is not None and step.drafts:
            return StepResult(len(step.part), delivery=self._publisher.hand_over(step.drafts))
        sent: list[Outgoing] = []
        result = StepResult(len(step.part))
        if isinstance(step, CallHandler):
            halt = await self._run(
                step.records, lane.stop_reasons, None, lane.scope, sent, step.attempt, *_passes(step)
            )
            result = outcome_of(step, unless_cancelled(lane, halt), self._batched)
        if self._publisher is not None and result.done and (sent or step.letters):
            stamp_reset(sent, lane.reset_epoch)
            await self._publisher.post_async(sent, step.letters)
        return result

    async def move_to(self, lane: Lane, offset: int, /) -> StepResult:
        raise KconsumeError(f"the lane of {lane.partition} cannot move to {offset}: the loop stores its offset")


def _passes(step: CallHandler) -> tuple[Passes, ...]:
    return () if step.passes is None else (step.passes,)
