"""Carries out the steps of a chunk's course: the only place that calls user code.

Plainly, a record is finished when its handler has returned and what it sends is confirmed. In transactions, a slice of
records shares one transaction of the store, in which the offset is advanced last. Each in two forms: for plain
functions, on a worker thread; for `async def`, on an event loop, where what may block is done by other threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

from kconsume.backends.abc import TransactionalStore, Tx
from kconsume.errors import Fenced, SendFailed, StoreUnavailable
from kconsume.outlet import Outlet
from kconsume.output import Outgoing
from kconsume.runner import AsyncRunner, Halt, Runner
from kconsume.runtime.course import Course, Outcome, PassOver, Rest, Step, Steps, Try
from kconsume.runtime.lanes import Chunk, Lane, Report

_RESTED = Outcome(0)


class Attempt(Protocol):
    """Runs a handler over a slice. What the store raises is raised; what the handler raises is in the outcome."""

    def __call__(self, lane: Lane, step: Try | PassOver, /) -> Outcome: ...


class AsyncAttempt(Protocol):
    def __call__(self, lane: Lane, step: Try | PassOver, /) -> Awaitable[Outcome]: ...


class ThreadWork:
    """The chunks of a plain function."""

    def __init__(self, course: Course, attempt: Attempt) -> None:
        self._course = course
        self._attempt = attempt

    def __call__(self, lane: Lane, chunk: Chunk, report: Report, /) -> None:
        steps = self._course.steps(lane, chunk, report)
        step = _next(steps, None)
        while step is not None:
            step = _next(steps, self._carry_out(lane, step))

    def _carry_out(self, lane: Lane, step: Step) -> Outcome | BaseException:
        if isinstance(step, Rest):
            time.sleep(step.seconds)
            return _RESTED
        try:
            return self._attempt(lane, step)
        except BaseException as error:  # noqa: BLE001  (raised in the course, which decides)
            return error


class LoopWork:
    """The chunks of an `async def`."""

    def __init__(self, course: Course, attempt: AsyncAttempt) -> None:
        self._course = course
        self._attempt = attempt

    async def __call__(self, lane: Lane, chunk: Chunk, report: Report, /) -> None:
        steps = self._course.steps(lane, chunk, report)
        step = _next(steps, None)
        while step is not None:
            step = _next(steps, await self._carry_out(lane, step))
            # A handler that never waits for anything would keep the loop to itself, slice after slice.
            await asyncio.sleep(0)

    async def _carry_out(self, lane: Lane, step: Step) -> Outcome | BaseException:
        if isinstance(step, Rest):
            await asyncio.sleep(step.seconds)
            return _RESTED
        try:
            return await self._attempt(lane, step)
        except asyncio.CancelledError:
            raise  # the lane was given up: nothing of the slice is known to be finished
        except BaseException as error:  # noqa: BLE001  (as above)
            return error


def _next(steps: Steps, answer: Outcome | BaseException | None) -> Step | None:
    try:
        if isinstance(answer, BaseException):
            return steps.throw(answer)
        return next(steps) if answer is None else steps.send(answer)
    except StopIteration:
        return None


# Without a transaction


class Plainly:
    """Finished when the handler returns, and what it sends is confirmed."""

    def __init__(self, run: Runner, batched: bool, outlet: Outlet | None = None) -> None:
        self._run = run
        self._batched = batched
        self._outlet = outlet

    def __call__(self, lane: Lane, step: Try | PassOver, /) -> Outcome:
        if isinstance(step, PassOver):
            return Outcome(len(step.part))
        sent: list[Outgoing] = []
        halt = self._run(step.records, lane.stop, None, lane.scope, sent)
        if sent and self._outlet is not None:
            self._outlet.deliver(sent).result()
        return _outcome(step, halt, self._batched)


class PlainlyAsync:
    def __init__(self, run: AsyncRunner, batched: bool, outlet: Outlet | None = None) -> None:
        self._run = run
        self._batched = batched
        self._outlet = outlet

    async def __call__(self, lane: Lane, step: Try | PassOver, /) -> Outcome:
        if isinstance(step, PassOver):
            return Outcome(len(step.part))
        sent: list[Outgoing] = []
        halt = _unless_cancelled(await self._run(step.records, lane.stop, None, lane.scope, sent))
        if sent and self._outlet is not None:
            await asyncio.wrap_future(self._outlet.deliver(sent))
        return _outcome(step, halt, self._batched)


# In transactions


class InTransactions:
    """Finished when the handler's writes and the offset have committed together."""

    def __init__(
        self, run: Runner, batched: bool, store: TransactionalStore, group: str, outlet: Outlet | None = None
    ) -> None:
        self._run = run
        self._batched = batched
        self._store = store
        self._group = group
        self._outlet = outlet

    def __call__(self, lane: Lane, step: Try | PassOver, /) -> Outcome:
        outcome = Outcome(0)
        try:
            with self._store.transaction(self._group, lane.partition, lane.epoch) as tx:
                outcome = Outcome(len(step.part))
                if isinstance(step, Try):
                    sent: list[Outgoing] = []
                    halt = self._run(step.records, lane.stop, tx.connection, lane.scope, sent)
                    outcome = _or_undo(_outcome(step, halt, self._batched))
                    if sent and self._outlet is not None:
                        self._outlet.deliver(sent).result()
                _advance(tx, lane, step, outcome)
        except BaseException as error:  # noqa: BLE001  (judged there)
            return _undone(step, error)
        return _stored(lane, step, outcome)


class InTransactionsAsync:
    def __init__(
        self, run: AsyncRunner, batched: bool, store: TransactionalStore, group: str, outlet: Outlet | None = None
    ) -> None:
        self._run = run
        self._batched = batched
        self._store = store
        self._group = group
        self._outlet = outlet

    async def __call__(self, lane: Lane, step: Try | PassOver, /) -> Outcome:
        outcome = Outcome(0)
        try:
            async with _OffTheLoop(self._store.transaction(self._group, lane.partition, lane.epoch)) as tx:
                outcome = Outcome(len(step.part))
                if isinstance(step, Try):
                    sent: list[Outgoing] = []
                    halt = await self._run(step.records, lane.stop, tx.connection, lane.scope, sent)
                    outcome = _or_undo(_outcome(step, _unless_cancelled(halt), self._batched))
                    if sent and self._outlet is not None:
                        await asyncio.wrap_future(self._outlet.deliver(sent))
                await asyncio.to_thread(_advance, tx, lane, step, outcome)
        except BaseException as error:  # noqa: BLE001  (judged there)
            return _undone(step, error)
        return _stored(lane, step, outcome)


class _OffTheLoop:
    """A transaction that may have to wait for its turn, entered and left on other threads than the event loop's."""

    def __init__(self, transaction: AbstractContextManager[Tx]) -> None:
        self._transaction = transaction

    async def __aenter__(self) -> Tx:
        entering = asyncio.ensure_future(asyncio.to_thread(self._transaction.__enter__))
        try:
            return await asyncio.shield(entering)
        except asyncio.CancelledError:
            # It goes on regardless in its thread: leave it as soon as it is entered, or it would hold its lock forever.
            entering.add_done_callback(self._leave_at_once)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await asyncio.shield(asyncio.to_thread(self._transaction.__exit__, kind, error, trace))

    def _leave_at_once(self, entered: asyncio.Future[Tx]) -> None:
        if entered.exception() is None:
            error = asyncio.CancelledError()
            asyncio.get_running_loop().run_in_executor(None, self._give_up, error)

    def _give_up(self, error: BaseException) -> None:
        try:
            self._transaction.__exit__(type(error), error, None)
        except asyncio.CancelledError:
            return


class _Undo(Exception):
    """Rolls a transaction back without showing the store an error that is the handler's."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


def _or_undo(outcome: Outcome) -> Outcome:
    if outcome.error is not None:
        raise _Undo(outcome)
    return outcome


def _undone(step: Try | PassOver, error: BaseException) -> Outcome:
    """What a transaction that did not commit means: the handler's failure, or the store's, which is raised."""
    if isinstance(error, _Undo):
        return error.outcome._replace(done=0)
    if isinstance(error, Fenced | StoreUnavailable | SendFailed | asyncio.CancelledError) or isinstance(step, PassOver):
        raise error
    # A transaction misused, or a constraint checked at COMMIT: which record it was, one alone will tell.
    return Outcome(0, step.part[0], error, certain=len(step.part) == 1)


def _advance(tx: Tx, lane: Lane, step: Try | PassOver, outcome: Outcome) -> None:
    if outcome.done:
        last = step.part[outcome.done - 1]
        tx.advance(lane.stored, last.offset() + 1, last.leader_epoch())


def _stored(lane: Lane, step: Try | PassOver, outcome: Outcome) -> Outcome:
    if outcome.done:
        lane.stored = step.part[outcome.done - 1].offset() + 1
    return outcome


# How a run of the handler went


def _outcome(step: Try, halt: Halt | None, batched: bool) -> Outcome:
    if halt is None:
        return Outcome(len(step.part))
    done = 0 if batched else step.part.index(halt.message)
    return Outcome(done, halt.message, halt.error, halt.certain)


def _unless_cancelled(halt: Halt | None) -> Halt | None:
    """A handler may raise CancelledError by itself, which is its failure; told by us, it is none."""
    if halt is not None and isinstance(halt.error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise halt.error
    return halt
