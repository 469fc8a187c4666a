"""What the chaos worker changes in kconsume: to watch it, to make it slow to notice, or to take a guard away.

A guard that is taken away is a negative control: the same test must then find duplicates.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import psycopg
from confluent_kafka import Producer

from kconsume import Outgoing, Partition
from kconsume.backends import claiming, postgres, postgres_letters, postgres_sql, redis_script, sqlite
from kconsume.backends.abc import Refused, TransactionalStore, Tx
from kconsume.backends.postgres_tx import PostgresTx
from kconsume.backends.redis import RedisStore
from kconsume.errors import StoreUnavailable
from kconsume.failures.letters import Letter
from kconsume.runtime import loop, pressure, work
from kconsume.runtime.budget import Deadline
from kconsume.runtime.holding import Holding
from kconsume.runtime.lanes import Lane
from kconsume.runtime.loop import Loop
from kconsume.runtime.mail import Mail
from kconsume.runtime.relay import Relay
from kconsume.runtime.steps import Outcome, PassOver, Try
from kconsume.runtime.strand import Strand
from kconsume.runtime.tenancy import Tenancy
from tests.chaos.phases import Board, Phase

_log = logging.getLogger("kconsume.chaos")

Begin = Callable[[Any, str, Partition, int], AbstractContextManager[Tx]]
Delivered = Callable[[Any, str, Mapping[Partition, Sequence[int]]], None]


def watch_transactions(board: Board) -> None:
    """Put on the board when a transaction is open and when it ends, and into the log when the store refuses it."""
    for store in (sqlite.SqliteStore, postgres.PostgresStore, RedisStore):
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
    late = _late(sqlite.SqliteStore.delivered, board, Phase.RELAY)
    sqlite.SqliteStore.delivered = late  # type: ignore[method-assign, assignment]
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
    ship = Relay._ship

    def too_soon(self: Relay, strand: Strand) -> None:
        if strand.lot:
            partition = next(p for p, each in self._strands.items() if each is strand)
            self._store.delivered(self._group, {partition: [row.number for row in strand.lot]})
            with board.during(Phase.RELAY, Phase.IDLE):
                time.sleep(0.01)
        ship(self, strand)

    Relay._ship = too_soon  # type: ignore[method-assign]


def part_letters_from_their_offsets(board: Board, brokers: str, database: str) -> None:
    """Each is written when the offset has passed its record: not before, for what is there is not written again."""
    keep, producer = Mail.keep, Producer({"bootstrap.servers": brokers, "acks": "all", "log_level": 0})

    apart: dict[int, Sequence[Letter]] = {}

    def without_letters(self: Mail, sent: Sequence[Outgoing], letters: Sequence[Letter], tx: Tx) -> Sequence[Outgoing]:
        apart[id(tx)] = letters
        return keep(self, sent, (), tx)

    def then_write(self: Mail, partition: Partition, rows: Sequence[Outgoing], tx: object) -> None:
        for letter in apart.pop(id(tx)):
            with board.during(Phase.APART, Phase.IDLE):
                time.sleep(0.01)
            if self._table is not None:
                write(self._table, letter)
            else:
                headers: list[tuple[str, str | bytes | None]] = [*letter.headers, *letter.marks]
                producer.produce(cast(str, self._topic), letter.value, letter.key, headers=headers)
                producer.flush()

    def write(table: str, letter: Letter) -> None:
        with psycopg.connect(database) as own:
            for statement in (*postgres_letters.made(table), *postgres_letters.kept(table, [letter])):
                own.execute(*statement)

    Mail.keep, Mail.left = without_letters, then_write  # type: ignore[method-assign]


def accept_every_claim() -> None:
    """The claims of all but Redis are not ordered."""
    claiming.accepts = lambda *_: True


def hold_the_first_claim(gate: Path) -> None:
    """On PostgreSQL: it has its partitions and its generation, and waits before it asks the server."""
    claim = postgres.PostgresStore.claim
    waits = [True]

    def held(self: postgres.PostgresStore, *asked: Any) -> claiming.Answers:
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
    """Offsets are committed when so many are finished and not committed, and not by the clock; but for a commit that is
    refused, as in a rebalance: trying it again is the clock's part."""
    loop.COMMIT_EVERY = 3600.0
    pressure.Window.MOST_RECORDS = records
    collect = Loop._collect_saved

    def collect_and_try_again(self: Loop) -> None:
        refused = any(result.error is not None for result in self._source.commit_results)
        collect(self)
        if refused:
            self._commit_at = min(self._commit_at, time.monotonic() + 0.5)

    Loop._collect_saved = collect_and_try_again  # type: ignore[method-assign]


def notice_slowly() -> None:
    """Between waking and learning of the loss, handlers run on. Classic groups learn soon, KIP-848 ones late: make
    that time long enough to be met by every run."""
    lost = Tenancy.lost

    def late(self: Tenancy, partitions: list[Partition]) -> None:
        time.sleep(1.0)
        lost(self, partitions)

    Tenancy.lost = late  # type: ignore[method-assign]


def stop_for_nobody() -> None:
    """Lanes of partitions that went work off what they have, and nobody waits for them."""

    def unseen(self: Loop, leaving: list[Holding], budget: Deadline) -> int:
        return 0

    def ignored(self: Tenancy, holdings: list[Holding], reason: str) -> int:
        return 0

    Tenancy._brake = ignored  # type: ignore[method-assign]
    Loop.see_off = unseen  # type: ignore[method-assign]


def take_the_fence_away() -> None:
    """The same stores with neither epoch nor offset compared, and with nobody's transaction ended."""
    _take_it_from_sqlite()
    _take_it_from_postgres()
    _take_it_from_redis()


def _take_it_from_sqlite() -> None:
    sqlite._ADVANCE = "update kconsume_offsets set next_offset = ?1, leader_epoch = ?2, updated_at = ?3 \
        where group_id = ?4 and topic = ?5 and partition = ?6 and ?7 >= 0 and ?8 >= 0"
    _begin_under_any_epoch(sqlite.SqliteStore)


def _take_it_from_redis() -> None:
    text = redis_script.APPLY.text.replace("held[1] ~= ARGV[1]", "false").replace("held[2] ~= ARGV[2]", "false")
    redis_script.APPLY = redis_script.Script(text)
    _begin_under_any_epoch(RedisStore)


def _begin_under_any_epoch(store: type[sqlite.SqliteStore] | type[RedisStore]) -> None:
    begin: Begin = store.transaction

    def unchecked(self: TransactionalStore, group: str, partition: Partition, epoch: int) -> AbstractContextManager[Tx]:
        (current,) = self.load(group, [partition]).values()
        return begin(self, group, partition, current.epoch)

    store.transaction = unchecked  # type: ignore[method-assign, assignment]


def _take_it_from_postgres() -> None:
    class Unfenced(postgres_sql.Statements):
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

    postgres.Statements = Unfenced  # type: ignore[attr-defined]
    postgres.PostgresStore._end_earlier_owners = let_them  # type: ignore[method-assign]


def retry_what_may_be_done() -> None:
    """When the connection broke, run the same records once more, as if nothing could have been committed."""
    once = work.InTransactions._once

    def again(self: work.InTransactions, lane: Lane, step: Try | PassOver) -> Outcome:
        while True:
            try:
                return once(self, lane, step)
            except StoreUnavailable as error:
                _log.warning("retried partition=%s cause=%s", lane.partition, error)
                time.sleep(0.05)

    work.InTransactions._once = again  # type: ignore[method-assign]


def take_everything_in() -> None:
    """Whatever comes is new."""

    def all_of_them(self: object, origins: Sequence[str]) -> set[str]:
        return set(origins)

    for transaction in (sqlite.SqliteTx, PostgresTx):
        transaction.take_in = all_of_them  # type: ignore[method-assign]


def die_before_the_outbox_is_told(once: Path) -> None:
    """When the brokers have confirmed rows of the outbox, and before they are deleted: the next owner sends them again.
    The first process that comes there makes the file, and dies."""
    delete = Relay._delete

    def die(self: Relay, strands: Mapping[Partition, Any]) -> None:
        if any(strand.confirmed for strand in strands.values()) and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        delete(self, strands)

    Relay._delete = die  # type: ignore[method-assign]
