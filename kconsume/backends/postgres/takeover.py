"""Finds the backends that block a claim, and ends them.

There are two kinds. A backend of the first kind is still in a transaction of an earlier epoch; the partition's advisory
lock identifies this backend. A backend of the second kind keeps the offset row locked while the claim waits for the
row. Each backend has `GRACE` seconds to end its transaction. Then only the backends that still block the claim are
ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, TypeAlias

import psycopg

from kconsume._event_log import EventLog
from kconsume.backends.postgres.address import Address
from kconsume.backends.postgres.pool import PooledConnection
from kconsume.backends.postgres.statements import (
    BLOCKERS,
    END_BLOCKER,
    ENTERING,
    MAY_END_OTHERS,
    MY_PID,
    NOW,
    ROLES,
    Statements,
)
from kconsume.backends.postgres.watchdog import watch
from kconsume.errors import KconsumeError

_log = EventLog("stores")

GRACE = 0.3
"""Seconds that a backend has to end its own transaction."""
_CHECK_EVERY = GRACE / 3

Values: TypeAlias = Mapping[str, Any]
Borrow: TypeAlias = Callable[[], AbstractContextManager[PooledConnection]]


def end_earlier_owners(borrow: Borrow, sql: Statements, values: Values, *, by_snapshot: bool = False) -> None:
    """Wait until no backend is in a transaction of an earlier epoch. After `GRACE` seconds, end such backends.

    Args:
        borrow: returns a connection for statements of kconsume.
        sql: the store's statements.
        values: the claimed partitions, with their new epochs and the numbers of their advisory locks.
        by_snapshot: True if a transaction takes its snapshot before it has its lock (repeatable read, serializable).
            Between the two, the transaction does not see the claim, and the claim does not see the lock. So the claim
            waits until the transaction has its lock.
    """
    began, since = time.monotonic(), None
    while True:
        with borrow() as connection:
            entering = False
            if by_snapshot:  # checked before the locks, because a transaction first waits for its lock, then has it
                since = since or connection.execute(NOW).fetchone()
                entering = connection.execute(ENTERING, since).fetchone() is not None
            holders = {pid for (pid,) in connection.execute(sql.lock_holders, values)}
            if not holders and not (entering and time.monotonic() - began <= GRACE):
                return
            if holders and time.monotonic() - began > GRACE:
                for pid in holders:
                    _end(connection, pid, sql.end_lock_holder, values, "still in a transaction of an earlier epoch")
                return
        time.sleep(0.01)


@contextmanager
def row_blockers_ended(address: Address, waiting: PooledConnection) -> Iterator[None]:
    """While the block runs, end each backend that holds a row lock for which `waiting` waits longer than `GRACE`.

    A thread ends the backends over its own connection, which is opened only after a third of `GRACE`.

    Args:
        address: where the thread's connection goes.
        waiting: the connection on which the block executes statements.
    """
    (pid,) = waiting.execute(MY_PID).fetchone() or (0,)  # behind a pooler, libpq knows another process id
    done = threading.Event()
    thread = threading.Thread(target=_end_row_blockers, args=(address, pid, done), name="kconsume-claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def _end_row_blockers(address: Address, waiting: int, done: threading.Event) -> None:
    if done.wait(_CHECK_EVERY):
        return
    try:
        with closing(address.connect()) as connection, watch.over(connection.pgconn, address.shown, own=True):
            since: dict[tuple[int, str], float] = {}
            while not done.wait(_CHECK_EVERY):
                now = time.monotonic()
                since = {each: since.get(each, now) for each in connection.execute(BLOCKERS, {"waiting": waiting})}
                for pid in {pid for (pid, _), first_seen in since.items() if now - first_seen > GRACE}:
                    _end(connection, pid, END_BLOCKER, {"waiting": waiting}, "kept a row locked that a claim waits for")
    except (psycopg.Error, KconsumeError) as error:
        _log.warning("row blockers unknown", store=address.shown, cause=error)


def _end(connection: PooledConnection, pid: int, statement: str, values: Values, reason: str) -> None:
    """End a backend. If the role may not end it, the error is logged, and the backend keeps its locks until its idle
    limit."""
    try:
        for _, ended in connection.execute(statement, {**values, "pid": pid}).fetchall():
            _log.warning("backend ended", backend=pid, done=ended, reason=reason)
    except psycopg.errors.InsufficientPrivilege as error:
        fix = _missing_right(connection, pid)
        _log.error(
            "cannot end backend",
            backend=pid,
            reason=reason,
            cause=error.diag.message_primary,
            hint=f"{fix}; until then the backend keeps its locks up to its idle limit",
        )


def _missing_right(connection: PooledConnection, pid: int) -> str:
    (may_call,) = connection.execute(MAY_END_OTHERS).fetchone() or (False,)
    theirs, ours = connection.execute(ROLES, {"pid": pid}).fetchone() or ("another role", "our role")
    if not may_call:
        return f"grant execute on function pg_terminate_backend(integer, bigint) to {ours}"
    return (
        f"the backend is of role {theirs} and we are {ours}: let all processes of the group connect with one role, or "
        f"grant pg_signal_backend to {ours}"
    )
