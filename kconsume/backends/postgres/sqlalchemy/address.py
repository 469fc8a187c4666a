"""The address of the database that a user's SQLAlchemy engine connects to, and the errors of a failed connect."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg.conninfo import make_conninfo
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine

from kconsume._config.client_settings import masked_address
from kconsume.backends.postgres.address import Address
from kconsume.backends.postgres.pool import PooledConnection
from kconsume.errors import ConfigurationError, StoreUnavailable


@dataclasses.dataclass(frozen=True, slots=True)
class EngineAddress(Address):
    """The address of an engine."""

    engine: Engine | None = None
    """The engine that opens kconsume's own connections; None if `conninfo` is used for them."""
    url: str = ""
    """The engine's address, without the password."""

    @property
    def shown(self) -> str:
        return self.url

    def connect(self) -> PooledConnection:
        """Open a connection by the engine, with its `connect_args` and listeners, and take it out of the engine's
        pool."""
        if self.engine is None:
            return Address.connect(self)
        with connection_errors(self):
            pooled = self.engine.raw_connection()
        connection = pooled.driver_connection
        pooled.detach()
        assert isinstance(connection, psycopg.Connection)
        connection.rollback()
        connection.isolation_level = connection.read_only = connection.deferrable = None
        connection.autocommit = True
        connection.prepare_threshold = None
        connection.row_factory = psycopg.rows.tuple_row
        return connection


def address_of(
    engine: Engine | AsyncEngine, conninfo: str | None, schema: str | None, pool: int, isolation: str
) -> EngineAddress:
    """The address of the engine's database. Raises `ConfigurationError` if the engine does not use psycopg.

    Args:
        engine: the user's engine.
        conninfo: for kconsume's own connections; None to use the engine, or its address if the engine is async.
        schema, pool, isolation: as in `PostgresStore`.
    """
    if not isinstance(engine, Engine | AsyncEngine):
        raise ConfigurationError(
            f"engine= is a {type(engine).__name__}: give create_engine('postgresql+psycopg://…') of SQLAlchemy, or "
            f"create_async_engine(…)"
        )
    url, dialect = engine.url, engine.dialect
    if dialect.name != "postgresql" or dialect.driver not in ("psycopg", "psycopg_async"):
        raise ConfigurationError(
            f"engine= was created with {url.drivername}://, and kconsume supports only psycopg 3: write "
            f"create_engine('postgresql+psycopg://…')"
        )
    if isinstance(engine, Engine) and dialect.is_async:
        raise ConfigurationError(
            f"engine= was created with {url.drivername}://, which is for an event loop: use create_async_engine(…)"
        )
    blocking = engine if conninfo is None and isinstance(engine, Engine) else None
    if conninfo is None and blocking is None:
        _, settings = dialect.create_connect_args(url)
        # Some of the settings are objects of the dialect, which an address cannot hold.
        conninfo = make_conninfo(
            **{name: str(value) for name, value in settings.items() if isinstance(value, str | int)}
        )
    shown = url.set(drivername="postgresql").render_as_string(hide_password=False)
    return EngineAddress(conninfo or "", schema, pool, isolation, blocking, masked_address(shown))


@contextmanager
def connection_errors(address: Address) -> Iterator[None]:
    """Raise the store's error if the engine cannot open a connection."""
    try:
        yield
    except PoolTimeout as error:
        raise StoreUnavailable(
            f"the engine of {address.shown} gave no connection in time ({error}): look for a handler that is slow "
            f"inside its transaction, or make the engine's pool_size larger"
        ) from error
    except psycopg.Error as error:
        raise address.refused(error) from error
    except DBAPIError as error:
        if isinstance(error.orig, psycopg.Error):
            raise address.refused(error.orig) from error
        raise
