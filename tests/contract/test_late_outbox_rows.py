"""Rows of an outbox in a real PostgreSQL that become visible behind those that were sent: they are sent too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing

import psycopg
import pytest

from kconsume._kafka.delivery import DeliveryResult
from kconsume._kafka.outgoing import Outgoing
from kconsume._runtime.deadlines import Deadline
from kconsume._runtime.output import partition_outbox
from kconsume._runtime.output.outbox_relay import OutboxRelay
from kconsume.backends import PostgresStore
from kconsume.backends.base import Position
from kconsume.backends.claim import granted
from kconsume.backends.outbox.tables import postgres_rows
from kconsume.records import Partition
from tests.waiting import eventually

GROUP, HERE = "shop", Partition("orders", 0)


class Broker:
    """Confirms what it gets."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def deliver_each(self, sent: Sequence[Outgoing]) -> Future[DeliveryResult]:
        self.sent += [each.value for each in sent]
        answer: Future[DeliveryResult] = Future()
        answer.set_result(DeliveryResult([True] * len(sent), None))
        return answer


class Stage:
    """The relay of one partition, and the transactions of its handler."""

    def __init__(self, url: str, store: PostgresStore) -> None:
        self.url, self.store, self.broker = url, store, Broker()
        self.relay = OutboxRelay(store, GROUP, self.broker, "me")  # type: ignore[arg-type]
        self.relay.start()
        self.claim()

    def claim(self) -> None:
        answers = self.store.claim(GROUP, [HERE], "me", lambda wanted: {p: Position(0, 0) for p in wanted})
        self.relay.open(HERE, granted(answers)[HERE].epoch)

    def put(self, connection: psycopg.Connection, value: bytes) -> None:
        rows = postgres_rows(GROUP, HERE, [Outgoing(value, topic="shipped")])
        connection.execute(self.store.database.statements.post, rows)

    def write(self, value: bytes) -> None:
        with psycopg.connect(self.url) as connection:
            self.put(connection, value)
        self.relay.rows_committed(HERE, 1)

    def write_and_send(self, value: bytes) -> None:
        self.write(value)
        eventually(lambda: value in self.broker.sent and self.relay._outboxes[HERE].is_done, what="sent and deleted")

    def leave_a_late_row(self) -> None:
        """One with a smaller number than another that was sent and deleted before it was committed."""
        with psycopg.connect(self.url) as slow:
            self.put(slow, b"late")
            self.write_and_send(b"early")


@pytest.fixture
def stage(postgres_url: str) -> Iterator[Stage]:
    with closing(PostgresStore(postgres_url)) as store:
        stage = Stage(postgres_url, store)
        yield stage
        stage.relay.close(Deadline(5.0))


def test_a_row_that_turns_up_behind_what_was_deleted_is_sent(stage: Stage) -> None:
    stage.leave_a_late_row()

    def write_more() -> bool:
        stage.write_and_send(b"more")
        return b"late" in stage.broker.sent

    eventually(write_more, what="the late row")


def test_a_late_row_of_a_handler_is_sent_at_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_outbox, "FROM_THE_START_EVERY", 1e9)
    stage.leave_a_late_row()
    stage.relay.rows_committed(HERE, 1)
    eventually(lambda: stage.broker.sent == [b"early", b"late"], what="the late row")


def test_control_without_a_look_at_the_beginning_it_would_not_be(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_outbox, "FROM_THE_START_EVERY", 1e9)
    stage.leave_a_late_row()
    stage.write_and_send(b"more")
    assert stage.broker.sent == [b"early", b"more"]
    stage.claim()
    eventually(lambda: stage.broker.sent == [b"early", b"more", b"late"], what="the next owner begins at the beginning")
