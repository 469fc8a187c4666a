"""One call of a handler outside a run: what `kconsume.testing.feed` and `kconsume try` share.

Records go through the same course and the same work as in a run: on the caller's thread, and an `async def` on one
event loop. What would be sent is kept and never leaves; resources are built for the call and closed after it; nothing
waits for a rate. Where records and transactions come from is the business of who asks. No broker is spoken to.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from types import TracebackType
from typing import ClassVar, NamedTuple, TypeVar, cast

from kconsume.backends.memory import MemoryStore
from kconsume.failures.policy import Policy, Verdict
from kconsume.handler import MOST_BYTES
from kconsume.output import Outgoing
from kconsume.records import Message, Partition
from kconsume.resources import Resource
from kconsume.runtime.budget import Pace
from kconsume.runtime.engine import BATCH, Equipment, HandlerPlan, work_for
from kconsume.runtime.furnishing import Furnishing
from kconsume.runtime.home import CallersLoop, Home, OwnLoop
from kconsume.runtime.lanes import Chunk, Failure, InlineLanes, Lane, Outcome, Progress, Work
from kconsume.runtime.running import in_thread

T = TypeVar("T")

Lend = Callable[[], AbstractContextManager[object]]
"""Lends the connection that a handler asks for; what is written through it is undone when an error leaves the block."""

# What a handler's failure is. Anything else that comes out of one is meant for whoever runs it: Ctrl-C, a test's end.
_FAILURES = (Exception, SystemExit, asyncio.CancelledError)


@dataclasses.dataclass(frozen=True, slots=True)
class Furniture:
    """Where the handler's resources come from."""

    declared: Mapping[object, Resource] = dataclasses.field(default_factory=dict)
    given: Mapping[object, object] = dataclasses.field(default_factory=dict)
    """Ready ones, which replace what is declared and are not closed here."""
    closing: float = 25.0
    """Seconds that closing may take."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tried:
    """What came of it."""

    skipped: int
    """How many records failed and were passed, because their policy is to skip them."""
    failed: bool
    """Whether a record failed and its policy is to stop there."""
    error: BaseException | None
    """What the record raised that failed; or else the first of those that were skipped."""
    sent: list[Outgoing]
    """What would be sent for the records that passed."""


class Trial:
    """A handler, and all that it needs to be called. `scope` is `group:topic_id`, the beginning of `Record.id`."""

    def __init__(
        self,
        handler: HandlerPlan,
        scope: str,
        furniture: Furniture,
        lend: Lend | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """`lend` is needed by a handler that takes the store's transaction."""
        self._handler = handler
        self._binding = handler.binding
        self._scope = scope
        self._furniture = furniture
        self._lend = lend
        self._most_bytes = most_bytes

    def run(self, messages: Sequence[Message]) -> Tried:
        """To the end, here. An `async def` gets an event loop of its own, so this must not be called inside one."""
        if self._binding.is_async:
            with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
                return runner.run(self.run_on_loop(messages))
        home = OwnLoop("kconsume-trial")
        furnishing = self._furnishing(home)
        trouble: BaseException | None = None
        try:
            attempt = _Attempt(self._handler, self._scope, messages)
            work = self._work(attempt, home, self._build(furnishing), self._lend)
            for chunk in attempt.chunks:
                work(attempt.lane, chunk, attempt.report)
        finally:
            trouble = furnishing.close(self._furniture.closing)
            home.close(self._furniture.closing)
        return attempt.tried(trouble)

    async def run_on_loop(self, messages: Sequence[Message]) -> Tried:
        """The same on the loop that runs; a handler that is no `async def` blocks it."""
        if not self._binding.is_async:
            return self.run(messages)
        loop, lend = asyncio.get_running_loop(), self._lend
        home = CallersLoop(loop)
        furnishing = self._furnishing(home)
        trouble: BaseException | None = None
        try:
            resources, cancelled = await in_thread(lambda: self._build(furnishing))
            if cancelled is not None:
                raise cancelled
            attempt = _Attempt(self._handler, self._scope, messages)
            work = self._work(attempt, home, resources, None if lend is None else lambda: _OnLoop(lend(), loop))
            for chunk in attempt.chunks:
                await cast(Awaitable[None], work(attempt.lane, chunk, attempt.report))
        finally:
            trouble, cancelled = await in_thread(lambda: furnishing.close(self._furniture.closing))
            home.close(0.0)
            if cancelled is not None:
                raise cancelled
        return attempt.tried(trouble)

    def _furnishing(self, home: Home) -> Furnishing:
        return Furnishing(self._furniture.declared, self._furniture.given, home)

    def _build(self, furnishing: Furnishing) -> Mapping[object, object]:
        given = self._furniture.given
        missing = [hint for hint in self._binding.resources.values() if hint not in given]
        return {**given, **furnishing.build(missing)}

    def _work(self, attempt: _Attempt, home: Home, resources: Mapping[object, object], lend: Lend | None) -> Work:
        """As in a run, with what is kept in the place of what leaves, and without waiting for a rate."""
        handler = dataclasses.replace(self._handler, policy=attempt.policy, rate=None)
        store = MemoryStore() if lend is None else _LentStore(lend, attempt.kept)
        return work_for(handler, store, "", Equipment(home, attempt.kept, resources, self._most_bytes))


class _Attempt:
    """One run of a trial: its lane, and what was reported of it."""

    def __init__(self, handler: HandlerPlan, scope: str, messages: Sequence[Message]) -> None:
        self.kept = _Kept()
        self.policy = _Overheard(handler.policy)
        self.chunks = list(_chunks(messages, BATCH if handler.batching is None else handler.batching.records))
        self.lane = Lane(
            Partition(messages[0].topic(), messages[0].partition()),
            InlineLanes(SimpleQueue()),
            _no_work,
            epoch=0,
            start=messages[0].offset(),
            scope=scope,
            pace=Pace(handler.chunk or BATCH),
        )
        self._reported: list[Outcome] = []

    def report(self, outcome: Outcome) -> None:
        self._reported.append(outcome)

    def tried(self, trouble: BaseException | None) -> Tried:
        """What came of it. What is no failure of the handler's is raised: the store's, or that of a resource."""
        failed = False
        error = next(iter(self.policy.heard), None)
        for outcome in self._reported:
            if isinstance(outcome, Progress):
                continue
            if not isinstance(outcome, Failure) or not isinstance(outcome.error, _FAILURES):
                raise outcome.error
            failed, error = True, outcome.error
        if trouble is not None:
            raise trouble
        skipped = sum(outcome.skipped for outcome in self._reported if isinstance(outcome, Progress))
        return Tried(skipped, failed, error, self.kept.sent)


def _chunks(messages: Sequence[Message], most: int) -> Iterator[Chunk]:
    for start in range(0, len(messages), most):
        part = list(messages[start : start + most])
        yield Chunk(part, part[0].offset(), part[-1].offset())


def _no_work(lane: Lane, chunk: Chunk, report: object, /) -> None:
    """The lane of a trial is not filled: its chunks are handed to the work one by one."""


class _Overheard(Policy):
    """The handler's policy, and the errors that it was asked about: those of skipped records are told nowhere else."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.heard: list[BaseException] = []

    def verdict(self, error: BaseException) -> Verdict:
        self.heard.append(error)
        return self._policy.verdict(error)


class _Kept:
    """Where what is sent ends."""

    def __init__(self) -> None:
        self.sent: list[Outgoing] = []

    def deliver(self, outgoing: Sequence[Outgoing]) -> Future[None]:
        self.sent.extend(outgoing)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _LentStore(MemoryStore):
    """A store whose offsets nobody asks for, and whose transaction is somebody else's."""

    connection_types: ClassVar[tuple[type, ...]] = ()
    parallel: ClassVar[int | None] = 1

    def __init__(self, lend: Lend, kept: _Kept) -> None:
        super().__init__()
        self._lend = lend
        self._kept = kept

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[_LentTx]:  # noqa: ARG002
        mark = len(self._kept.sent)
        try:
            with self._lend() as connection:
                yield _LentTx(connection)
        except BaseException:
            del self._kept.sent[mark:]  # the records did not pass
            raise


class _LentTx(NamedTuple):
    connection: object

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """There is no offset to move."""


class _OnLoop(AbstractContextManager[object]):
    """Entered and left on the event loop's own thread: work on a loop enters transactions from other threads, and a
    connection of SQLite belongs to one."""

    def __init__(self, lent: AbstractContextManager[object], loop: asyncio.AbstractEventLoop) -> None:
        self._lent = lent
        self._loop = loop

    def __enter__(self) -> object:
        return self._there(self._lent.__enter__)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._there(lambda: self._lent.__exit__(kind, error, trace))

    def _there(self, step: Callable[[], T]) -> T:
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(step())
            except BaseException as error:  # noqa: BLE001  (raised where it was asked for)
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result()
