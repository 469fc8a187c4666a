"""Calls a handler in a transaction of the store that also advances the offset: exactly once.

A slice of records shares one transaction, in which the offset is advanced last. The output of the handler is part of
the transaction if the store has an outbox. Otherwise the output is sent after the offset was advanced and before the
COMMIT, because advancing the offset shows whether the transaction was fenced or has ended. A handler that does not take
the transaction runs before the transaction begins, so that no transaction is open while the handler works.

`TransactionalAttempt` runs on a worker thread, `AsyncTransactionalAttempt` on an event loop. Both raise errors of the
store; errors of the handler are in the result.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias, cast

from kconsume._handlers.compiled import AsyncRunner, Runner
from kconsume._kafka.outgoing import Outgoing, stamp_reset
from kconsume._runtime.lanes.lane import Lane
from kconsume._runtime.output.publisher import Publisher
from kconsume._runtime.processing.blocking_tx import AsyncBegin
from kconsume._runtime.processing.dedup import Deduplication
from kconsume._runtime.processing.pipelining import Pipelining
from kconsume._runtime.processing.slice_result import in_the_part, outcome_of, unless_cancelled
from kconsume._runtime.processing.steps import CallHandler, SkipRecords, SliceStep, StepResult
from kconsume.backends.base import TransactionalStore, Tx
from kconsume.backends.capabilities import AsyncTx, FinishingTx, SeverableTx, capabilities_of
from kconsume.errors import (
    Conflict,
    LetterFailed,
    OffsetError,
    SendFailed,
    StoreError,
    TooManyFailures,
    TransactionMisused,
)
from kconsume.records import Partition

Begin: TypeAlias = Callable[[str, Partition, int], AbstractContextManager[Tx]]
_NO_RECORD_FAILED = (StoreError, OffsetError, SendFailed, LetterFailed, TooManyFailures, asyncio.CancelledError)
_PAUSES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds before a record that conflicted with another transaction is tried again. A conflict after the last pause is
an error of the store."""


class TransactionalAttempt:
    """Runs a slice with a plain function. The records are finished when the writes and the offset have committed
    together."""

    def __init__(
        self,
        run: Runner,
        batched: bool,
        store: TransactionalStore,
        group: str,
        publisher: Publisher | None = None,
        *,
        gives_tx: bool = True,
        waits_in_handler: bool = False,
        dedup: Deduplication | None = None,
    ) -> None:
        """
        Args:
            run: calls the handler.
            batched: True if one call gets the whole slice.
            store: begins the transactions.
            group: the consumer group.
            publisher: publishes output and dead letters, if the handler can have any.
            gives_tx: True if the handler takes the transaction.
            waits_in_handler: True if the handler waits for each of its statements, so that a pipeline is of no use.
            dedup: drops records that were handled before; None if repeats are not dropped.
        """
        self._run = run
        self._batched = batched
        self._store = store
        self._group = group
        self._publisher = publisher
        self._gives_tx = gives_tx
        self._dedup = dedup
        self._pipeline = Pipelining.of(store, batched or waits_in_handler or not gives_tx)
        self._finishes = capabilities_of(store).finishes

    def __call__(self, lane: Lane, step: SliceStep, /) -> StepResult:
        for pause in _PAUSES:
            try:
                return self._once(lane, step)
            except Conflict as error:
                if len(step.part) > 1:
                    return StepResult(0, step.part[0], error, certain=False)  # smaller slices have fewer conflicts
            time.sleep(pause * random.uniform(0.5, 1.0))
        return self._once(lane, step)

    def move_to(self, lane: Lane, offset: int, /) -> StepResult:
        with self._store.transaction(self._group, lane.partition, lane.epoch) as tx:
            tx.advance(lane.stored, offset, lane.leader_epoch)
        lane.stored = offset
        return StepResult(0)

    def _once(self, lane: Lane, step: SliceStep) -> StepResult:
        pipeline = self._pipeline
        if pipeline is None or pipeline.is_off or len(step.part) == 1 or isinstance(step, SkipRecords) or step.letters:
            return self._attempt(self._store.transaction, lane, step)
        result = self._attempt(pipeline.store.pipelined, lane, step)
        if result.error is None:
            return result
        again = self._attempt(self._store.transaction, lane, step)
        if again.error is None and again.done == len(step.part):
            pipeline.failed_alone(result.error)
        return again

    def _attempt(self, begin: Begin, lane: Lane, step: SliceStep) -> StepResult:
        begun, result, sent = False, StepResult(len(step.part)), list[Outgoing]()
        rows: Sequence[Outgoing] = ()
        dedups = self._dedup is not None and self._dedup.applies_to(lane.partition.topic)
        inside = self._gives_tx or dedups
        if isinstance(step, CallHandler) and not inside:
            halt = self._run(step.records, lane.stop_reasons, None, lane.scope, sent, step.attempt)
            result = outcome_of(step, halt, self._batched)
            if not result.done:
                return result
        try:
            with begin(self._group, lane.partition, lane.epoch) as tx:
                begun = True
                admitted = step if self._dedup is None else self._dedup.without_repeats(step, tx, lane.reset_epoch)
                if isinstance(step, CallHandler) and isinstance(admitted, CallHandler) and inside:
                    halt = self._run(admitted.records, lane.stop_reasons, tx.connection, lane.scope, sent, step.attempt)
                    halt = in_the_part(step, admitted, halt)
                    result = outcome_of(step, halt, self._batched)
                    result = _or_undo(result, tx, abandoned=halt is not None and halt.abandoned)
                    _must_be_whole(step, result, dedups)
                if self._publisher is not None:
                    stamp_reset(sent, lane.reset_epoch)
                    rows = self._publisher.keep(sent, admitted.letters, tx)
                posts = self._publisher is not None and self._publisher.posts(sent, admitted.letters)
                if (move := _move(lane, step, result)) is not None:
                    (cast(FinishingTx, tx).finish if self._finishes and not posts else tx.advance)(*move)
                if self._publisher is not None and posts:
                    self._publisher.post(sent, admitted.letters)
        except BaseException as error:  # noqa: BLE001  (`_rolled_back` decides)
            return _rolled_back(step, error, begun)
        if self._publisher is not None:
            self._publisher.committed(lane.partition, rows)
        return _stored(lane, step, result)


class AsyncTransactionalAttempt:
    """Runs a slice with an `async def`. The parameters are those of `TransactionalAttempt`."""

    def __init__(
        self,
        run: AsyncRunner,
        batched: bool,
        begin: AsyncBegin,
        group: str,
        publisher: Publisher | None = None,
        *,
        gives_tx: bool = True,
        dedup: Deduplication | None = None,
    ) -> None:
        self._run = run
        self._batched = batched
        self._begin = begin
        self._group = group
        self._publisher = publisher
        self._gives_tx = gives_tx
        self._dedup = dedup

    async def __call__(self, lane: Lane, step: SliceStep, /) -> StepResult:
        for pause in _PAUSES:
            try:
                return await self._once(lane, step)
            except Conflict as error:
                if len(step.part) > 1:
                    return StepResult(0, step.part[0], error, certain=False)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        return await self._once(lane, step)

    async def move_to(self, lane: Lane, offset: int, /) -> StepResult:
        async with self._begin(self._group, lane.partition, lane.epoch) as tx:
            await tx.advance(lane.stored, offset, lane.leader_epoch)
        lane.stored = offset
        return StepResult(0)

    async def _once(self, lane: Lane, step: SliceStep) -> StepResult:
        begun, result, sent = False, StepResult(len(step.part)), list[Outgoing]()
        rows: Sequence[Outgoing] = ()
        dedups = self._dedup is not None and self._dedup.applies_to(lane.partition.topic)
        inside = self._gives_tx or dedups
        if isinstance(step, CallHandler) and not inside:
            halt = await self._run(step.records, lane.stop_reasons, None, lane.scope, sent, step.attempt)
            result = outcome_of(step, unless_cancelled(lane, halt), self._batched)
            if not result.done:
                return result
        try:
            async with self._begin(self._group, lane.partition, lane.epoch) as tx:
                begun = True
                admitted = (
                    step if self._dedup is None else await self._dedup.without_repeats_async(step, tx, lane.reset_epoch)
                )
                if isinstance(step, CallHandler) and isinstance(admitted, CallHandler) and inside:
                    halt = await self._run(
                        admitted.records, lane.stop_reasons, tx.connection, lane.scope, sent, step.attempt
                    )
                    halt = in_the_part(step, admitted, unless_cancelled(lane, halt))
                    result = _or_undo(outcome_of(step, halt, self._batched), tx)
                    _must_be_whole(step, result, dedups)
                if self._publisher is not None:
                    stamp_reset(sent, lane.reset_epoch)
                    rows = await self._publisher.keep_async(sent, admitted.letters, tx)
                if (move := _move(lane, step, result)) is not None:
                    await tx.advance(*move)
                if self._publisher is not None:
                    await self._publisher.post_async(sent, admitted.letters)
        except BaseException as error:  # noqa: BLE001  (`_rolled_back` decides)
            return _rolled_back(step, error, begun)
        if self._publisher is not None:
            self._publisher.committed(lane.partition, rows)
        return _stored(lane, step, result)


class _Undo(Exception):
    """Rolls the transaction back without passing the handler's error to the store."""

    def __init__(self, result: StepResult) -> None:
        self.result = result


def _or_undo(result: StepResult, tx: Tx | AsyncTx, *, abandoned: bool = False) -> StepResult:
    """Return `result` if the slice is done. Otherwise raise, so that the transaction is rolled back.

    Args:
        abandoned: True if the handler still runs on an abandoned thread and can use the connection.
    """
    if result.error is None and result.done:
        return result
    if abandoned:
        cast(SeverableTx, tx).sever()
        raise _Undo(result)
    fault = None if result.error is None else tx.fault(result.error)
    if fault is None:
        raise _Undo(result)
    raise fault from result.error


def _must_be_whole(step: CallHandler, result: StepResult, dedups: bool) -> None:
    """Roll back a slice that its lane stopped before the end, if the store has recorded all records of the slice as
    handled. Otherwise the records that were not handled would be lost."""
    if dedups and result.done < len(step.part):
        raise _Undo(result)


def _rolled_back(step: SliceStep, error: BaseException, begun: bool) -> StepResult:
    """The result of a transaction that did not commit, if the handler failed. An error of the store is raised instead,
    so that no record is skipped because of it."""
    if isinstance(error, _Undo):
        return error.result._replace(done=0)
    no_record_failed = isinstance(error, _NO_RECORD_FAILED) and not isinstance(error, TransactionMisused)
    if not begun or no_record_failed or isinstance(step, SkipRecords):
        raise error
    # A misused transaction, or a constraint checked at COMMIT: a slice of one record shows which record it was.
    return StepResult(0, step.part[0], error, certain=len(step.part) == 1)


def _move(lane: Lane, step: SliceStep, result: StepResult) -> tuple[int, int, int | None] | None:
    """The old and the new offset of the row, with the leader epoch; None if the row does not move."""
    if not result.done:
        return None
    last = step.part[result.done - 1]
    return lane.stored, last.offset() + 1, last.leader_epoch()


def _stored(lane: Lane, step: SliceStep, result: StepResult) -> StepResult:
    """Note in the lane the offset that has committed."""
    if result.done:
        last = step.part[result.done - 1]
        lane.stored, lane.leader_epoch = last.offset() + 1, last.leader_epoch()
    return result
