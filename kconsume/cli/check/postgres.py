"""Findings about a PostgreSQL server: rights, tables and settings, and what they mean for an app.

Uses one connection of its own, and rolls back its trial, so nothing is created or changed. Only one number of the
outbox is used up, because PostgreSQL does not roll sequences back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends import OffsetStore
from kconsume.cli.check.findings import Finding, unusable_store
from kconsume.cli.store_kind import is_postgres
from kconsume.errors import KconsumeError
from kconsume.records import Partition

if TYPE_CHECKING:
    from psycopg import Connection

    from kconsume.backends.postgres.address import Address
    from kconsume.backends.postgres.statements import Statements

_TRIAL = "kconsume check"
_FIRST_TABLES = frozenset({"kconsume_offsets", "kconsume_schema"})
"""The tables that every version has."""


class PostgresFacts(msgspec.Struct, frozen=True):
    """Facts about the server, the role, and the tables."""

    role: str
    server: int
    """`server_version_num`, as in 180001."""
    version: int
    """The version of the tables; 0 if there are none."""
    wanted: int
    lacks_additions: bool = False
    """True if the tables are not up to date. They may lack columns that were added without a new version."""
    standby: bool = False
    read_only: bool = False
    may_create: bool = True
    """True if the role may create or change the tables."""
    missing: tuple[str, ...] = ()
    """Rights that the role lacks, each as `grant` writes it."""
    failed: str | None = None
    """Why the statements of a run failed, although the role has the rights."""
    may_end: bool = True
    """True if the role may end backends of its own role."""
    may_end_all: bool = False
    """True if the role may also end backends of other roles."""
    idle_limit: str = "0"
    """`idle_in_transaction_session_timeout` of this role, 0 for none."""
    pooled: bool = False
    synchronous_commit: str = "on"
    connections: int = 100
    """The highest number of connections that the server allows the role."""


def of_stores(stores: Iterable[OffsetStore], *, offline: bool = False) -> Iterator[Finding]:
    """Findings about the PostgreSQL stores. Asks each store once, or none if `offline`."""
    asked: set[int] = set()
    for store in stores:
        if id(store) in asked or offline or not is_postgres(store):
            continue
        asked.add(id(store))
        yield from _of_store(store)


def _of_store(store: OffsetStore) -> Iterator[Finding]:
    import psycopg

    from kconsume.backends.postgres.errors import store_error
    from kconsume.backends.postgres.store import PostgresStore

    assert isinstance(store, PostgresStore)
    address = store.database.address
    try:
        with closing(address.connect()) as connection:
            facts = ask(connection, store.database.statements, address)
    except KconsumeError as error:
        yield unusable_store(store.address, error)
    except psycopg.Error as error:
        yield unusable_store(store.address, store_error(error, store.address))
    else:
        yield from of_server(store.address, facts, address.pool)


# The facts


def ask(connection: Connection[tuple[Any, ...]], sql: Statements, address: Address) -> PostgresFacts:
    """Ask for the facts that a run depends on. Asks no more if the server is too old or the role lacks a right."""
    from kconsume.backends.postgres.statements import MAY_END_ALL, MAY_END_OTHERS
    from kconsume.backends.postgres.tables import OLDEST, VERSION

    server = connection.info.server_version
    role, pid, standby, read_only, idle, commits, most = _one(connection, _SERVER)
    facts = PostgresFacts(
        role=role,
        server=server,
        version=0,
        wanted=VERSION,
        standby=standby,
        read_only=read_only == "on",
        idle_limit=idle,
        pooled=pid != connection.info.backend_pid,
        synchronous_commit=commits,
        connections=most,
    )
    if server < OLDEST:
        return facts
    replace = msgspec.structs.replace
    facts = replace(
        facts,
        may_end=_one(connection, MAY_END_OTHERS)[0],
        may_end_all=_one(connection, MAY_END_ALL)[0],
    )
    there = _tables(connection, address)
    if there >= _FIRST_TABLES:
        if missing := tuple(_missing(connection, sql, address, there)):
            return replace(facts, missing=missing)
        facts = replace(facts, version=_one(connection, f"select version from {sql.schema}")[0])
    else:
        facts = replace(facts, may_create=_may_create(connection, address))
    if facts.standby or facts.version > VERSION or not facts.may_create:
        return facts
    return _tried(connection, sql, address, facts)


_SERVER = """
    select current_user, pg_backend_pid(), pg_is_in_recovery(), current_setting('default_transaction_read_only'),
        current_setting('idle_in_transaction_session_timeout'), current_setting('synchronous_commit'),
        (select least(current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,
            nullif(r.rolconnlimit, -1), nullif(d.datconnlimit, -1))
         from pg_roles r, pg_database d where r.rolname = current_user and d.datname = current_database())"""
_TABLES = """
    select c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.relname = any(%(tables)s)
        and case when %(schema)s::text is null then pg_table_is_visible(c.oid) else n.nspname = %(schema)s end"""
_MAY_CREATE_HERE = "select coalesce(has_schema_privilege(current_schema(), 'create'), false)"
_MAY_CREATE_THERE = """
    select coalesce((select has_schema_privilege(oid, 'usage, create') from pg_namespace where nspname = %(schema)s),
        has_database_privilege(current_database(), 'create'))"""


def _tables(connection: Connection[tuple[Any, ...]], address: Address) -> set[str]:
    """kconsume's tables that exist: an older version has fewer."""
    from kconsume.backends.postgres.tables import RIGHTS

    values = {"schema": address.schema, "tables": [table for table, _ in RIGHTS]}
    return {name for (name,) in connection.execute(_TABLES, values)}


def _may_create(connection: Connection[tuple[Any, ...]], address: Address) -> bool:
    if address.schema is None:
        return bool(_one(connection, _MAY_CREATE_HERE)[0])
    return bool(_one(connection, _MAY_CREATE_THERE, {"schema": address.schema})[0])


def _missing(
    connection: Connection[tuple[Any, ...]], sql: Statements, address: Address, there: set[str]
) -> Iterator[str]:
    """The rights that the role lacks, as `grant` writes them."""
    from kconsume.backends.postgres.tables import RIGHTS

    usage, schema = "select has_schema_privilege(%(schema)s, 'usage')", address.schema
    if schema is not None and not _one(connection, usage, {"schema": schema})[0]:
        yield f"usage on schema {sql.prefix.rstrip('.')}"
        return  # without `usage`, `has_table_privilege` raises an error
    for table, rights in RIGHTS:
        if table not in there:
            continue
        name = f"{sql.prefix}{table}"
        lacks = [
            right
            for right in rights.split(", ")
            if not _one(connection, "select has_table_privilege(%(name)s, %(right)s)", {"name": name, "right": right})[
                0
            ]
        ]
        if lacks:
            yield f"{', '.join(lacks)} on {name}"


def _tried(
    connection: Connection[tuple[Any, ...]], sql: Statements, address: Address, facts: PostgresFacts
) -> PostgresFacts:
    """Migrate the tables, and write, read and delete rows, in a transaction that is rolled back. Returns the facts with
    the result.

    The trial shows whether the role may change tables of an older version: only the owner of a table may.
    """
    import psycopg

    from kconsume.backends.postgres.schema import (
        locked_schema_state,
        migration_script,
        schema_state,
        with_actual_schema,
    )
    from kconsume.backends.postgres.tables import VERSION
    from kconsume.backends.postgres.tx_statements import BEGIN

    replace = msgspec.structs.replace
    connection.execute(BEGIN)
    try:
        connection.execute("set local lock_timeout = '2s'; set local idle_in_transaction_session_timeout = '10s'")
        there = schema_state(connection, sql)
        if not there.is_current:
            there = locked_schema_state(connection, sql)
        facts = replace(facts, version=there.version, lacks_additions=not there.is_current)
        if facts.version > VERSION:
            return facts
        if not there.is_current:
            sql = with_actual_schema(connection, sql)
            is_new = not facts.version and not _has_schema(connection, address.schema)
            try:
                connection.execute(migration_script(sql, address.schema if is_new else None, facts.version))
            except psycopg.errors.InsufficientPrivilege:
                return replace(facts, may_create=False)
        return replace(facts, failed=_works(connection, with_actual_schema(connection, sql)))
    except psycopg.Error as error:
        return replace(facts, failed=" ".join(str(error).split()))
    finally:
        if not connection.closed:
            connection.execute("rollback")


def _works(connection: Connection[tuple[Any, ...]], sql: Statements) -> str | None:
    """Run the statements of a run on each table. Returns None if they work, or else names a row that could not be read
    back: a row-level security policy hides rows without an error."""
    from kconsume.backends.outbox.tables import ALL_TARGETS, postgres_rows
    from kconsume.backends.postgres.rows import target_arrays

    key: dict[str, object] = {"group": _TRIAL, "topics": [_TRIAL], "partitions": [0]}
    connection.execute(sql.reset, {**key, "offsets": [0]})
    connection.execute(sql.lock_rows, key)
    claimed = connection.execute(sql.raise_epochs, {**key, "owner": _TRIAL, "generation": None}).fetchall()
    if len(claimed) != 1:
        return _hidden("kconsume_offsets")
    epochs = [row[3] for row in claimed]
    connection.execute(sql.post, postgres_rows(_TRIAL, Partition(_TRIAL, 0), [Outgoing(b"", topic=_TRIAL)]))
    asked = {**key, **target_arrays([ALL_TARGETS]), "epochs": epochs, "most": 1}
    numbers = [number for _, number, *_ in connection.execute(sql.posted, asked)]
    one = {"group": _TRIAL, "topic": _TRIAL, "partition": 0, "numbers": numbers}
    if not numbers or connection.execute(sql.delivered, one).rowcount != 1:
        return _hidden("kconsume_outbox")
    connection.execute(sql.lease, {"owner": _TRIAL})
    connection.execute(sql.record_origins, {"group": _TRIAL, "origins": [_TRIAL]})
    # Not `Statements.forget_origins`, which would lock rows of other groups until the rollback.
    forget = f"delete from {sql.prefix}kconsume_seen where group_id = '{_TRIAL}' and origin = '{_TRIAL}'"
    if connection.execute(forget).rowcount != 1:
        return _hidden("kconsume_seen")
    connection.execute(sql.delete, key)
    return None


def _hidden(table: str) -> str:
    return f"a row that was written to {table} could not be read afterwards"


def _has_schema(connection: Connection[tuple[Any, ...]], schema: str | None) -> bool:
    return bool(_one(connection, "select count(*) from pg_namespace where nspname = %(schema)s", {"schema": schema})[0])


def _one(
    connection: Connection[tuple[Any, ...]], statement: str, values: dict[str, object] | None = None
) -> tuple[Any, ...]:
    row = connection.execute(statement, values).fetchone()
    assert row is not None
    return row


# Findings from the facts


def of_server(address: str, facts: PostgresFacts, pool: int) -> Iterator[Finding]:
    """Findings from these facts.

    Args:
        pool: the size of the app's connection pool.
    """
    from kconsume.backends.postgres.database import OWN_CONNECTIONS
    from kconsume.backends.postgres.tables import OLDEST

    if facts.server < OLDEST:
        yield Finding(
            "error", "postgres-too-old", address,
            f"{address} is PostgreSQL {facts.server // 10000}, which cannot end a frozen consumer in the way that "
            f"kconsume needs",
            f"use PostgreSQL {OLDEST // 10000} or newer",
        )  # fmt: skip
        return
    yield from _of_writing(address, facts)
    yield from _of_tables(address, facts)
    yield _of_frozen_consumers(address, facts)
    yield from _of_waits(address, facts)
    if facts.pooled:
        yield Finding(
            "note", "postgres-pooler", address,
            f"a connection pooler is in front of {address}. This works, also in transaction mode: kconsume prepares no "
            f"statements, and no setting or lock outlives its transaction",
            f"let the pooler open at least {pool + OWN_CONNECTIONS} server connections for each process of this app",
        )  # fmt: skip
    yield from _of_durability(address, facts)
    yield from _of_connections(address, facts, pool)


def _of_writing(address: str, facts: PostgresFacts) -> Iterator[Finding]:
    if facts.standby:
        yield Finding(
            "error", "postgres-standby", address,
            f"{address} is a standby, which refuses writes",
            "name the primary in offsets=, or all hosts with ?target_session_attrs=read-write",
        )  # fmt: skip
    elif facts.read_only:
        yield Finding(
            "note", "postgres-read-only", address,
            f"{address} has default_transaction_read_only on for {facts.role}; kconsume begins each "
            f"transaction as read write, so it writes there nevertheless",
            "if nothing must be written there, name another database in offsets=, or revoke the rights",
        )  # fmt: skip


def _of_tables(address: str, facts: PostgresFacts) -> Iterator[Finding]:
    if facts.missing:
        yield Finding(
            "error", "postgres-rights", address,
            f"{address} does not give {facts.role} the rights on kconsume's tables: {'; '.join(facts.missing)}",
            " ".join(f"grant {right} to {facts.role};" for right in facts.missing),
        )  # fmt: skip
    elif facts.version > facts.wanted:
        yield Finding(
            "error", "postgres-schema-newer", address,
            f"{address} has tables of version {facts.version}, and this kconsume writes version {facts.wanted}",
            "upgrade kconsume here",
        )  # fmt: skip
    elif _is_outdated(facts) and facts.failed is None and not (facts.standby and facts.version):
        yield _outdated(address, facts)  # on a standby nothing is tried, so it is not known who may change the tables
    if facts.failed is not None:
        yield Finding(
            "error", "postgres-trial", address,
            f"{address} refused the statements of a run, in a trial transaction that was rolled back: {facts.failed}",
            "look for a trigger, a policy or a lock on kconsume's tables",
        )  # fmt: skip


def _is_outdated(facts: PostgresFacts) -> bool:
    return facts.version < facts.wanted or (facts.version == facts.wanted and facts.lacks_additions)


def _outdated(address: str, facts: PostgresFacts) -> Finding:
    has = f"has tables of version {facts.version}" if facts.version else "has no tables of kconsume yet"
    if facts.version == facts.wanted:
        has += " without some columns that this kconsume adds"
    if facts.may_create:
        return Finding(
            "note", "postgres-schema", address,
            f"{address} {has}; the first run brings them to version {facts.wanted}, and {facts.role} has the right to",
            "nothing to do; kconsume schema show prints the SQL that the first run executes",
        )  # fmt: skip
    return Finding(
        "error", "postgres-schema", address,
        f"{address} {has}, this kconsume writes version {facts.wanted}, and {facts.role} may not "
        f"{'change them' if facts.version else 'create tables'}",
        "let a role with that right run kconsume schema migrate, or the SQL that kconsume schema show prints",
    )  # fmt: skip


def _of_frozen_consumers(address: str, facts: PostgresFacts) -> Finding:
    from kconsume.backends.postgres.transaction import IDLE_LIMIT, SHORT_IDLE_LIMIT

    if facts.may_end and facts.may_end_all:
        return Finding(
            "note", "postgres-frozen", address,
            f"if a consumer freezes inside a transaction, the next owner of the partition ends the connection at "
            f"once: {facts.role} may call pg_terminate_backend, also for backends of other roles",
            "nothing to do",
        )  # fmt: skip
    if facts.may_end:
        return Finding(
            "note", "postgres-frozen", address,
            f"if a consumer freezes inside a transaction, the next owner of the partition ends the connection at "
            f"once: {facts.role} may call pg_terminate_backend for backends of that role. A backend of another role "
            f"is ended by idle_in_transaction_session_timeout {IDLE_LIMIT}",
            f"nothing to do if all processes of a group connect with the same role; otherwise grant pg_signal_backend "
            f"to {facts.role};",
        )  # fmt: skip
    return Finding(
        "warning", "postgres-frozen", address,
        f"if a consumer freezes inside a transaction, the next owner of the partition cannot end the connection, "
        f"because {facts.role} may not call pg_terminate_backend. The server ends it after "
        f"idle_in_transaction_session_timeout {SHORT_IDLE_LIMIT}; no handler may wait longer between two statements",
        f"grant execute on function pg_terminate_backend(integer, bigint) to {facts.role};",
    )  # fmt: skip


def _of_waits(address: str, facts: PostgresFacts) -> Iterator[Finding]:
    if facts.idle_limit != "0" and facts.may_end:
        yield Finding(
            "note", "postgres-idle-limit", address,
            f"{address} ends transactions of {facts.role} that are idle for {facts.idle_limit}: a handler that waits "
            f"longer between two statements loses its transaction, and the record is handled again",
            "keep calls to other services short inside a transaction, or raise idle_in_transaction_session_timeout",
        )  # fmt: skip


def _of_durability(address: str, facts: PostgresFacts) -> Iterator[Finding]:
    if facts.synchronous_commit == "off":
        yield Finding(
            "note", "postgres-asynchronous", address,
            f"{address} has synchronous_commit off: a crash of the server loses the last transactions, offsets and "
            f"effects together; their records are handled again, so each effect exists once, but what a "
            f"handler did elsewhere is repeated",
            "if other programs act on committed data, set synchronous_commit to on for this role",
        )  # fmt: skip


def _of_connections(address: str, facts: PostgresFacts, pool: int) -> Iterator[Finding]:
    from kconsume.backends.postgres.database import OWN_CONNECTIONS

    own, needed = OWN_CONNECTIONS, pool + OWN_CONNECTIONS
    if needed > facts.connections:
        yield Finding(
            "error", "postgres-connections", address,
            f"a process opens up to {needed} connections (pool={pool} and {own} for claims), and {address} allows "
            f"{facts.role} only {facts.connections}",
            f"write ?pool={max(1, facts.connections - own)} or less in offsets=, or raise the limit",
        )  # fmt: skip
    elif needed * 2 > facts.connections:
        yield Finding(
            "warning", "postgres-connections", address,
            f"a process opens up to {needed} connections (pool={pool} and {own} for claims), and {address} allows "
            f"{facts.role} only {facts.connections}: two processes at once, as in a rolling update, do not fit",
            f"write ?pool={max(1, facts.connections // 2 - own)} or less in offsets=, raise the limit, or use a pooler",
        )  # fmt: skip
