"""Finds the tables of `postgresql://`, creates them on first use, or updates them. If that fails, the error names the
fix."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import psycopg
from psycopg import Connection, errors

from kconsume._event_log import EventLog
from kconsume.backends.postgres.address import Address
from kconsume.backends.postgres.errors import store_error
from kconsume.backends.postgres.statements import Statements, quoted
from kconsume.backends.postgres.tables import ADD, ADDITIONS, OLDEST, STEPS, VERSION
from kconsume.backends.postgres.tx_statements import BEGIN_SCHEMA
from kconsume.errors import ConfigurationError, StoreError

_log = EventLog("stores")

# Processes that start together create the tables one after the other, by this lock. "If not exists" is not enough: two
# transactions that create the same table at once would fail.
_LOCK_SCHEMA = "select pg_advisory_xact_lock(hashtextextended('kconsume schema', 0))"


def ensure_tables(connection: Connection[tuple[Any, ...]], sql: Statements, address: Address) -> None:
    """Create or update the tables, unless they already have this version and its additions.

    Args:
        connection: autocommit, with no transaction open.
        sql: the statements for the schema of the address.
        address: for messages, and for the schema to create.

    Raises `ConfigurationError` if the server is too old or the role lacks a right, `StoreError` if the tables are
    newer.
    """
    if (server := connection.info.server_version) < OLDEST:
        raise ConfigurationError(
            f"{address.shown} is PostgreSQL {server // 10000}, which lacks the function that kconsume uses to end a "
            f"frozen consumer: use PostgreSQL {OLDEST // 10000} or newer"
        )
    try:
        version, additions = schema_state(connection, sql)
        if version > VERSION:
            raise StoreError(
                f"{address.shown} has tables of version {version}, and this kconsume writes version {VERSION}: "
                f"upgrade kconsume here"
            )
        if version < VERSION or additions < ADDITIONS:
            try:
                _update(connection, sql, address)
            except errors.InsufficientPrivilege as error:
                raise ConfigurationError(
                    f"{address.shown} does not let this role make version {VERSION} of the tables "
                    f"({' '.join(str(error).split())}): as a role with that right, run `kconsume schema migrate "
                    f"--offsets ADDRESS`, or the SQL that `kconsume schema show` prints"
                ) from error
    except psycopg.Error as error:
        raise store_error(error, address.shown) from error


class SchemaState(NamedTuple):
    """The version and the additions of the tables that exist."""

    version: int
    """The version of the tables; 0 if there are none."""
    additions: int
    """How many of the additions to that version the tables have."""

    @property
    def is_current(self) -> bool:
        return self.version == VERSION and self.additions >= ADDITIONS


def schema_state(connection: Connection[tuple[Any, ...]], sql: Statements) -> SchemaState:
    # Reads pg_class: a backend that did not find the table repeats this answer until it opens some relation.
    if connection.execute("select 1 from pg_class where oid = to_regclass(%s)", (sql.schema,)).fetchone() is None:
        return SchemaState(0, 0)
    # Reads the row as JSON, in which a column that does not exist is null and causes no error.
    query = f"select version, coalesce((to_jsonb(s) ->> 'additions')::integer, 0) from {sql.schema} s"
    return SchemaState(*(connection.execute(query).fetchone() or (0, 0)))


def locked_schema_state(connection: Connection[tuple[Any, ...]], sql: Statements) -> SchemaState:
    """Lock the schema until the transaction ends, then read its state, which another process may just have updated."""
    connection.execute(_LOCK_SCHEMA)
    return schema_state(connection, sql)


def with_actual_schema(connection: Connection[tuple[Any, ...]], sql: Statements) -> Statements:
    """Return the statements with the name of the schema in which the tables are.

    The name is needed because a handler may change `search_path`, and because the numbers of the advisory locks depend
    on the name: all processes must use the same locks, whether their address names the schema or not.
    """
    query = "select nspname from pg_class c join pg_namespace n on n.oid = relnamespace where c.oid = to_regclass(%s)"
    row = connection.execute(query, (sql.schema,)).fetchone()
    return sql if row is None else dataclasses.replace(sql, prefix=quoted(row[0]))


def migration_script(sql: Statements, schema: str | None = None, since: int = 0) -> str:
    """The SQL that updates the tables from an earlier version to this one, for users to read and to run.

    The SQL may be run twice if the tables have this version and miss only additions.

    Args:
        sql: the statements for the schema of the tables.
        schema: the name of the schema to create; None to create none.
        since: the version of the tables that exist; 0 if there are none.
    """
    begin = "" if schema is None else f"create schema if not exists {sql.prefix.rstrip('.')};\n"
    steps = [step.format(schema=sql.prefix) for step in (*STEPS[since:], ADD)]
    return begin + "\n".join(steps)


def set_version(sql: Statements) -> str:
    return f"update {sql.schema} set version = {VERSION}, additions = {ADDITIONS}"


def _update(connection: Connection[tuple[Any, ...]], sql: Statements, address: Address) -> None:
    connection.execute(BEGIN_SCHEMA)
    try:
        state = locked_schema_state(connection, sql)
        if not state.is_current:
            since = state.version
            # New tables go into the schema of the old ones, under any `search_path`.
            sql = with_actual_schema(connection, sql)
            schema = address.schema
            if schema is not None and _has_schema(connection, schema):
                schema = None  # `create schema if not exists` needs a right even if the schema exists
            connection.execute(migration_script(sql, schema, since))
            connection.execute(set_version(sql))
            _log.info("tables updated", store=address.shown, from_version=since, to_version=VERSION)
        connection.execute("commit")
    finally:
        if not connection.broken and connection.pgconn.transaction_status:
            connection.execute("rollback")


def _has_schema(connection: Connection[tuple[Any, ...]], schema: str) -> bool:
    found = connection.execute("select 1 from pg_namespace where nspname = %s", (schema,)).fetchone()
    return found is not None
