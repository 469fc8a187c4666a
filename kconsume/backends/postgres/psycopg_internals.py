"""The private parts of psycopg that kconsume depends on. No other module uses them.

psycopg has no public way to do four things: to learn which connection an error came from, to fetch the results of a
pipeline, to send the statements of a pipeline in larger portions, and to mark a connection as autocommit without a
round trip. `pyproject.toml` limits psycopg to the minor versions that were tried, and
`tests/contract/test_psycopg_internals.py` says which private method changed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import psycopg

_AnyCursor: Any = object
"""A placeholder for psycopg's cursor classes: a class with one of the mixins below also inherits from such a class."""


class ErrorReportingCursor(_AnyCursor):  # type: ignore[misc]
    """A mixin for psycopg's cursors: calls `on_server_error` with every error that the server returned."""

    def on_server_error(self, error: psycopg.Error) -> None:
        """Called with each error. Must not raise."""
        raise NotImplementedError

    def _raise_for_result(self, result: Any) -> Any:
        try:
            return super()._raise_for_result(result)
        except psycopg.Error as error:
            self.on_server_error(error)
            raise


class PipelineFetchingCursor(_AnyCursor):  # type: ignore[misc]
    """A mixin for psycopg's blocking cursors: inside a pipeline, `rowcount`, `statusmessage` and `description` fetch
    the result first, so that they are the same as without a pipeline."""

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


class PortionedPipeline(psycopg.Pipeline):
    """A pipeline that sends statements in portions. psycopg's own pipeline polls the socket after each statement, which
    takes a third of the pipeline's time."""

    _PORTION = 64

    def _communicate_gen(self) -> Any:
        queue = self.command_queue
        if queue and len(queue) < self._PORTION and queue[-1] != self.pgconn.pipeline_sync:
            return
        yield from super()._communicate_gen()

    def _fetch_gen(self, *, flush: bool) -> Any:
        if self.command_queue:
            yield from super()._communicate_gen()
        yield from super()._fetch_gen(flush=flush)


def portioned_pipeline(connection: psycopg.Connection[Any]) -> AbstractContextManager[psycopg.Pipeline]:
    """A `PortionedPipeline` on the connection: `Connection.pipeline` reuses the pipeline object that it finds."""
    connection._pipeline = PortionedPipeline(connection)
    return connection.pipeline()


def mark_autocommit(connection: psycopg.BaseConnection[Any]) -> None:
    """Make a new connection object autocommit, although a transaction may be open: psycopg then never sends BEGIN."""
    connection._autocommit = True
