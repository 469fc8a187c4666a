"""Brokers that are wrong, away, frozen or restarted, and records at the limits; on a real Kafka."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from kconsume import App, DeadLetter, Record, RetryTopics
from kconsume._config.client_settings import ClientValue
from kconsume._kafka.cluster import Cluster
from kconsume.errors import BrokerUnavailable, ConfigurationError
from kconsume.testing.services import KafkaService, LocalKafka
from tests.fix_kafka import MakeTopic, create_topic, produce
from tests.waiting import eventually


def test_a_wrong_address_is_an_error_that_names_it(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster.__init__, "__kwdefaults__", {"patience": 1.0})
    app = App("127.0.0.1:1", group=group)

    @app.consume("orders")
    def handle(value: bytes) -> None: ...

    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1 .*check the address"):
        app.catch_up()


@pytest.mark.parametrize(
    "consume",
    [{}, {"on_error": DeadLetter("orders.dead")}, {"partitions": [0]}, {"retry": RetryTopics((0.1,))}],
    ids=["alone", "dead-letter", "partitions", "retry-topics"],
)
def test_brokers_that_are_silent_at_the_start_are_asked_once(
    consume: dict[str, Any], group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second question would wait as long again, and the error say half of the time."""
    asked: list[str] = []

    class Admin(AdminClient):
        def list_topics(self, *arguments: Any, **options: Any) -> Any:
            asked.append("topics")
            return super().list_topics(*arguments, **options)

        def describe_consumer_groups(self, *arguments: Any, **options: Any) -> Any:
            asked.append("group")
            return super().describe_consumer_groups(*arguments, **options)

    monkeypatch.setattr("kconsume._kafka.cluster.AdminClient", Admin)
    monkeypatch.setattr(Cluster.__init__, "__kwdefaults__", {"patience": 1.0})
    app = App("127.0.0.1:1", group=group, offsets="memory://")

    @app.consume("orders", **consume)
    def handle(value: bytes) -> None: ...

    with pytest.raises(BrokerUnavailable, match="within 1 s"):
        app.catch_up()
    assert asked == ["topics"]


@pytest.mark.parametrize(
    "settings", [{"fetch.wat.max.ms": 1}, {"fetch.wait.max.ms": "soon"}, {"session.timeout.ms": 400_000}]
)
def test_a_property_that_the_client_refuses_is_a_configuration_error(
    kafka: KafkaService, group: str, settings: dict[str, ClientValue]
) -> None:
    app = App(kafka.bootstrap, group=group, kafka=settings)

    @app.consume("orders")
    def handle(value: bytes) -> None: ...

    with pytest.raises(ConfigurationError, match="check the property"):
        app.catch_up()


def test_a_record_of_4_mb_is_handled_like_any_other(kafka: KafkaService, topic: MakeTopic, group: str) -> None:
    name = topic(1, config={"max.message.bytes": "10000000"})
    large = os.urandom(4_000_000)
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "message.max.bytes": 5_000_000})
    for value in (b"small", large, b"small"):
        producer.produce(name, value)
    assert producer.flush(30) == 0
    app = App(kafka.bootstrap, group=group)
    seen: list[int] = []

    @app.consume(name)
    def handle(value: bytes) -> None:
        seen.append(len(value))

    app.catch_up(idle=0.2)
    assert seen == [5, 4_000_000, 5]


def test_records_of_aborted_transactions_are_not_handled_and_gaps_are_passed(
    kafka: KafkaService, topic: MakeTopic, group: str
) -> None:
    name = topic(1)
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": group})
    producer.init_transactions(30)
    for number, commit in enumerate([True, False, True, False]):
        producer.begin_transaction()
        for n in range(5):
            producer.produce(name, f"{number}:{n}")
        producer.commit_transaction(30) if commit else producer.abort_transaction(30)
    app = App(kafka.bootstrap, group=group)
    seen: list[tuple[int, bytes | None]] = []

    @app.consume(name)
    def handle(record: Record) -> None:
        seen.append((record.offset, record.value))

    report = app.catch_up(idle=0.3)
    assert [value for _, value in seen] == [f"{number}:{n}".encode() for number in (0, 2) for n in range(5)]
    assert list(report.committed.values()) == [seen[-1][0] + 1]
    assert app.catch_up(idle=0.3).handled == 0


# A broker of their own, because they break it


@pytest.fixture
def breakable() -> Iterator[LocalKafka]:
    with LocalKafka() as broker:
        broker.start()
        yield broker


def test_a_broker_that_restarts_costs_no_record(breakable: LocalKafka, group: str) -> None:
    create_topic(AdminClient({"bootstrap.servers": breakable.bootstrap, "log_level": 0}), "orders", 2)
    app = App(breakable.bootstrap, group=group)
    seen: list[bytes] = []

    @app.consume("orders")
    def handle(value: bytes) -> None:
        seen.append(value)

    with app.running():
        produce(breakable.bootstrap, "orders", [b"%d" % n for n in range(100)])
        eventually(lambda: len(seen) == 100, what="before the restart")
        breakable.kill()
        breakable.start()
        produce(breakable.bootstrap, "orders", [b"%d" % n for n in range(100, 200)])
        eventually(lambda: len(set(seen)) == 200, within=60, what="after the restart")
    assert set(seen) == {b"%d" % n for n in range(200)}


def test_sigterm_ends_by_the_deadline_though_the_brokers_are_frozen(
    breakable: LocalKafka, group: str, tmp_path: Path
) -> None:
    create_topic(AdminClient({"bootstrap.servers": breakable.bootstrap, "log_level": 0}), "orders", 2)
    produce(breakable.bootstrap, "orders", [b"%d" % n for n in range(100)])
    (tmp_path / "frozen.py").write_text(
        f"from kconsume import App\n"
        f"app = App({breakable.bootstrap!r}, group={group!r}, shutdown=4.0)\n"
        f"@app.consume('orders')\n"
        f"def handle(value: bytes) -> None:\n"
        # One write a record: print's own newline is a second one, and another partition's thread gets between.
        f"    print(f'{{value.decode()}}\\n', end='', flush=True)\n"
        f"app.run()\n"
    )
    out, err = tmp_path / "out.txt", tmp_path / "err.txt"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen([sys.executable, "frozen.py"], cwd=tmp_path, stdout=stdout, stderr=stderr)
    try:
        eventually(lambda: len(out.read_text().split()) == 100, what="records are handled")
        breakable.freeze()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 3, "ended by itself, with the client left behind"
    finally:
        breakable.thaw()
        process.kill()
        process.wait(10)
    assert "without closing" in err.read_text()
