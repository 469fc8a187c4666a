"""The transactions of a dry run. Each is always rolled back or is the caller's own; the store commits nothing.

`rolled_back_connection` gives a transaction of the handler's store. A caller may give its own connection instead.
Outgoing records are collected (`CollectedRecords`). Offsets are neither read nor written.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from types import TracebackType
from typing import ClassVar, NamedTuple, TypeVar

from kconsume._config.client_settings import masked_address
from kconsume._handlers.binding import Binding
from kconsume._kafka.outgoing import Outgoing
from kconsume._runtime.output.publisher import outgoing_of
from kconsume.backends.base import OffsetStore
from kconsume.backends.capabilities import AsyncDryRunStore, Capabilities, capabilities_of
from kconsume.backends.memory import MemoryStore
from kconsume.errors import ConfigurationError
from kconsume.failures.letter_headers import Letter
from kconsume.records import Partition

T = TypeVar("T")

ConnectionSource = Callable[[], AbstractContextManager[object]]
"""Opens the connection that a handler asks for. If an error leaves the block, all writes through the connection are
rolled back."""


class AsyncConnectionSource(NamedTuple):
    """Opens the connection of an `async def` handler, like `ConnectionSource`."""

    open: Callable[[], AbstractAsyncContextManager[object]]


def rolled_back_connection(store: OffsetStore, binding: Binding) -> ConnectionSource | AsyncConnectionSource | None:
    """A transaction of the store that is always rolled back, for a handler that takes one; None for any other handler.

    Raises `ConfigurationError` if the store cannot give such a transaction.
    """
    if binding.transaction is None:
        return None
    offers = capabilities_of(store)
    is_awaited = binding.transaction in (offers.async_connection_types or ())
    if is_awaited and offers.async_dry_run is not None:
        return AsyncConnectionSource(_async_opener(offers.async_dry_run))
    blocking = offers.dry_run
    if is_awaited or blocking is None:
        raise ConfigurationError(
            f"{binding.name} takes the transaction of {masked_address(store.address)}, which has none that is always "
            f"rolled back (it declares no dry_run): run it against a copy of the data instead"
        )

    @contextmanager
    def open_connection() -> Iterator[object]:
        with blocking.dry_run() as tx:
            yield tx.connection

    return open_connection


def _async_opener(store: AsyncDryRunStore) -> Callable[[], AbstractAsyncContextManager[object]]:
    @asynccontextmanager
    async def open_connection() -> AsyncIterator[object]:
        async with store.async_dry_run() as tx:
            yield tx.connection

    return open_connection


class CollectedRecords:
    """Collects the records that would be sent."""

    def __init__(self) -> None:
        self.records: list[Outgoing] = []

    def deliver(self, outgoing: Sequence[Outgoing]) -> Future[None]:
        self.records.extend(outgoing)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """If the block fails, forget the records that were sent in it, because the offset would not pass the records
        that are handled in it."""
        mark = len(self.records)
        try:
            yield
        except BaseException:
            del self.records[mark:]
            raise


class GivenConnectionStore(MemoryStore):
    """A store whose transactions use a given connection. Its offsets are never read."""

    connection_types: ClassVar[tuple[type, ...]] = ()
    parallel: ClassVar[int | None] = 1
    by_record: ClassVar[bool] = False

    def __init__(self, connection: ConnectionSource, sent: CollectedRecords, dead_letters: CollectedRecords) -> None:
        super().__init__()
        self._connection = connection
        self._sent = sent
        self._dead_letters = dead_letters

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, keeps_letters=True)

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[_DryRunTx]:  # noqa: ARG002
        with self._sent.undone_on_error(), self._dead_letters.undone_on_error(), self._connection() as connection:
            yield _DryRunTx(connection, self._dead_letters)


class AsyncGivenConnectionStore(GivenConnectionStore):
    """Like `GivenConnectionStore`, but awaited."""

    def __init__(
        self,
        connection: AsyncConnectionSource,
        sent: CollectedRecords,
        dead_letters: CollectedRecords,
        wanted: type,
    ) -> None:
        super().__init__(_must_be_awaited, sent, dead_letters)
        self._async_connection = connection
        self.async_connection_types: tuple[type, ...] = (wanted,)

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, async_transactional=self)

    @asynccontextmanager
    async def async_transaction(self, *claimed: object) -> AsyncIterator[_AsyncDryRunTx]:  # noqa: ARG002
        with self._sent.undone_on_error(), self._dead_letters.undone_on_error():
            async with self._async_connection.open() as connection:
                yield _AsyncDryRunTx(connection, self._dead_letters)


def _must_be_awaited() -> AbstractContextManager[object]:
    raise ConfigurationError("this transaction is for an event loop: make the handler `async def`")


class _DryRunTx(NamedTuple):
    connection: object
    dead_letters: CollectedRecords

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """There is no offset to move."""

    def keep(self, table: str, letters: Sequence[Letter]) -> None:  # noqa: ARG002  (the table does not matter)
        self.dead_letters.deliver([outgoing_of(letter) for letter in letters])

    def fault(self, error: BaseException) -> None:  # noqa: ARG002  (every error is the caller's)
        return None


class _AsyncDryRunTx(NamedTuple):
    connection: object
    dead_letters: CollectedRecords

    async def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """There is no offset to move."""

    async def keep(self, table: str, letters: Sequence[Letter]) -> None:  # noqa: ARG002  (as in `_DryRunTx`)
        self.dead_letters.deliver([outgoing_of(letter) for letter in letters])

    def fault(self, error: BaseException) -> None:  # noqa: ARG002  (as in `_DryRunTx`)
        return None


def opened_on_loop(
    connection: ConnectionSource | AsyncConnectionSource, loop: asyncio.AbstractEventLoop
) -> ConnectionSource | AsyncConnectionSource:
    return connection if isinstance(connection, AsyncConnectionSource) else lambda: _OnLoop(connection(), loop)


class _OnLoop(AbstractContextManager[object]):
    """Enters and leaves a connection on the event loop's own thread.

    This is necessary because attempts on a loop enter transactions on other threads, and a connection of SQLite belongs
    to one thread.
    """

    def __init__(self, opened: AbstractContextManager[object], loop: asyncio.AbstractEventLoop) -> None:
        self._opened = opened
        self._loop = loop

    def __enter__(self) -> object:
        return self._on_loop_thread(self._opened.__enter__)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._on_loop_thread(lambda: self._opened.__exit__(kind, error, trace))

    def _on_loop_thread(self, step: Callable[[], T]) -> T:
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(step())
            except BaseException as error:  # noqa: BLE001  (raised on the thread that asked)
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result()
