"""A connection to an SQLite file, its turnstile, and how it is lent to a handler.

Knows the file and nothing of offsets: what is written through the door is `sqlite.py`'s business.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kconsume.errors import Fenced, StoreUnavailable, TransactionMisused

_PATIENCE = 30.0
"""How long a writer waits at the turnstile, in seconds. A handler may be slow; a frozen one is not waited for."""

# Python's sqlite3 begins by itself, before a statement that writes, where no transaction is open. It never has
# to for us; for a handler that goes on after an INSERT OR ROLLBACK it is refused, as any BEGIN of a handler.
# Without it, a statement that is prepared already would not be authorised again, and would commit itself.
_IMPLICIT: Final = "IMMEDIATE"

_NOT_YOURS = (
    "a handler must not begin, commit or roll back: its writes and the offset commit together when it returns, "
    "and are undone when it raises; remove the call (a SAVEPOINT is allowed)"
)
ENDED = (
    "the transaction was ended by a statement of the handler (an error that rolls back, such as "
    "INSERT OR ROLLBACK): nothing was passed; let the exception reach kconsume instead"
)


class LentConnection(sqlite3.Connection):
    """A connection whose transaction is ours to end, also while a handler uses it."""

    _is_lent = False
    _refused = False

    def guard(self) -> None:
        self.set_authorizer(self._authorize)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """While lent, BEGIN, COMMIT and ROLLBACK are refused by SQLite itself. A handler that tried has not
        done what it believes, whether it lets the refusal through or not."""
        self._is_lent, self._refused = True, False
        try:
            yield
        except Fenced:
            raise
        except Exception as error:
            if self._refused:
                raise TransactionMisused(_NOT_YOURS) from error
            raise
        finally:
            self._is_lent = False
            self.restore()
        if self._refused:
            raise TransactionMisused(_NOT_YOURS)
        if not self.in_transaction:
            raise TransactionMisused(ENDED)

    def restore(self) -> None:
        """Undo what a handler may have set on the connection for itself."""
        self.row_factory = None
        self.text_factory = str
        self.isolation_level = _IMPLICIT

    def close(self) -> None:
        if self._is_lent:
            self._refused = True
            raise TransactionMisused(
                "a handler must not close the connection: kconsume commits its writes and the offset on it; "
                "remove the call"
            )
        super().close()

    def _authorize(self, action: int, *_: object) -> int:
        if self._is_lent and (action == sqlite3.SQLITE_TRANSACTION or not self.in_transaction):
            self._refused = True
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK


class Door:
    """One connection and its place in the queue of writers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue = os.open(f"{path}-turnstile", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self.connection = sqlite3.connect(
                path, timeout=5.0, isolation_level=_IMPLICIT, check_same_thread=False, factory=LentConnection
            )
        except BaseException:
            os.close(self._queue)
            raise
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise

    def _set_up(self) -> None:
        if self.connection.execute("pragma journal_mode").fetchone() != ("wal",):
            with self.turnstile():
                self.connection.execute("pragma journal_mode = wal").fetchone()
        self.connection.execute("pragma synchronous = normal")
        # Every 16 MB and not every 4: a page that many transactions touch is copied back less often.
        self.connection.execute("pragma wal_autocheckpoint = 4000").fetchone()
        self.connection.guard()

    @contextmanager
    def turnstile(self) -> Iterator[None]:
        try:
            fcntl.flock(self._queue, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._queue_up()
        try:
            yield
        finally:
            fcntl.flock(self._queue, fcntl.LOCK_UN)

    def _queue_up(self) -> None:
        """Wait in the kernel's queue, with a deadline. `flock` has none, and asking again and again would lose
        the place in the queue, so a thread waits for us, on a descriptor of its own of the same open file. If we
        give up, the door is closed, and the thread's turn, when it comes, ends with its descriptor."""
        turn: Future[None] = Future()
        threading.Thread(target=_take_turn, args=(os.dup(self._queue), turn), name="turnstile", daemon=True).start()
        try:
            turn.result(_PATIENCE)
        except TimeoutError:
            raise StoreUnavailable(
                f"{self._path} was held by another writer for {_PATIENCE:g} s, and nothing was written: look for a "
                f"handler that is slow inside its transaction, or a frozen process (fuser {self._path}-turnstile)"
            ) from None

    def close(self) -> None:
        self.connection.close()
        os.close(self._queue)


def _take_turn(queue: int, turn: Future[None]) -> None:
    try:
        fcntl.flock(queue, fcntl.LOCK_EX)
    except OSError as error:
        turn.set_exception(error)
    else:
        turn.set_result(None)
    finally:
        os.close(queue)
