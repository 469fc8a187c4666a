"""What an error of PostgreSQL means: the store is away, two transactions met, or it is the handler's own fault."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
from psycopg import BaseConnection
from psycopg.pq import TransactionStatus

from kconsume.backends.causes import causes_of
from kconsume.backends.postgres_sql import RIGHTS
from kconsume.errors import ConfigurationError, Conflict, KconsumeError, StoreError, StoreUnavailable

_AWAY = ("08", "53", "57", "58")
"""Classes of codes: connection, resources (disk full, too many connections), operator intervention, system."""
_CANCELLED = "57014"
"""By a person, or by a `statement_timeout`. In a statement of the handler's that is the handler's own affair."""
_INTERNAL = "XX"
_READ_ONLY = "25006"
_ON_A_STANDBY = "0A000"
"""To BEGIN with READ WRITE; nothing else that we send is a feature that a server may not have."""
_LOCKED = "55P03"
_CONFLICTS = ("40001", "40P01")
_NO_RIGHT = "42501"
_OFFSETS = "kconsume_offsets"


def fault_of(
    error: BaseException, address: str, connection: BaseConnection[object], raised: Callable[[BaseException], bool]
) -> StoreError | None:
    """Whose fault it is that a handler ended with `error`, given the connection of its transaction, and which errors
    were `raised` on it: the handler may have others."""
    if connection.broken or connection.closed:
        return StoreUnavailable(f"{address} broke the connection: {_said(error)}")
    was_ours = any(raised(cause) for cause in causes_of(error))
    meaning = meaning_of(error, address)
    if connection.pgconn.transaction_status == TransactionStatus.INERROR:
        return meaning
    # A conflict may have been in a part of it that was undone since. Whatever else it is, it was not in here.
    return meaning if was_ours and isinstance(meaning, Conflict) else None


def meaning_of(error: BaseException, address: str) -> StoreError | None:
    """The same of an error that is known to have been in the transaction."""
    for cause in causes_of(error):
        if isinstance(cause, psycopg.Error) and (fault := _of_code(cause, address)) is not None:
            return fault
    return None


def store_error(error: psycopg.Error, address: str) -> KconsumeError:
    """What it means that a statement of ours failed."""
    if (fault := _of_code(error, address)) is not None:
        return fault
    if error.sqlstate == _CANCELLED or (error.sqlstate or "").startswith(_INTERNAL):
        return StoreUnavailable(f"{address} gave up a statement of kconsume: {_said(error)}")
    if error.sqlstate == _ON_A_STANDBY:
        return _read_only(address)
    if error.sqlstate == _LOCKED:
        return StoreUnavailable(f"{address} keeps a row locked that we must have: {_said(error)}")
    if error.sqlstate == _NO_RIGHT:
        rights = "; ".join(f"{what} on {table}" for table, what in RIGHTS)
        return ConfigurationError(f"{address} does not let our role do its work ({_said(error)}): it needs {rights}")
    if error.sqlstate is None:  # not from the server: the connection
        return StoreUnavailable(f"{address} did not answer: {_said(error)}")
    return StoreError(f"{address} refused a statement of kconsume: {_said(error)}")


def commit_error(error: psycopg.Error, address: str) -> BaseException:
    """What it means that COMMIT failed. What was deferred until then, a constraint or a trigger, is the handler's, and
    raised as it is."""
    if error.sqlstate == _CANCELLED or error.sqlstate is None or error.sqlstate.startswith(_INTERNAL):
        return store_error(error, address)
    return _of_code(error, address) or error


def ending_error(error: psycopg.Error, address: str) -> BaseException:
    """The same where the offset moves in the same message. Which of the two failed is told by what has no language: the
    name of our table, or a place in our text; what fails at COMMIT has neither."""
    diag = error.diag
    is_ours = diag.statement_position is not None or _OFFSETS in f"{diag.message_primary} {diag.context}"
    return (store_error if is_ours else commit_error)(error, address)


def _of_code(error: psycopg.Error, address: str) -> StoreError | None:
    code = error.sqlstate or ""
    if code in _CONFLICTS:
        return Conflict(f"{address} undid the transaction because of another one: {_said(error)}")
    if code == _READ_ONLY:
        return _read_only(address)
    if code[:2] in _AWAY and code != _CANCELLED:
        return StoreUnavailable(f"{address} cannot work now: {_said(error)}")
    return None


def _read_only(address: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"{address} is read-only: connect to the primary (?target_session_attrs=read-write finds it)"
    )


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())
