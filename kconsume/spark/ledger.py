"""Where a stream keeps what it has done: what every ledger can do, and the one for stores without shared transactions.

A ledger is what the batches of one query need of an offset store: the partitions claimed, the plan persisted before it
runs, a transaction over all ranges of a batch, and the store's word afterwards. On PostgreSQL (`ledger_postgres.py`)
all of it; elsewhere the offsets pass after the handler, behind the fence where the store has one: at least once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, Protocol

from kconsume.backends.abc import FencedStore, OffsetStore, Position, Positions
from kconsume.errors import Fenced, StoreError, StreamTaken
from kconsume.failures.letters import Letter
from kconsume.output import Outgoing
from kconsume.records import Partition
from kconsume.spark.ranges import OffsetRange, Plan


class RangesTx(Protocol):
    """A transaction over the ranges of one batch."""

    @property
    def connection(self) -> object:
        """What the handler gets; None where the store has nothing to give."""
        ...

    def piece(self) -> AbstractContextManager[None]:
        """A part of it that is undone by itself when it raises."""
        ...

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        """Dead letters, into a table."""
        ...

    def post(self, partition: Partition, outgoing: Sequence[Outgoing]) -> None:
        """Records that leave once the transaction has committed."""
        ...

    def finish(self, ranges: Sequence[OffsetRange], positions: Positions) -> None:
        """Move the offsets over these ranges, and be done with the plan. Called once, last."""
        ...

    def fault(self, error: BaseException) -> StoreError | None:
        """As `backends.abc.Tx.fault`."""
        ...


class Ledger(Protocol):
    """Of one query of a group."""

    exactly_once: ClassVar[bool]
    """Whether what a handler writes through the transaction commits with the offsets."""

    def enter(self, topics: Sequence[str]) -> None:
        """Be the one query of the group that reads these topics; `StreamTaken` if another is alive."""
        ...

    def also(self, topics: Sequence[str]) -> None:
        """The same of topics that appeared later."""
        ...

    def beat(self) -> bool:
        """Say that we are alive; answers whether somebody has asked to stop."""
        ...

    def leave(self) -> None:
        """Let go of it all."""
        ...

    def pending(self) -> Plan | None:
        """The plan that was begun and not finished, by whoever."""
        ...

    def begin(self, plan: Plan) -> int | None:
        """Persist the plan before it runs; its number, the same when the same plan is begun again."""
        ...

    def reserve(self, count: int) -> int | None:
        """The first of `count` numbers for parts of the pending plan. They are higher than the plan's own number, and
        lower than the number that the plan gets when it is begun again."""
        ...

    def drop(self) -> None:
        """Forget the pending plan: it is done, or no longer what has to be done."""
        ...

    def transaction(self, positions: Positions) -> AbstractContextManager[RangesTx]:
        """Over these partitions, under their epochs."""
        ...


class PlainTx:
    """No transaction at all: the offsets are saved when it is finished."""

    connection: None = None

    def __init__(self, store: OffsetStore, group: str) -> None:
        self._store = store
        self._group = group

    @contextmanager
    def piece(self) -> Iterator[None]:
        yield

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        raise StoreError(f"{self._store.address} has no tables for {len(letters)} dead letters to {table}")

    def post(self, partition: Partition, outgoing: Sequence[Outgoing]) -> None:
        raise StoreError(f"{self._store.address} has no outbox for {len(outgoing)} records of {partition}")

    def finish(self, ranges: Sequence[OffsetRange], positions: Positions) -> None:
        moved = {each.partition: _moved(positions[each.partition], each.end) for each in ranges}
        if not isinstance(self._store, FencedStore):
            stored = self._store.load(self._group, moved)
            for each in ranges:
                at = stored[each.partition].next_offset if each.partition in stored else each.first
                if at != each.first:
                    raise Fenced(
                        f"{each.partition} of group {self._group!r} was at {each.first} and is at {at} now: another "
                        f"consumer of the group is at work; stop it, or give this query a group of its own"
                    )
        self._store.save(self._group, moved)

    def fault(self, error: BaseException) -> StoreError | None:  # noqa: ARG002
        return None


def _moved(position: Position, end: int) -> Position:
    return Position(end, position.epoch, position.topic_id, position.owner)


_here: set[tuple[str, str, str]] = set()
_guard = threading.Lock()


class PlainLedger:
    """Of a store whose transactions are not shared with handlers here. Of other processes it knows nothing; the epochs
    of a fenced store keep them apart."""

    exactly_once: ClassVar[bool] = False

    def __init__(self, store: OffsetStore, group: str) -> None:
        self._store = store
        self._group = group
        self._held: set[tuple[str, str, str]] = set()

    def enter(self, topics: Sequence[str]) -> None:
        wanted = {(self._store.address, self._group, topic) for topic in topics} - self._held
        with _guard:
            if taken := wanted & _here:
                raise taken_by(self._group, min(taken)[2], "this process")
            _here.update(wanted)
        self._held |= wanted

    also = enter

    def beat(self) -> bool:
        return False

    def leave(self) -> None:
        with _guard:
            _here.difference_update(self._held)
        self._held.clear()

    def pending(self) -> Plan | None:
        return None

    def begin(self, plan: Plan) -> int | None:  # noqa: ARG002
        return None

    def reserve(self, count: int) -> int | None:  # noqa: ARG002
        return None

    def drop(self) -> None:
        return None

    @contextmanager
    def transaction(self, positions: Mapping[Partition, Position]) -> Iterator[RangesTx]:  # noqa: ARG002
        yield PlainTx(self._store, self._group)


def taken_by(group: str, topic: str, who: str) -> StreamTaken:
    return StreamTaken(
        f"group {group!r} has a Spark query on topic {topic!r} already, in {who}: two would do the same work; stop "
        f"that one (handle.drain(), or kconsume.spark.request_stop), or give this one a group of its own"
    )


def connection_types(store: OffsetStore) -> tuple[type, ...]:
    """The annotations by which a handler asks for the transaction of a batch in this store."""
    types: tuple[type, ...] = getattr(store, "connection_types", ())
    return tuple(each for each in types if f"{each.__module__}.{each.__qualname__}" == "psycopg.Connection")


def ledger_of(store: OffsetStore, group: str, name: str, owner: str, *, by_handler: bool) -> Ledger:
    """That of this store, for one query of the group. `by_handler`: as for `PostgresLedger`."""
    try:
        from kconsume.backends.postgres import PostgresStore
        from kconsume.spark.ledger_postgres import PostgresLedger
    except ImportError:
        return PlainLedger(store, group)
    if isinstance(store, PostgresStore):
        return PostgresLedger(store, group, name, owner, by_handler=by_handler)
    return PlainLedger(store, group)
