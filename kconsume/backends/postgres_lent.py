"""The connection that a handler gets: psycopg's own, on which only kconsume begins and ends a transaction.

Each transaction has an object of its own over the pooled connection: so what a handler sets on it (a row factory, an
adapter) is gone with it, and one that was kept is refused instead of writing in somebody else's transaction.

In a pipeline, what a cursor says about its statement is fetched first, so that it is as without one. Which statements
end a transaction is `postgres_scan.py`'s.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, NoReturn, cast

import psycopg
from psycopg import pq, sql

from kconsume.backends.postgres_scan import ending
from kconsume.backends.postgres_sql import Statement, in_one
from kconsume.backends.postgres_watch import cut
from kconsume.errors import TransactionMisused

ENDED = (
    "the handler's transaction was ended by a statement of its own (COMMIT, ROLLBACK or another), so its offset was "
    "not passed: remove the statement; kconsume commits when the handler returns"
)
BROKEN = (
    "a statement of the handler failed and the handler went on, but PostgreSQL had given up the transaction with it, "
    "so its offset was not passed: let the error out, or put the statement into `with tx.transaction():`"
)
_NOT_YOURS = (
    "a handler must not call {call} on its transaction, because kconsume commits its writes and the offset together "
    "when it returns: remove the call, or use `with tx.transaction():` for a part that may be undone"
)
_LEFT_OPEN = (
    "the handler returned inside a pipeline, so its offset was not passed: use `with tx.pipeline():`, which ends it"
)
_OVER = (
    "this transaction has ended, for a handler has it until it returns: do not keep it, and use a connection of your "
    "own for what comes later"
)


_CANCEL_WITHIN = 5.0


def _nothing() -> pq.abc.PGconn:
    """A connection that was closed: what a lent one is when its time is over."""
    nothing = pq.PGconn.connect_start(b"host=/nowhere")
    nothing.finish()
    return nothing


_NOTHING = _nothing()
_DONE = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)


class _Lent:
    """What both kinds of lent connection have: refusals, and an end."""

    pgconn: pq.abc.PGconn
    refused: str | None = None
    """What the handler tried, whether or not it let the refusal out."""

    def __init__(self, pgconn: pq.abc.PGconn) -> None:
        super().__init__(pgconn)  # type: ignore[call-arg]
        self._raised: deque[tuple[psycopg.Error, str | None]] = deque(maxlen=16)

    def note(self, error: psycopg.Error, own: str | None) -> None:
        """What the server said to a statement: one of kconsume's `own`, or one of the handler's."""
        if not isinstance(error, psycopg.errors.PipelineAborted):  # that is only said of what stands behind one
            self._raised.append((error, own))

    def raised(self, error: BaseException) -> bool:
        """Whether it was on this connection, and not on another of the handler's."""
        return any(error is noted for noted, _ in self._raised)

    def failing(self, error: BaseException) -> str | None:
        """The statement of kconsume's that it was the answer to, if it was to one."""
        return next((own for noted, own in self._raised if noted is error), None)

    @property
    def status(self) -> pq.TransactionStatus:
        return pq.TransactionStatus(self.pgconn.transaction_status)

    def end(self) -> None:
        """The handler's time with it is over; the connection below lives on."""
        self.pgconn = _NOTHING
        self._raised.clear()

    def check(self) -> None:
        """Whether the transaction is still the handler's to leave, and whole."""
        if self.refused is not None:
            raise TransactionMisused(_NOT_YOURS.format(call=self.refused))
        if self.status == pq.TransactionStatus.INERROR:
            raise TransactionMisused(BROKEN)
        if self.status == pq.TransactionStatus.IDLE:
            raise TransactionMisused(ENDED)
        if self.pgconn.pipeline_status:
            raise TransactionMisused(_LEFT_OPEN)

    def refuse(self, call: str) -> NoReturn:
        if self.pgconn is _NOTHING:
            raise TransactionMisused(_OVER)
        self.refused = call
        raise TransactionMisused(_NOT_YOURS.format(call=call))


_AnyCursor: Any = object
"""Stands for psycopg's classes of cursors, of which one is always the other base."""


def _text_of(query: object, connection: psycopg.BaseConnection[Any]) -> str:
    if isinstance(query, str):
        return query
    if isinstance(query, bytes):
        return query.decode(errors="replace")
    if isinstance(query, sql.Composable):
        return query.as_string(connection)
    return sql.as_string(query, connection)  # a template string, which only newer versions of both know


def _admit(connection: Any, query: object) -> None:
    """Whether a statement of a handler may be sent. One that ends the transaction may not: what was written before it
    would be committed without the offset, and what later records of the chunk write would be outside of any."""
    pgconn = connection.pgconn
    if pgconn is _NOTHING:
        raise TransactionMisused(_OVER)
    text = _text_of(query, connection)
    backslashes = "\\" in text and pgconn.parameter_status(b"standard_conforming_strings") == b"off"
    if (words := ending(text, backslashes=backslashes)) is not None:
        connection.refuse(f"`{words}`")
    if pgconn.transaction_status == pq.TransactionStatus.IDLE:
        raise TransactionMisused(ENDED)


class _Noting(_AnyCursor):  # type: ignore[misc]
    """A cursor that tells its connection of errors, so that it is known afterwards where one came from."""

    own: str | None = None
    """The statement, if it is one of kconsume's."""

    def _raise_for_result(self, result: Any) -> Any:
        try:
            return super()._raise_for_result(result)
        except psycopg.Error as error:
            self.connection.note(error, self.own)
            raise


class _Admitting(_Noting):
    """A cursor of a handler's, of whatever class: its statements are looked at before they are sent."""

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        _admit(self.connection, query)
        return super().execute(query, *args, **kwargs)

    def executemany(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        _admit(self.connection, query)
        return super().executemany(query, *args, **kwargs)

    def stream(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        _admit(self.connection, query)
        return super().stream(query, *args, **kwargs)

    def copy(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
        _admit(self.connection, statement)
        return super().copy(statement, *args, **kwargs)


class _Fetching(_Admitting):
    """In a pipeline, it asks for what it is asked."""

    @property
    def rowcount(self) -> int:
        self._fetch_pipeline()
        return int(super().rowcount)

    @property
    def statusmessage(self) -> Any:
        self._fetch_pipeline()
        return super().statusmessage

    @property
    def description(self) -> Any:
        self._fetch_pipeline()
        return super().description


class LentCursor(_Fetching, psycopg.Cursor[Any]):
    """A cursor of a handler's connection."""


class LentAsyncCursor(_Admitting, psycopg.AsyncCursor[Any]):
    """A cursor of an `async def` handler's connection. What it says is not awaited, so it cannot fetch: in a pipeline
    it is known after the next `await` of a `fetch…`. That is why those handlers run without one."""


class _OwnCursor(_Noting, psycopg.Cursor[Any]):
    """For a statement of kconsume's."""


class _OwnAsyncCursor(_Noting, psycopg.AsyncCursor[Any]):
    """The same, awaited."""


@functools.cache
def _lent(kind: Any, manner: type[_Admitting]) -> Any:
    """A class of cursors that a handler has chosen (`tx.cursor_factory = psycopg.ClientCursor`), looked at as ours."""
    return kind if issubclass(kind, _Admitting) else type(f"Lent{kind.__name__}", (manner, kind), {})


class _Gathering(psycopg.Pipeline):
    """Sends statements some at a time: psycopg's own asks the socket after each, which costs a third of its time."""

    _AT_ONCE = 64

    def _communicate_gen(self) -> Any:
        queue = self.command_queue
        if queue and len(queue) < self._AT_ONCE and queue[-1] != self.pgconn.pipeline_sync:
            return
        yield from super()._communicate_gen()

    def _fetch_gen(self, *, flush: bool) -> Any:
        if self.command_queue:
            yield from super()._communicate_gen()
        yield from super()._fetch_gen(flush=flush)


class LentConnection(_Lent, psycopg.Connection[Any]):
    """What a plain function gets."""

    def __init__(self, pgconn: pq.abc.PGconn) -> None:
        super().__init__(pgconn)
        self._autocommit = True  # BEGIN and COMMIT are statements of ours
        self.prepare_threshold = None
        self.cursor_factory = LentCursor

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        if self.pgconn is _NOTHING:
            raise TransactionMisused(_OVER)
        self.cursor_factory = _lent(cast(Any, self.cursor_factory), _Fetching)
        return super().cursor(*args, **kwargs)

    def gather(self) -> AbstractContextManager[psycopg.Pipeline]:
        """A pipeline for many statements."""
        self._pipeline = _Gathering(self)
        return self.pipeline()

    def own(self, query: str, params: Mapping[str, Any] | None = None) -> psycopg.Cursor[Any]:
        """A statement of kconsume's."""
        cursor = _OwnCursor(self)
        cursor.own = query
        return cursor.execute(query, params)

    def at_once(self, *statements: Statement) -> bool:
        """Statements of kconsume's in one round trip, outside of a pipeline; whether the last one answered with a row.

        By libpq's own call, which costs a tenth of a cursor's way. What cuts a silent connection ends it as well."""
        text = in_one(statements)
        with self.lock:
            result = self.pgconn.exec_(text.encode(self.info.encoding))
        if result.status in _DONE:
            return result.ntuples > 0
        error = psycopg.errors.error_from_result(result, encoding=self.info.encoding)
        if error.sqlstate is None:  # it was not the server that said it
            error = psycopg.OperationalError(*error.args)
        self.note(error, text)
        raise error

    def __enter__(self) -> NoReturn:
        self.refuse("`with tx:`")

    def commit(self) -> None:
        self.refuse("commit()")

    def rollback(self) -> None:
        self.refuse("rollback()")

    def close(self) -> None:
        self.refuse("close()")


class LentAsyncConnection(_Lent, psycopg.AsyncConnection[Any]):
    """What an `async def` gets."""

    def __init__(self, pgconn: pq.abc.PGconn) -> None:
        super().__init__(pgconn)
        self._autocommit = True
        self.prepare_threshold = None
        self.cursor_factory = LentAsyncCursor

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        if self.pgconn is _NOTHING:
            raise TransactionMisused(_OVER)
        self.cursor_factory = _lent(cast(Any, self.cursor_factory), _Admitting)
        return super().cursor(*args, **kwargs)

    async def own(self, query: str, params: Mapping[str, Any] | None = None) -> psycopg.AsyncCursor[Any]:
        """A statement of kconsume's."""
        cursor = _OwnAsyncCursor(self)
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


def sever(below: psycopg.Connection[Any], lent: LentConnection | None = None) -> None:
    """Take a connection away from a handler that does not come back, and may be anywhere, also in the middle of a
    statement. The server ends that statement first: it would notice that nobody waits only at its end. It then finds
    the socket shut, and undoes the transaction.

    The library's own object is not ended under the handler's hands, which would end the process: it goes with the last
    who has it."""
    if lent is not None:
        lent.end()
    pgconn = below.pgconn
    with suppress(psycopg.Error):  # a server that cannot be reached: it ends such a transaction by its own means
        below.cancel_safe(timeout=_CANCEL_WITHIN)
    with suppress(psycopg.Error):  # it broke by itself
        cut(pgconn.socket)
    below.pgconn = _NOTHING
