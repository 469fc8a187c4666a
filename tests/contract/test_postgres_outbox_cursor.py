"""Rows of an outbox in a real PostgreSQL that turn up behind those that were deleted: they are found all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends import PostgresStore
from kconsume.backends.base import Position
from kconsume.backends.claim import granted
from kconsume.backends.outbox.tables import postgres_rows
from kconsume.backends.postgres.outbox_cursor import OutboxCursor
from kconsume.records import Partition
from tests.waiting import eventually

GROUP, HERE = "shop", Partition("orders", 0)


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    with closing(PostgresStore(postgres_url)) as store:
        yield store


def claimed(store: PostgresStore) -> dict[Partition, int]:
    position = granted(store.claim(GROUP, [HERE], "me", lambda wanted: {p: Position(0, 0) for p in wanted}))[HERE]
    return {HERE: position.epoch}


def put(connection: psycopg.Connection, store: PostgresStore, value: bytes) -> None:
    connection.execute(store.database.statements.post, postgres_rows(GROUP, HERE, [Outgoing(value, topic="shipped")]))


def send_all(store: PostgresStore, epochs: dict[Partition, int]) -> list[object]:
    rows = store.posted(GROUP, epochs, 100).get(HERE, [])
    store.delivered(GROUP, {HERE: [row.number for row in rows]})
    return [row.outgoing.value for row in rows]


def late_row(store: PostgresStore, url: str) -> dict[Partition, int]:
    """One with a smaller number than another that was sent and deleted before it was committed."""
    epochs = claimed(store)
    with psycopg.connect(url) as slow:
        put(slow, store, b"late")
        with psycopg.connect(url) as swift:
            put(swift, store, b"early")
        assert send_all(store, epochs) == [b"early"]
    return epochs


def test_a_row_that_turns_up_behind_what_was_deleted_is_found(store: PostgresStore, postgres_url: str) -> None:
    epochs = late_row(store, postgres_url)
    assert eventually(lambda: send_all(store, epochs), what="the late row") == [b"late"]


def test_without_a_look_at_the_beginning_it_would_not_be(store: PostgresStore, postgres_url: str) -> None:
    store._outbox_cursor = OutboxCursor(lambda: 0.0)
    epochs = late_row(store, postgres_url)
    assert send_all(store, epochs) == []
    assert send_all(store, claimed(store)) == [b"late"], "nor by this owner: the next one begins at the beginning"
