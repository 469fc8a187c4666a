"""`kconsume schema`: shows the SQL of an offset store's tables, or runs it.

A service creates its tables itself if its role has the right. This command is for a service whose role lacks it: it
prints the SQL, or runs the SQL with another role. The store's package defines the tables.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from kconsume._config.client_settings import masked_address
from kconsume.backends import OffsetStore, SqliteStore, open_store
from kconsume.cli.app_loader import load
from kconsume.cli.command_group import CommandGroup
from kconsume.cli.options import app_argument, json_option
from kconsume.cli.store_kind import is_postgres
from kconsume.errors import ConfigurationError, StoreError

if TYPE_CHECKING:
    from psycopg import Connection

    from kconsume.backends.postgres.address import Address
    from kconsume.backends.postgres.statements import Statements

Command = TypeVar("Command", bound=Callable[..., object])


class Tables(msgspec.Struct):
    """The tables of one store, as `--json` prints them."""

    store: str
    """The address of the store, without a password."""
    version: int | None
    """The version of the tables that exist; 0 if there are none, None for a store without tables."""
    wanted: int | None
    """The version that this kconsume writes."""
    said: str
    """In one sentence: which tables exist, and what was done or must be done."""
    changed: bool = False
    sql: str | None = None
    """The SQL to run; None if there is nothing to do."""


@click.group(cls=CommandGroup, short_help="The tables that keep offsets: show their SQL, migrate them.")
def schema() -> None:
    """The tables that keep offsets.

    A service creates and migrates the tables when it first connects, if its role has the right. Otherwise run:

    \b
      kconsume schema show shop:app                     print the SQL that is still to be run
      kconsume schema show shop:app | psql -d shop      run it
      kconsume schema migrate --offsets postgresql://owner@db/shop
    """


def _shared(command: Command) -> Command:
    """The parameters of both commands: an app or an address, and `--json`."""
    command = json_option(command)
    command = click.option(
        "--offsets",
        metavar="ADDRESS",
        show_default="the stores of APP",
        help="The store at this address, instead of the stores of an app.",
    )(command)
    return app_argument(command)


@schema.command(short_help="Print the SQL that brings the tables to this version.")
@_shared
@click.option(
    "--since",
    type=click.IntRange(min=0),
    show_default="the version in the database",
    help="Print the SQL from this version on, without asking the database; 0 prints all of it.",
)
def show(app: str | None, offsets: str | None, since: int | None, as_json: bool) -> None:
    """Print the SQL that brings the tables of APP's stores to the version of this kconsume. Changes nothing.

    Other output is printed as SQL comments, so that all of it can be piped to psql.
    """
    print_tables([shown(store, since) for store in _stores(app, offsets)], as_json, comments=True)


@schema.command(short_help="Bring the tables to this version.")
@_shared
def migrate(app: str | None, offsets: str | None, as_json: bool) -> None:
    """Bring the tables of APP's stores to the version of this kconsume, each in one transaction.

    Stored offsets stay. The command may run while services run. If it runs twice at once, the second one finds nothing
    to do.
    """
    print_tables([migrated(store) for store in _stores(app, offsets)], as_json, comments=False)


def print_tables(all_tables: Sequence[Tables], as_json: bool, *, comments: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(all_tables))
        return
    for tables in all_tables:
        click.echo(f"{'-- ' if comments else ''}{tables.store}: {tables.said}")
        if comments and tables.sql is not None:
            click.echo(tables.sql)


def shown(store: OffsetStore, since: int | None = None) -> Tables:
    """The SQL to run.

    Args:
        since: the version to start from; None asks the database.
    """
    if isinstance(store, SqliteStore):
        return _of_sqlite(store)
    if not is_postgres(store):
        return _without(store)
    from kconsume.backends.postgres.schema import SchemaState, schema_state, with_actual_schema
    from kconsume.backends.postgres.tables import VERSION

    address, sql = _parts(store)
    if since is None:
        with _connected(address) as connection:
            there, sql = schema_state(connection, sql), with_actual_schema(connection, sql)
    elif since > VERSION:
        raise ConfigurationError(f"--since {since} is above version {VERSION}, which this kconsume writes")
    else:
        there = SchemaState(since, 0)
    since = there.version
    if since > VERSION:
        return Tables(store.address, since, VERSION, f"{_has(since)}, newer than {VERSION}: upgrade kconsume here")
    if there.is_current:
        return Tables(store.address, since, VERSION, f"{_has(since)}, the version of this kconsume: nothing to do")
    said = f"{_has(since)}, and this kconsume writes version {VERSION}: run the SQL that follows"
    if since == VERSION:
        said = f"{_has(since)}, {_ADDED}: run the SQL that follows"
    return Tables(store.address, since, VERSION, said, sql=_script(address, sql, since))


def migrated(store: OffsetStore) -> Tables:
    """Migrate the tables."""
    if isinstance(store, SqliteStore):
        return _migrated_sqlite(store)
    if not is_postgres(store):
        return _without(store)
    from kconsume.backends.postgres.schema import ensure_tables, schema_state
    from kconsume.backends.postgres.tables import VERSION

    address, sql = _parts(store)
    with _connected(address) as connection:
        there = schema_state(connection, sql)
        ensure_tables(connection, sql, address)
    before = there.version
    if there.is_current:
        return Tables(store.address, before, VERSION, f"{_has(before)}, the version of this kconsume: nothing to do")
    if before == VERSION:
        said = f"{_has(before)}, {_ADDED}: these columns exist now; {_RIGHTS_OF_OTHERS}"
        return Tables(store.address, VERSION, VERSION, said, changed=True)
    said = f"created tables of version {VERSION}" if not before else _brought(before, VERSION)
    return Tables(store.address, VERSION, VERSION, f"{said}; {_RIGHTS_OF_OTHERS}", changed=True)


# Which stores


def _stores(app: str | None, offsets: str | None) -> list[OffsetStore]:
    if offsets is not None:
        return [open_store(offsets)]
    if not app:
        raise ConfigurationError("no store was named: write MODULE:APP, as in shop:app, or --offsets ADDRESS")
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
        "kafka": "the brokers keep the offsets, in the group",
        "memory": "the process keeps the offsets, and they end with it",
        "redis": "offsets are kept in hashes, which need no preparation",
        "rediss": "offsets are kept in hashes, which need no preparation",
    }.get(scheme, "its own code defines what it keeps")
    return Tables(masked_address(store.address), None, None, f"has no tables ({why}): nothing to do")


# PostgreSQL


def _parts(store: OffsetStore) -> tuple[Address, Statements]:
    from kconsume.backends.postgres.store import PostgresStore

    assert isinstance(store, PostgresStore)
    return store.database.address, store.database.statements


@contextmanager
def _connected(address: Address) -> Iterator[Connection[tuple[Any, ...]]]:
    import psycopg

    from kconsume.backends.postgres.errors import store_error

    with closing(address.connect()) as connection:
        try:
            yield connection
        except psycopg.Error as error:
            raise store_error(error, address.shown) from error


def _script(address: Address, sql: Statements, since: int) -> str:
    """The SQL in one transaction, then as comments the grants that the service's role needs afterwards."""
    from kconsume.backends.postgres.schema import migration_script, set_version
    from kconsume.backends.postgres.tables import RIGHTS

    steps = migration_script(sql, address.schema if not since else None, since).strip()
    version = f"{set_version(sql)};"
    grants = [f"grant {rights} on {sql.prefix}{table} to ROLE;" for table, rights in RIGHTS]
    if address.schema is not None:
        grants.insert(0, f"grant usage on schema {sql.prefix.rstrip('.')} to ROLE;")
    comments = "\n".join(f"--   {grant}" for grant in grants)
    return f"begin;\n{steps}\n{version}\ncommit;\n-- and for the role of the service, unless it owns them:\n{comments}"


_ADDED = "without some columns that this kconsume adds, and that an earlier kconsume ignores"
_RIGHTS_OF_OTHERS = "a role that does not own the tables may lack rights on them: `kconsume check` names the grants"


def _has(version: int) -> str:
    return "has no tables" if version == 0 else f"has tables of version {version}"


def _brought(before: int, after: int) -> str:
    return f"migrated from version {before} to {after}"


# SQLite


def _of_sqlite(store: SqliteStore) -> Tables:
    """Nothing to run: the first process that opens the file creates or migrates its tables."""
    from kconsume.backends.sqlite.schema import SCHEMA_VERSION

    version = _sqlite_version(store)
    if version == 0:
        said = f"has no tables; the first process that opens it creates version {SCHEMA_VERSION}: nothing to do"
    elif version == SCHEMA_VERSION:
        said = f"{_has(version)}, the version of this kconsume: nothing to do"
    elif version < SCHEMA_VERSION:
        said = f"{_has(version)}; the first process that opens it migrates to version {SCHEMA_VERSION}: nothing to do"
    else:
        said = f"{_has(version)}, and this kconsume writes version {SCHEMA_VERSION}: upgrade kconsume here"
    return Tables(store.address, version, SCHEMA_VERSION, said)


def _migrated_sqlite(store: SqliteStore) -> Tables:
    """Migrate a file that exists. Creates no file."""
    from kconsume.backends.sqlite.schema import SCHEMA_VERSION

    before = _sqlite_version(store)
    if before in (0, SCHEMA_VERSION):
        return _of_sqlite(store)
    try:
        store.groups()  # opening the file migrates it, or refuses it
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
