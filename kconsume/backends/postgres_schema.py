"""The tables of `postgresql://`: found, made on first use, brought up to date, or refused with what to do."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple

import psycopg
from psycopg import Connection, errors

from kconsume.backends.postgres_address import Address
from kconsume.backends.postgres_faults import store_error
from kconsume.backends.postgres_sql import ADD, ADDITIONS, BEGIN_SCHEMA, OLDEST, STEPS, VERSION, Statements, quoted
from kconsume.errors import ConfigurationError, StoreError

_log = logging.getLogger("kconsume.stores")

# One at a time, whoever starts first: "if not exists" alone is no protection against two who make the same table.
_ALONE = "select pg_advisory_xact_lock(hashtextextended('kconsume schema', 0))"


def ready(connection: Connection[tuple[Any, ...]], sql: Statements, address: Address) -> None:
    """Whether the tables are there in our version, with its additions; made or brought up to date if they are not."""
    if (server := connection.info.server_version) < OLDEST:
        raise ConfigurationError(
            f"{address.shown} is PostgreSQL {server // 10000}, which cannot end a frozen consumer as kconsume does it: "
            f"use PostgreSQL {OLDEST // 10000} or newer"
        )
    try:
        version, additions = state_of(connection, sql)
        if version > VERSION:
            raise StoreError(
                f"{address.shown} has tables of version {version}, and this kconsume writes version {VERSION}: "
                f"upgrade kconsume here"
            )
        if version < VERSION or additions < ADDITIONS:
            try:
                _bring_up_to_date(connection, sql, address)
            except errors.InsufficientPrivilege as error:
                raise ConfigurationError(
                    f"{address.shown} does not let our role make version {VERSION} of the tables "
                    f"({' '.join(str(error).split())}): let a role that may run `kconsume schema migrate --offsets "
                    f"ADDRESS`, or what `kconsume schema show` prints"
                ) from error
    except psycopg.Error as error:
        raise store_error(error, address.shown) from error


class Found(NamedTuple):
    """The tables that are there."""

    version: int
    """0 if there are none."""
    additions: int
    """How much of what was added to that version they have."""

    @property
    def is_ours(self) -> bool:
        return self.version == VERSION and self.additions >= ADDITIONS


def state_of(connection: Connection[tuple[Any, ...]], sql: Statements) -> Found:
    # From pg_class: a server that once found no such table goes on saying so until it opens some relation.
    if connection.execute("select 1 from pg_class where oid = to_regclass(%s)", (sql.schema,)).fetchone() is None:
        return Found(0, 0)
    # By way of JSON: a column that is not there is nothing, and no error.
    asked = f"select version, coalesce((to_jsonb(s) ->> 'additions')::integer, 0) from {sql.schema} s"
    return Found(*(connection.execute(asked).fetchone() or (0, 0)))


def alone(connection: Connection[tuple[Any, ...]], sql: Statements) -> Found:
    """Until the transaction ends, nobody else makes or changes the tables. Answers with what is there now, for another
    may have been here first."""
    connection.execute(_ALONE)
    return state_of(connection, sql)


def found(connection: Connection[tuple[Any, ...]], sql: Statements) -> Statements:
    """The statements for the tables where they are now, by the name of their schema: `search_path` may change later,
    and whoever finds them by another way must come to the same lock."""
    named = "select nspname from pg_class c join pg_namespace n on n.oid = relnamespace where c.oid = to_regclass(%s)"
    row = connection.execute(named, (sql.schema,)).fetchone()
    return sql if row is None else dataclasses.replace(sql, prefix=quoted(row[0]))


def script(sql: Statements, schema: str | None = None, since: int = 0) -> str:
    """What brings the tables from a version to ours, for people to read and to run. It may be run twice if the tables
    have our version and miss only additions."""
    begin = "" if schema is None else f"create schema if not exists {sql.prefix.rstrip('.')};\n"
    steps = [step.format(schema=sql.prefix) for step in (*STEPS[since:], ADD)]
    return begin + "\n".join(steps)


def set_version(sql: Statements) -> str:
    return f"update {sql.schema} set version = {VERSION}, additions = {ADDITIONS}"


def _bring_up_to_date(connection: Connection[tuple[Any, ...]], sql: Statements, address: Address) -> None:
    connection.execute(BEGIN_SCHEMA)
    try:
        there = alone(connection, sql)
        if not there.is_ours:
            since = there.version
            sql = found(connection, sql)  # what is new goes where the rest is, wherever `search_path` begins
            schema = address.schema
            if schema is not None and _has_schema(connection, schema):
                schema = None  # to ask for it again needs a right that is not needed
            connection.execute(script(sql, schema, since))
            connection.execute(set_version(sql))
            _log.info("tables brought up to date store=%s from=%d to=%d", address.shown, since, VERSION)
        connection.execute("commit")
    finally:
        if not connection.broken and connection.pgconn.transaction_status:
            connection.execute("rollback")


def _has_schema(connection: Connection[tuple[Any, ...]], schema: str) -> bool:
    found = connection.execute("select 1 from pg_namespace where nspname = %s", (schema,)).fetchone()
    return found is not None
