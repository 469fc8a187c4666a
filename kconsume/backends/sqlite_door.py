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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

from kconsume.errors import Fenced, StoreUnavailable, TransactionMisused

_PATIENCE = 30.0
"""How long a writer waits at the turnstile, in seconds. A handler may be slow; a frozen one is not waited for."""

# Python's sqlite3 begins by itself, before a statement that writes, where no transaction is open. It never has
# to for us; for a handler that goes on after an INSERT OR ROLLBACK it is refused, as any BEGIN of a handler.
# Without it, a statement that is prepared already would not be authorised again, and would commit itself.
_IMPLICIT: Final = "IMMEDIATE"

_STEPS = 1_000_000
"""Of SQLite's machine, some 10 ms: after so many of one statement it is asked whether it may go on."""

_NOT_YOURS = (
    "a handler must not begin, commit or roll back: its writes and the offset commit together when it returns, "
    "and are undone when it raises; remove the call (a SAVEPOINT is allowed)"
)
ENDED = (
    "the transaction was ended by a statement of the handler (an error that rolls back, such as "
    "INSERT OR ROLLBACK): nothing was passed; let the exception reach kconsume instead"
)


_OVER = (
    "the connection was used after its handler had returned, when its transaction had ended: write before the handler "
    "returns, or open a connection of your own"
)


class LentConnection(sqlite3.Connection):
    """A connection whose transaction is ours to end, also while a handler uses it."""

    _is_lent = False
    _is_resting = False
    _severed_by: int | None = None
    """The thread that has taken it away from a handler, and alone may still use it."""
    _refused = False

    def guard(self) -> None:
        self.set_authorizer(self._authorize)
        # A statement that begins just as the connection is severed is not broken off by that, and would never end.
        self.set_progress_handler(self._is_to_end, _STEPS)

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

    def rest(self) -> None:
        """Nobody's turn: a handler that kept the connection must not write with it, in no transaction or another's."""
        self._is_resting = True
        self.__class__ = _Resting

    def wake(self) -> None:
        """Ours again, from the pool."""
        self._is_resting = False
        self.__class__ = LentConnection

    def sever(self) -> None:
        """Its handler does not come back, and may be anywhere, also in the middle of a statement: that is broken off,
        and nothing more is done through it. Undone here, because a connection that is closed keeps its transaction
        until the last cursor is gone, and the handler may have one."""
        self.rest()
        self._severed_by = threading.get_ident()
        self.interrupt()
        with suppress(sqlite3.Error):  # an error that rolls back may have come first
            sqlite3.Connection.execute(self, "rollback")

    def close(self) -> None:
        if self._is_lent:
            self._refused = True
            raise TransactionMisused(
                "a handler must not close the connection: kconsume commits its writes and the offset on it; "
                "remove the call"
            )
        super().close()

    def _is_to_end(self) -> bool:
        return self._is_resting

    def _authorize(self, action: int, *_: object) -> int:
        if self._is_resting:  # by a cursor that was kept; writing begins a transaction, and so it asks
            ours = self._severed_by == threading.get_ident()
            return sqlite3.SQLITE_OK if ours else sqlite3.SQLITE_DENY
        if self._is_lent and (action == sqlite3.SQLITE_TRANSACTION or not self.in_transaction):
            self._refused = True
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK


class _Resting(LentConnection):
    """A connection in the pool. A class of its own, so that a lent one pays nothing for the question."""

    def cursor(self, *_: object, **__: object) -> NoReturn:
        raise TransactionMisused(_OVER)

    execute = executemany = executescript = commit = rollback = cursor


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
        except OSError as error:  # the kernel has no lock left, or the file system none to give
            raise self._stuck(error) from error
        try:
            yield
        finally:
            fcntl.flock(self._queue, fcntl.LOCK_UN)

    def _queue_up(self) -> None:
        """Wait in the kernel's queue, with a deadline. `flock` has none, and asking again and again would lose
        the place in the queue, so a thread waits for us, on a descriptor of its own of the same open file. If we
        give up, the door is closed, and the thread's turn, when it comes, ends with its descriptor."""
        turn: Future[None] = Future()
        try:
            self._send(turn)
            turn.result(_PATIENCE)
        except TimeoutError:
            raise StoreUnavailable(
                f"{self._path} was held by another writer for {_PATIENCE:g} s, and nothing was written: look for a "
                f"handler that is slow inside its transaction, or a frozen process (fuser {self._path}-turnstile)"
            ) from None
        except (OSError, RuntimeError) as error:  # no descriptor, no thread or no lock is left
            raise self._stuck(error) from error

    def _send(self, turn: Future[None]) -> None:
        queue = os.dup(self._queue)
        try:
            threading.Thread(target=_take_turn, args=(queue, turn), name="turnstile", daemon=True).start()
        except BaseException:
            os.close(queue)
            raise

    def _stuck(self, error: BaseException) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self._path}-turnstile cannot be waited at ({error}), and nothing was written: free what the system "
            f"lacks (ulimit -n, ulimit -u), or put the file on a file system with locks"
        )

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
