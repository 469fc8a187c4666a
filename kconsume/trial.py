"""One call of a handler outside a run: what `kconsume.testing.feed` and `kconsume try` share.

Records go through the same course and the same work as in a run: on the caller's thread, and an `async def` on one
event loop. What would be sent is kept and never leaves; resources are built for the call and closed after it; nothing
waits for a rate. Where records and transactions come from is the business of who asks. No broker is spoken to.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from queue import SimpleQueue
from types import TracebackType
from typing import ClassVar, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

from kconsume.backends.abc import OffsetStore
from kconsume.backends.memory import MemoryStore
from kconsume.backends.registry import transactions_of
from kconsume.errors import ConfigurationError
from kconsume.failures.letters import Letter
from kconsume.failures.policy import Policy, Verdict
from kconsume.handler import MOST_BYTES, Binding
from kconsume.output import Outgoing
from kconsume.records import Message, Partition
from kconsume.resources import Resource
from kconsume.runtime.budget import Pace
from kconsume.runtime.fitting import BATCH, work_for
from kconsume.runtime.furnishing import Furnishing
from kconsume.runtime.home import CallersLoop, Home, OwnLoop
from kconsume.runtime.lanes import (
    Chunk,
    Ended,
    Failure,
    InlineLanes,
    Lane,
    Outcome,
    Parked,
    Progress,
    Undelivered,
    Work,
    Worked,
)
from kconsume.runtime.mail import outgoing_of
from kconsume.runtime.plans import Equipment, HandlerPlan
from kconsume.runtime.running import in_thread
from kconsume.settings import masked_address

T = TypeVar("T")

Lend = Callable[[], AbstractContextManager[object]]
"""Lends the connection that a handler asks for; what is written through it is undone when an error leaves the block."""


class AsyncLend(NamedTuple):
    """The same where it is awaited, for a handler that is an `async def`."""

    lend: Callable[[], AbstractAsyncContextManager[object]]


class _Lent(Protocol):
    @property
    def connection(self) -> object: ...


@runtime_checkable
class _Rehearsing(Protocol):
    """A store with transactions of which nothing stays."""

    def rehearsal(self) -> AbstractContextManager[_Lent]: ...


@runtime_checkable
class _RehearsingAsync(Protocol):
    """The same for those of its transactions that are awaited."""

    @property
    def async_connection_types(self) -> tuple[type, ...]: ...

    def async_rehearsal(self) -> AbstractAsyncContextManager[_Lent]: ...


def rehearsal(store: OffsetStore, binding: Binding) -> Lend | AsyncLend | None:
    """The transaction of the store that the handler asks for, if it does, undone at the end."""
    if binding.transaction is None:
        return None
    if isinstance(store, _RehearsingAsync) and binding.transaction in store.async_connection_types:
        return AsyncLend(_lender(store))
    if not isinstance(store, _Rehearsing) or binding.transaction in (transactions_of(store)[1] or ()):
        raise ConfigurationError(
            f"{binding.name} takes the transaction of {masked_address(store.address)}, which cannot lend one that is "
            f"rolled back (it has no rehearsal()): run it against a copy of the data instead"
        )

    @contextmanager
    def lend() -> Iterator[object]:
        with store.rehearsal() as lent:
            yield lent.connection

    return lend


def _lender(store: _RehearsingAsync) -> Callable[[], AbstractAsyncContextManager[object]]:
    @asynccontextmanager
    async def lend() -> AsyncIterator[object]:
        async with store.async_rehearsal() as lent:
            yield lent.connection

    return lend


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
    """How many records failed and were passed, because their policy is to skip them, or to write a dead letter."""
    failed: bool
    """Whether a record failed and its policy is to stop there."""
    error: BaseException | None
    """What the record raised that failed; or else the first of those that were skipped."""
    sent: list[Outgoing]
    """What would be sent for the records that passed."""
    dead: list[Outgoing]
    """The dead letters that would be written, wherever to."""


class Trial:
    """A handler, and all that it needs to be called. `scope` is `group:topic_id`, the beginning of `Record.id`."""

    def __init__(
        self,
        handler: HandlerPlan,
        scope: str,
        furniture: Furniture,
        lend: Lend | AsyncLend | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """`lend` is needed by a handler that takes the store's transaction."""
        self._handler = dataclasses.replace(handler, outbox=False, ladder=None, drops_repeats=False, timeout=None)
        """With what it sends told to the caller, and not kept anywhere; nothing is left for later. As long as it takes:
        it runs on the thread of who tries it out, with their connection."""
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
                going = cast("Parked | None", work(attempt.lane, chunk, attempt.report))
                while going is not None:  # nothing is waited for here
                    going = cast("Parked | None", going.resume())
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
            work = self._work(attempt, home, resources, lend if lend is None else _on_loop(lend, loop))
            for chunk in attempt.chunks:
                going = await cast("Awaitable[Parked | None]", work(attempt.lane, chunk, attempt.report))
                while going is not None:  # as above
                    going = await cast("Awaitable[Parked | None]", going.resume())
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

    def _work(
        self, attempt: _Attempt, home: Home, resources: Mapping[object, object], lend: Lend | AsyncLend | None
    ) -> Work:
        """As in a run, with what is kept in the place of what leaves, and without waiting for a rate."""
        handler = dataclasses.replace(self._handler, policy=attempt.policy, rate=None)
        equipment = Equipment(home, attempt.kept, resources, self._most_bytes, attempt.dead)
        return work_for(handler, self._store(attempt, lend), self._scope.partition(":")[0], equipment)

    def _store(self, attempt: _Attempt, lend: Lend | AsyncLend | None) -> MemoryStore:
        if not self._handler.in_transactions:
            return MemoryStore()
        if lend is None:  # it asks for none, and only its dead letters would be kept in one
            return _LentStore(nullcontext, attempt)
        if isinstance(lend, AsyncLend):
            assert self._binding.transaction is not None
            return _AsyncLentStore(lend, attempt, self._binding.transaction)
        return _LentStore(lend, attempt)


class _Attempt:
    """One run of a trial: its lane, and what was reported of it."""

    def __init__(self, handler: HandlerPlan, scope: str, messages: Sequence[Message]) -> None:
        self.kept = _Kept()
        self.dead = _Kept()
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
        self.lane.tally.close()
        failed = False
        error = next(iter(self.policy.heard), None)
        for outcome in self._reported:
            if isinstance(outcome, Progress | Worked | Ended | Undelivered):
                continue  # nothing is on its way in here: what is sent is kept at once
            if not isinstance(outcome, Failure) or not isinstance(outcome.error, _FAILURES):
                raise outcome.error
            failed, error = True, outcome.error
        if trouble is not None:
            raise trouble
        skipped = sum(outcome.skipped for outcome in self._reported if isinstance(outcome, Progress))
        return Tried(skipped, failed, error, self.kept.sent, self.dead.sent)


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
        self.dead_letter, self.retry = policy.dead_letter, policy.retry
        self.goes_on, self.holds = policy.goes_on, policy.holds
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

    @contextmanager
    def or_nothing(self) -> Iterator[None]:
        """What is sent in a block that fails is not kept: its records did not pass."""
        mark = len(self.sent)
        try:
            yield
        except BaseException:
            del self.sent[mark:]
            raise


class _LentStore(MemoryStore):
    """A store whose offsets nobody asks for, and whose transaction is somebody else's."""

    connection_types: ClassVar[tuple[type, ...]] = ()
    parallel: ClassVar[int | None] = 1
    by_record: ClassVar[bool] = False

    def __init__(self, lend: Lend, attempt: _Attempt) -> None:
        super().__init__()
        self._lend = lend
        self._kept = attempt.kept
        self._dead = attempt.dead

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[_LentTx]:  # noqa: ARG002
        with self._kept.or_nothing(), self._dead.or_nothing(), self._lend() as connection:
            yield _LentTx(connection, self._dead)


class _AsyncLentStore(_LentStore):
    """The same, awaited."""

    def __init__(self, lend: AsyncLend, attempt: _Attempt, wanted: type) -> None:
        super().__init__(_must_be_awaited, attempt)
        self._awaited = lend
        self.async_connection_types = (wanted,)

    @asynccontextmanager
    async def async_transaction(self, *claimed: object) -> AsyncIterator[_AsyncLentTx]:  # noqa: ARG002
        with self._kept.or_nothing(), self._dead.or_nothing():
            async with self._awaited.lend() as connection:
                yield _AsyncLentTx(connection, self._dead)


def _must_be_awaited() -> AbstractContextManager[object]:
    raise ConfigurationError("this transaction is for an event loop: make the handler `async def`")


class _LentTx(NamedTuple):
    connection: object
    dead: _Kept

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """There is no offset to move."""

    def keep(self, table: str, letters: Sequence[Letter]) -> None:  # noqa: ARG002  (it is only told)
        self.dead.deliver([outgoing_of(letter) for letter in letters])

    def fault(self, error: BaseException) -> None:  # noqa: ARG002  (whatever it is, it is told to the caller)
        return None


class _AsyncLentTx(NamedTuple):
    connection: object
    dead: _Kept

    async def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """As above."""

    async def keep(self, table: str, letters: Sequence[Letter]) -> None:  # noqa: ARG002  (as above)
        self.dead.deliver([outgoing_of(letter) for letter in letters])

    def fault(self, error: BaseException) -> None:  # noqa: ARG002  (as above)
        return None


def _on_loop(lend: Lend | AsyncLend, loop: asyncio.AbstractEventLoop) -> Lend | AsyncLend:
    return lend if isinstance(lend, AsyncLend) else lambda: _OnLoop(lend(), loop)


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
