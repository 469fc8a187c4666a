"""Who is in the way of a claim, and how they are ended.

Two kinds: a backend that is still in a transaction of an earlier epoch, known by the partition's advisory lock; and one
that keeps the row itself locked while the claim waits for it. Both are given a moment to end by themselves, and then
exactly those are ended. What a claim is, and when it is made, is `postgres.py`'s.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, TypeAlias

import psycopg

from kconsume.backends.postgres_address import Address
from kconsume.backends.postgres_slots import Plain
from kconsume.backends.postgres_sql import (
    BLOCKERS,
    END_BLOCKER,
    ENTERING,
    MAY_END_OTHERS,
    MY_PID,
    NOW,
    WHOSE,
    Statements,
)
from kconsume.backends.postgres_watch import watch
from kconsume.errors import KconsumeError

_log = logging.getLogger("kconsume.stores")

GRACE = 0.3
"""Seconds that somebody is given to end by themselves."""
_LOOK_EVERY = GRACE / 3

Values: TypeAlias = Mapping[str, Any]
Desk: TypeAlias = Callable[[], AbstractContextManager[Plain]]


def end_earlier_owners(desk: Desk, sql: Statements, values: Values, *, by_snapshot: bool = False) -> None:
    """Those that are still in a transaction on partitions that we have claimed, when the grace is over.

    `by_snapshot`: transactions see the rows as of a moment before they have their lock. Whoever is between the two does
    not see our claim, and is not seen by its lock yet: it is waited for.
    """
    began, since = time.monotonic(), None
    while True:
        with desk() as connection:
            enters = False
            if by_snapshot:  # first this, then who has the lock: it goes from the one to the other
                since = since or connection.execute(NOW).fetchone()
                enters = connection.execute(ENTERING, since).fetchone() is not None
            holders = {pid for (pid,) in connection.execute(sql.holders, values)}
            if not holders and not (enters and time.monotonic() - began <= GRACE):
                return
            if holders and time.monotonic() - began > GRACE:
                for pid in holders:
                    _end(connection, pid, sql.end_holder, values, "was still in a transaction of an earlier epoch")
                return
        time.sleep(0.01)


@contextmanager
def row_holders_ended(address: Address, waiting: Plain) -> Iterator[None]:
    """While `waiting` works, whoever makes it wait for a row for longer than the grace is ended, over a connection that
    is opened if it comes to that."""
    (pid,) = waiting.execute(MY_PID).fetchone() or (0,)  # behind a pooler, the client's library has another number
    done = threading.Event()
    lookout = threading.Thread(target=_look_out, args=(address, pid, done), name="kconsume-claim", daemon=True)
    lookout.start()
    try:
        yield
    finally:
        done.set()


def _look_out(address: Address, waiting: int, done: threading.Event) -> None:
    if done.wait(_LOOK_EVERY):
        return
    try:
        with closing(address.connect()) as connection, watch.over(connection.pgconn, address.shown, ours=True):
            since: dict[tuple[int, str], float] = {}
            while not done.wait(_LOOK_EVERY):
                now = time.monotonic()
                since = {who: since.get(who, now) for who in connection.execute(BLOCKERS, {"waiting": waiting})}
                for pid in {pid for (pid, _), at in since.items() if now - at > GRACE}:
                    _end(connection, pid, END_BLOCKER, {"waiting": waiting}, "kept a row locked that a claim waits for")
    except (psycopg.Error, KconsumeError) as error:
        _log.warning(
            "cannot look for who is in the way of a claim, which waits store=%s cause=%s", address.shown, error
        )


def _end(connection: Plain, pid: int, statement: str, values: Values, why: str) -> None:
    """Also if it may not be: it can still not commit. What it has locked, it has until its idle limit."""
    try:
        for _, ended in connection.execute(statement, {**values, "pid": pid}).fetchall():
            _log.warning("ended backend=%d done=%s because it %s", pid, ended, why)
    except psycopg.errors.InsufficientPrivilege as error:
        fix = _right_that_lacks(connection, pid)
        _log.error(
            "cannot end backend=%d, which %s, so what it has locked stays locked until its idle limit cause=%s fix=%s",
            pid, why, error.diag.message_primary, fix,
        )  # fmt: skip


def _right_that_lacks(connection: Plain, pid: int) -> str:
    (may_call,) = connection.execute(MAY_END_OTHERS).fetchone() or (False,)
    theirs, ours = connection.execute(WHOSE, {"pid": pid}).fetchone() or ("another role", "our role")
    if not may_call:
        return f"grant execute on function pg_terminate_backend(integer, bigint) to {ours}"
    return (
        f"it is of role {theirs} and we are {ours}: let all processes of the group connect with one role, or grant "
        f"pg_signal_backend to {ours}"
    )
