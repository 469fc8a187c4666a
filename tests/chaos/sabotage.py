"""What the chaos worker changes in kconsume: to watch it, to make it slow to notice, or to take a guard away.

A guard that is taken away is a negative control: the same test must then find duplicates.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import psycopg
from confluent_kafka import Producer

from kconsume import Outgoing, Partition
from kconsume._runtime import loop
from kconsume._runtime.assignment.assignment import Assignment
from kconsume._runtime.assignment.partition import OwnedPartition
from kconsume._runtime.deadlines import Deadline
from kconsume._runtime.lanes import backpressure
from kconsume._runtime.lanes.lane import Lane
from kconsume._runtime.loop import Loop
from kconsume._runtime.output.outbox_relay import OutboxRelay
from kconsume._runtime.output.partition_outbox import PartitionOutbox
from kconsume._runtime.output.publisher import Publisher
from kconsume._runtime.processing import transactional
from kconsume._runtime.processing.steps import SliceStep, StepResult
from kconsume.backends import SqliteStore
from kconsume.backends import claim as claiming
from kconsume.backends.base import Refused, TransactionalStore, Tx
from kconsume.backends.postgres import database as postgres_database
from kconsume.backends.postgres import statements
from kconsume.backends.postgres import store as postgres
from kconsume.backends.postgres.dead_letters import writer
from kconsume.backends.postgres.transaction import PostgresTx
from kconsume.backends.redis import scripts
from kconsume.backends.redis.store import RedisStore
from kconsume.backends.sqlite import statements as sqlite_statements
from kconsume.backends.sqlite.transaction import SqliteTx
from kconsume.errors import StoreUnavailable
from kconsume.failures.letter_headers import Letter
from tests.chaos.phases import Board, Phase

_log = logging.getLogger("kconsume.chaos")

Begin = Callable[[Any, str, Partition, int], AbstractContextManager[Tx]]
Delivered = Callable[[Any, str, Mapping[Partition, Sequence[int]]], None]


def watch_transactions(board: Board) -> None:
    """Put on the board when a transaction is open and when it ends, and into the log when the store refuses it."""
    for store in (SqliteStore, postgres.PostgresStore, RedisStore):
        for name in ("transaction", "pipelined"):
            if hasattr(store, name):
                setattr(store, name, _watched(getattr(store, name), board))


def _watched(begin: Begin, board: Board) -> Begin:
    @contextmanager
    def watched(self: TransactionalStore, group: str, partition: Partition, epoch: int) -> Iterator[Tx]:
        try:
            with begin(self, group, partition, epoch) as tx:
                board.set(Phase.TRANSACTION)
                yield tx
                board.set(Phase.COMMIT)
        except Exception as error:
            _log.warning("refused transaction partition=%s epoch=%d as=%s", partition, epoch, type(error).__name__)
            raise
        finally:
            board.set(Phase.IDLE)

    return watched


def watch_the_relay(board: Board) -> None:
    """Put on the board when rows of the outbox are confirmed and about to be deleted, long enough to be seen."""
    # Who waits for the turnstile has deleted nothing yet; who has asked a server may have.
    late = _late(SqliteStore.delivered, board, Phase.RELAY)
    SqliteStore.delivered = late  # type: ignore[method-assign, assignment]
    late = _late(postgres.PostgresStore.delivered, board, Phase.IDLE)
    postgres.PostgresStore.delivered = late  # type: ignore[method-assign, assignment]


def _late(delivered: Delivered, board: Board, deleting: Phase) -> Delivered:
    def late(self: Any, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        with board.during(Phase.RELAY, deleting):
            time.sleep(0.005)
        try:
            delivered(self, group, numbers)
        finally:
            board.set(Phase.IDLE)

    return late


def delete_what_is_not_confirmed(board: Board) -> None:
    """The rows of a lot are deleted first, and then sent."""
    ship = OutboxRelay._deliver

    def too_soon(self: OutboxRelay, outbox: PartitionOutbox) -> None:
        if outbox.in_flight:
            partition = next(p for p, each in self._outboxes.items() if each is outbox)
            self._store.delivered(self._group, {partition: [row.number for row in outbox.in_flight]})
            with board.during(Phase.RELAY, Phase.IDLE):
                time.sleep(0.01)
        ship(self, outbox)

    OutboxRelay._deliver = too_soon  # type: ignore[method-assign]


def part_letters_from_their_offsets(board: Board, brokers: str, database: str) -> None:
    """Each is written when the offset has passed its record: not before, for what is there is not written again."""
    keep, producer = Publisher.keep, Producer({"bootstrap.servers": brokers, "acks": "all", "log_level": 0})

    apart: dict[int, Sequence[Letter]] = {}

    def without_letters(
        self: Publisher, sent: Sequence[Outgoing], letters: Sequence[Letter], tx: Tx
    ) -> Sequence[Outgoing]:
        apart[threading.get_ident()] = letters
        return keep(self, sent, (), tx)

    def then_write(self: Publisher, partition: Partition, rows: Sequence[Outgoing]) -> None:
        for letter in apart.pop(threading.get_ident()):
            with board.during(Phase.APART, Phase.IDLE):
                time.sleep(0.01)
            if self._table is not None:
                write(self._table, letter)
            else:
                headers: list[tuple[str, str | bytes | None]] = [*letter.headers, *letter.added_headers]
                producer.produce(cast(str, self._topic), letter.value, letter.key, headers=headers)
                producer.flush()

    def write(table: str, letter: Letter) -> None:
        with psycopg.connect(database) as own:
            for statement in (*writer.create_table(table), *writer.insert_letters(table, [letter])):
                own.execute(*statement)

    Publisher.keep, Publisher.committed = without_letters, then_write  # type: ignore[method-assign]


def accept_every_claim() -> None:
    """The claims of all but Redis are not ordered."""
    claiming.accepts = lambda *_: True


def hold_the_first_claim(gate: Path) -> None:
    """On PostgreSQL: it has its partitions and its generation, and waits before it asks the server."""
    claim = postgres.PostgresStore.claim
    waits = [True]

    def held(self: postgres.PostgresStore, *asked: Any) -> claiming.ClaimResults:
        if not waits:
            return claim(self, *asked)
        waits.clear()
        _log.warning("claim at the gate")
        while not gate.exists():
            time.sleep(0.01)
        answers = claim(self, *asked)
        _log.warning("claim through the gate refused=%d", sum(isinstance(each, Refused) for each in answers.values()))
        return answers

    postgres.PostgresStore.claim = held  # type: ignore[method-assign, assignment]


def commit_by_windows_alone(records: int) -> None:
    """Offsets are committed when so many are finished and not committed, and not by the clock. The clock's part is done
    here for a commit that was refused, as in a rebalance, for one that had no answer, and for a full window that met a
    commit that was not answered yet: each is tried again."""
    loop.COMMIT_EVERY = 3600.0
    backpressure.Backpressure.MOST_RECORDS = records
    turn, commit = Loop._turn, Loop._commit

    def turn_and_try_again(self: Loop) -> None:
        committer = self._assignment.commits._committer
        given_up = committer._given_up_count  # type: ignore[attr-defined]
        refused = any(result.error is not None for result in self._consumer.commit_results)
        turn(self)
        if refused or committer._given_up_count > given_up:  # type: ignore[attr-defined]
            self._commit_at = min(self._commit_at, time.monotonic() + 0.5)

    def commit_when_free(self: Loop, now: float) -> None:
        was_busy = self._assignment.commits._committer.busy
        commit(self, now)
        if was_busy:
            self._commit_at = now + 0.05

    Loop._turn = turn_and_try_again  # type: ignore[method-assign]
    Loop._commit = commit_when_free  # type: ignore[method-assign]


def notice_slowly() -> None:
    """Between waking and learning of the loss, handlers run on. Classic groups learn soon, KIP-848 ones late: make
    that time long enough to be met by every run."""
    lost = Assignment.lost

    def late(self: Assignment, partitions: list[Partition]) -> None:
        time.sleep(1.0)
        lost(self, partitions)

    Assignment.lost = late  # type: ignore[method-assign]


def notice_when_told(told: Path) -> None:
    """As above, for as long as the test wants it."""
    lost = Assignment.lost

    def late(self: Assignment, partitions: list[Partition]) -> None:
        while not told.exists():
            time.sleep(0.01)
        lost(self, partitions)

    Assignment.lost = late  # type: ignore[method-assign]


def stop_for_nobody() -> None:
    """Lanes of partitions that went work off what they have, and nobody waits for them."""

    def unseen(self: Assignment, leaving: list[OwnedPartition], deadline: Deadline) -> int:
        return 0

    def ignored(self: Assignment, owned_partitions: list[OwnedPartition], reason: str) -> int:
        return 0

    Assignment._brake = ignored  # type: ignore[method-assign]
    Assignment.drain = unseen  # type: ignore[method-assign]


def take_the_fence_away() -> None:
    """The same stores with neither epoch nor offset compared, and with nobody's transaction ended."""
    _take_it_from_sqlite()
    _take_it_from_postgres()
    _take_it_from_redis()


def _take_it_from_sqlite() -> None:
    sqlite_statements.ADVANCE = "update kconsume_offsets set next_offset = ?1, leader_epoch = ?2, updated_at = ?3 \
        where group_id = ?4 and topic = ?5 and partition = ?6 and ?7 >= 0 and ?8 >= 0"
    _begin_under_any_epoch(SqliteStore)


def _take_it_from_redis() -> None:
    text = scripts.APPLY.text.replace("held[1] ~= ARGV[1]", "false").replace("held[2] ~= ARGV[2]", "false")
    scripts.APPLY = scripts.Script(text)
    _begin_under_any_epoch(RedisStore)


def _begin_under_any_epoch(store: type[SqliteStore] | type[RedisStore]) -> None:
    begin: Begin = store.transaction

    def unchecked(self: TransactionalStore, group: str, partition: Partition, epoch: int) -> AbstractContextManager[Tx]:
        (current,) = self.load(group, [partition]).values()
        return begin(self, group, partition, current.epoch)

    store.transaction = unchecked  # type: ignore[method-assign, assignment]


def _take_it_from_postgres() -> None:
    class Unfenced(statements.Statements):
        @property
        def check(self) -> str:
            return super().check.replace("epoch = %(epoch)s", "%(epoch)s >= 0")

        @property
        def advance(self) -> str:
            return (
                super()
                .advance.replace("epoch = %(epoch)s", "%(epoch)s >= 0")
                .replace("next_offset = %(old)s", "%(old)s >= 0")
            )

    def let_them(self: postgres.PostgresStore, group: str, epochs: Mapping[Partition, int]) -> None:
        """Nobody is ended."""

    postgres_database.Statements = Unfenced  # type: ignore[attr-defined]
    postgres.PostgresStore._end_earlier_owners = let_them  # type: ignore[method-assign]


def retry_what_may_be_done() -> None:
    """When the connection broke, run the same records once more, as if nothing could have been committed."""
    once = transactional.TransactionalAttempt._once

    def again(self: transactional.TransactionalAttempt, lane: Lane, step: SliceStep) -> StepResult:
        while True:
            try:
                return once(self, lane, step)
            except StoreUnavailable as error:
                _log.warning("retried partition=%s cause=%s", lane.partition, error)
                time.sleep(0.05)

    transactional.TransactionalAttempt._once = again  # type: ignore[method-assign]


def take_everything_in() -> None:
    """Whatever comes is new."""

    def all_of_them(self: object, origins: Sequence[str]) -> set[str]:
        return set(origins)

    for transaction in (SqliteTx, PostgresTx):
        transaction.record_origins = all_of_them  # type: ignore[method-assign]


def die_before_the_outbox_is_told(once: Path) -> None:
    """When the brokers have confirmed rows of the outbox, and before they are deleted: the next owner sends them again.
    The first process that comes there makes the file, and dies."""
    delete = OutboxRelay._delete

    def die(self: OutboxRelay, outboxes: Mapping[Partition, Any]) -> None:
        if any(outbox.confirmed for outbox in outboxes.values()) and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        delete(self, outboxes)

    OutboxRelay._delete = die  # type: ignore[method-assign]
