"""One transaction on a connection of a user's SQLAlchemy engine, in blocking calls.

On an event loop SQLAlchemy runs these calls in a greenlet, so the same code serves `Session` and `AsyncSession`.

A session rolls back its transaction when a flush fails. Listeners on a copy of the engine, which shares the engine's
pool, notice this rollback, and record whether the server had already aborted the transaction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, ExceptionContext, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends.error_chain import causes_of
from kconsume.backends.postgres.connection import ENDED, sever
from kconsume.backends.postgres.dead_letters import writer as letter_statements
from kconsume.backends.postgres.errors import fault_of, meaning_of
from kconsume.backends.postgres.sql_scanner import transaction_statement
from kconsume.backends.postgres.sqlalchemy.sessions import NOT_ALLOWED, HandlerSession
from kconsume.backends.postgres.transaction import COMMIT, OffsetRow
from kconsume.backends.postgres.watchdog import watch
from kconsume.errors import StoreError, TransactionMisused
from kconsume.failures.letter_headers import Letter

_TRANSACTION = "kconsume_transaction"
"""The key in `Connection.info` under which the listeners find the transaction."""
_REUSABLE = (TransactionStatus.IDLE, TransactionStatus.INTRANS, TransactionStatus.INERROR)

_ROLLED_BACK = (
    "a statement or a flush of the handler failed, or the handler rolled back, and the handler continued; but the "
    "transaction was already rolled back, so the offset was not moved: do not catch the error, or put this part into "
    "`session.begin_nested()`"
)


class EngineTransaction:
    """A transaction between its BEGIN and its end. One thread, or one task, at a time uses it; only `sever` may be
    called from another thread."""

    def __init__(self, row: OffsetRow | None, session: HandlerSession, connection: Connection) -> None:
        """
        Args:
            row: the offset row that moves; None for a dry run.
            session: the session that the handler gets.
            connection: the session's connection.
        """
        self.session = session
        self._row = row
        self._connection = connection
        self._driver = _driver_of(connection)
        self._server_had_failed = False
        """True if the server had aborted the transaction, or a savepoint, when it was rolled back."""
        self._rolled_back = False
        self._own_statement_runs = False
        """True while kconsume executes a statement. Then the listeners allow all statements."""
        self._errors: deque[BaseException] = deque(maxlen=16)
        connection.info[_TRANSACTION] = self
        # Begins the session's transaction, so that there is one to commit even if the handler never uses the session.
        session.connection()

    @property
    def row(self) -> OffsetRow:
        assert self._row is not None
        return self._row

    @property
    def status(self) -> TransactionStatus:
        return TransactionStatus(self._driver.pgconn.transaction_status)

    def watched(self, address: str) -> AbstractContextManager[None]:
        return watch.over(self._driver.pgconn, address, own=False)

    def has_raised(self, error: BaseException) -> bool:
        """True if the error came from this connection, and not from another connection of the handler."""
        return any(error is recorded for recorded in self._errors)

    def open(self) -> None:
        """Begin the transaction. Raises `Fenced` if the epoch is stale."""
        with self._own_statement():
            for text, values in self.row.entry_statements():
                checked = self._connection.exec_driver_sql(text, values)
            if checked.first() is None:
                raise self.row.stale(self._read_row())

    def advance(self, old: int, new: int, leader_epoch: int | None) -> None:
        self._flush()
        try:
            with self._own_statement():
                for statement in self.row.move_statements(old, new, leader_epoch):
                    self._connection.exec_driver_sql(*statement)
        except _NotMoved:
            raise self.row.not_moved(old, self._read_row()) from None

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        with self._own_statement():
            exists = self._connection.exec_driver_sql(*letter_statements.table_exists(table)).scalar()
            for statement in () if exists else letter_statements.create_table(table):
                self._connection.exec_driver_sql(*statement)
            for statement in letter_statements.insert_letters(table, letters):
                self._connection.exec_driver_sql(*statement)

    def post(self, outgoing: Sequence[Outgoing]) -> None:
        self._flush()
        with self._own_statement():
            self._connection.exec_driver_sql(*self.row.post_statement(outgoing))

    def record_origins(self, origins: Sequence[str]) -> set[str]:
        with self._own_statement():
            return set(self._connection.exec_driver_sql(*self.row.record_origins_statement(origins)).scalars())

    def commit(self) -> None:
        self._flush()
        with self._own_statement(COMMIT):
            Session.commit(self.session)

    def begin_dry_run(self) -> None:
        self._connection.exec_driver_sql("select 1")  # the driver begins the transaction with the first statement

    def check_dry_run(self) -> None:
        """Flush the session, and check deferred constraints as a COMMIT would."""
        self._flush()
        self._connection.exec_driver_sql("set constraints all immediate")

    def fault(self, error: BaseException) -> StoreError | None:
        if self._server_had_failed and self.status != TransactionStatus.INERROR and not self._driver.closed:
            was_here = any(map(self.has_raised, causes_of(error)))
            return meaning_of(error, self.row.settings.address) if was_here else None
        return fault_of(error, self.row.settings.address, self._driver, self.has_raised)

    def sever(self) -> None:
        """Take the connection away from a handler that does not return. SQLAlchemy then has a closed connection."""
        assert isinstance(self._driver, psycopg.Connection)
        self.session.over = True
        sever(self._driver)

    def end(self) -> None:
        """Roll back if the transaction is not committed. The session and its objects cannot be used afterwards."""
        self._own_statement_runs = self.session.over = True
        if self.status not in _REUSABLE:
            self._connection.invalidate()  # the pool must not lend it again, and a rollback would only fail
        elif not self._connection.invalidated:
            self._connection.info.pop(_TRANSACTION, None)
        with suppress(SQLAlchemyError):  # the pool then closes the connection, which rolls back as well
            Session.close(self.session)
            if self.status != TransactionStatus.IDLE and not self._connection.invalidated:
                # SQLAlchemy treats a commit() that kconsume refused as the end of the transaction.
                self._connection.connection.rollback()

    def _flush(self) -> None:
        """Flush the changes that the handler left in its session. An error of the flush is the handler's error."""
        self._check()
        try:
            self.session.flush()
        except SQLAlchemyError as error:
            if self._row is None or (fault := self.fault(error)) is None:
                raise
            raise fault from error

    def _check(self) -> None:
        """Raise `TransactionMisused` unless the transaction is open and not failed, and the handler has not tried to
        end it."""
        if self.session.refused is not None:
            raise TransactionMisused(NOT_ALLOWED.format(call=self.session.refused))
        if self._rolled_back or self.status == TransactionStatus.INERROR:
            raise TransactionMisused(_ROLLED_BACK)
        if self.status == TransactionStatus.IDLE:
            raise TransactionMisused(ENDED)

    @contextmanager
    def _own_statement(self, statement: str = "") -> Iterator[None]:
        """Execute statements of kconsume in the block.

        Args:
            statement: `COMMIT` if the block commits, because errors of COMMIT may be the handler's.
        """
        self._own_statement_runs = True
        try:
            yield
        except DBAPIError as error:
            driver_error = error.orig
            if isinstance(driver_error, psycopg.errors.DivisionByZero):
                raise _NotMoved from None
            if not isinstance(driver_error, psycopg.Error):
                raise
            meaning = self.row.failed(driver_error, self._driver, statement)
            if meaning is None or meaning is driver_error:
                raise  # SQLAlchemy's error, unchanged
            raise meaning from error
        finally:
            self._own_statement_runs = False

    def _read_row(self) -> tuple[Any, ...] | None:
        """The current row, read in a transaction of its own."""
        self._own_statement_runs = True
        Session.rollback(self.session)
        row = self._connection.exec_driver_sql(self.row.settings.statements.read_row, self.row.key).first()
        self._connection.rollback()
        return None if row is None else tuple(row)

    # Called by the listeners

    def before_statement(self, statement: str) -> None:
        if not self._own_statement_runs:
            backslashes = self._driver.pgconn.parameter_status(b"standard_conforming_strings") == b"off"
            words = transaction_statement(statement, backslashes=backslashes)
            if words is not None:
                self.session.refuse(f"`{words}`")

    def after_error(self, error: BaseException) -> None:
        self._errors.append(error)

    def before_commit(self) -> None:
        if not self._own_statement_runs:
            self.session.refuse("commit()")

    def before_rollback(self, *, to_savepoint: bool) -> None:
        if not self._own_statement_runs:
            self._server_had_failed = self._server_had_failed or self.status == TransactionStatus.INERROR
            self._rolled_back = self._rolled_back or not to_savepoint


class _NotMoved(Exception):
    """The row has another epoch or another offset."""


def _driver_of(connection: Connection) -> psycopg.BaseConnection[Any]:
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.BaseConnection)
    return driver


# Listeners


def listen(engine: Engine) -> None:
    """Add the listeners to an engine. engine: a copy of the user's engine that only kconsume uses."""
    event.listen(engine, "before_cursor_execute", _before_statement)
    event.listen(engine, "handle_error", _after_error)
    event.listen(engine, "commit", _before_commit)
    event.listen(engine, "rollback", _before_rollback)
    event.listen(engine, "rollback_savepoint", _before_rollback)


def _transaction_on(connection: Connection | None) -> EngineTransaction | None:
    return None if connection is None else connection.info.get(_TRANSACTION)


def _before_statement(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
    if (transaction := _transaction_on(connection)) is not None:
        transaction.before_statement(statement)


def _after_error(context: ExceptionContext) -> None:
    if (transaction := _transaction_on(context.connection)) is not None:
        transaction.after_error(context.original_exception)


def _before_commit(connection: Connection) -> None:
    if (transaction := _transaction_on(connection)) is not None:
        transaction.before_commit()


def _before_rollback(connection: Connection, *savepoint: object) -> None:
    if (transaction := _transaction_on(connection)) is not None:
        transaction.before_rollback(to_savepoint=bool(savepoint))
