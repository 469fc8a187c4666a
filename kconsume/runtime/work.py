"""Carries out the steps of a chunk's course: the only place that calls user code.

Plainly, a record is finished when its handler has returned and what it sends is confirmed. In transactions, a slice of
records shares one transaction of the store, in which the offset is advanced last. What they send is a part of it, if
the store has an outbox; else it leaves between the offset and the COMMIT: a transaction that was fenced or ended shows
when its offset is advanced. A handler that does not take the transaction is run before it begins, so that none is held
open while it works. Each in two forms: for plain functions, on a worker thread; for `async def`, on an event loop,
where what may block is done by other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol, TypeAlias, cast

from kconsume.backends.abc import AsyncTx, FinishingTx, SeverableTx, TransactionalStore, Tx
from kconsume.errors import (
    BatchError,
    Conflict,
    KconsumeError,
    LetterFailed,
    OffsetError,
    SendFailed,
    StoreError,
    TooManyFailures,
    TransactionMisused,
)
from kconsume.output import Outgoing, stamp_reset
from kconsume.records import Partition, index_of
from kconsume.runner import AsyncRunner, Halt, Passes, Runner
from kconsume.runtime.async_lanes import CANCELLED
from kconsume.runtime.course import Course
from kconsume.runtime.intake import Intake, named_in
from kconsume.runtime.lanes import Chunk, Lane, Parked, Report
from kconsume.runtime.mail import Mail
from kconsume.runtime.off_loop import AsyncBegin
from kconsume.runtime.pipelining import Pipelining
from kconsume.runtime.steps import MoveTo, Note, Outcome, PassOver, Rest, Step, Steps, Try
from kconsume.runtime.turns import Turns

Begin: TypeAlias = Callable[[str, Partition, int], AbstractContextManager[Tx]]

_RESTED = Outcome(0)
_OF_NO_RECORD = (StoreError, OffsetError, SendFailed, LetterFailed, TooManyFailures, asyncio.CancelledError)
_PAUSES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Before a record that met another transaction is tried again; after the last, its conflict is the store's trouble."""


class Attempt(Protocol):
    """Runs a handler over a slice. What the store raises is raised; what the handler raises is in the outcome."""

    def __call__(self, lane: Lane, step: Try | PassOver, /) -> Outcome: ...

    def move_to(self, lane: Lane, offset: int, /) -> Outcome:
        """Move the lane's row to the end of the log."""
        ...


class Notes(Protocol):
    """Has the store remember how often a record was tried."""

    def __call__(self, lane: Lane, note: Note, /) -> None: ...


class AsyncAttempt(Protocol):
    def __call__(self, lane: Lane, step: Try | PassOver, /) -> Awaitable[Outcome]: ...

    def move_to(self, lane: Lane, offset: int, /) -> Awaitable[Outcome]: ...


class ThreadWork:
    """The chunks of a plain function."""

    def __init__(self, course: Course, attempt: Attempt, notes: Notes | None = None) -> None:
        self._course = course
        self._attempt = attempt
        self._notes = notes

    def __call__(self, lane: Lane, chunk: Chunk, report: Report, /) -> Parked | None:
        return self._go_on(lane, self._course.steps(lane, chunk, report), None)

    def _go_on(self, lane: Lane, steps: Steps, answer: Outcome | None) -> Parked | None:
        step = _next(steps, answer)
        while step is not None:
            if isinstance(step, Rest):
                return Parked(step.seconds, partial(self._go_on, lane, steps, _RESTED))
            step = _next(steps, self._carry_out(lane, step))
        return None

    def _carry_out(self, lane: Lane, step: Try | PassOver | MoveTo | Note) -> Outcome | BaseException:
        if isinstance(step, Note):
            return _noted(self._notes, lane, step)
        try:
            if isinstance(step, MoveTo):
                return self._attempt.move_to(lane, step.offset)
            return self._attempt(lane, step)
        except BaseException as error:  # noqa: BLE001  (raised in the course, which decides)
            return error


class LoopWork:
    """The chunks of an `async def`."""

    def __init__(self, course: Course, attempt: AsyncAttempt, notes: Notes | None = None) -> None:
        self._course = course
        self._attempt = attempt
        self._notes = notes

    async def __call__(self, lane: Lane, chunk: Chunk, report: Report, /) -> Parked | None:
        return await self._go_on(lane, self._course.steps(lane, chunk, report), None)

    async def _go_on(self, lane: Lane, steps: Steps, answer: Outcome | None) -> Parked | None:
        step = _next(steps, answer)
        while step is not None:
            if isinstance(step, Rest):
                return Parked(step.seconds, partial(self._go_on, lane, steps, _RESTED))
            step = _next(steps, await self._carry_out(lane, step))
            # A handler that never waits for anything would keep the loop to itself, slice after slice.
            await asyncio.sleep(0)
        return None

    async def _carry_out(self, lane: Lane, step: Try | PassOver | MoveTo | Note) -> Outcome | BaseException:
        if isinstance(step, Note):
            return await asyncio.to_thread(_noted, self._notes, lane, step)
        try:
            if isinstance(step, MoveTo):
                return await self._attempt.move_to(lane, step.offset)
            return await self._attempt(lane, step)
        except asyncio.CancelledError:
            raise  # the lane was given up: nothing of the slice is known to be finished
        except BaseException as error:  # noqa: BLE001  (as above)
            return error


def _noted(notes: Notes | None, lane: Lane, note: Note) -> Outcome:
    """If it can be: a store that is away is not waited for, for no record depends on it."""
    if notes is not None:
        with contextlib.suppress(KconsumeError):
            notes(lane, note)
    return Outcome(0)


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

    def __init__(self, run: Runner, batched: bool, mail: Mail | None = None) -> None:
        self._run = run
        self._batched = batched
        self._mail = mail

    def __call__(self, lane: Lane, step: Try | PassOver, /) -> Outcome:
        if isinstance(step, PassOver) and self._mail is not None and step.drafts:
            return Outcome(len(step.part), delivery=self._mail.hand_over(step.drafts))
        sent: list[Outgoing] = []
        outcome = Outcome(len(step.part))
        if isinstance(step, Try):
            halt = self._run(step.records, lane.stop, None, lane.scope, sent, step.attempt, *_passes(step))
            outcome = _outcome(step, halt, self._batched)
        if self._mail is not None and outcome.done and (sent or step.letters):
            stamp_reset(sent, lane.reset_epoch)
            self._mail.post(sent, step.letters)
        return outcome

    def move_to(self, lane: Lane, offset: int, /) -> Outcome:
        raise KconsumeError(f"{lane.partition} is moved to {offset} by its lane, and its offset is saved by the loop")


class PlainlyAsync:
    def __init__(self, run: AsyncRunner, batched: bool, mail: Mail | None = None) -> None:
        self._run = run
        self._batched = batched
        self._mail = mail

    async def __call__(self, lane: Lane, step: Try | PassOver, /) -> Outcome:
        if isinstance(step, PassOver) and self._mail is not None and step.drafts:
            return Outcome(len(step.part), delivery=self._mail.hand_over(step.drafts))
        sent: list[Outgoing] = []
        outcome = Outcome(len(step.part))
        if isinstance(step, Try):
            halt = await self._run(step.records, lane.stop, None, lane.scope, sent, step.attempt, *_passes(step))
            outcome = _outcome(step, _unless_cancelled(lane, halt), self._batched)
        if self._mail is not None and outcome.done and (sent or step.letters):
            stamp_reset(sent, lane.reset_epoch)
            await self._mail.post_async(sent, step.letters)
        return outcome

    async def move_to(self, lane: Lane, offset: int, /) -> Outcome:
        raise KconsumeError(f"{lane.partition} is moved to {offset} by its lane, and its offset is saved by the loop")


def _passes(step: Try) -> tuple[Passes, ...]:
    return () if step.passes is None else (step.passes,)


# In transactions


class InTransactions:
    """Finished when the handler's writes and the offset have committed together."""

    def __init__(
        self,
        run: Runner,
        batched: bool,
        store: TransactionalStore,
        group: str,
        mail: Mail | None = None,
        *,
        lends: bool = True,
        waits_inside: bool = False,
        intake: Intake | None = None,
    ) -> None:
        """`lends`: the handler takes the transaction. `waits_inside`: what it does there is waited for as it is done.
        `intake`: says which records it has had before."""
        self._run = run
        self._batched = batched
        self._store = store
        self._group = group
        self._mail = mail
        self._lends = lends
        self._intake = intake
        self._pipeline = Pipelining.of(store, batched or waits_inside or not lends)
        self._turns = Turns()

    def __call__(self, lane: Lane, step: Try | PassOver, /) -> Outcome:
        for pause in _PAUSES:
            try:
                return self._once(lane, step)
            except Conflict as error:
                if len(step.part) > 1:
                    return Outcome(0, step.part[0], error, certain=False)  # fewer at once are less in each other's way
            time.sleep(pause * random.uniform(0.5, 1.0))
        return self._once(lane, step)

    def move_to(self, lane: Lane, offset: int, /) -> Outcome:
        with self._store.transaction(self._group, lane.partition, lane.epoch) as tx:
            tx.advance(lane.stored, offset, lane.leader_epoch)
        lane.stored = offset
        return Outcome(0)

    def _once(self, lane: Lane, step: Try | PassOver) -> Outcome:
        pipeline = self._pipeline
        if pipeline is None or pipeline.is_off or len(step.part) == 1 or isinstance(step, PassOver) or step.letters:
            return self._attempt(self._store.transaction, lane, step)
        outcome = self._attempt(pipeline.store.pipelined, lane, step)
        if outcome.error is None:
            return outcome
        again = self._attempt(self._store.transaction, lane, step)
        if again.error is None and again.done == len(step.part):
            pipeline.failed_alone(outcome.error)
        return again

    def _attempt(self, begin: Begin, lane: Lane, step: Try | PassOver) -> Outcome:
        begun, outcome, sent = False, Outcome(len(step.part)), list[Outgoing]()
        left: Sequence[Outgoing] = ()
        takes_in = self._intake is not None and self._intake.concerns(lane.partition.topic)
        inside = self._lends or takes_in
        if isinstance(step, Try) and not inside:
            halt = self._run(step.records, lane.stop, None, lane.scope, sent, step.attempt)
            outcome = _outcome(step, halt, self._batched)
            if not outcome.done:
                return outcome
        try:
            with begin(self._group, lane.partition, lane.epoch) as tx:
                begun = True
                admitted = step if self._intake is None else self._intake.admit(step, tx, lane.reset_epoch)
                if isinstance(step, Try) and isinstance(admitted, Try) and inside:
                    with self._turns.take() as turn:
                        halt = self._run(admitted.records, lane.stop, tx.connection, lane.scope, sent, step.attempt)
                    halt = _in_the_part(step, admitted, halt)
                    outcome = _outcome(step, halt, self._batched)._replace(waited=turn.waited)
                    outcome = _or_undo(outcome, tx, forsaken=halt is not None and halt.forsaken)
                    _must_be_whole(step, outcome, takes_in)
                if self._mail is not None:
                    stamp_reset(sent, lane.reset_epoch)
                    left = self._mail.keep(sent, admitted.letters, tx)
                posts = self._mail is not None and self._mail.posts(sent, admitted.letters)
                if (move := _move(lane, step, outcome)) is not None:
                    (tx.advance if posts else _finishing(tx))(*move)
                if self._mail is not None and posts:
                    self._mail.post(sent, admitted.letters)
        except BaseException as error:  # noqa: BLE001  (judged there)
            return _undone(step, error, begun)
        if self._mail is not None:
            self._mail.left(lane.partition, left, tx)
        return _stored(lane, step, outcome)


class InTransactionsAsync:
    def __init__(
        self,
        run: AsyncRunner,
        batched: bool,
        begin: AsyncBegin,
        group: str,
        mail: Mail | None = None,
        *,
        lends: bool = True,
        intake: Intake | None = None,
    ) -> None:
        self._run = run
        self._batched = batched
        self._begin = begin
        self._group = group
        self._mail = mail
        self._lends = lends
        self._intake = intake

    async def __call__(self, lane: Lane, step: Try | PassOver, /) -> Outcome:
        for pause in _PAUSES:
            try:
                return await self._once(lane, step)
            except Conflict as error:
                if len(step.part) > 1:
                    return Outcome(0, step.part[0], error, certain=False)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        return await self._once(lane, step)

    async def move_to(self, lane: Lane, offset: int, /) -> Outcome:
        async with self._begin(self._group, lane.partition, lane.epoch) as tx:
            await tx.advance(lane.stored, offset, lane.leader_epoch)
        lane.stored = offset
        return Outcome(0)

    async def _once(self, lane: Lane, step: Try | PassOver) -> Outcome:
        begun, outcome, sent = False, Outcome(len(step.part)), list[Outgoing]()
        left: Sequence[Outgoing] = ()
        takes_in = self._intake is not None and self._intake.concerns(lane.partition.topic)
        inside = self._lends or takes_in
        if isinstance(step, Try) and not inside:
            halt = await self._run(step.records, lane.stop, None, lane.scope, sent, step.attempt)
            outcome = _outcome(step, _unless_cancelled(lane, halt), self._batched)
            if not outcome.done:
                return outcome
        try:
            async with self._begin(self._group, lane.partition, lane.epoch) as tx:
                begun = True
                admitted = step if self._intake is None else await self._intake.admit_async(step, tx, lane.reset_epoch)
                if isinstance(step, Try) and isinstance(admitted, Try) and inside:
                    halt = await self._run(admitted.records, lane.stop, tx.connection, lane.scope, sent, step.attempt)
                    halt = _in_the_part(step, admitted, _unless_cancelled(lane, halt))
                    outcome = _or_undo(_outcome(step, halt, self._batched), tx)
                    _must_be_whole(step, outcome, takes_in)
                if self._mail is not None:
                    stamp_reset(sent, lane.reset_epoch)
                    left = await self._mail.keep_async(sent, admitted.letters, tx)
                if (move := _move(lane, step, outcome)) is not None:
                    await tx.advance(*move)
                if self._mail is not None:
                    await self._mail.post_async(sent, admitted.letters)
        except BaseException as error:  # noqa: BLE001  (judged there)
            return _undone(step, error, begun)
        if self._mail is not None:
            self._mail.left(lane.partition, left, tx)
        return _stored(lane, step, outcome)


class _Undo(Exception):
    """Rolls a transaction back without showing the store an error that is the handler's."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


def _or_undo(outcome: Outcome, tx: Tx | AsyncTx, *, forsaken: bool = False) -> Outcome:
    """`forsaken`: the handler still has the connection in hand."""
    if outcome.error is None and outcome.done:
        return outcome
    if forsaken:
        cast(SeverableTx, tx).sever()
        raise _Undo(outcome)
    fault = None if outcome.error is None else tx.fault(outcome.error)
    if fault is None:
        raise _Undo(outcome)
    raise fault from outcome.error


def _must_be_whole(step: Try, outcome: Outcome, takes_in: bool) -> None:
    """Told to stop, a slice ends early: of one that was taken in, what was not handled would then be lost."""
    if takes_in and outcome.done < len(step.part):
        raise _Undo(outcome)


def _undone(step: Try | PassOver, error: BaseException, begun: bool) -> Outcome:
    """What a transaction that did not commit means: the handler's failure, or the store's, which is raised: no record
    is skipped for what the store could not do."""
    if isinstance(error, _Undo):
        return error.outcome._replace(done=0)
    of_no_record = isinstance(error, _OF_NO_RECORD) and not isinstance(error, TransactionMisused)
    if not begun or of_no_record or isinstance(step, PassOver):
        raise error
    # A transaction misused, or a constraint checked at COMMIT: which record it was, one alone will tell.
    return Outcome(0, step.part[0], error, certain=len(step.part) == 1)


def _move(lane: Lane, step: Try | PassOver, outcome: Outcome) -> tuple[int, int, int | None] | None:
    """From where to where the offset goes, if it goes anywhere."""
    if not outcome.done:
        return None
    last = step.part[outcome.done - 1]
    return lane.stored, last.offset() + 1, last.leader_epoch()


def _finishing(tx: Tx) -> Callable[[int, int, int | None], None]:
    """How the offset is moved where nothing follows. By its name: to ask for the protocol takes as long as ten
    records."""
    finish = getattr(tx, "finish", None)
    return tx.advance if finish is None else cast(FinishingTx, tx).finish


def _stored(lane: Lane, step: Try | PassOver, outcome: Outcome) -> Outcome:
    if outcome.done:
        last = step.part[outcome.done - 1]
        lane.stored, lane.leader_epoch = last.offset() + 1, last.leader_epoch()
    return outcome


# How a run of the handler went


def _outcome(step: Try, halt: Halt | None, batched: bool) -> Outcome:
    if halt is None:
        return Outcome(len(step.part))
    # A part of which some are passed over is done as a whole or not at all: what is written about them is, too.
    whole = batched or halt.void or len(step.records) < len(step.part)
    done = 0 if whole else index_of(step.part, halt.message)
    return Outcome(done, halt.message, halt.error, halt.certain)


def _in_the_part(step: Try, admitted: Try, halt: Halt | None) -> Halt | None:
    """What a batch handler names, it names by the records that it was given."""
    if admitted is step or halt is None or not isinstance(halt.error, BatchError):
        return halt
    return halt._replace(error=named_in(step.part, admitted.records, halt.error))


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
