"""Stand-ins for what comes from outside: the client's message, and a store whose transactions are lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from kconsume.backends import MemoryStore, Position
from kconsume.errors import Fenced, StoreError
from kconsume.records import Partition

ORDERS = Partition("orders", 0)


class FakeMessage:
    """What kconsume reads of a message, given as values."""

    def __init__(
        self,
        value: bytes | None = b"",
        *,
        offset: int = 0,
        key: bytes | None = None,
        topic: str = "orders",
        partition: int = 0,
        headers: list[tuple[str, bytes | None]] | None = None,
        timestamp: tuple[int, int] = (1, 1_700_000_000_123),
        leader_epoch: int | None = None,
    ) -> None:
        self._value = value
        self._offset = offset
        self._key = key
        self._topic = topic
        self._partition = partition
        self._headers = headers
        self._timestamp = timestamp
        self._leader_epoch = leader_epoch

    def topic(self) -> str:
        return self._topic

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        return self._timestamp

    def leader_epoch(self) -> int | None:
        return self._leader_epoch

    def __len__(self) -> int:
        return len(self._value or b"")

    def __repr__(self) -> str:
        return f"FakeMessage({self._topic}/{self._partition}@{self._offset})"


class Writes(list[int]):
    """The transaction of a `ListStore`, as a handler gets it: append to it."""


class ListStore(MemoryStore):
    """A transactional store in memory. What a handler appends is in `effects` once its transaction commits."""

    connection_types: ClassVar[tuple[type, ...]] = (Writes,)
    parallel: ClassVar[int | None] = None
    by_record: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.faults: dict[type[BaseException], StoreError] = {}
        """Errors of handlers that the store takes on itself."""
        self.effects: list[int] = []
        self.moves: list[tuple[int, int]] = []
        """Each (old, new) by which the offset was advanced and committed."""
        self.before_begin: Callable[[], None] = _nothing
        self.before_commit: Callable[[], None] = _nothing

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[ListTx]:
        self.before_begin()
        self._must_be(group, partition, epoch)
        tx = ListTx(self, group, partition, epoch)
        yield tx
        self.before_commit()
        self._must_be(group, partition, epoch)
        self.effects.extend(tx.connection)
        for old, new in tx.moves:
            self.save(group, {partition: Position(new, epoch)})
            self.moves.append((old, new))

    def _must_be(self, group: str, partition: Partition, epoch: int) -> None:
        if self.row(group, partition).epoch != epoch:
            raise Fenced(f"{partition}: epoch {epoch} is not the store's")

    def row(self, group: str, partition: Partition) -> Position:
        return self.load(group, [partition])[partition]


class ListTx:
    def __init__(self, store: ListStore, group: str, partition: Partition, epoch: int) -> None:
        self.connection = Writes()
        self.moves: list[tuple[int, int]] = []
        self._store = store
        self._group = group
        self._partition = partition

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        assert not self.moves, "advance is called once"
        if self._store.row(self._group, self._partition).next_offset != old:
            raise Fenced(f"{self._partition} is not at offset {old}")
        self.moves.append((old, new))

    def fault(self, error: BaseException) -> StoreError | None:
        return self._store.faults.get(type(error))


def messages_at(offsets: Iterable[int]) -> list[FakeMessage]:
    return [FakeMessage(b"%d" % offset, offset=offset) for offset in offsets]


def _nothing() -> None:
    pass
