"""A connection to an SQLite file, and how the connection is lent to a handler.

Writers of the file take turns by a lock on a second file, the turnstile.
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
"""Seconds that a writer waits for the turnstile lock: long enough for a slow handler, not for a frozen one."""

# Python's sqlite3 sends BEGIN before a writing statement if no transaction is open. While a handler runs, a transaction
# is open, unless the handler ended it by an INSERT OR ROLLBACK. If that handler continues, this BEGIN is refused like
# every BEGIN of a handler. Without this BEGIN, SQLite would not call the authorizer for an already prepared statement,
# and would commit the statement by itself.
_IMPLICIT: Final = "IMMEDIATE"

_STEPS = 1_000_000
"""SQLite calls the progress handler each time a statement has run this many steps, about every 10 ms."""

HANDLER_ENDS_IT = (
    "a handler must not begin, commit or roll back: its writes and the offset commit together when the handler "
    "returns, and are rolled back when the handler raises; remove the call (a SAVEPOINT is allowed)"
)
ENDED = (
    "the transaction was ended by a statement of the handler (an error that rolls back, such as "
    "INSERT OR ROLLBACK), so the offset was not moved: do not catch the exception in the handler"
)

_OVER = (
    "the connection was used after its handler had returned and its transaction had ended: write before the handler "
    "returns, or open a connection of your own"
)


class LentSqliteConnection(sqlite3.Connection):
    """A connection on which only kconsume ends the transaction, also while a handler uses the connection."""

    _is_lent = False
    _is_idle = False
    _severed_by: int | None = None
    """The thread that severed the connection; only this thread may still use it."""
    _refused = False

    def guard(self) -> None:
        """Install the callbacks that refuse statements. Called once, when the connection is set up."""
        self.set_authorizer(self._authorize)
        # `sever` does not interrupt a statement that begins at the same moment. The progress handler ends it.
        self.set_progress_handler(self._is_to_end, _STEPS)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lend the connection to a handler. Until the block ends, SQLite refuses BEGIN, COMMIT and ROLLBACK. If the
        handler tried one of these statements, the end of the block raises `TransactionMisused`, even if the handler
        caught the error."""
        self._is_lent, self._refused = True, False
        try:
            yield
        except Fenced:
            raise
        except Exception as error:
            if self._refused:
                raise TransactionMisused(HANDLER_ENDS_IT) from error
            raise
        finally:
            self._is_lent = False
            self.restore()
        if self._refused:
            raise TransactionMisused(HANDLER_ENDS_IT)
        if not self.in_transaction:
            raise TransactionMisused(ENDED)

    def restore(self) -> None:
        """Undo the settings that a handler may have changed on the connection."""
        self.row_factory = None
        self.text_factory = str
        self.isolation_level = _IMPLICIT

    def deactivate(self) -> None:
        """Refuse further use. Called when the connection goes back to the pool. A handler that kept the connection must
        not write with it any more, neither outside of a transaction nor in the next handler's transaction."""
        self._is_idle = True
        self.__class__ = _IdleConnection

    def activate(self) -> None:
        """Allow use again. Called when the connection is taken from the pool."""
        self._is_idle = False
        self.__class__ = LentSqliteConnection

    def sever(self) -> None:
        """Take the connection away from a handler that hangs, possibly in the middle of a statement.

        The statement is interrupted, and later statements are refused. The transaction is rolled back here, because a
        closed connection keeps its transaction until the last cursor is freed, and the handler may have a cursor.
        """
        self.deactivate()
        self._severed_by = threading.get_ident()
        self.interrupt()
        with suppress(sqlite3.Error):  # an error may already have rolled the transaction back
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
        return self._is_idle

    def _authorize(self, action: int, *_: object) -> int:
        if self._is_idle:  # the handler kept a cursor; a writing statement of it begins a transaction and comes here
            ours = self._severed_by == threading.get_ident()
            return sqlite3.SQLITE_OK if ours else sqlite3.SQLITE_DENY
        if self._is_lent and (action == sqlite3.SQLITE_TRANSACTION or not self.in_transaction):
            self._refused = True
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK


class _IdleConnection(LentSqliteConnection):
    """A connection in the pool. It has its own class, so that a lent connection need not check its state at each
    call."""

    def cursor(self, *_: object, **__: object) -> NoReturn:
        raise TransactionMisused(_OVER)

    execute = executemany = executescript = commit = rollback = cursor


class SqliteConnection:
    """One connection, and the open turnstile file. Writers queue for the lock of the turnstile file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue = os.open(f"{path}-turnstile", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self.connection = sqlite3.connect(
                path, timeout=5.0, isolation_level=_IMPLICIT, check_same_thread=False, factory=LentSqliteConnection
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
        # Checkpoint every 16 MB instead of every 4 MB: a page that many transactions change is copied back less often.
        self.connection.execute("pragma wal_autocheckpoint = 4000").fetchone()
        self.connection.guard()

    @contextmanager
    def turnstile(self) -> Iterator[None]:
        """Hold the lock that admits one writer at a time to `BEGIN IMMEDIATE`."""
        try:
            fcntl.flock(self._queue, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._wait_for_turn()
        except OSError as error:  # the kernel has no lock left, or the file system has no locks
            raise self._cannot_wait(error) from error
        try:
            yield
        finally:
            fcntl.flock(self._queue, fcntl.LOCK_UN)

    def _wait_for_turn(self) -> None:
        """Wait in the kernel's queue, with a deadline.

        `flock` has no deadline, and repeated attempts would lose the place in the queue. So a thread waits, on a
        duplicate descriptor of the same open file. If this method raises, the connection is closed. If the thread gets
        the lock after that, the lock is released when the thread closes its descriptor.
        """
        turn: Future[None] = Future()
        try:
            self._start_waiting(turn)
            turn.result(_PATIENCE)
        except TimeoutError:
            raise StoreUnavailable(
                f"{self._path} was held by another writer for {_PATIENCE:g} s, and nothing was written: look for a "
                f"handler that is slow inside its transaction, or a frozen process (fuser {self._path}-turnstile)"
            ) from None
        except (OSError, RuntimeError) as error:  # no descriptor, thread or lock is left
            raise self._cannot_wait(error) from error

    def _start_waiting(self, turn: Future[None]) -> None:
        queue = os.dup(self._queue)
        try:
            threading.Thread(target=_take_turn, args=(queue, turn), name="turnstile", daemon=True).start()
        except BaseException:
            os.close(queue)
            raise

    def _cannot_wait(self, error: BaseException) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self._path}-turnstile cannot be locked ({error}), and nothing was written: raise the limit that is "
            f"reached (ulimit -n, ulimit -u), or put the file on a file system with locks"
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
