"""Carries out the steps of a chunk's course: the only place that calls user code.

Plainly, a record is finished when its handler has returned and what it sends is confirmed. In transactions, a slice of
records shares one transaction of the store, in which the offset is advanced last. What they send leaves between that
and the COMMIT: a transaction that was fenced or ended shows when its offset is advanced. Each in two forms: for plain
functions, on a worker thread; for `async def`, on an event loop, where what may block is done by other threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Protocol, TypeVar

from kconsume.backends.abc import TransactionalStore, Tx
from kconsume.errors import Fenced, SendFailed, StoreUnavailable
from kconsume.output import Outgoing
from kconsume.runner import AsyncRunner, Halt, Runner
from kconsume.runtime.async_lanes import CANCELLED
from kconsume.runtime.course import Course, Outcome, PassOver, Rest, Step, Steps, Try
from kconsume.runtime.errands import Errands
from kconsume.runtime.hands import Hands, end
from kconsume.runtime.lanes import Chunk, Lane, Report

T = TypeVar("T")

_RESTED = Outcome(0)


class Delivers(Protocol):
    """Takes what handlers send, and says when all of it is confirmed."""

    def deliver(self, outgoing: Sequence[Outgoing]) -> Future[None]: ...


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

    def __init__(self, run: Runner, batched: bool, outlet: Delivers | None = None) -> None:
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
    def __init__(self, run: AsyncRunner, batched: bool, outlet: Delivers | None = None) -> None:
        self._run = run
        self._batched = batched
        self._outlet = outlet

    async def __call__(self, lane: Lane, step: Try | PassOver, /) -> Outcome:
        if isinstance(step, PassOver):
            return Outcome(len(step.part))
        sent: list[Outgoing] = []
        halt = _unless_cancelled(lane, await self._run(step.records, lane.stop, None, lane.scope, sent))
        if sent and self._outlet is not None:
            await asyncio.wrap_future(self._outlet.deliver(sent))
        return _outcome(step, halt, self._batched)


# In transactions


class InTransactions:
    """Finished when the handler's writes and the offset have committed together."""

    def __init__(
        self, run: Runner, batched: bool, store: TransactionalStore, group: str, outlet: Delivers | None = None
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
                outcome, sent = Outcome(len(step.part)), list[Outgoing]()
                if isinstance(step, Try):
                    halt = self._run(step.records, lane.stop, tx.connection, lane.scope, sent)
                    outcome = _or_undo(_outcome(step, halt, self._batched))
                _advance(tx, lane, step, outcome)
                if sent and self._outlet is not None:
                    self._outlet.deliver(sent).result()
        except BaseException as error:  # noqa: BLE001  (judged there)
            return _undone(step, error)
        return _stored(lane, step, outcome)


class InTransactionsAsync:
    def __init__(
        self,
        run: AsyncRunner,
        batched: bool,
        store: TransactionalStore,
        group: str,
        outlet: Delivers | None = None,
        hands: Hands | None = None,
    ) -> None:
        """`hands`: threads that are kept for the next transactions; without them, each has one of its own."""
        self._run = run
        self._batched = batched
        self._store = store
        self._group = group
        self._outlet = outlet
        self._hands = hands

    async def __call__(self, lane: Lane, step: Try | PassOver, /) -> Outcome:
        outcome = Outcome(0)
        try:
            transaction = self._store.transaction(self._group, lane.partition, lane.epoch)
            async with _OffTheLoop(transaction, self._hands) as (tx, hand):
                outcome, sent = Outcome(len(step.part)), list[Outgoing]()
                if isinstance(step, Try):
                    halt = await self._run(step.records, lane.stop, tx.connection, lane.scope, sent)
                    outcome = _or_undo(_outcome(step, _unless_cancelled(lane, halt), self._batched))
                await _there(hand, partial(_advance, tx, lane, step, outcome))
                if sent and self._outlet is not None:
                    await asyncio.wrap_future(self._outlet.deliver(sent))
        except BaseException as error:  # noqa: BLE001  (judged there)
            return _undone(step, error)
        return _stored(lane, step, outcome)


class _OffTheLoop:
    """A transaction that may have to wait for its turn, entered and left on another thread than the event loop's.

    One thread for all of it, which does one thing after the other: so it is left, whatever becomes of the task and of
    the loop.
    """

    def __init__(self, transaction: AbstractContextManager[Tx], hands: Hands | None) -> None:
        self._transaction = transaction
        self._hands = hands

    async def __aenter__(self) -> tuple[Tx, Errands]:
        self._hand = Errands("kconsume-transaction") if self._hands is None else self._hands.take()
        entering = self._hand.send(self._transaction.__enter__)
        try:
            return await asyncio.shield(asyncio.wrap_future(entering)), self._hand
        except asyncio.CancelledError:
            # It is entered regardless, when its turn comes: left right after, or it would hold its lock forever.
            self._hand.send(partial(self._leave, entering))
            end(self._hand)
            raise
        except BaseException:
            self._let_go()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            answer = await _there(self._hand, partial(self._transaction.__exit__, kind, error, trace))
        except asyncio.CancelledError:
            end(self._hand)  # it has not left yet: not for others
            raise
        except BaseException:
            self._let_go()
            raise
        self._let_go()
        return answer

    def _let_go(self) -> None:
        if self._hands is None:
            end(self._hand)
        else:
            self._hands.give_back(self._hand)

    def _leave(self, entered: Future[Tx]) -> None:
        if entered.exception() is None:
            error = asyncio.CancelledError()
            self._transaction.__exit__(type(error), error, None)


async def _there(hand: Errands, work: Callable[[], T]) -> T:
    """Done by that thread, to its end, also if the task that waits here is cancelled."""
    return await asyncio.shield(asyncio.wrap_future(hand.send(work)))


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


def _unless_cancelled(lane: Lane, halt: Halt | None) -> Halt | None:
    """A handler may raise CancelledError by itself, which is its failure. When its task was cancelled, that is none;
    and if it was by us, neither is anything else that it raises then: no record is skipped because of it."""
    if halt is None or halt.error is None:
        return halt
    is_cancellation = isinstance(halt.error, asyncio.CancelledError)
    task = asyncio.current_task()
    if CANCELLED in lane.stop or (is_cancellation and task is not None and task.cancelling()):
        raise halt.error if is_cancellation else asyncio.CancelledError from halt.error
    return halt
