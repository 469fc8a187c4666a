"""A transactional store in memory that applies all at the end, as stores do that queue their commands.

For the tests of the conformance suites: of the ways in which a store may keep the contract, it is the other extreme to
SQLite. Any number of transactions are open at once, a claim waits for none, and a stale one is refused at its very end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from kconsume.backends import MemoryStore, Position
from kconsume.backends.capabilities import Capabilities
from kconsume.errors import Fenced, StoreUnavailable, TransactionMisused
from kconsume.records import Partition
from kconsume.testing.conformance import Subject, awaited


class Switch:
    """A lock that cannot be had while the place is away. Every method of the store takes it."""

    def __init__(self) -> None:
        self.away = False
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if self.away:
            raise StoreUnavailable("memory:// is away")
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Queue:
    """What a handler gets: numbers are put into it, and count when the transaction has ended."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.over = False

    def next_record(self, offset: int) -> None:
        self.refuse_if_over()

    def put(self, number: int) -> None:
        self.refuse_if_over()
        self.numbers.append(number)

    def refuse_if_over(self) -> None:
        if self.over:
            raise TransactionMisused("the transaction has ended")


class QueueTx:
    def __init__(self, store: QueueStore) -> None:
        self.connection = Queue()
        self.move: tuple[int, int, int | None] | None = None
        self._store = store

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        self.connection.refuse_if_over()
        self.move = (old, new, leader_epoch)

    def sever(self) -> None:
        self.connection.over = True

    def fault(self, error: BaseException) -> StoreUnavailable | None:
        return None


class QueueStore(MemoryStore):
    guarantee: ClassVar[str] = "exactly once, in memory"
    connection_types: ClassVar[tuple[type, ...]] = (Queue,)
    parallel: ClassVar[int | None] = None
    by_record: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.effects: list[int] = []
        self.switch = Switch()
        self._lock: Any = self.switch

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, severs=True)

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        with self._lock:
            self.begin(group, partition, epoch)
        tx = QueueTx(self)
        try:
            yield tx
            with self._lock:
                self.end(group, partition, epoch, tx)
        finally:
            tx.connection.over = True

    def begin(self, group: str, partition: Partition, epoch: int) -> None:
        self._check_epoch(group, partition, epoch)

    def end(self, group: str, partition: Partition, epoch: int, tx: QueueTx) -> None:
        """Checked and applied in one step."""
        self._check_epoch(group, partition, epoch)
        if tx.move is not None:
            self._rows[group, partition] = self.moved(self._rows[group, partition], *tx.move)
        self.effects.extend(tx.connection.numbers)

    def moved(self, row: Position, old: int, new: int, leader_epoch: int | None) -> Position:
        if row.next_offset != old:
            raise Fenced(f"the partition stands at {row.next_offset} and not at {old}")
        return replace(row, next_offset=new, leader_epoch=leader_epoch)

    @contextmanager
    def away(self) -> Iterator[None]:
        self.switch.away = True
        try:
            yield
        finally:
            self.switch.away = False


class PipelinedQueueStore(QueueStore):
    """The same, and one that looks only at its end."""

    @contextmanager
    def pipelined(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueTx]:
        tx = QueueTx(self)
        try:
            yield tx
            with self._lock:
                self.end(group, partition, epoch, tx)
        finally:
            tx.connection.over = True

    transaction: Any = None  # that this one is not asked for


class AwaitedQueueTx:
    def __init__(self, tx: QueueTx) -> None:
        self.connection = tx.connection
        self.fault = tx.fault
        self._tx = tx

    async def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        await asyncio.sleep(0)
        self._tx.advance(old, new, leader_epoch)


class AwaitedQueueStore(QueueStore):
    """The same, awaited."""

    by_record: ClassVar[bool] = False
    async_connection_types: ClassVar[tuple[type, ...]] = (Queue,)

    @asynccontextmanager
    async def async_transaction(self, group: str, partition: Partition, epoch: int) -> AsyncIterator[AwaitedQueueTx]:
        await asyncio.sleep(0)
        with QueueStore.transaction(self, group, partition, epoch) as tx:
            yield AwaitedQueueTx(tx)

    transaction: Any = None  # that this one is not asked for


async def awaited_write(queue: Queue, number: int) -> None:
    await asyncio.sleep(0)
    queue.put(number)


def awaited_subject_of(store: AwaitedQueueStore) -> Subject:
    return replace(subject_of(store), open=lambda: awaited(store), write=awaited_write)


def subject_of(store: QueueStore) -> Subject:
    return Subject(
        open=lambda: store,
        write=lambda queue, number: queue.put(number),
        effects=lambda: store.effects,
        away=store.away,
    )
