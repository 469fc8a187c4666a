"""A stream's ledger on PostgreSQL: which query runs, its plan, and its locks.

The offset rows of the store show which ranges were applied (`kconsume.spark._batch.ledger.postgres_tx`). Each query
also has a row in `kconsume_streams`: the plan that was begun, its number, the owner, and whether a stop was requested.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import psycopg

from kconsume._event_log import EventLog
from kconsume.backends.base import Positions
from kconsume.backends.postgres.errors import store_error
from kconsume.backends.postgres.pool import PooledConnection
from kconsume.backends.postgres.store import PostgresStore
from kconsume.errors import ConfigurationError, Fenced
from kconsume.spark._batch.ledger import statements as texts
from kconsume.spark._batch.ledger.base import RangesTx, stream_taken
from kconsume.spark._batch.ledger.postgres_tx import ranges_transaction
from kconsume.spark._batch.ledger.statements import StreamStatements
from kconsume.spark._batch.ranges import Plan

_log = EventLog("spark")
_LOCK_PATIENCE = 2.0
"""Seconds to wait for the lock of a topic if its holder has no row in `kconsume_streams` yet."""


class PostgresLedger:
    """The ledger of one query of a group."""

    exactly_once: ClassVar[bool] = True

    def __init__(self, store: PostgresStore, group: str, name: str, owner: str, *, by_handler: bool = False) -> None:
        """Make the ledger, without I/O.

        Args:
            name: identifies the query in its group.
            owner: identifies this run of the query.
            by_handler: True if the name is the handler's. A query of other topics in the group may have the same name.
        """
        self._store = store
        self._database = store.database
        self._group = group
        self._identity = {"group": group, "name": name, "owner": owner}
        self._by_handler = by_handler
        self._topics: set[str] = set()
        self._lock_connection: PooledConnection | None = None
        """The connection whose open transaction holds the locks of the topics. Used under `_lock_guard`."""
        self._lock_guard = threading.Lock()

    # Registration as the only query on its topics

    def register(self, topics: Sequence[str]) -> None:
        self._make_table()
        self._lock_topics(topics)
        name, read = self._identity["name"], sorted(self._topics)
        for each in [name, f"{name} {','.join(read)}"] if self._by_handler else [name]:
            values = {**self._identity, "name": each, "topics": texts.array(read), "mine": not self._by_handler}
            if self._execute(self._sql.register, values):
                self._identity["name"] = each
                return
        raise ConfigurationError(
            f"group {self._group!r} has two queries named {name!r}, and neither reads {', '.join(read)}: give this "
            f"query a name of its own, foreach_batch(…, name=…)"
        )

    def add_topics(self, topics: Sequence[str]) -> None:
        if new := set(topics) - self._topics:
            self._lock_topics(sorted(new))
            self._execute(self._sql.set_topics, {**self._identity, "topics": texts.array(sorted(self._topics))})

    def heartbeat(self) -> bool:
        with self._lock_guard:
            if self._lock_connection is not None:
                try:
                    self._lock_connection.execute("select 1")
                except psycopg.Error:
                    self._lock_connection = None
        if self._lock_connection is None and self._topics:
            self._lock_topics(sorted(self._topics))
        rows = self._execute(self._sql.heartbeat, self._identity)
        if not rows:
            raise self._replaced()
        return bool(rows[0][0])

    def request_stop(self, name: str | None) -> list[str]:
        """Ask the group's queries, or those of one name, to stop. Returns the names of the queries that were asked."""
        self._make_table()
        rows = self._execute(self._sql.request_stop, {"group": self._group, "name": name})
        return sorted(row[0] for row in rows)

    def unregister(self) -> None:
        with self._lock_guard:
            if self._lock_connection is not None:
                with contextlib.suppress(psycopg.Error):
                    # Without a rollback the server keeps the locks until it notices that the connection was closed.
                    self._lock_connection.rollback()
                self._lock_connection.close()
            self._lock_connection = None
            self._topics.clear()

    def _lock_topics(self, topics: Sequence[str]) -> None:
        with self._lock_guard, self._store_errors():
            if self._lock_connection is None:
                self._lock_connection = self._database.address.connect()
                self._lock_connection.execute(texts.BEGIN_LOCK_TRANSACTION)
            for topic in topics:
                self._lock_topic(self._lock_connection, topic)
            self._topics.update(topics)

    def _lock_topic(self, connection: PooledConnection, topic: str) -> None:
        values = {"lock": texts.stream_lock(self._database.tx_settings.prefix, self._group, topic)}
        deadline = time.monotonic() + _LOCK_PATIENCE
        while True:
            (got,) = connection.execute(texts.TRY_LOCK, values).fetchone() or (False,)
            if got:
                return
            if owner := self._execute(self._sql.live_owner, {**self._identity, "topic": topic}):
                raise stream_taken(self._group, topic, str(owner[0][0]))
            # A query that holds the lock and has no heartbeat is frozen or disconnected. It must not block others.
            if self._execute(texts.TERMINATE_LOCK_HOLDER, values):
                _log.warning("silent query replaced", group=self._group, topic=topic)
            elif time.monotonic() > deadline:
                raise stream_taken(self._group, topic, "a process that has only just started")
            time.sleep(0.05)

    # Plans

    def pending_plan(self) -> Plan | None:
        rows = self._execute(self._sql.pending_plan, self._identity)
        return Plan.from_json(rows[0][0]) if rows and rows[0][0] else None

    def begin_plan(self, plan: Plan) -> int:
        rows = self._execute(self._sql.begin_plan, {**self._identity, "plan": plan.to_json()})
        if not rows:
            raise self._replaced()
        return int(rows[0][0])

    def reserve_numbers(self, count: int) -> int:
        rows = self._execute(self._sql.reserve_numbers, {**self._identity, "count": count + 1})
        if not rows:
            raise self._replaced()
        return int(rows[0][0]) - count

    def drop_plan(self) -> None:
        self._execute(self._sql.drop_plan, self._identity)

    def _replaced(self) -> Fenced:
        return Fenced(f"group {self._group!r} has another query named {self._identity['name']!r} now: this one stops")

    # A batch

    @contextmanager
    def transaction(self, positions: Positions) -> Iterator[RangesTx]:
        with self._database.pool.borrow() as pooled:
            settings = self._database.tx_settings
            with ranges_transaction(settings, self._sql, pooled, self._group, positions, self._identity) as tx:
                yield tx

    # Statements

    @property
    def _sql(self) -> StreamStatements:
        return StreamStatements(self._database.statements)

    def _make_table(self) -> None:
        self._database.prepare()
        with self._store_errors(), self._database.connection() as connection:
            sql = self._sql
            (exists,) = connection.execute(sql.table_exists, {"table": sql.table}).fetchone() or (False,)
            if not exists:
                try:
                    with connection.transaction():
                        connection.execute("select pg_advisory_xact_lock(hashtextextended('kconsume schema', 0))")
                        connection.execute(sql.create_table)
                except psycopg.errors.InsufficientPrivilege as error:
                    raise ConfigurationError(
                        f"{self._store.address} does not let this role make a table ({error.diag.message_primary}): "
                        f"as a role that may, run the following statement, and grant select, insert and update: "
                        f"{sql.create_table}"
                    ) from error

    def _execute(self, query: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        with self._store_errors(), self._database.connection() as connection:
            cursor = connection.execute(query, values)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Raise errors of psycopg as errors of the store."""
        try:
            yield
        except psycopg.Error as error:
            raise store_error(error, self._store.address) from error
