"""Calls a handler outside a run, without a broker: shared by `kconsume.testing.feed` and `kconsume try`.

Records go through the same rules and the same attempts as in a run. They run on the caller's thread or, for an
`async def`, on one event loop. Outgoing records are collected and not sent. Resources are built for the call and closed
after it. The rate limit is ignored. The caller supplies the records and the transaction.

`DryRun` runs records and returns a `DryRunResult`. `DryRunResources` says where resources come from. The transaction
comes from `_runtime/processing/dry_run_tx.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import (
    nullcontext,
)
from queue import SimpleQueue
from typing import cast

from kconsume._handlers.binding import MOST_BYTES
from kconsume._handlers.resources import Resource
from kconsume._kafka.outgoing import Outgoing
from kconsume._runtime.build import BATCH, work_for
from kconsume._runtime.handler_loop import CallersLoop, EventLoopThread, HandlerLoop
from kconsume._runtime.lanes.inline import InlineLanes
from kconsume._runtime.lanes.lane import Chunk, Lane, Work
from kconsume._runtime.lanes.pacing import Pace
from kconsume._runtime.lanes.reports import (
    Failure,
    LaneReport,
    LettersFailed,
    MovedToLogEnd,
    Progress,
    Suspended,
    Unblocked,
)
from kconsume._runtime.plan import HandlerPlan, SharedParts
from kconsume._runtime.processing.dry_run_tx import (
    AsyncConnectionSource,
    AsyncGivenConnectionStore,
    CollectedRecords,
    ConnectionSource,
    GivenConnectionStore,
    opened_on_loop,
)
from kconsume._runtime.resource_scope import ResourceScope
from kconsume._runtime.running_block import in_thread
from kconsume.backends.memory import MemoryStore
from kconsume.failures.policy import Policy, Verdict
from kconsume.records import Message, Partition

# Errors that count as the handler's failure. Any other error is meant for the caller: Ctrl-C, the end of a test.
_FAILURES = (Exception, SystemExit, asyncio.CancelledError)


@dataclasses.dataclass(frozen=True, slots=True)
class DryRunResources:
    """Where the handler's resources come from."""

    declared: Mapping[object, Resource] = dataclasses.field(default_factory=dict)
    """The resources of the app, by type. They are built for the call and closed after it."""
    given: Mapping[object, object] = dataclasses.field(default_factory=dict)
    """Ready objects, by type. They replace declared resources and are not closed here."""
    closing: float = 25.0
    """Seconds that closing may take."""


@dataclasses.dataclass(frozen=True, slots=True)
class DryRunResult:
    """What the handler did with the records."""

    skipped: int
    """How many records failed and were skipped, with or without a dead letter."""
    failed: bool
    """True if a record failed and the policy is to stop at that record."""
    error: BaseException | None
    """The error of the failed record, else the error of the first skipped record. None if no record failed."""
    sent: list[Outgoing]
    """The records that the handler would send, for consumed records whose offsets would pass."""
    dead_letters: list[Outgoing]
    """The dead letters that would be written, to a topic or a table."""


class DryRun:
    """Calls one handler, once or several times."""

    def __init__(
        self,
        handler: HandlerPlan,
        scope: str,
        resources: DryRunResources,
        connection: ConnectionSource | AsyncConnectionSource | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """
        Args:
            handler: what to call.
            scope: `group:topic_id`, the beginning of `Record.id`.
            resources: where its resources come from.
            connection: opens the connection of a handler that takes the store's transaction; None for any other
                handler.
            most_bytes: how large a record may be that is sent.
        """
        # Records that the handler sends are returned to the caller and not kept in an outbox. There is no timeout,
        # because the handler runs on the caller's thread, with the caller's connection.
        options = dataclasses.replace(handler.options, repeats="handle", timeout=None)
        self._handler = dataclasses.replace(handler, options=options, outbox=False, retry_chain=None)
        self._binding = handler.binding
        self._scope = scope
        self._resources = resources
        self._connection = connection
        self._most_bytes = most_bytes

    def run(self, messages: Sequence[Message]) -> DryRunResult:
        """Run the handler on records of one partition, on the calling thread.

        An `async def` gets an event loop of its own, so this must not be called on one.
        """
        if self._binding.is_async:
            with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
                return runner.run(self.run_on_loop(messages))
        handler_loop = EventLoopThread("kconsume-dry-run")
        resource_scope = self._resource_scope(handler_loop)
        closing_error: BaseException | None = None
        try:
            run = _DryRunLane(self._handler, self._scope, messages)
            work = self._work(run, handler_loop, self._build(resource_scope), self._connection)
            for chunk in run.chunks:
                suspended = cast("Suspended | None", work(run.lane, chunk, run.report))
                while suspended is not None:  # a dry run waits for nothing
                    suspended = cast("Suspended | None", suspended.resume())
        finally:
            closing_error = resource_scope.close(self._resources.closing)
            handler_loop.close(self._resources.closing)
        return run.result(closing_error)

    async def run_on_loop(self, messages: Sequence[Message]) -> DryRunResult:
        """Like `run`, on the running event loop. A handler that is no `async def` blocks the loop."""
        if not self._binding.is_async:
            return self.run(messages)
        loop, connection = asyncio.get_running_loop(), self._connection
        handler_loop = CallersLoop(loop)
        resource_scope = self._resource_scope(handler_loop)
        closing_error: BaseException | None = None
        try:
            resources, cancelled = await in_thread(lambda: self._build(resource_scope))
            if cancelled is not None:
                raise cancelled
            run = _DryRunLane(self._handler, self._scope, messages)
            work = self._work(
                run, handler_loop, resources, connection if connection is None else opened_on_loop(connection, loop)
            )
            for chunk in run.chunks:
                suspended = await cast("Awaitable[Suspended | None]", work(run.lane, chunk, run.report))
                while suspended is not None:  # a dry run waits for nothing
                    suspended = await cast("Awaitable[Suspended | None]", suspended.resume())
        finally:
            closing_error, cancelled = await in_thread(lambda: resource_scope.close(self._resources.closing))
            handler_loop.close(0.0)
            if cancelled is not None:
                raise cancelled
        return run.result(closing_error)

    def _resource_scope(self, handler_loop: HandlerLoop) -> ResourceScope:
        return ResourceScope(self._resources.declared, self._resources.given, handler_loop)

    def _build(self, resource_scope: ResourceScope) -> Mapping[object, object]:
        given = self._resources.given
        missing = [hint for hint in self._binding.resources.values() if hint not in given]
        return {**given, **resource_scope.build(missing)}

    def _work(
        self,
        run: _DryRunLane,
        handler_loop: HandlerLoop,
        resources: Mapping[object, object],
        connection: ConnectionSource | AsyncConnectionSource | None,
    ) -> Work:
        """The work of a run, except that outgoing records are collected instead of sent, and that there is no rate."""
        options = dataclasses.replace(self._handler.options, rate=None)
        handler = dataclasses.replace(self._handler, policy=run.policy, options=options)
        shared = SharedParts(handler_loop, run.sent, resources, self._most_bytes, run.dead_letters)
        return work_for(handler, self._store(run, connection), self._scope.partition(":")[0], shared)

    def _store(self, run: _DryRunLane, connection: ConnectionSource | AsyncConnectionSource | None) -> MemoryStore:
        if not self._handler.in_transactions:
            return MemoryStore()
        if connection is None:  # the handler takes no transaction; only its dead letters would be written in one
            return GivenConnectionStore(nullcontext, run.sent, run.dead_letters)
        if isinstance(connection, AsyncConnectionSource):
            assert self._binding.transaction is not None
            wanted = self._binding.transaction
            return AsyncGivenConnectionStore(connection, run.sent, run.dead_letters, wanted)
        return GivenConnectionStore(connection, run.sent, run.dead_letters)


class _DryRunLane:
    """One dry run: its lane, and the reports of the lane."""

    def __init__(self, handler: HandlerPlan, scope: str, messages: Sequence[Message]) -> None:
        self.sent = CollectedRecords()
        self.dead_letters = CollectedRecords()
        self.policy = _RecordingPolicy(handler.policy)
        self.chunks = list(_chunks(messages, BATCH if handler.batching is None else handler.batching.records))
        self.lane = Lane(
            Partition(messages[0].topic(), messages[0].partition()),
            InlineLanes(SimpleQueue()),
            _unused_work,
            epoch=0,
            start=messages[0].offset(),
            scope=scope,
            pace=Pace(handler.options.chunk or BATCH),
        )
        self._reports: list[LaneReport] = []

    def report(self, report: LaneReport) -> None:
        self._reports.append(report)

    def result(self, closing_error: BaseException | None) -> DryRunResult:
        """The result of the run. Raises an error that is no failure of the handler, such as an error of the store or of
        closing a resource."""
        self.lane.skip_log.close()
        failed = False
        error = next(iter(self.policy.errors), None)
        for report in self._reports:
            if isinstance(report, Progress | Unblocked | MovedToLogEnd | LettersFailed):
                continue  # nothing is in flight here, because outgoing records are collected at once
            if not isinstance(report, Failure) or not isinstance(report.error, _FAILURES):
                raise report.error
            failed, error = True, report.error
        if closing_error is not None:
            raise closing_error
        skipped = sum(report.skipped for report in self._reports if isinstance(report, Progress))
        return DryRunResult(skipped, failed, error, self.sent.records, self.dead_letters.records)


def _chunks(messages: Sequence[Message], most: int) -> Iterator[Chunk]:
    for start in range(0, len(messages), most):
        part = list(messages[start : start + most])
        yield Chunk(part, part[0].offset(), part[-1].offset())


def _unused_work(lane: Lane, chunk: Chunk, report: object, /) -> None:
    """Never called: `DryRun` passes its chunks to the work directly and submits nothing to the lane."""


class _RecordingPolicy(Policy):
    """The handler's policy. It also collects the errors that it decides about, because the errors of skipped records
    are reported nowhere else."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.dead_letter, self.retry = policy.dead_letter, policy.retry
        self.skips_failures, self.holds_partition = policy.skips_failures, policy.holds_partition
        self.errors: list[BaseException] = []

    def verdict(self, error: BaseException) -> Verdict:
        self.errors.append(error)
        return self._policy.verdict(error)
