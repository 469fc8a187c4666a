"""The transactional outbox for code outside of handlers: a record is sent if and only if a transaction commits.

    outbox = Outbox("postgresql://localhost/shop")

    with psycopg.connect(...) as connection:
        connection.execute("insert into orders ...")
        outbox.send(connection, "orders", order)

`send` inserts a row in the user's transaction. A running app that keeps its offsets in the same database sends the
record to Kafka. This module does not commit and does not use Kafka.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable
from typing import Any, cast

from kconsume._kafka.outgoing import ORIGIN, Outgoing, OutgoingHeaders, encoded
from kconsume.backends.base import OffsetStore
from kconsume.backends.capabilities import capabilities_of
from kconsume.backends.registry import open_store
from kconsume.errors import ConfigurationError, InvalidHandler
from kconsume.records import Headers

_MOST_BYTES = 1_000_000 - 256
_NOTHING = Outgoing(None, None, (), "nowhere")
_ROOTS = {"psycopg": "postgresql://", "sqlite3": "sqlite:///", "sqlalchemy": "postgresql://"}


class Outbox:
    """The outbox of a database: `Outbox("postgresql://localhost/shop")`.

    Args:
        store: the address of the database, or its store: a `PostgresStore` or a `SqliteStore`.
    """

    def __init__(self, store: str | OffsetStore) -> None:
        opened = open_store(store) if isinstance(store, str) else store
        outbox = capabilities_of(opened).outbox
        if outbox is None:
            raise ConfigurationError(
                f"{opened.address} has no outbox, because it is not a database: give postgresql://… or sqlite:///…"
            )
        self._store = outbox
        if opened.address.startswith("sqlite:///"):
            # Create the tables now. Later, `send` runs inside the user's transaction, and SQLite allows one writer, so
            # no other connection could create them.
            outbox.insert_statement(_NOTHING)

    def send(
        self, tx: object, topic: str, value: object, key: bytes | str | None = None, headers: OutgoingHeaders = ()
    ) -> None:
        """Insert a record into the outbox, in the transaction of `tx`. The record is sent after the commit.

        Args:
            tx: a connection of psycopg, sqlite3 or SQLAlchemy, or a `Session`.
            topic: the topic of the record.
            value: bytes, text, None (a tombstone), or what msgspec or pydantic encodes as JSON.
            key: bytes or text; None for no key.
            headers: pairs of a name and bytes or text.
        """
        root = self._must_fit(tx, awaited=False)
        _execute(root, tx)(*self._statement(topic, value, key, headers))

    async def asend(
        self, tx: object, topic: str, value: object, key: bytes | str | None = None, headers: OutgoingHeaders = ()
    ) -> None:
        """As `send`, for an `AsyncConnection` or an `AsyncSession`. The first call blocks the event loop while it
        checks the tables."""
        root = self._must_fit(tx, awaited=True)
        statement = self._statement(topic, value, key, headers)
        if root == "sqlalchemy":
            await tx.run_sync(lambda inner: _execute(root, inner)(*statement))  # type: ignore[attr-defined]
        else:
            await tx.execute(*statement)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close the store's connections."""
        self._store.close()

    def _statement(
        self, topic: str, value: object, key: bytes | str | None, headers: OutgoingHeaders
    ) -> tuple[str, Any]:
        ready = encoded(Outgoing(value, key, headers, topic), None, _MOST_BYTES)
        origin = (ORIGIN, f"outbox:{uuid.uuid4().hex}#0".encode())
        pairs = cast(Headers, ready.headers)
        return self._store.insert_statement(Outgoing(ready.value, ready.key, (*pairs, origin), ready.topic))

    def _must_fit(self, tx: object, *, awaited: bool) -> str:
        """Return the package of the transaction, such as `"psycopg"`. Raises `InvalidHandler` if the transaction cannot
        be one of this database."""
        roots = {kind.__module__.partition(".")[0] for kind in type(tx).__mro__}
        root = next((known for known in _ROOTS if known in roots), None)
        execute = getattr(tx, "execute", None)
        if root is None or execute is None or not self._store.address.startswith(_ROOTS[root]):
            raise InvalidHandler(
                f"a {type(tx).__name__} is not a transaction of {self._store.address}: give the connection, or the "
                f"Session, that the rest of the transaction uses"
            )
        if inspect.iscoroutinefunction(execute) is not awaited:
            fix = "call send(...)" if awaited else "write await outbox.asend(...)"
            raise InvalidHandler(f"the methods of a {type(tx).__name__} are {'not ' * awaited}awaited: {fix}")
        return root


def _execute(root: str, tx: Any) -> Callable[[str, Any], object]:
    if root != "sqlalchemy":
        return cast("Callable[[str, Any], object]", tx.execute)
    connection = tx if hasattr(tx, "exec_driver_sql") else tx.connection()
    return cast("Callable[[str, Any], object]", connection.exec_driver_sql)
