"""The harness of the suites: consumers with store objects of their own, and the rows and effects seen from outside.

The harness acts as the runtime does: an error of a handler is passed to `Tx.fault`, and the offset is advanced last.
The harness asserts nothing about the behaviour of the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import pytest

from kconsume.backends.base import (
    ClaimTerms,
    FencedStore,
    OffsetStore,
    Position,
    Positions,
    Start,
    TransactionalStore,
    Tx,
)
from kconsume.backends.capabilities import capabilities_of
from kconsume.backends.claim import ClaimResults, granted
from kconsume.errors import Fenced, StoreError, StoreUnavailable
from kconsume.records import Partition
from kconsume.testing.conformance.async_driver import AwaitedTx
from kconsume.testing.conformance.subject import Subject

_T = TypeVar("_T")

LONG = 60.0
"""Seconds after which a thread of a test is considered hung."""

NOT_OURS = (Fenced, StoreUnavailable)
"""How a store may refuse an owner that was fenced while its transaction was open: by `Fenced`, or by a broken
connection, after which the owner learns of the fence at its next claim."""


class Bench:
    """The subject, a group, four partitions, and as many consumers as a test needs."""

    def __init__(self, subject: Subject, group: str | None = None) -> None:
        self.subject = subject
        self.group = subject.group if group is None else group
        self.partitions = [Partition(subject.topic, number) for number in range(4)]
        self._opened = ExitStack()
        self._me: Owner | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def me(self) -> Owner:
        """The first consumer of a test."""
        if self._me is None:
            self._me = self.owner("me")
        return self._me

    @property
    def store(self) -> OffsetStore:
        return self.me.store

    def owner(self, name: str) -> Owner:
        """Another consumer of the group, with a store object of its own."""
        return Owner(name, self.open(), self)

    def open(self) -> OffsetStore:
        """A store object that is closed when the test ends."""
        store = self.subject.open()
        self._opened.callback(store.close)
        return store

    def of_group(self, group: str) -> Bench:
        """A bench on the same place, for another group."""
        return self._opened.enter_context(Bench(self.subject, group))

    def rows(self) -> dict[Partition, Position]:
        return self.store.load(self.group, self.partitions)

    def offsets(self) -> dict[Partition, int]:
        return {p: position.next_offset for p, position in self.rows().items()}

    def move(self, offsets: Mapping[Partition, int], topic_id: str | None = None) -> None:
        """Claim partitions and save these offsets."""
        self.me.claim(*offsets)
        self.me.save(offsets, topic_id=topic_id)

    def effects(self) -> list[int]:
        """The committed effects, sorted. `number` maps a record to its effect."""
        if self.subject.effects is None:
            pytest.fail("the Subject of a transactional store needs effects=, to read back what write= wrote")
        return sorted(self.subject.effects())

    def settled(self, partition: Partition) -> bool:
        """True if the partition has exactly one effect for each record below its offset, and no other effect."""
        passed = self.offsets().get(partition, 0)
        return [n for n in self.effects() if _is_of(n, partition)] == [number(partition, at) for at in range(passed)]


@dataclass
class Owner:
    """A consumer: its store object, and the positions that it regards as its own. The consumer may be a zombie without
    knowing it."""

    name: str
    store: OffsetStore
    bench: Bench
    held: dict[Partition, Position] = field(default_factory=dict)

    @property
    def fenced(self) -> FencedStore:
        """The store, at the second level."""
        fenced = capabilities_of(self.store).fenced
        assert fenced is not None, f"{type(self.store).__name__} is no FencedStore: it needs claim, reclaim"
        return fenced

    @property
    def transactional(self) -> TransactionalStore:
        """The store, at the third level."""
        transactional = capabilities_of(self.store).transactional
        assert transactional is not None, (
            f"{type(self.store).__name__} is no TransactionalStore: it needs claim, reclaim, transaction, "
            f"connection_types, parallel, by_record"
        )
        return transactional

    def claim(self, *partitions: Partition, at: int = 0) -> dict[Partition, Position]:
        """Claim these partitions, or all. A store of the first level has no claims: the positions are only loaded."""
        chosen = partitions or tuple(self.bench.partitions)
        if capabilities_of(self.store).fenced is not None:
            claimed = self.claim_from(lambda missing: dict.fromkeys(missing, Position(at)), *chosen)
        else:
            claimed = {p: self.store.load(self.bench.group, [p]).get(p, Position(at)) for p in chosen}
        self.held.update(claimed)
        return claimed

    def claim_from(
        self, start: Callable[[Sequence[Partition]], Positions], *partitions: Partition
    ) -> dict[Partition, Position]:
        """Claim partitions, with the given `start`."""
        claimed = granted(self.fenced.claim(self.bench.group, partitions, self.name, start))
        self.held.update(claimed)
        return claimed

    def claim_under(self, terms: ClaimTerms, *partitions: Partition, start: Start | None = None) -> ClaimResults:
        """Claim these partitions, or all, on these terms. Keeps the positions of those that are granted."""
        chosen = partitions or tuple(self.bench.partitions)
        begin = start or (lambda missing: dict.fromkeys(missing, Position(0)))
        answers = self.fenced.claim(self.bench.group, chosen, self.name, begin, terms)
        self.held.update({p: answer for p, answer in answers.items() if isinstance(answer, Position)})
        return answers

    def reclaim(self, *partitions: Partition) -> dict[Partition, Position]:
        """Reclaim owned partitions."""
        epochs = {p: self.held[p].epoch for p in partitions}
        claimed = self.fenced.reclaim(self.bench.group, epochs, self.name)
        self.held.update(claimed)
        return claimed

    def save(
        self, offsets: Mapping[Partition, int], topic_id: str | None = None, leader_epoch: int | None = None
    ) -> None:
        """Save offsets under the owned epochs."""
        change = {"topic_id": topic_id, "leader_epoch": leader_epoch}
        positions = {p: replace(self.held[p], next_offset=at, **cast(Any, change)) for p, at in offsets.items()}
        self.store.save(self.bench.group, positions)

    @contextmanager
    def transaction(self, partition: Partition, epoch: int | None = None) -> Iterator[Handling]:
        """A transaction under the owned epoch, run as the runtime does."""
        held = self.held[partition].epoch if epoch is None else epoch
        with self.transactional.transaction(self.bench.group, partition, held) as tx:
            try:
                yield Handling(tx, partition, self)
            except StoreError:
                raise
            except Exception as error:
                behind = tx.fault(error)
                if behind is None:
                    raise
                raise behind from error

    def run(self, partition: Partition, handler: Callable[[Handling], object]) -> None:
        """Run a handler of the test in a transaction."""
        with self.transaction(partition) as handling:
            handler(handling)

    def handle(self, partition: Partition, records: int = 1) -> None:
        """Handle the next records: write their effects and advance the offset, in one transaction."""
        at = self.held[partition].next_offset
        with self.transaction(partition) as handling:
            for offset in range(at, at + records):
                handling.write(offset)
            handling.advance(at, at + records)
        self.held[partition] = replace(self.held[partition], next_offset=at + records)


@dataclass(frozen=True)
class Handling:
    """An open transaction, its partition and its owner."""

    tx: Tx
    partition: Partition
    owner: Owner

    def write(self, offset: int) -> None:
        """Write the effect of one record, as its handler would."""
        write = self.owner.bench.subject.write
        if write is None:
            pytest.fail("the Subject of a transactional store needs write=, to write an effect in a transaction")
        connection = self.tx.connection
        if self.owner.transactional.by_record:
            cast(Any, connection).next_record(offset)
        if isinstance(self.tx, AwaitedTx):
            self.tx.wait_for(lambda: write(connection, number(self.partition, offset)))
        else:
            write(connection, number(self.partition, offset))

    def handle(self, offset: int) -> None:
        """Write the effect of one record and advance the offset behind it."""
        self.write(offset)
        self.advance(offset, offset + 1)

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        self.tx.advance(old, new, leader_epoch)


def below(handling: Handling) -> object:
    """The transaction of the store itself, without the wrapper that drives an async transaction."""
    return handling.tx.awaited if isinstance(handling.tx, AwaitedTx) else handling.tx


_PARTITION = 1_000_000


def number(partition: Partition, offset: int) -> int:
    """The effect of a record; different for each record of a test."""
    return partition.number * _PARTITION + offset % _PARTITION


def _is_of(effect: int, partition: Partition) -> bool:
    return effect // _PARTITION == partition.number


def at_once(count: int, act: Callable[[int, threading.Barrier], _T]) -> list[_T]:
    """Run `act` in `count` threads at once. Each thread gets its number, and a barrier for all threads. If a thread
    raises, the barrier is broken, and the error is raised here."""
    gate = threading.Barrier(count, timeout=LONG)

    def guarded(each: int) -> _T:
        try:
            return act(each, gate)
        except BaseException:
            gate.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        doing = [pool.submit(guarded, each) for each in range(count)]
    errors = [error for error in (each.exception() for each in doing) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [each.result() for each in doing]


@contextmanager
def meanwhile(act: Callable[[], _T]) -> Iterator[Future[_T]]:
    """Run `act` in a thread while the block runs. The end of the block waits for the thread."""
    with ThreadPoolExecutor(1) as pool:
        doing = pool.submit(act)
        yield doing
        doing.result(LONG)


def once_it_is_back(call: Callable[[], _T]) -> _T:
    """Repeat the call while the place is unavailable, as the runtime does."""
    deadline = time.monotonic() + LONG
    while True:
        try:
            return call()
        except StoreUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
