"""Computes the result of a slice from how its handler ended: normally, with an error, or cancelled."""

from __future__ import annotations

import asyncio

from kconsume._handlers.compiled import Halt
from kconsume._runtime.lanes.event_loop import CANCELLED
from kconsume._runtime.lanes.lane import Lane
from kconsume._runtime.processing.dedup import named_in
from kconsume._runtime.processing.steps import CallHandler, StepResult
from kconsume.errors import BatchError
from kconsume.records import index_of


def outcome_of(step: CallHandler, halt: Halt | None, batched: bool) -> StepResult:
    """The result of a step whose handler ended with `halt`. If `halt` is None, all records are finished."""
    if halt is None:
        return StepResult(len(step.part))
    # If some records of a part are skipped, the part is finished as a whole or not at all. The same applies to the
    # letters about these records.
    whole = batched or halt.sends_lost or len(step.records) < len(step.part)
    done = 0 if whole else index_of(step.part, halt.message)
    return StepResult(done, halt.message, halt.error, halt.certain)


def in_the_part(step: CallHandler, admitted: CallHandler, halt: Halt | None) -> Halt | None:
    """Return `halt`, with the indexes of a `BatchError` counted in all records of the step.

    A batch handler names failed records by their index in the batch that it got, which has no repeats.
    """
    if admitted is step or halt is None or not isinstance(halt.error, BatchError):
        return halt
    return halt._replace(error=named_in(step.part, admitted.records, halt.error))


def unless_cancelled(lane: Lane, halt: Halt | None) -> Halt | None:
    """Return `halt`, or raise `CancelledError` if the handler ended because its task was cancelled.

    A handler may raise `CancelledError` although nobody cancels its task: that is a failure, and `halt` is returned. If
    the task is being cancelled, a `CancelledError` is no failure. If kconsume cancelled the task, no exception of the
    handler is a failure, so no record is skipped because of it.
    """
    if halt is None or halt.error is None:
        return halt
    is_cancellation = isinstance(halt.error, asyncio.CancelledError)
    task = asyncio.current_task()
    if CANCELLED in lane.stop_reasons or (is_cancellation and task is not None and task.cancelling()):
        raise halt.error if is_cancellation else asyncio.CancelledError from halt.error
    return halt
