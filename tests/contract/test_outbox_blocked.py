"""A row of the outbox that is refused is passed by no later row of its partition to the same topic, and holds no row to
another one; on a real broker, in both databases."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing

import psycopg
import pytest

from kconsume import App, DeadLetter, Outgoing, Record, Sender
from kconsume._config.client_settings import ClientValue
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.producer import RelayProducer
from kconsume._runtime.output import outbox_relay as relay
from kconsume._runtime.output import partition_outbox
from kconsume._runtime.output.outbox_relay import BlockedRow
from kconsume.backends import Outbox
from kconsume.testing.services import KafkaService
from tests.contract.test_failures_stores import Shop
from tests.contract.test_outbox import alter, numbers, offset, rows, values
from tests.contract.test_output import everything
from tests.fix_arena import Arena
from tests.fix_kafka import MakeTopic, unique
from tests.waiting import eventually

SOON: Mapping[str, ClientValue] = {"topic.metadata.propagation.max.ms": 500}
"""How long the client believes that a topic which it does not find may appear."""
TOO_LARGE = 37


@pytest.fixture
def real(kafka: KafkaService) -> Iterator[Arena]:
    arena = Arena("real", kafka.bootstrap, None)
    yield arena
    arena.clean_up()


@pytest.fixture(params=["sqlite", "postgres"])
def shop(request: pytest.FixtureRequest) -> Shop:
    return Shop(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was refused is tried again soon."""
    monkeypatch.setattr(partition_outbox, "_LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(relay, "_POLL_EVERY", 0.1)


def blocked(app: App) -> list[BlockedRow]:
    supervisor = app._supervisor
    assert supervisor is not None
    return [
        each for consumer in supervisor.consumers if consumer._relay is not None for each in consumer._relay.blocked
    ]


def stripped(broker: Arena, topic: str) -> list[str]:
    return [value.strip() for value in values(broker, topic)]


def by_partition(broker: Arena, topic: str) -> dict[int, list[int]]:
    taken: dict[int, list[int]] = {}
    for message in everything(broker.bootstrap, topic):
        taken.setdefault(message.partition() or 0, []).append(int((message.value() or b"").strip()))
    return taken


def first_of(numbers: list[str]) -> list[str]:
    return list(dict.fromkeys(numbers))


# Too large


def sending_one_too_large(
    real: Arena, topic: MakeTopic, group: str, shop: Shop, partitions: int = 1
) -> tuple[App, str, str]:
    """Sixty rows, spread over the target; one in the middle is larger than the topic takes."""
    source, out = numbers(real, 60), topic(partitions, config={"max.message.bytes": "2000"})
    app = real.app(group, shop.url)

    @app.consume(source, to=out)
    def handle(value: str) -> Outgoing:
        return Outgoing(value.ljust(5000 if value == str(TOO_LARGE) else 200), key=value)

    return app, source, out


@pytest.mark.dense
@pytest.mark.parametrize("partitions", [1, 3])
def test_a_row_too_large_for_its_topic_is_passed_by_none(
    real: Arena, topic: MakeTopic, group: str, shop: Shop, partitions: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kconsume.outbox")
    app, source, out = sending_one_too_large(real, topic, group, shop, partitions)
    with app.running():
        eventually(lambda: blocked(app), within=40, what="it is known")
        eventually(lambda: rows(shop) == 60 - TOO_LARGE, within=40, what="all before it have left")
        assert offset(shop, group, source) == 60, "handlers go on"
        (seen,) = blocked(app)
        assert (seen.partition, seen.topic) == ((source, 0), out)
        assert "too large" in seen.cause
        assert sorted(stripped(real, out), key=int) == [str(n) for n in range(TOO_LARGE)], "and none behind it"
        alter(real.admin, out, "max.message.bytes", "100000")
        eventually(lambda: rows(shop) == 0, within=40, what="sent, now that it is taken")
        assert not blocked(app)
    taken = by_partition(real, out)
    assert sorted(n for each in taken.values() for n in each) == list(range(60)), "each once"
    assert all(each == sorted(each) for each in taken.values()), "in order"
    (said,) = [m for m in caplog.messages if "outbox_blocked" in m]
    assert f"partition={source}/0 group={group} topic={out} row={seen.number}" in said
    assert f"a record to topic {out!r} is too large for it" in said


def test_where_the_brokers_tell_no_limits_none_passes_in_the_same_partition(
    real: Arena, topic: MakeTopic, group: str, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the principal may not describe configurations: the producer stops at the refusal."""
    monkeypatch.setattr(Cluster, "ask_limits", lambda *_: {})
    app, _, out = sending_one_too_large(real, topic, group, shop)
    with app.running():
        eventually(lambda: blocked(app), within=60, what="it is known")
        eventually(lambda: rows(shop) == 60 - TOO_LARGE, within=60, what="all before it have left")
        assert first_of(stripped(real, out)) == [str(n) for n in range(TOO_LARGE)]
        alter(real.admin, out, "max.message.bytes", "100000")
        eventually(lambda: rows(shop) == 0, within=60, what="sent, now that it is taken")
    assert first_of(stripped(real, out)) == [str(n) for n in range(60)], "in order, at the first arrival"


def test_control_a_producer_that_goes_on_behind_a_refusal_lets_later_rows_pass(
    real: Arena, topic: MakeTopic, group: str, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the client does without the two guards."""
    made = RelayProducer.__init__

    def without_guarantee(self: RelayProducer, settings: Mapping[str, ClientValue], name: str) -> None:
        made(self, settings, name)
        self._settings["enable.gapless.guarantee"] = False
        self._settings["batch.num.messages"] = 5

    monkeypatch.setattr(RelayProducer, "__init__", without_guarantee)
    monkeypatch.setattr(Cluster, "ask_limits", lambda *_: {})
    app, _, out = sending_one_too_large(real, topic, group, shop)
    with app.running():
        eventually(lambda: blocked(app), within=60, what="it is known")
        assert max(map(int, stripped(real, out))) > TOO_LARGE, "later rows have passed it"


def test_a_record_without_a_key_for_a_compacted_topic_is_passed_by_none(
    real: Arena, topic: MakeTopic, group: str, shop: Shop
) -> None:
    source, out = numbers(real, 30), topic(1, config={"cleanup.policy": "compact"})
    app = real.app(group, shop.url)

    @app.consume(source, to=out)
    def handle(value: str) -> Outgoing:
        return Outgoing(value, key=None if value == "17" else value)

    with app.running():
        eventually(lambda: blocked(app) and rows(shop) == 13, within=40, what="all before it have left")
        assert stripped(real, out) == [str(n) for n in range(17)]
        alter(real.admin, out, "cleanup.policy", "delete")
        eventually(lambda: rows(shop) == 0, within=40, what="sent, now that it is taken")
    assert stripped(real, out) == [str(n) for n in range(30)]


# A topic that is not there


def test_a_missing_dead_letter_topic_does_not_stop_what_the_handler_sends(
    real: Arena, group: str, shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kconsume.outbox")
    source, out, missing = numbers(real, 30), real.topic(1), unique("missing")
    bad = {"3", "4", "20"}
    app = real.app(group, shop.url, kafka=SOON)

    @app.consume(source, to=out, on_error=DeadLetter(missing))
    def handle(value: str) -> str:
        if value in bad:
            raise LookupError(value)
        return value

    with app.running():
        eventually(lambda: blocked(app), what="it is known")
        eventually(lambda: rows(shop) == 3, what="what the handler sends has left")
        real.produce(source, ["more", "20"], 0)
        eventually(lambda: "more" in values(real, out), what="and goes on leaving")
        assert [(b.partition, b.topic) for b in blocked(app)] == [((source, 0), missing)]
        real.topic(1, missing)
        eventually(lambda: rows(shop) == 0, within=60, what="sent, now that it is there")
    assert values(real, missing) == ["3", "4", "20", "20"], "each once, in order"
    assert values(real, out) == [*(str(n) for n in range(30) if str(n) not in bad), "more"]
    (said,) = [m for m in caplog.messages if "outbox_blocked" in m]
    assert f"topic {missing!r} does not exist on" in said


@pytest.mark.dense
def test_while_the_client_waits_for_a_topic_other_topics_go_on(real: Arena, group: str, shop: Shop) -> None:
    """By default it believes for 30 s that a topic may appear, and says nothing of its records meanwhile."""
    source, out, missing = real.topic(1), real.topic(1), unique("missing")
    app, began = real.app(group, shop.url, kafka={"topic.metadata.propagation.max.ms": 300_000}), time.monotonic()

    @app.consume(source)
    def handle(value: str, sender: Sender) -> None:
        sender.send(missing if value == "first" else out, value)

    with app.running():
        real.produce(source, ["first"], 0)
        eventually(lambda: offset(shop, group, source) == 1, what="handled")
        real.produce(source, ["second", "third"], 0)
        eventually(lambda: offset(shop, group, source) == 3, what="handled")
        eventually(lambda: rows(shop) == 1, within=100, what="the others have left")
        assert values(real, out) == ["second", "third"]
    assert time.monotonic() - began < 250, "and not because the client gave up"


def test_the_next_owner_of_a_partition_with_a_blocked_row_sends_it_and_the_first_one_leaves_at_once(
    real: Arena, group: str, shop: Shop
) -> None:
    source, out, missing = real.topic(2), real.topic(1), unique("missing")

    def member() -> App:
        app = real.app(group, shop.url, kafka=SOON)

        @app.consume(source)
        def handle(value: str, record: Record, sender: Sender) -> None:
            sender.send(missing, f"{record.partition}:{value}")
            sender.send(out, f"{record.partition}:{value}")

        return app

    one, two = member(), member()
    for partition in range(2):
        real.produce(source, [str(n) for n in range(10)], partition)
    with one.running():
        eventually(lambda: len(blocked(one)) == 2 and rows(shop) == 20, what="both partitions have a blocked row")
        with two.running():
            eventually(lambda: len(blocked(one)) == len(blocked(two)) == 1, within=60, what="one moved, held as it was")
            left_at = time.monotonic()
        assert time.monotonic() - left_at < 20, "a shutdown does not wait for what is blocked"
        eventually(lambda: len(blocked(one)) == 2, within=60, what="and back")
    real.topic(1, missing)
    last = member()
    last.catch_up(idle=0.5)
    assert rows(shop) == 0, "the next owner sends them"
    for mark in "01":
        own = [value for value in values(real, missing) if value.startswith(mark)]
        assert own == [f"{mark}:{n}" for n in range(10)], "each once, in order"
    assert len(values(real, out)) == 20


# By hand


def test_a_row_that_is_deleted_while_it_is_blocked_is_not_sent_and_holds_nothing_any_more(
    real: Arena, topic: MakeTopic, group: str, shop: Shop
) -> None:
    app, _, out = sending_one_too_large(real, topic, group, shop)
    with app.running():
        eventually(lambda: blocked(app) and rows(shop) == 60 - TOO_LARGE, within=40, what="all before it have left")
        shop.look(f"delete from kconsume_outbox where id = {blocked(app)[0].number}")
        eventually(lambda: rows(shop) == 0, within=40, what="what is behind it is sent")
        assert not blocked(app)
    assert stripped(real, out) == [str(n) for n in range(60) if n != TOO_LARGE]


def test_what_a_program_left_is_held_by_topic_as_well(real: Arena, group: str, shop: Shop) -> None:
    out, missing, outbox = real.topic(1), unique("missing"), Outbox(shop.url)
    path = shop.url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path) if shop.is_sqlite else psycopg.connect(shop.url)) as own:
        for n in range(5):
            outbox.send(own, missing, f"m{n}")
            outbox.send(own, out, str(n))
        own.commit()
    app = real.app(group, shop.url, kafka=SOON)

    @app.consume(real.topic(1))
    def handle(value: str) -> None: ...

    with app.running():
        eventually(lambda: blocked(app) and rows(shop) == 5, what="those to the other topic have left")
        assert values(real, out) == [str(n) for n in range(5)]
        real.topic(1, missing)
        eventually(lambda: rows(shop) == 0, within=60, what="sent, now that it is there")
    outbox.close()
    assert values(real, missing) == [f"m{n}" for n in range(5)]
