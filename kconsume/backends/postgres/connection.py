"""The connection that a handler gets: psycopg's own, on which only kconsume begins and ends a transaction.

Each transaction has its own connection object over the pooled connection. Settings that a handler makes on this object
(a row factory, an adapter) end with the transaction. If a handler keeps the object, a later use raises
`TransactionMisused` instead of writing in another handler's transaction.

`sql_scanner` knows which statements end a transaction, and `psycopg_internals` holds what depends on psycopg's private
methods.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, NoReturn, cast

import psycopg
from psycopg import pq, sql

from kconsume.backends.postgres.psycopg_internals import (
    ErrorReportingCursor,
    PipelineFetchingCursor,
    mark_autocommit,
    portioned_pipeline,
)
from kconsume.backends.postgres.sql_scanner import transaction_statement
from kconsume.backends.postgres.tx_statements import Statement, one_text
from kconsume.backends.postgres.watchdog import cut
from kconsume.errors import TransactionMisused

ENDED = (
    "the handler's transaction was ended by a statement of its own (COMMIT, ROLLBACK or another), so the offset was "
    "not moved: remove the statement; kconsume commits when the handler returns"
)
BROKEN = (
    "a statement of the handler failed and the handler continued, but PostgreSQL had aborted the transaction, so the "
    "offset was not moved: do not catch the error, or put the statement into `with tx.transaction():`"
)
_NOT_ALLOWED = (
    "a handler must not call {call} on its transaction, because kconsume commits the handler's writes and the offset "
    "together when the handler returns: remove the call, or use `with tx.transaction():` for a part that may be rolled "
    "back"
)
_LEFT_OPEN = (
    "the handler returned inside a pipeline, so the offset was not moved: use `with tx.pipeline():`, which ends the "
    "pipeline"
)
_OVER = (
    "this transaction has ended, because a handler may use it only until the handler returns: do not keep it, and use "
    "a connection of your own for later work"
)

_CANCEL_TIMEOUT = 5.0


def _closed_pgconn() -> pq.abc.PGconn:
    """The closed libpq connection that a handler's connection gets when its transaction has ended."""
    pgconn = pq.PGconn.connect_start(b"host=/nowhere")
    pgconn.finish()
    return pgconn


_CLOSED = _closed_pgconn()
_SUCCESS = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)


class _ConnectionGuard:
    """The common part of the blocking and the async connection: refused calls, connection errors, and the end of
    use."""

    pgconn: pq.abc.PGconn
    refused: str | None = None
    """The forbidden call that the handler made, even if the handler caught the error; None if there was none."""

    def __init__(self, pgconn: pq.abc.PGconn) -> None:
        super().__init__(pgconn)  # type: ignore[call-arg]
        self._errors: deque[tuple[psycopg.Error, str | None]] = deque(maxlen=16)

    def record_error(self, error: psycopg.Error, own: str | None) -> None:
        """Remember the server's error.

        Args:
            own: the statement, if it is one of kconsume's; None for a statement of the handler.
        """
        # `PipelineAborted` is reported only for the statements after the failed one.
        if not isinstance(error, psycopg.errors.PipelineAborted):
            self._errors.append((error, own))

    def has_raised(self, error: BaseException) -> bool:
        """True if the error came from this connection, and not from another connection of the handler."""
        return any(error is recorded for recorded, _ in self._errors)

    def own_statement(self, error: BaseException) -> str | None:
        """The statement of kconsume that failed with this error; None if it was a statement of the handler."""
        return next((own for recorded, own in self._errors if recorded is error), None)

    @property
    def status(self) -> pq.TransactionStatus:
        return pq.TransactionStatus(self.pgconn.transaction_status)

    def detach(self) -> None:
        """End the handler's use of this connection. The pooled connection stays open."""
        self.pgconn = _CLOSED
        self._errors.clear()

    def check(self) -> None:
        """Raise `TransactionMisused` unless the transaction is open and not failed, and the handler has not tried to
        end it."""
        if self.refused is not None:
            raise TransactionMisused(_NOT_ALLOWED.format(call=self.refused))
        if self.status == pq.TransactionStatus.INERROR:
            raise TransactionMisused(BROKEN)
        if self.status == pq.TransactionStatus.IDLE:
            raise TransactionMisused(ENDED)
        if self.pgconn.pipeline_status:
            raise TransactionMisused(_LEFT_OPEN)

    def refuse(self, call: str) -> NoReturn:
        if self.pgconn is _CLOSED:
            raise TransactionMisused(_OVER)
        self.refused = call
        raise TransactionMisused(_NOT_ALLOWED.format(call=call))


def _text_of(query: object, connection: psycopg.BaseConnection[Any]) -> str:
    if isinstance(query, str):
        return query
    if isinstance(query, bytes):
        return query.decode(errors="replace")
    if isinstance(query, sql.Composable):
        return query.as_string(connection)
    return sql.as_string(query, connection)  # a template string, which only newer versions of Python and psycopg have


def _check_statement(connection: Any, query: object) -> None:
    """Refuse a handler's statement that ends the transaction. Otherwise earlier writes would be committed without the
    offset, and later records of the chunk would write outside of any transaction."""
    pgconn = connection.pgconn
    if pgconn is _CLOSED:
        raise TransactionMisused(_OVER)
    text = _text_of(query, connection)
    backslashes = "\\" in text and pgconn.parameter_status(b"standard_conforming_strings") == b"off"
    if (words := transaction_statement(text, backslashes=backslashes)) is not None:
        connection.refuse(f"`{words}`")
    if pgconn.transaction_status == pq.TransactionStatus.IDLE:
        raise TransactionMisused(ENDED)


class _RecordingCursor(ErrorReportingCursor):
    """A cursor that records the server's errors on its connection."""

    own: str | None = None
    """The statement, if kconsume executes it; None for a statement of the handler."""

    def on_server_error(self, error: psycopg.Error) -> None:
        self.connection.record_error(error, self.own)


class _CheckingCursor(_RecordingCursor):
    """A mixin for a handler's cursor, of any cursor class: checks each statement before it is sent."""

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        _check_statement(self.connection, query)
        return super().execute(query, *args, **kwargs)

    def executemany(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        _check_statement(self.connection, query)
        return super().executemany(query, *args, **kwargs)

    def stream(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        _check_statement(self.connection, query)
        return super().stream(query, *args, **kwargs)

    def copy(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
        _check_statement(self.connection, statement)
        return super().copy(statement, *args, **kwargs)


class _CheckingFetchingCursor(PipelineFetchingCursor, _CheckingCursor):
    """A `_CheckingCursor` for a blocking connection, which may be in a pipeline."""


class HandlerCursor(_CheckingFetchingCursor, psycopg.Cursor[Any]):
    """A cursor of a handler's connection."""


class AsyncHandlerCursor(_CheckingCursor, psycopg.AsyncCursor[Any]):
    """A cursor of an `async def` handler's connection.

    A property such as `rowcount` cannot await, so it cannot fetch results: in a pipeline it is known only after the
    next awaited `fetch…`. Therefore `async def` handlers run without a pipeline of kconsume.
    """


class _OwnCursor(_RecordingCursor, psycopg.Cursor[Any]):
    """A cursor for a statement of kconsume."""


class _AsyncOwnCursor(_RecordingCursor, psycopg.AsyncCursor[Any]):
    """A cursor for an awaited statement of kconsume."""


@functools.cache
def _checked_class(cursor_class: Any, mixin: type[_CheckingCursor]) -> Any:
    """The cursor class that a handler chose (`tx.cursor_factory = psycopg.ClientCursor`), with its statements
    checked."""
    if issubclass(cursor_class, _CheckingCursor):
        return cursor_class
    return type(f"Handler{cursor_class.__name__}", (mixin, cursor_class), {})


class HandlerConnection(_ConnectionGuard, psycopg.Connection[Any]):
    """The connection that a plain function gets."""

    def __init__(self, pgconn: pq.abc.PGconn) -> None:
        super().__init__(pgconn)
        mark_autocommit(self)  # kconsume sends BEGIN and COMMIT as statements
        self.prepare_threshold = None
        self.cursor_factory = HandlerCursor

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        if self.pgconn is _CLOSED:
            raise TransactionMisused(_OVER)
        self.cursor_factory = _checked_class(cast(Any, self.cursor_factory), _CheckingFetchingCursor)
        return super().cursor(*args, **kwargs)

    def portioned_pipeline(self) -> AbstractContextManager[psycopg.Pipeline]:
        """A pipeline for many statements."""
        return portioned_pipeline(self)

    def execute_own(self, query: str, params: Mapping[str, Any] | None = None) -> psycopg.Cursor[Any]:
        """Execute a statement of kconsume, which may be one that a handler must not send."""
        cursor = _OwnCursor(self)
        cursor.own = query
        return cursor.execute(query, params)

    def execute_together(self, *statements: Statement) -> bool:
        """Execute statements of kconsume in one round trip. Returns True if the last statement returned a row. Must not
        be called in a pipeline.

        Uses libpq's own call, which takes a tenth of the time of a cursor. The watchdog ends this call too if the
        server does not answer.
        """
        text = one_text(statements)
        with self.lock:
            result = self.pgconn.exec_(text.encode(self.info.encoding))
        if result.status in _SUCCESS:
            return result.ntuples > 0
        error = psycopg.errors.error_from_result(result, encoding=self.info.encoding)
        if error.sqlstate is None:  # the error is libpq's, not the server's
            error = psycopg.OperationalError(*error.args)
        self.record_error(error, text)
        raise error

    def __enter__(self) -> NoReturn:
        self.refuse("`with tx:`")

    def commit(self) -> None:
        self.refuse("commit()")

    def rollback(self) -> None:
        self.refuse("rollback()")

    def close(self) -> None:
        self.refuse("close()")


class AsyncHandlerConnection(_ConnectionGuard, psycopg.AsyncConnection[Any]):
    """The connection that an `async def` gets."""

    def __init__(self, pgconn: pq.abc.PGconn) -> None:
        super().__init__(pgconn)
        mark_autocommit(self)
        self.prepare_threshold = None
        self.cursor_factory = AsyncHandlerCursor

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        if self.pgconn is _CLOSED:
            raise TransactionMisused(_OVER)
        self.cursor_factory = _checked_class(cast(Any, self.cursor_factory), _CheckingCursor)
        return super().cursor(*args, **kwargs)

    async def execute_own(self, query: str, params: Mapping[str, Any] | None = None) -> psycopg.AsyncCursor[Any]:
        """Execute a statement of kconsume, which may be one that a handler must not send."""
        cursor = _AsyncOwnCursor(self)
        cursor.own = query
        return await cursor.execute(query, params)

    async def __aenter__(self) -> NoReturn:
        self.refuse("`async with tx:`")

    async def commit(self) -> None:
        self.refuse("commit()")

    async def rollback(self) -> None:
        self.refuse("rollback()")

    async def close(self) -> None:
        self.refuse("close()")


def sever(pooled: psycopg.Connection[Any], connection: HandlerConnection | None = None) -> None:
    """Take a connection away from a handler that does not return, and may be in the middle of a statement.

    The server is first asked to cancel the statement: otherwise the server would notice only at the statement's end
    that the client has gone. The server then finds the socket shut, and rolls the transaction back. libpq's connection
    object is not closed here, because closing it while the handler's thread uses it would crash the process. Python
    frees the object when no thread uses it any more.

    Args:
        pooled: the connection of the pool; its next user must find it closed.
        connection: the handler's connection object, if there is one.
    """
    if connection is not None:
        connection.detach()
    pgconn = pooled.pgconn
    with suppress(psycopg.Error):  # an unreachable server ends such a transaction by its own timeouts
        pooled.cancel_safe(timeout=_CANCEL_TIMEOUT)
    with suppress(psycopg.Error):  # the connection was already broken
        cut(pgconn.socket)
    pooled.pgconn = _CLOSED
