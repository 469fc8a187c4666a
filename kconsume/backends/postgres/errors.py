"""Decides what an error of PostgreSQL means: the store is unavailable, two transactions conflicted, or the handler
failed."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
from psycopg import BaseConnection
from psycopg.pq import TransactionStatus

from kconsume.backends.error_chain import causes_of
from kconsume.backends.postgres.tables import RIGHTS
from kconsume.errors import ConfigurationError, Conflict, KconsumeError, StoreError, StoreUnavailable

_UNAVAILABLE = ("08", "53", "57", "58")
"""Classes of error codes: connection, resources (disk full, too many connections), operator intervention, system."""
_CANCELLED = "57014"
"""Cancelled by a user or by `statement_timeout`. For a statement of the handler this is an error of the handler."""
_INTERNAL = "XX"
_READ_ONLY = "25006"
_ON_A_STANDBY = "0A000"
"""The error that a standby returns for BEGIN with READ WRITE. No other statement of kconsume uses a feature that a
server may lack."""
_LOCKED = "55P03"
_CONFLICTS = ("40001", "40P01")
_NO_RIGHT = "42501"
_NO_TABLE = "42P01"
_OFFSETS = "kconsume_offsets"


def fault_of(
    error: BaseException, address: str, connection: BaseConnection[object], has_raised: Callable[[BaseException], bool]
) -> StoreError | None:
    """Return the store's error that caused the error of a handler; None if the store did not cause it.

    Args:
        error: the error that the handler raised.
        address: the store's address, for the message.
        connection: the connection of the handler's transaction.
        has_raised: returns True if an error came from `connection`. The handler may use other connections too.
    """
    if connection.broken or connection.closed:
        return StoreUnavailable(f"{address} broke the connection: {_text(error)}")
    was_here = any(has_raised(cause) for cause in causes_of(error))
    meaning = meaning_of(error, address)
    if connection.pgconn.transaction_status == TransactionStatus.INERROR:
        return meaning
    # The transaction is not aborted, so the error is the handler's, unless it is a conflict. A conflict counts even if
    # the handler has rolled back to a savepoint since.
    return meaning if was_here and isinstance(meaning, Conflict) else None


def meaning_of(error: BaseException, address: str) -> StoreError | None:
    """As `fault_of`, for an error that is known to come from the transaction."""
    for cause in causes_of(error):
        if isinstance(cause, psycopg.Error) and (fault := _by_code(cause, address)) is not None:
            return fault
    return None


def store_error(error: psycopg.Error, address: str) -> KconsumeError:
    """The error to raise when a statement of kconsume failed."""
    if (fault := _by_code(error, address)) is not None:
        return fault
    if error.sqlstate == _CANCELLED or (error.sqlstate or "").startswith(_INTERNAL):
        return StoreUnavailable(f"{address} could not finish a statement of kconsume: {_text(error)}")
    if error.sqlstate == _ON_A_STANDBY:
        return _read_only(address)
    if error.sqlstate == _LOCKED:
        return StoreUnavailable(f"{address} keeps a row locked that kconsume needs: {_text(error)}")
    if error.sqlstate == _NO_RIGHT:
        rights = "; ".join(f"{what} on {table}" for table, what in RIGHTS)
        return ConfigurationError(
            f"{address} refused a statement of kconsume ({_text(error)}): the role needs {rights}"
        )
    if error.sqlstate == _NO_TABLE and any(table in (error.diag.message_primary or "") for table, _ in RIGHTS):
        return StoreError(
            f"{address} does not have the tables of kconsume any more ({_text(error)}): stop the group's processes and "
            f"restore the tables from a backup. If there is no backup, start the processes again: they make empty "
            f"tables, and a partition that had an offset is not consumed until store.reset(group, {{partition: "
            f"offset}}) has set one. If the tables exist in another schema, add ?schema= to the address. If they exist "
            f"in this schema, grant the role usage on it"
        )
    if error.sqlstate is None:  # from libpq, not from the server
        return StoreUnavailable(f"{address} did not answer: {_text(error)}")
    return StoreError(f"{address} refused a statement of kconsume: {_text(error)}")


def commit_error(error: psycopg.Error, address: str) -> BaseException:
    """The error to raise when COMMIT failed. An error of a deferred constraint or trigger is the handler's, and stays
    unchanged."""
    if error.sqlstate == _CANCELLED or error.sqlstate is None or error.sqlstate.startswith(_INTERNAL):
        return store_error(error, address)
    return _by_code(error, address) or error


def advance_and_commit_error(error: psycopg.Error, address: str) -> BaseException:
    """The error to raise when the offset and COMMIT were sent in one message and one of them failed.

    An error of the statement that moves the offset has the name of kconsume's table, or a position in the SQL text; an
    error of COMMIT has neither. Name and position do not depend on the language of the server's messages.
    """
    diag = error.diag
    is_own = diag.statement_position is not None or _OFFSETS in f"{diag.message_primary} {diag.context}"
    return (store_error if is_own else commit_error)(error, address)


def _by_code(error: psycopg.Error, address: str) -> StoreError | None:
    code = error.sqlstate or ""
    if code in _CONFLICTS:
        return Conflict(f"{address} rolled back the transaction because of another transaction: {_text(error)}")
    if code == _READ_ONLY:
        return _read_only(address)
    if code[:2] in _UNAVAILABLE and code != _CANCELLED:
        return StoreUnavailable(f"{address} is not available: {_text(error)}")
    return None


def _read_only(address: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"{address} is read-only: connect to the primary (?target_session_attrs=read-write finds it)"
    )


def _text(error: BaseException) -> str:
    return " ".join(str(error).split())
