"""Exactly once in PostgreSQL, against the same statements in plain psycopg, and against the usual loop on Kafka.

The code is in `in_postgres.py`, which is imported when a case runs. The sides without kconsume have their values in
memory, one connection in one thread, and no offsets. Their transactions have the size of kconsume's transactions.
"""

from __future__ import annotations

from benchmarks import orders
from benchmarks.case import Case, Measured, Task, Topics
from benchmarks.ratios import Bar
from benchmarks.targets import records_in, target_topic


class _InPostgres(Case):
    """A case in which kconsume's side makes one insert for each record."""

    needs = ("postgres",)

    def tasks(self, topics: Topics, records: int) -> tuple[Task, Task]:
        task = topics.orders(records // 10, "typed")
        return task, task

    def ours(self, task: Task) -> Measured:
        from benchmarks import in_postgres

        return in_postgres.by_kconsume(task, in_postgres.insert)


class Postgres(_InPostgres):
    name = "postgres"
    about = "exactly once in PostgreSQL, one insert a record, against the same transactions in plain psycopg"
    bar = Bar(2.5)
    names = ("kconsume", "plain psycopg")

    def theirs(self, task: Task) -> Measured:
        from benchmarks import in_postgres

        return in_postgres.one_by_one(task, pipelined=False)


class PostgresPipeline(_InPostgres):
    name = "postgres-pipeline"
    about = "the same, against the same transactions in psycopg's pipeline mode"
    bar = Bar(0.85)
    names = ("kconsume", "psycopg pipeline")

    def theirs(self, task: Task) -> Measured:
        from benchmarks import in_postgres

        return in_postgres.one_by_one(task, pipelined=True)


class PostgresCopy(_InPostgres):
    name = "postgres-copy"
    about = "exactly once in PostgreSQL, a COPY a batch, against the same COPYs in plain psycopg"
    bar = Bar(0.85)
    names = ("kconsume", "plain psycopg")

    def tasks(self, topics: Topics, records: int) -> tuple[Task, Task]:
        task = topics.orders(records * 3 // 10, "typed")
        return task, task

    def ours(self, task: Task) -> Measured:
        from benchmarks import in_postgres

        return in_postgres.by_kconsume(task, in_postgres.copy)

    def theirs(self, task: Task) -> Measured:
        from benchmarks import in_postgres

        return in_postgres.copied(task)


class PostgresLoop(_InPostgres):
    name = "postgres-loop"
    about = "one insert a record, against the usual loop: one transaction and one Kafka commit a record"
    bar = Bar(80)
    names = ("kconsume", "usual loop")

    def tasks(self, topics: Topics, records: int) -> tuple[Task, Task]:
        return topics.orders(records // 10, "typed"), topics.orders(min(records, 1500), "typed")

    def theirs(self, task: Task) -> Measured:
        from benchmarks import in_postgres

        return in_postgres.usual_loop(task)


class PostgresOutbox(_InPostgres):
    name = "postgres-outbox"
    about = "one insert a record and to= through the outbox, until it is confirmed, against the same without output"
    bar = Bar(0.5)
    names = ("with to=", "without")

    def ours(self, task: Task) -> Measured:
        from benchmarks import in_postgres

        with target_topic(task.bootstrap) as target:
            measured = in_postgres.through_the_outbox(task, target)
            if (sent := records_in(task.bootstrap, target)) != orders.total(task.records):
                raise AssertionError(f"{sent} records were sent, and {orders.total(task.records)} consumed")
        return measured

    def theirs(self, task: Task) -> Measured:
        from benchmarks import in_postgres

        return in_postgres.by_kconsume(task, in_postgres.insert)
