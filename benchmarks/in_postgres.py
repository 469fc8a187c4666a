"""Write orders to PostgreSQL: with kconsume, exactly once, and with programs that a user would write without it.

All sides call the same handlers with the same decoding, on connections with the same settings, and count after each
commit. Each run has its own database. This module is imported only when a case runs, so that other cases do not load
psycopg.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from urllib.parse import urlsplit

import msgspec
import psycopg
from confluent_kafka import Consumer, KafkaException
from psycopg import sql

from benchmarks import bare, orders
from benchmarks.case import Measured, Task
from benchmarks.consumed import catch_up, committed_rate
from benchmarks.marks import mean_tally, stretch, tallied, tally
from benchmarks.orders import MARKS, PARTITIONS, Order
from benchmarks.witness import WitnessedTx, witnessed
from kconsume import App
from kconsume.backends.postgres.store import PostgresStore
from kconsume.records import Partition

_TABLE = """create table orders (
    id bigint not null, sku text not null, quantity integer not null, customer text not null, cents integer not null,
    placed timestamptz not null
)"""
_INSERT = "insert into orders (id, sku, quantity, customer, cents, placed) values (%s, %s, %s, %s, %s, %s)"
_COPY = "copy orders (id, sku, quantity, customer, cents, placed) from stdin"

_decode = msgspec.json.Decoder(Order).decode
_row = msgspec.structs.astuple

Handler = Callable[[Order, psycopg.Connection], None]
BatchHandler = Callable[[list[Order], psycopg.Connection], None]


# The handlers of all sides


def insert(order: Order, tx: psycopg.Connection) -> None:
    tx.execute(_INSERT, _row(order))


def copy(batch: list[Order], tx: psycopg.Connection) -> None:
    with tx.cursor() as cursor, cursor.copy(_COPY) as rows:
        for order in batch:
            rows.write_row(_row(order))


# kconsume


class WitnessedPostgres(PostgresStore):
    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[WitnessedTx]:
        with witnessed(super().transaction(group, partition, epoch)) as tx:
            yield tx

    @contextmanager
    def pipelined(self, group: str, partition: Partition, epoch: int) -> Iterator[WitnessedTx]:  # type: ignore[override]
        with witnessed(super().pipelined(group, partition, epoch)) as tx:
            yield tx


def by_kconsume(task: Task, handler: Handler | BatchHandler) -> Measured:
    with _database(task.postgres) as url:
        store = WitnessedPostgres(url)
        app = App(task.bootstrap, group=task.group, offsets=store)
        app.consume(task.topic)(handler)
        catch_up(app, task)
        store.close()
        return committed_rate(task, _effects(url))


def insert_and_send(order: Order, tx: psycopg.Connection) -> Order:
    tx.execute(_INSERT, _row(order))
    return order


class WitnessedOutbox(PostgresStore):
    """Counts the outbox rows that were deleted after the broker had confirmed their records."""

    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        super().delivered(group, numbers)
        tally(sum(map(len, numbers.values())))


def through_the_outbox(task: Task, target: str) -> Measured:
    with _database(task.postgres) as url:
        store = WitnessedOutbox(url)
        app = App(task.bootstrap, group=task.group, offsets=store)
        app.consume(task.topic, to=target)(insert_and_send)
        catch_up(app, task)
        store.close()
        with _connect(url) as connection:
            if (left := connection.execute("select count(*) from kconsume_outbox").fetchone()) != (0,):
                raise AssertionError(f"rows left in the outbox: {left}")
        return committed_rate(task, _effects(url))


# Without kconsume, and without Kafka


def one_by_one(task: Task, *, pipelined: bool) -> Measured:
    """One insert for each record. Waits for each insert; with `pipelined`, once for all inserts of a transaction."""
    with _database(task.postgres) as url, _connect(url) as connection:
        for part in _parts(task):
            way: AbstractContextManager[object] = connection.pipeline() if pipelined else nullcontext()
            with way, connection.transaction():
                for value in part:
                    insert(_decode(value), connection)
            tally(len(part))
        return committed_rate(task, _effects(url))


def copied(task: Task) -> Measured:
    """One COPY and one transaction for each batch."""
    with _database(task.postgres) as url, _connect(url) as connection:
        for part in _parts(task):
            with connection.transaction():
                copy([_decode(value) for value in part], connection)
            tally(len(part))
        return committed_rate(task, _effects(url))


def _parts(task: Task) -> Sequence[Sequence[bytes]]:
    """Return all values, divided into transactions of the size that kconsume had."""
    assert task.transaction is not None  # known, because kconsume's side runs first in the warm-up
    values = [value for partition in range(PARTITIONS) for value in orders.values(partition, task.records, "typed")]
    return [values[first : first + task.transaction] for first in range(0, len(values), task.transaction)]


# Without kconsume, with Kafka


def usual_loop(task: Task) -> Measured:
    """For each of `records` records: one poll, one transaction, one synchronous commit. Stops after them."""
    consumer = Consumer({**bare.own_defaults(task.bootstrap, task.group), "enable.auto.commit": False})
    consumer.subscribe([task.topic])
    with _database(task.postgres) as url, _connect(url) as connection:
        while tallied() < task.records:
            message = consumer.poll(1.0)
            if message is None:
                continue
            if error := message.error():
                raise KafkaException(error)
            with connection.transaction():
                insert(_decode(message.value() or b""), connection)
            consumer.commit(message=message, asynchronous=False)
            tally(1)
        consumer.close()
        if (rows := _effects(url)) != task.records:
            raise AssertionError(f"{rows} rows were written, and {task.records} records were consumed")
    span, count = stretch(task.records)
    return Measured(count / span.seconds, span.cpu, count, mean_tally())


# The database


@contextmanager
def _database(address: str) -> Iterator[str]:
    """Create a database with an empty table for orders. Yields its address."""
    name = f"bench_{uuid.uuid4().hex[:12]}"
    url = urlsplit(address)._replace(path=f"/{name}").geturl()
    with psycopg.connect(address, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        try:
            with _connect(url) as connection:
                connection.execute(_TABLE)
            yield url
        finally:
            admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def _connect(url: str) -> psycopg.Connection:
    """Connect with the settings of kconsume's own connections. They prepare no statement, so that poolers work."""
    return psycopg.connect(url, autocommit=True, prepare_threshold=None)


def _effects(url: str) -> int:
    """Return the number of rows. Raises if an order was written twice. Only the marks have equal ids."""
    with _connect(url) as connection:
        found = connection.execute("select count(*), count(distinct id), count(*) filter (where id = 0) from orders")
        rows, distinct, marked = found.fetchone() or (0, 0, 0)
    if rows - marked != distinct - bool(marked) or marked > MARKS:
        raise AssertionError(f"{rows} rows with {distinct} distinct ids, {marked} marks: a record had its effect twice")
    return int(rows)
