"""`kconsume schema`: the tables of an offset store, shown or brought up to date.

A service makes its tables itself where its role may. This is for those whose role may not: what has to be run, or the
running of it by another role. What the tables are is the store's own; here is only what is said about them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from kconsume.backends import OffsetStore, SqliteStore, open_store
from kconsume.cli.target import app_argument, load
from kconsume.errors import ConfigurationError, StoreError
from kconsume.settings import masked_address

if TYPE_CHECKING:
    from psycopg import Connection

    from kconsume.backends.postgres_address import Address
    from kconsume.backends.postgres_sql import Statements

Command = TypeVar("Command", bound=Callable[..., object])


class Tables(msgspec.Struct):
    """The tables of one store; printed as they are with `--json`."""

    store: str
    """Its address, with no password in it."""
    version: int | None
    """Of the tables that are there; 0 if there are none, None for a store that has no tables of ours."""
    wanted: int | None
    """The version that this kconsume writes."""
    said: str
    """In one sentence: what is there, and what was or is to be done."""
    changed: bool = False
    sql: str | None = None
    """What is to be run; None if nothing is."""


@click.group(short_help="The tables that offsets are kept in: show them, bring them up to date.")
def schema() -> None:
    """The tables that offsets are kept in.

    A service makes and updates them by itself, where its role may create tables. Where it may not, a person does it:

    \b
      kconsume schema show shop:app                     the SQL that is still to be run
      kconsume schema show shop:app | psql -d shop      run it
      kconsume schema migrate --offsets postgresql://owner@db/shop
    """


def _shared(command: Command) -> Command:
    """What both commands take: an app or an address, and `--json`."""
    command = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)
    command = click.option(
        "--offsets", metavar="ADDRESS", help="The store at this address, instead of those of an app."
    )(command)
    return app_argument(command)


@schema.command(short_help="The SQL that brings the tables to this version.")
@_shared
@click.option(
    "--since", type=click.IntRange(min=0), help="Begin at this version, and do not ask the database; 0 is all of it."
)
def show(app: str | None, offsets: str | None, since: int | None, as_json: bool) -> None:
    """The SQL that brings the tables of APP's stores to the version of this kconsume. Changes nothing.

    Everything else that is said is a comment of SQL, so that the output can be given to psql.
    """
    tell([shown(store, since) for store in _stores(app, offsets)], as_json, comments=True)


@schema.command(short_help="Bring the tables to this version.")
@_shared
def migrate(app: str | None, offsets: str | None, as_json: bool) -> None:
    """Bring the tables of APP's stores to the version of this kconsume, each in one transaction.

    What is stored stays. It may run while services do, and twice at once: who comes second finds nothing to do.
    """
    tell([migrated(store) for store in _stores(app, offsets)], as_json, comments=False)


def tell(all_tables: Sequence[Tables], as_json: bool, *, comments: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(all_tables))
        return
    for tables in all_tables:
        click.echo(f"{'-- ' if comments else ''}{tables.store}: {tables.said}")
        if comments and tables.sql is not None:
            click.echo(tables.sql)


def shown(store: OffsetStore, since: int | None = None) -> Tables:
    """What is to be run. With `since`, nobody is asked."""
    if isinstance(store, SqliteStore):
        return _of_sqlite(store)
    if not _is_postgres(store):
        return _without(store)
    from kconsume.backends.postgres_schema import Found, found, state_of
    from kconsume.backends.postgres_sql import VERSION

    address, sql = _parts(store)
    if since is None:
        with _connected(address) as connection:
            there, sql = state_of(connection, sql), found(connection, sql)
    elif since > VERSION:
        raise ConfigurationError(f"--since {since} is above version {VERSION}, which this kconsume writes")
    else:
        there = Found(since, 0)
    since = there.version
    if since > VERSION:
        return Tables(store.address, since, VERSION, f"{_has(since)}, newer than {VERSION}: upgrade kconsume here")
    if there.is_ours:
        return Tables(store.address, since, VERSION, f"{_has(since)}, which is this kconsume's: nothing to do")
    said = f"{_has(since)}, and this kconsume writes version {VERSION}: run what follows"
    if since == VERSION:
        said = f"{_has(since)}, {_ADDED}: run what follows"
    return Tables(store.address, since, VERSION, said, sql=_script(address, sql, since))


def migrated(store: OffsetStore) -> Tables:
    """Bring the tables up to date, and say what was done."""
    if isinstance(store, SqliteStore):
        return _migrated_sqlite(store)
    if not _is_postgres(store):
        return _without(store)
    from kconsume.backends.postgres_schema import ready, state_of
    from kconsume.backends.postgres_sql import VERSION

    address, sql = _parts(store)
    with _connected(address) as connection:
        there = state_of(connection, sql)
        ready(connection, sql, address)
    before = there.version
    if there.is_ours:
        return Tables(store.address, before, VERSION, f"{_has(before)}, which is this kconsume's: nothing to do")
    if before == VERSION:
        said = f"{_has(before)}, {_ADDED}: it is there now; {_RIGHTS_OF_OTHERS}"
        return Tables(store.address, VERSION, VERSION, said, changed=True)
    said = f"made, in version {VERSION}" if not before else _brought(before, VERSION)
    return Tables(store.address, VERSION, VERSION, f"{said}; {_RIGHTS_OF_OTHERS}", changed=True)


# Which stores


def _stores(app: str | None, offsets: str | None) -> list[OffsetStore]:
    if offsets is not None:
        return [open_store(offsets)]
    if not app:
        raise ConfigurationError("whose tables? Write MODULE:APP, as in shop:app, or --offsets ADDRESS")
    stores = {r.store_address: r.store for r in load(app).registrations}
    if not stores:
        raise ConfigurationError(
            "the app has no handler, so it keeps no offsets: decorate a function with @app.consume('topic'), or write "
            "--offsets ADDRESS"
        )
    return list(stores.values())


def _without(store: OffsetStore) -> Tables:
    scheme = store.address.partition("://")[0]
    why = {
        "kafka": "offsets are kept by the brokers, in the group",
        "memory": "offsets are kept in the process, and gone with it",
        "redis": "offsets are kept in hashes, which need no preparation",
        "rediss": "offsets are kept in hashes, which need no preparation",
    }.get(scheme, "what it keeps is its own")
    return Tables(masked_address(store.address), None, None, f"has no tables ({why}): nothing to do")


# PostgreSQL


def _is_postgres(store: OffsetStore) -> bool:
    """By the name of its class: to ask for the class itself would need the extra, also of those who do not use it."""
    return any(kind.__module__ == "kconsume.backends.postgres" for kind in type(store).__mro__)


def _parts(store: OffsetStore) -> tuple[Address, Statements]:
    from kconsume.backends.postgres import PostgresStore

    assert isinstance(store, PostgresStore)
    return store._at, store._sql


@contextmanager
def _connected(address: Address) -> Iterator[Connection[tuple[Any, ...]]]:
    import psycopg

    from kconsume.backends.postgres_faults import store_error

    with closing(address.connect()) as connection:
        try:
            yield connection
        except psycopg.Error as error:
            raise store_error(error, address.shown) from error


def _script(address: Address, sql: Statements, since: int) -> str:
    """As a person runs it: whole or not at all, and with the rights that the service's role needs in the end."""
    from kconsume.backends.postgres_schema import script, set_version
    from kconsume.backends.postgres_sql import RIGHTS

    steps = script(sql, address.schema if not since else None, since).strip()
    version = f"{set_version(sql)};"
    grants = [f"grant {rights} on {sql.prefix}{table} to ROLE;" for table, rights in RIGHTS]
    if address.schema is not None:
        grants.insert(0, f"grant usage on schema {sql.prefix.rstrip('.')} to ROLE;")
    told = "\n".join(f"--   {grant}" for grant in grants)
    return f"begin;\n{steps}\n{version}\ncommit;\n-- and for the role of the service, unless it owns them:\n{told}"


_ADDED = "without what this kconsume adds to them, which earlier ones of that version do not mind"
_RIGHTS_OF_OTHERS = "a role that does not own them may lack rights on what is new: `kconsume check` names the grants"


def _has(version: int) -> str:
    return "has no tables" if version == 0 else f"has tables of version {version}"


def _brought(before: int, after: int) -> str:
    return f"brought from version {before} to {after}"


# SQLite


def _of_sqlite(store: SqliteStore) -> Tables:
    """Its tables are made with the file, and brought up to date by whoever opens it."""
    from kconsume.backends.sqlite_schema import SCHEMA_VERSION

    version = _sqlite_version(store)
    if version == 0:
        said = f"has no tables; whoever opens it first makes them, in version {SCHEMA_VERSION}: nothing to do"
    elif version == SCHEMA_VERSION:
        said = f"{_has(version)}, which is this kconsume's: nothing to do"
    elif version < SCHEMA_VERSION:
        said = f"{_has(version)}; whoever opens it first makes version {SCHEMA_VERSION} of them: nothing to do"
    else:
        said = f"{_has(version)}, and this kconsume writes version {SCHEMA_VERSION}: upgrade kconsume here"
    return Tables(store.address, version, SCHEMA_VERSION, said)


def _migrated_sqlite(store: SqliteStore) -> Tables:
    """A file that is not there is not made."""
    from kconsume.backends.sqlite_schema import SCHEMA_VERSION

    before = _sqlite_version(store)
    if before in (0, SCHEMA_VERSION):
        return _of_sqlite(store)
    try:
        store.groups()  # to open it brings it up to date, or refuses it
    finally:
        store.close()
    return Tables(store.address, SCHEMA_VERSION, SCHEMA_VERSION, _brought(before, SCHEMA_VERSION), changed=True)


def _sqlite_version(store: SqliteStore) -> int:
    if not store.path.exists():
        return 0
    try:
        with closing(sqlite3.connect(f"{store.path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            there = connection.execute("select count(*) from sqlite_master where name = 'kconsume_schema'").fetchone()
            return int(connection.execute("select version from kconsume_schema").fetchone()[0]) if there[0] else 0
    except sqlite3.Error as error:
        raise StoreError(f"{store.address} cannot be read ({error}): is it a database of SQLite?") from error
