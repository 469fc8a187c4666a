"""The address of a PostgreSQL and its settings: `postgresql://user@host/db?schema=…&pool=…&isolation=…`.

This module parses the address, and opens connections with the settings that kconsume needs. It sends no statements.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any
from urllib.parse import quote, unquote_plus

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.conninfo import conninfo_to_dict

from kconsume._config.client_settings import masked_address
from kconsume.backends.postgres.statements import quoted
from kconsume.errors import ConfigurationError, StoreUnavailable

POOL = 8
ISOLATION = ("read committed", "repeatable read", "serializable")

# A peer that vanishes without closing the connection is noticed in about 20 seconds; the system's default is two hours.
_KEEPALIVE = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "application_name": "kconsume",
}
_OWN_SETTINGS = ("schema", "pool", "isolation")
_BARE_PERCENT = re.compile("%(?![0-9a-fA-F]{2})")
_UNKNOWN_SETTING = re.compile(r'invalid (?:URI query parameter|connection option):? "(\w+)"')
_REFUSED = ("28", "3D")
"""Classes of error codes: the login is refused, or there is no database of that name."""
# Most versions of libpq report no error code for a failed connect. Then the server's English text decides.
_REFUSALS = (
    "password authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "does not exist",
    "authentication failed",
    "permission denied for database",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """The connection string of a database, and kconsume's own settings for this database."""

    conninfo: str = dataclasses.field(repr=False)
    """The connection string, with the password."""
    schema: str | None = None
    """Where kconsume's tables are; None for the first schema of `search_path`."""
    pool: int = POOL
    """How many handlers' transactions may be open at once."""
    isolation: str = "read committed"

    def __post_init__(self) -> None:
        if self.isolation not in ISOLATION:
            raise ConfigurationError(
                f"isolation={self.isolation!r} is not an isolation level of PostgreSQL: write one of "
                f"{', '.join(map(repr, ISOLATION))} (in an address with + for the space)"
            )
        if self.pool < 1:
            raise ConfigurationError(f"pool={self.pool!r} must be a number of connections: write 1 or more")
        if "://" in self.conninfo:
            _check_password(self.conninfo)
        try:
            conninfo_to_dict(self.conninfo)
        except psycopg.ProgrammingError as error:
            raise _unreadable(self.conninfo, error) from None

    @property
    def prefix(self) -> str:
        return "" if self.schema is None else quoted(self.schema)

    @property
    def shown(self) -> str:
        """The address as a user writes it, without the password."""
        if "://" not in self.conninfo:
            return "postgresql://(connection string)"
        shown = masked_address(self.conninfo)
        if self.schema is None:
            return shown
        return f"{shown}{'&' if '?' in shown else '?'}schema={quote(self.schema)}"

    def connect(self) -> Connection[tuple[Any, ...]]:
        try:
            return psycopg.connect(self.conninfo, **self._options())
        except psycopg.Error as error:
            raise self.refused(error) from error

    async def connect_async(self) -> AsyncConnection[tuple[Any, ...]]:
        try:
            return await AsyncConnection.connect(self.conninfo, **self._options())
        except psycopg.Error as error:
            raise self.refused(error) from error

    def _options(self) -> dict[str, Any]:
        given = conninfo_to_dict(self.conninfo)
        keepalive = {name: value for name, value in _KEEPALIVE.items() if name not in given}
        # No prepared statements: behind a pooler the next transaction may run on another server connection.
        return {**keepalive, "autocommit": True, "prepare_threshold": None}

    def refused(self, error: psycopg.Error) -> ConfigurationError | StoreUnavailable:
        """Return the store's error for a failed connect."""
        text = " ".join(str(error).split())
        needs_password = error.pgconn is not None and error.pgconn.needs_password
        is_refusal = (error.sqlstate or "").startswith(_REFUSED) or needs_password
        if is_refusal or any(refusal in text for refusal in _REFUSALS):
            return ConfigurationError(
                f"{self.shown} refused the login ({text}): check user, password and database in offsets="
            )
        return StoreUnavailable(f"{self.shown} cannot be reached: {text}")


def address_of(url: str) -> Address:
    """Parse the address that a user writes. Settings that are not kconsume's (`sslmode`, `target_session_attrs`) go to
    libpq unchanged."""
    _check_password(url)
    base, _, query = url.partition("?")
    settings = [piece for piece in query.split("&") if piece]
    values = {name: unquote_plus(value) for name, _, value in (piece.partition("=") for piece in settings)}
    rest = "&".join(piece for piece in settings if piece.partition("=")[0] not in _OWN_SETTINGS)
    conninfo = f"{base}?{rest}" if rest else base
    if not base.partition("://")[2].strip("/") and "dbname" not in values and "service" not in values:
        raise ConfigurationError(
            f"{masked_address(url)!r} names no database: write postgresql://user@host:port/database"
        )
    pool = values.get("pool", str(POOL))
    if not pool.isdecimal():
        raise ConfigurationError(f"pool={pool!r} in {masked_address(url)!r} must be a number: write pool={POOL}")
    return Address(conninfo, values.get("schema") or None, int(pool), values.get("isolation", ISOLATION[0]).lower())


def _unreadable(conninfo: str, error: psycopg.ProgrammingError) -> ConfigurationError:
    """The error for an address that libpq cannot parse. Takes only a setting's name from libpq's message, which may
    quote any part of the address, the password included."""
    found = _UNKNOWN_SETTING.search(str(error))
    if found is None:
        return ConfigurationError(
            f"{masked_address(conninfo)!r} is not a PostgreSQL address: write "
            f"postgresql://user@host:port/database?schema=…, and write characters other than letters and digits as %XX"
        )
    name = found.group(1)
    how = f"give PostgresStore(…, {name}=…)" if name in _OWN_SETTINGS else "correct its name, or leave it out"
    return ConfigurationError(
        f'{masked_address(conninfo)!r} has a setting that PostgreSQL\'s client does not know ("{name}"): {how}'
    )


def _check_password(url: str) -> None:
    """Refuse a password with a character that has a meaning in an address: libpq would split the password there, and
    parts of it would appear in messages."""
    base, _, query = url.partition("?")
    scheme, _, rest = (url if "@" in query and "@" not in base else base).partition(
        "://"
    )  # if `@` is only in the query, the password contains a question mark
    login, at, _ = rest.rpartition("@")
    user, colon, password = login.partition(":")
    is_torn = not password.isprintable() or set(password) & set("/@?#[] ") or _BARE_PERCENT.search(password)
    if at and colon and (is_torn or "%00" in password):
        raise ConfigurationError(
            f"the password in {scheme}://{user}:…@ has a character that an address needs as %XX: write / as %2F, @ as "
            f"%40, ? as %3F, # as %23, [ as %5B, ] as %5D, % as %25, a space as %20, and none as %00"
        )
