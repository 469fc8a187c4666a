"""Where a PostgreSQL is and how it is used: `postgresql://user@host/db?schema=…&pool=…&isolation=…`.

Reads the address, and opens connections with what kconsume needs of them. What a connection does is not known here.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any
from urllib.parse import quote, unquote_plus

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.conninfo import conninfo_to_dict

from kconsume.backends.postgres_sql import quoted
from kconsume.errors import ConfigurationError, StoreUnavailable
from kconsume.settings import masked_address

POOL = 8
ISOLATION = ("read committed", "repeatable read", "serializable")

# A peer that is gone without a word is noticed in about 20 seconds, and not after the system's two hours.
_WATCHFUL = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "application_name": "kconsume",
}
_OURS = ("schema", "pool", "isolation")
_BARE_PERCENT = re.compile("%(?![0-9a-fA-F]{2})")
_NO_SETTING = re.compile(r'invalid (?:URI query parameter|connection option):? "(\w+)"')
_REFUSED = ("28", "3D")
"""Classes of codes: who asks is not let in, or not to a database of that name."""
# Where the client's library hands on no code, which is in most versions of it: what a server says in English.
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
    """A database, and the settings that are ours."""

    conninfo: str = dataclasses.field(repr=False)
    """With the password in it."""
    schema: str | None = None
    pool: int = POOL
    isolation: str = "read committed"

    def __post_init__(self) -> None:
        if self.isolation not in ISOLATION:
            raise ConfigurationError(
                f"isolation={self.isolation!r} is not an isolation level of PostgreSQL: write one of "
                f"{', '.join(map(repr, ISOLATION))} (in an address with + for the space)"
            )
        if self.pool < 1:
            raise ConfigurationError(f"pool={self.pool!r} is no number of connections: write 1 or more")
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
        """As a person writes it, with no password."""
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
        watchful = {name: value for name, value in _WATCHFUL.items() if name not in given}
        # Nothing is prepared: behind a pooler the next transaction may be on another server connection.
        return {**watchful, "autocommit": True, "prepare_threshold": None}

    def refused(self, error: psycopg.Error) -> ConfigurationError | StoreUnavailable:
        said = " ".join(str(error).split())
        asked_for_one = error.pgconn is not None and error.pgconn.needs_password
        is_refusal = (error.sqlstate or "").startswith(_REFUSED) or asked_for_one
        if is_refusal or any(refusal in said for refusal in _REFUSALS):
            return ConfigurationError(
                f"{self.shown} does not let us in ({said}): check user, password and database in offsets="
            )
        return StoreUnavailable(f"{self.shown} cannot be reached: {said}")


def address_of(url: str) -> Address:
    """From what a person writes. What is not ours (`sslmode`, `target_session_attrs`) goes to PostgreSQL's client, byte
    by byte."""
    _check_password(url)
    base, _, query = url.partition("?")
    settings = [piece for piece in query.split("&") if piece]
    ours = {name: unquote_plus(value) for name, _, value in (piece.partition("=") for piece in settings)}
    rest = "&".join(piece for piece in settings if piece.partition("=")[0] not in _OURS)
    conninfo = f"{base}?{rest}" if rest else base
    if not base.partition("://")[2].strip("/") and "dbname" not in ours and "service" not in ours:
        raise ConfigurationError(
            f"{masked_address(url)!r} names no database: write postgresql://user@host:port/database"
        )
    pool = ours.get("pool", str(POOL))
    if not pool.isdecimal():
        raise ConfigurationError(f"pool={pool!r} in {masked_address(url)!r} is no number: write pool={POOL}")
    return Address(conninfo, ours.get("schema") or None, int(pool), ours.get("isolation", ISOLATION[0]).lower())


def _unreadable(conninfo: str, error: psycopg.ProgrammingError) -> ConfigurationError:
    """What the client's library says may quote any part of the address: of that only the name of a setting is told."""
    found = _NO_SETTING.search(str(error))
    if found is None:
        return ConfigurationError(
            f"{masked_address(conninfo)!r} is no address of a PostgreSQL: write "
            f"postgresql://user@host:port/database?schema=…, with %XX for what is neither letter nor digit in its parts"
        )
    name = found.group(1)
    how = f"give PostgresStore(…, {name}=…)" if name in _OURS else "correct its name, or leave it out"
    return ConfigurationError(
        f'{masked_address(conninfo)!r} has a setting that PostgreSQL\'s client does not know ("{name}"): {how}'
    )


def _check_password(url: str) -> None:
    """One with a character that means something in an address would be taken apart, and parts of it end in messages."""
    base, _, query = url.partition("?")
    scheme, _, rest = (url if "@" in query and "@" not in base else base).partition("://")  # a mark in the password
    login, at, _ = rest.rpartition("@")
    user, colon, password = login.partition(":")
    is_torn = not password.isprintable() or set(password) & set("/@?#[] ") or _BARE_PERCENT.search(password)
    if at and colon and (is_torn or "%00" in password):
        raise ConfigurationError(
            f"the password in {scheme}://{user}:…@ has a character that an address needs as %XX: write / as %2F, @ as "
            f"%40, ? as %3F, # as %23, [ as %5B, ] as %5D, % as %25, a space as %20, and none as %00"
        )
