"""What the batches of one query need of an offset store, and the ledger for stores without shared transactions.

A ledger registers the query, persists each plan before it runs, and opens a transaction over all ranges of a batch.
PostgreSQL offers all of this (`kconsume.spark._batch.ledger.postgres`). In any other store the offsets are saved after
the handler returned, fenced if the store has epochs. The guarantee is then at-least-once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, Protocol

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends.base import OffsetStore, Position, Positions
from kconsume.backends.capabilities import capabilities_of
from kconsume.errors import Fenced, StoreError, StreamTaken
from kconsume.failures.letter_headers import Letter
from kconsume.records import Partition
from kconsume.spark._batch.ranges import OffsetRange, Plan


class RangesTx(Protocol):
    """A transaction over all partitions of one batch."""

    @property
    def connection(self) -> object:
        """What the handler gets; None if the store offers no transaction."""
        ...

    def savepoint(self) -> AbstractContextManager[None]:
        """If the block raises, its writes are rolled back and the transaction continues."""
        ...

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        """Write dead letters into a table, which is made if it is missing."""
        ...

    def post(self, partition: Partition, outgoing: Sequence[Outgoing]) -> None:
        """Add records to the outbox of the partition. They are sent after COMMIT."""
        ...

    def finish(self, ranges: Sequence[OffsetRange], positions: Positions) -> None:
        """Move the offsets to the ends of these ranges, and drop the pending plan. Must be called once, and last.

        Args:
            positions: all partitions of the transaction, with their epochs.
        """
        ...

    def fault(self, error: BaseException) -> StoreError | None:
        """As `Tx.fault` in `kconsume.backends.base`."""
        ...


class Ledger(Protocol):
    """The part of an offset store that one query of a group uses."""

    exactly_once: ClassVar[bool]
    """True if what a handler writes through the transaction commits with the offsets."""

    def register(self, topics: Sequence[str]) -> None:
        """Register as the group's only query of these topics. Raises `StreamTaken` if another such query is alive."""
        ...

    def add_topics(self, topics: Sequence[str]) -> None:
        """Register, as `register` does, for topics that appeared later."""
        ...

    def heartbeat(self) -> bool:
        """Record that this query is alive. Returns True if a stop was requested.

        Raises `Fenced` if another query has taken the name.
        """
        ...

    def unregister(self) -> None:
        """Release the topics."""
        ...

    def pending_plan(self) -> Plan | None:
        """The unfinished plan of this query, or of an earlier query of the same name."""
        ...

    def begin_plan(self, plan: Plan) -> int | None:
        """Persist the plan before it runs. Returns its number; the same plan, begun again, has the same number."""
        ...

    def reserve_numbers(self, count: int) -> int | None:
        """Reserve `count` numbers for parts of the pending plan, and return the first.

        The reserved numbers are higher than the plan's own number, and lower than the number that the plan gets when it
        is begun again.
        """
        ...

    def drop_plan(self) -> None:
        """Delete the pending plan."""
        ...

    def transaction(self, positions: Positions) -> AbstractContextManager[RangesTx]:
        """A transaction over these partitions, under their epochs."""
        ...


class OffsetsOnlyTx:
    """No real transaction: `finish` saves the offsets, and nothing else commits with them."""

    connection: None = None

    def __init__(self, store: OffsetStore, group: str) -> None:
        self._store = store
        self._group = group

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        yield

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        raise StoreError(f"{self._store.address} has no tables: {len(letters)} dead letters cannot go to {table}")

    def post(self, partition: Partition, outgoing: Sequence[Outgoing]) -> None:
        raise StoreError(f"{self._store.address} has no outbox: {len(outgoing)} records of {partition} are not sent")

    def finish(self, ranges: Sequence[OffsetRange], positions: Positions) -> None:
        moved = {each.partition: _moved(positions[each.partition], each.end) for each in ranges}
        if capabilities_of(self._store).fenced is None:
            stored = self._store.load(self._group, moved)
            for each in ranges:
                at = stored[each.partition].next_offset if each.partition in stored else each.first
                if at != each.first:
                    raise Fenced(
                        f"{each.partition} of group {self._group!r} was at {each.first} and is at {at} now: another "
                        f"consumer of the group is running; stop it, or give this query a group of its own"
                    )
        self._store.save(self._group, moved)

    def fault(self, error: BaseException) -> StoreError | None:  # noqa: ARG002
        return None


def _moved(position: Position, end: int) -> Position:
    return Position(end, position.epoch, position.topic_id, position.owner)


_taken: set[tuple[str, str, str]] = set()
"""Store, group and topic of each query of this process. Guarded by `_taken_lock`."""
_taken_lock = threading.Lock()


class OffsetsOnlyLedger:
    """For stores that have no transaction for handlers under Spark.

    It registers queries of this process only. Against a query of another process, only the epochs of a fenced store
    protect the offsets.
    """

    exactly_once: ClassVar[bool] = False

    def __init__(self, store: OffsetStore, group: str) -> None:
        self._store = store
        self._group = group
        self._registered: set[tuple[str, str, str]] = set()

    def register(self, topics: Sequence[str]) -> None:
        wanted = {(self._store.address, self._group, topic) for topic in topics} - self._registered
        with _taken_lock:
            if taken := wanted & _taken:
                raise stream_taken(self._group, min(taken)[2], "this process")
            _taken.update(wanted)
        self._registered |= wanted

    add_topics = register

    def heartbeat(self) -> bool:
        return False

    def unregister(self) -> None:
        with _taken_lock:
            _taken.difference_update(self._registered)
        self._registered.clear()

    def pending_plan(self) -> Plan | None:
        return None

    def begin_plan(self, plan: Plan) -> int | None:  # noqa: ARG002
        return None

    def reserve_numbers(self, count: int) -> int | None:  # noqa: ARG002
        return None

    def drop_plan(self) -> None:
        return None

    @contextmanager
    def transaction(self, positions: Mapping[Partition, Position]) -> Iterator[RangesTx]:  # noqa: ARG002
        yield OffsetsOnlyTx(self._store, self._group)


def stream_taken(group: str, topic: str, owner: str) -> StreamTaken:
    return StreamTaken(
        f"group {group!r} has a Spark query on topic {topic!r} already, in {owner}, and two queries would do the same "
        f"work: stop that query (drain() of its stream, or kconsume.spark.request_stop), or give this query a group of "
        f"its own"
    )


def connection_types(store: OffsetStore) -> tuple[type, ...]:
    """The annotations by which a handler can ask for the transaction of a batch in this store."""
    types = capabilities_of(store).connection_types
    return tuple(each for each in types if f"{each.__module__}.{each.__qualname__}" == "psycopg.Connection")


def open_ledger(store: OffsetStore, group: str, name: str, owner: str, *, by_handler: bool) -> Ledger:
    """The ledger of this store for one query of the group. The parameters are those of `PostgresLedger`."""
    try:
        from kconsume.backends.postgres.store import PostgresStore
        from kconsume.spark._batch.ledger.postgres import PostgresLedger
    except ImportError:
        return OffsetsOnlyLedger(store, group)
    if isinstance(store, PostgresStore):
        return PostgresLedger(store, group, name, owner, by_handler=by_handler)
    return OffsetsOnlyLedger(store, group)
