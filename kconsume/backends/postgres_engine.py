"""A database by the SQLAlchemy engine that connects to it: where it is, and what it means that it gives no connection.

The engine is the person's. What is done on its connections is `postgres_sqlalchemy.py`'s.
"""

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

from kconsume.backends.postgres_address import Address
from kconsume.backends.postgres_slots import Plain
from kconsume.errors import ConfigurationError, StoreUnavailable
from kconsume.settings import masked_address


@dataclasses.dataclass(frozen=True, slots=True)
class EngineAddress(Address):
    """A database by the engine that connects to it."""

    engine: Engine | None = None
    """For connections of our own; without it, those are made from `conninfo`."""
    url: str = ""

    @property
    def shown(self) -> str:
        return self.url

    def connect(self) -> Plain:
        """Made by the engine, so by its `connect_args` and listeners, and then ours: no longer of its pool."""
        if self.engine is None:
            return Address.connect(self)
        with reached(self):
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
    """`conninfo`, if there is one, is for kconsume's own connections."""
    if not isinstance(engine, Engine | AsyncEngine):
        raise ConfigurationError(
            f"engine= is a {type(engine).__name__}: give create_engine('postgresql+psycopg://…') of SQLAlchemy, or "
            f"create_async_engine(…)"
        )
    url, dialect = engine.url, engine.dialect
    if dialect.name != "postgresql" or dialect.driver not in ("psycopg", "psycopg_async"):
        raise ConfigurationError(
            f"engine= is made of {url.drivername}://, and kconsume works with psycopg 3 alone: write "
            f"create_engine('postgresql+psycopg://…')"
        )
    if isinstance(engine, Engine) and dialect.is_async:
        raise ConfigurationError(
            f"engine= is made of {url.drivername}:// for an event loop: use create_async_engine(…)"
        )
    blocking = engine if conninfo is None and isinstance(engine, Engine) else None
    if conninfo is None and blocking is None:
        _, settings = dialect.create_connect_args(url)
        # Among them are objects of the dialect's own, which are nothing for an address.
        conninfo = make_conninfo(
            **{name: str(value) for name, value in settings.items() if isinstance(value, str | int)}
        )
    shown = url.set(drivername="postgresql").render_as_string(hide_password=False)
    return EngineAddress(conninfo or "", schema, pool, isolation, blocking, masked_address(shown))


@contextmanager
def reached(address: Address) -> Iterator[None]:
    """What it means that the engine gives no connection."""
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
