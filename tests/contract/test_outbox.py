"""The outbox: what handlers send leaves if and only if their transaction commits, in order; in both databases."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Any, cast

import psycopg
import pytest
from confluent_kafka import KafkaError, Message
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from kconsume import App, Batching, DeadLetter, Outgoing, Partition, Record, Sender
from kconsume._embedded.controls import KafkaControls
from kconsume._kafka.delivery import DeliveryResult
from kconsume._kafka.producer import Producer
from kconsume._runtime.output import outbox_relay, partition_outbox
from kconsume._runtime.output.publisher import Publisher
from kconsume.backends import FencedStore, Outbox, Position, PostgresStore, open_store
from kconsume.errors import ConfigurationError, InvalidHandler, KconsumeError, SendFailed, StoreUnavailable
from kconsume.records import Headers
from kconsume.testing.services import KafkaService
from tests.contract.test_failures import MARKS, marks, own_headers, write
from tests.contract.test_failures_stores import Shop
from tests.contract.test_output import everything
from tests.contract.test_rebalance import assigned
from tests.fix_arena import QUICK, Arena
from tests.fix_kafka import MakeTopic, unique
from tests.waiting import eventually

FORMS = [
    *(("postgres", form) for form in ("tx", "async tx", "batch tx", "without tx", "async without tx")),
    *(("sqlite", form) for form in ("tx", "async tx", "batch without tx")),
]
UNDONE = [("sqlite", "tx"), ("sqlite", "without tx"), ("postgres", "async tx"), ("postgres", "batch tx")]
LETTERS = [("sqlite", "tx"), ("postgres", "tx"), ("postgres", "async without tx")]
FULL = [("sqlite", "tx"), ("postgres", "async without tx")]
BAD = {"0", "5", "6", "29"}
Check = Callable[[str], None]


@pytest.fixture
def broker(embedded: KafkaControls) -> Arena:
    return Arena("embedded", embedded.bootstrap, embedded)


@pytest.fixture
def real(kafka: KafkaService) -> Iterator[Arena]:
    """The embedded broker makes every topic that a producer names, and refuses nothing."""
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
    monkeypatch.setattr(outbox_relay, "_POLL_EVERY", 0.1)


def sending(shop: Shop, form: str, other: str, check: Check = lambda _: None) -> Callable[..., Any]:
    """A handler in this form. Of each value it sends two, `…a` and `…b`, by its sender, to `other`; and it returns the
    value and `…!` for its `to=`. With a transaction it writes the value as well. Then it may fail."""
    insert = f"insert into effects values ({'?' if shop.is_sqlite else '%s'})"

    def send(value: str, record: Record, sender: Sender) -> list[Outgoing]:
        sender.send(other, f"{value}a", key=f"key-{value}", headers={"id": record.id})
        sender.send(other, f"{value}b")
        check(value)
        return [Outgoing(value, key="k"), Outgoing(f"{value}!")]

    def tx_one(value: str, record: Record, sender: Sender, tx: Any) -> list[Outgoing]:
        tx.execute(insert, (value,))
        return send(value, record, sender)

    async def async_one(value: str, record: Record, sender: Sender, tx: Any) -> list[Outgoing]:
        done = tx.execute(insert, (value,))
        if asyncio.iscoroutine(done):
            await done
        return send(value, record, sender)

    def tx_many(records: list[Record], sender: Sender, tx: Any) -> list[Outgoing]:
        each = [tx_one((record.value or b"").decode(), record, sender, tx) for record in records]
        return [outgoing for some in each for outgoing in some]

    async def later(value: str, record: Record, sender: Sender) -> list[Outgoing]:
        await asyncio.sleep(0)
        return send(value, record, sender)

    def many(records: list[Record], sender: Sender) -> list[Outgoing]:
        each = [send((record.value or b"").decode(), record, sender) for record in records]
        return [outgoing for some in each for outgoing in some]

    forms: dict[str, Callable[..., Any]] = {
        "tx": tx_one, "async tx": async_one, "batch tx": tx_many, "without tx": send, "async without tx": later,
        "batch without tx": many,
    }  # fmt: skip
    made = forms[form]
    if "tx" in made.__annotations__:
        of_postgres = psycopg.AsyncConnection if form == "async tx" else psycopg.Connection
        made.__annotations__["tx"] = sqlite3.Connection if shop.is_sqlite else of_postgres
    return made


def consume(app: App, form: str, source: str, handler: Callable[..., Any], **options: Any) -> None:
    if "batch" in form:
        options["batch"] = Batching(7, wait=0.05)
    app.consume(source, **options)(handler)


def values(broker: Arena, topic: str) -> list[str]:
    return [(message.value() or b"").decode() for message in everything(broker.bootstrap, topic)]


def origin(message: Message) -> str:
    (found,) = [value for name, value in cast(Headers, message.headers()) if name == "kconsume-origin"]
    return found.decode()


def rows(shop: Shop) -> int:
    """How many wait in the outbox."""
    try:
        ((count,),) = shop.look("select count(*) from kconsume_outbox")
    except (sqlite3.OperationalError, psycopg.errors.UndefinedTable):
        return 0  # before the first one
    return int(count)


def offset(shop: Shop, group: str, topic: str) -> int:
    """How many records of all partitions are passed."""
    with closing(open_store(shop.url)) as store:
        return sum(p.next_offset for p in store.load(group, [Partition(topic, n) for n in range(4)]).values())


def numbers(broker: Arena, count: int = 30, partitions: int = 1) -> str:
    source = broker.topic(partitions)
    for partition in range(partitions):
        broker.produce(source, [str(n) for n in range(count)], partition)
    return source


class Held:
    """The way out, closed until the test opens it: what is in the outbox stays there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gate = threading.Event()
        deliver = Producer.deliver_each

        def held_back(outlet: Producer, outgoing: Sequence[Outgoing]) -> Future[DeliveryResult]:
            if not self._gate.is_set():
                raise SendFailed("held back by the test")
            return deliver(outlet, outgoing)

        monkeypatch.setattr(Producer, "deliver_each", held_back)

    def open(self) -> None:
        self._gate.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


# Together with the offset, or not at all


@pytest.mark.dense
@pytest.mark.parametrize(("shop", "form"), FORMS, indirect=["shop"])
def test_what_handlers_send_leaves_once_in_order_and_says_where_it_came_from(
    broker: Arena, group: str, shop: Shop, form: str
) -> None:
    source, out, other = numbers(broker), broker.topic(1), broker.topic(1)
    for handled in (30, 0):  # the second run finds nothing more to send
        app = broker.app(group, shop.url)
        consume(app, form, source, sending(shop, form, other), to=out)
        assert app.catch_up(idle=0.2).handled == handled
        assert rows(shop) == 0, "a run that ends well leaves nothing in the outbox"
        assert values(broker, out) == [f"{n}{mark}" for n in range(30) for mark in ("", "!")]
        assert values(broker, other) == [f"{n}{mark}" for n in range(30) for mark in "ab"]
        assert offset(shop, group, source) == 30
    first = everything(broker.bootstrap, other)[0]
    assert (first.key(), own_headers(first)) == (b"key-0", (("id", origin(first).partition("#")[0].encode()),))
    by_sender, returned = (list(map(origin, everything(broker.bootstrap, topic))) for topic in (other, out))
    assert len({*by_sender, *returned}) == 120, "each has an origin of its own"
    if "batch" not in form:  # there it is the first record of a batch that names what all of it sent
        ids = [dict(own_headers(m))["id"].decode() for m in everything(broker.bootstrap, other) if m.key()]
        assert by_sender == [f"{each}#{index}" for each in ids for index in (0, 1)]
        assert returned == [f"{each}#{index}" for each in ids for index in (2, 3)]
    if "without" not in form:
        assert shop.effects() == [str(n) for n in range(30)]


@pytest.mark.dense
@pytest.mark.parametrize(("shop", "form"), FORMS, indirect=["shop"])
def test_nothing_leaves_of_a_record_that_fails_and_all_of_the_others(
    broker: Arena, group: str, shop: Shop, form: str
) -> None:
    source, out, other = numbers(broker), broker.topic(1), broker.topic(1)

    def must_be_good(value: str) -> None:
        if value in BAD:
            raise LookupError(value)

    app = broker.app(group, shop.url)
    consume(app, form, source, sending(shop, form, other, must_be_good), to=out, on_error="skip")
    report = app.catch_up(idle=0.2)
    good = [str(n) for n in range(30) if str(n) not in BAD]
    assert (report.handled, report.skipped) == (26, 4)
    assert values(broker, out) == [f"{n}{mark}" for n in good for mark in ("", "!")]
    assert values(broker, other) == [f"{n}{mark}" for n in good for mark in "ab"]
    assert rows(shop) == 0
    assert offset(shop, group, source) == 30


@pytest.mark.parametrize(("shop", "form"), UNDONE, indirect=["shop"])
def test_what_was_put_into_the_outbox_never_leaves_when_its_transaction_is_undone(
    broker: Arena, group: str, shop: Shop, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, other = numbers(broker), broker.topic(1), broker.topic(1)
    errors = iter([StoreUnavailable("the server went away, with the rows written and the offset not yet")])
    keep, keep_async = Publisher.keep, Publisher.keep_async

    def kept(self: Publisher, *arguments: Any) -> Sequence[Outgoing]:
        rows = keep(self, *arguments)
        for error in errors:
            raise error
        return rows

    async def kept_async(self: Publisher, *arguments: Any) -> Sequence[Outgoing]:
        rows = await keep_async(self, *arguments)
        for error in errors:
            raise error
        return rows

    monkeypatch.setattr(Publisher, "keep", kept)
    monkeypatch.setattr(Publisher, "keep_async", kept_async)
    app = broker.app(group, shop.url)
    consume(app, form, source, sending(shop, form, other), to=out)
    app.catch_up(idle=0.5)
    assert next(errors, None) is None
    assert values(broker, out) == [f"{n}{mark}" for n in range(30) for mark in ("", "!")], "each once"
    assert values(broker, other) == [f"{n}{mark}" for n in range(30) for mark in "ab"]
    assert rows(shop) == 0


@pytest.mark.parametrize(("store", "form"), [("sqlite", "without tx"), ("postgres", "without tx"), ("postgres", "tx")])
def test_what_a_fenced_owner_sends_does_not_leave(
    request: pytest.FixtureRequest, broker: Arena, group: str, store: str, form: str
) -> None:
    """The partition is claimed while the handler works on a record: what it sends then is not sent by this attempt."""
    shop = Shop(request.getfixturevalue(f"{store}_url"))
    source, out, other = numbers(broker), broker.topic(1), broker.topic(1)
    called = Counter[str]()

    def claimed_at_3(value: str) -> None:
        called[value] += 1
        if value == "3" and called[value] == 1:
            with closing(open_store(shop.url)) as rival:
                assert isinstance(rival, FencedStore)
                rival.claim(group, [Partition(source, 0)], "rival", lambda missing: dict.fromkeys(missing, Position(0)))

    app = broker.app(group, shop.url)
    consume(app, form, source, sending(shop, form, other, claimed_at_3), to=out)
    with app.running():
        eventually(lambda: offset(shop, group, source) == 30, what="claimed again, and all handled")
    assert called["3"] > 1, "its first attempt was in vain"
    assert values(broker, out) == [f"{n}{mark}" for n in range(30) for mark in ("", "!")], "each once"
    assert values(broker, other) == [f"{n}{mark}" for n in range(30) for mark in "ab"]
    assert rows(shop) == 0


@pytest.mark.dense
def test_the_offset_passes_with_the_rows_before_they_are_sent(
    broker: Arena, group: str, shop: Shop, held: Held
) -> None:
    source, out, other = numbers(broker), broker.topic(1), broker.topic(1)
    app = broker.app(group, shop.url)
    consume(app, "tx", source, sending(shop, "tx", other), to=out)
    with app.running():
        eventually(lambda: offset(shop, group, source) == 30, what="all handled")
        assert (rows(shop), values(broker, out)) == (120, [])
        held.open()
        eventually(lambda: rows(shop) == 0, what="sent and deleted")
    assert values(broker, out) == [f"{n}{mark}" for n in range(30) for mark in ("", "!")]


def test_what_an_app_left_behind_is_sent_by_the_next_one_before_its_own(
    broker: Arena, group: str, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = numbers(broker, 10), broker.topic(1)

    def run() -> int:
        app = broker.app(group, shop.url)

        @app.consume(source, to=out)
        def handle(value: str) -> str:
            return value

        return app.catch_up(idle=0.2).unsent

    with monkeypatch.context() as patched:
        patched.setattr(outbox_relay, "_PATIENCE", 0.2)
        Held(patched)
        assert run() >= 10, "it says how many it left: rows that it read before it was told of them count twice"
        assert (rows(shop), values(broker, out)) == (10, [])
    broker.produce(source, [str(n) for n in range(10, 20)], 0)
    assert run() == 0
    assert values(broker, out) == [str(n) for n in range(20)]
    assert rows(shop) == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_sessions_of_sqlalchemy_have_an_outbox_too(
    broker: Arena, group: str, postgres_url: str, is_async: bool
) -> None:
    source, out, shop = numbers(broker), broker.topic(1), Shop(postgres_url)
    url = postgres_url.replace("postgresql://", "postgresql+psycopg://", 1)
    plain_engine, async_engine = create_engine(url), create_async_engine(url, poolclass=NullPool)
    store = PostgresStore(engine=async_engine if is_async else plain_engine)
    app = App(broker.bootstrap, group=group, offsets=store, kafka=QUICK)
    insert = text("insert into effects values (:value)")

    def one(value: str, session: Session) -> str:
        session.execute(insert, {"value": value})
        if value in BAD:
            raise LookupError(value)
        return value

    async def later(value: str, session: AsyncSession) -> str:
        await session.execute(insert, {"value": value})
        if value in BAD:
            raise LookupError(value)
        return value

    app.consume(source, to=out, on_error="skip")(later if is_async else one)
    app.catch_up(idle=0.2)
    plain_engine.dispose()
    assert values(broker, out) == shop.effects() == [str(n) for n in range(30) if str(n) not in BAD]
    assert rows(shop) == 0


def test_what_has_one_key_arrives_in_the_order_of_its_records(broker: Arena, group: str, shop: Shop) -> None:
    source, out = numbers(broker, 300, partitions=2), broker.topic(3)
    app = broker.app(group, shop.url)

    @app.consume(source, to=out)
    def handle(value: str, record: Record) -> list[Outgoing]:
        return [Outgoing(f"{value}{mark}", key=f"{record.partition}-{int(value) % 7}") for mark in "ab"]

    app.catch_up(idle=0.2)
    by_key: dict[bytes, list[str]] = {}
    for message in everything(broker.bootstrap, out):
        by_key.setdefault(message.key() or b"", []).append((message.value() or b"").decode())
    assert by_key == {
        f"{partition}-{rest}".encode(): [f"{n}{mark}" for n in range(rest, 300, 7) for mark in "ab"]
        for partition in range(2)
        for rest in range(7)
    }


def test_a_record_has_all_that_it_was_given(broker: Arena, group: str, shop: Shop) -> None:
    """Any bytes, nothing at all, an empty value, and headers of one name."""
    source, out = numbers(broker, 1), broker.topic(1)
    app = broker.app(group, shop.url)
    headers = [("a", b"\x00\xff"), ("a", b""), ("ü", b"2")]

    @app.consume(source, to=out)
    def handle(value: str) -> list[Outgoing]:
        return [
            Outgoing(b"\x00\xff", key=b"\xff\x00", headers=headers),
            Outgoing(None, key="gone"),
            Outgoing(b""),
            Outgoing(b"x" * 900_000),
        ]

    app.catch_up(idle=0.2)
    sent = everything(broker.bootstrap, out)
    assert [(m.key(), m.value()) for m in sent[:3]] == [(b"\xff\x00", b"\x00\xff"), (b"gone", None), (None, b"")]
    assert len(sent[3].value() or b"") == 900_000
    assert own_headers(sent[0]) == tuple(headers)


# Dead letters


@pytest.mark.dense
@pytest.mark.parametrize(("shop", "form"), LETTERS, indirect=["shop"])
def test_dead_letters_to_a_topic_leave_by_the_outbox_with_their_marks(
    broker: Arena, group: str, shop: Shop, form: str, held: Held
) -> None:
    source, out, other, dead = broker.topic(1), broker.topic(1), broker.topic(1), broker.topic(1)
    write(broker, source, [str(n).encode() for n in range(30)])

    def must_be_good(value: str) -> None:
        if value in BAD:
            raise LookupError(f"no such order: {value}")

    app = broker.app(group, shop.url)
    consume(app, form, source, sending(shop, form, other, must_be_good), to=out, on_error=DeadLetter(dead))
    with app.running():
        eventually(lambda: offset(shop, group, source) == 30, what="all handled, or dead")
        ((waiting,),) = shop.look(f"select count(*) from kconsume_outbox where target = '{dead}'")
        assert (waiting, values(broker, dead)) == (4, [])
        held.open()
    letters = everything(broker.bootstrap, dead)
    assert [letter.value() for letter in letters] == [n.encode() for n in sorted(BAD, key=int)]
    for letter in letters:
        said = marks(letter)
        assert said.keys() == MARKS
        assert (said["kconsume-topic"], said["kconsume-group"]) == (source, group)
        assert said["kconsume-message"] == f"no such order: {said['kconsume-offset']}"
        assert len(own_headers(letter)) == 3
        assert letter.key() == f"key-{said['kconsume-offset']}".encode()
    assert len({marks(letter)["kconsume-origin"] for letter in letters}) == 4
    assert rows(shop) == 0


# What a broker does not take


def test_a_topic_that_is_not_there_holds_what_is_sent_to_it_until_it_is_made(
    real: Arena, group: str, shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kconsume.outbox")
    source, out, missing = numbers(real, 10, partitions=2), real.topic(1), unique("missing")
    app = real.app(group, shop.url, kafka={"topic.metadata.propagation.max.ms": 500})

    @app.consume(source)
    def handle(value: str, record: Record, sender: Sender) -> None:
        sender.send(missing if record.partition == 0 else out, value)

    with app.running():
        eventually(lambda: "does not exist" in caplog.text, what="it is said")
        eventually(lambda: rows(shop) == 10, what="the other partition has sent its own")
        assert values(real, out) == [str(n) for n in range(10)]
        real.produce(source, ["more"], 0)
        real.produce(source, ["more"], 1)
        eventually(lambda: rows(shop) == 11, what="handlers go on, and so does the other partition")
        real.topic(1, missing)
        eventually(lambda: rows(shop) == 0, within=60, what="sent, now that it is there")
    assert values(real, missing) == [*(str(n) for n in range(10)), "more"], "each once, in order"
    said = [record.getMessage() for record in caplog.records if "does not exist" in record.getMessage()]
    assert len(said) == 1, f"once, and not each time: {said}"
    assert f"topic {missing!r} does not exist on" in said[0]


@pytest.mark.dense
def test_a_record_too_large_for_its_topic_is_held_with_those_behind_it_until_it_is_taken(
    real: Arena, topic: MakeTopic, group: str, shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """Those before it leave, also where all of them together are too large for a batch. `test_outbox_blocked.py` has
    more of it."""
    caplog.set_level(logging.INFO, "kconsume.outbox")
    source, out = numbers(real, 40), topic(1, config={"max.message.bytes": "2000"})
    app = real.app(group, shop.url)

    @app.consume(source, to=out)
    def handle(value: str) -> str:
        return value.ljust(5000 if value == "37" else 200)

    with app.running():
        eventually(lambda: "too large" in caplog.text, what="it is said")
        eventually(lambda: rows(shop) == 3, within=40, what="what stands before it has left")
        assert offset(shop, group, source) == 40
        taken = [value.strip() for value in values(real, out)]
        assert taken == [str(n) for n in range(37)], "all before it, each once"
        alter(real.admin, out, "max.message.bytes", "100000")
        eventually(lambda: rows(shop) == 0, within=40, what="sent, now that it is taken")
    assert [value.strip() for value in values(real, out)] == [str(n) for n in range(40)], "in order"
    assert f"a record to topic {out!r} is too large for it" in caplog.text


@pytest.mark.dense
def test_replicas_that_are_not_there_hold_what_is_sent_until_they_are(broker: Arena, group: str, shop: Shop) -> None:
    """As where `min.insync.replicas` is not met: a topic of one replica on a real broker never has too few."""
    source, out = numbers(broker, 20), broker.topic(1)
    app = broker.app(group, shop.url)

    @app.consume(source, to=out)
    def handle(value: str) -> str:
        return value

    assert broker.embedded is not None
    try:
        broker.embedded.fail_next("Produce", *[KafkaError.NOT_ENOUGH_REPLICAS] * 1000)
        with app.running():
            eventually(lambda: offset(shop, group, source) == 20, what="handled")
            assert (rows(shop), values(broker, out)) == (20, [])
            broker.embedded.clear_failures("Produce")
            eventually(lambda: rows(shop) == 0, what="sent, now that they are enough")
    finally:
        broker.embedded.clear_failures("Produce")
    assert values(broker, out) == [str(n) for n in range(20)], "each once, in order"


def alter(admin: AdminClient, topic: str, name: str, value: str) -> None:
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    (done,) = admin.incremental_alter_configs(
        [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])]
    ).values()
    done.result(timeout=20)


# Back-pressure, the end, and a rebalance


@pytest.mark.dense
@pytest.mark.parametrize(("shop", "form"), FULL, indirect=["shop"])
def test_a_full_outbox_holds_the_handler_until_there_is_room(
    broker: Arena, group: str, shop: Shop, form: str, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_relay, "FULL", 40)
    source, out, other = numbers(broker, 200), broker.topic(1), broker.topic(1)
    app, called = broker.app(group, shop.url), list[str]()
    consume(app, form, source, sending(shop, form, other, called.append), to=out, chunk=5)
    with app.running():
        eventually(lambda: rows(shop) >= 40, what="full")
        known = -1
        while known != len(called):  # what has begun ends
            known = len(called)
            threading.Event().wait(0.3)
        assert 40 <= rows(shop) <= 40 + 5 * 4, "and then no more is written"
        assert len(called) < 200
        held.open()
        eventually(lambda: offset(shop, group, source) == 200, what="it goes on")
    assert values(broker, out) == [f"{n}{mark}" for n in range(200) for mark in ("", "!")]
    assert rows(shop) == 0


@pytest.mark.dense
def test_partitions_that_move_between_members_repeat_nothing(real: Arena, group: str, shop: Shop) -> None:
    source, out = real.topic(4), real.topic(2)

    def member() -> App:
        app = real.app(group, shop.url)

        @app.consume(source, to=out)
        def handle(value: str, record: Record) -> Outgoing:
            return Outgoing(value, key=str(record.partition))

        return app

    one, two = member(), member()
    with one.running():
        eventually(lambda: len(assigned(one)) == 4, what="the first member has all")
        real.fill(source, 500)
        with two.running():
            eventually(lambda: len(assigned(one)) == len(assigned(two)) == 2, what="two each")
            real.fill(source, 500)
        eventually(lambda: len(assigned(one)) == 4, what="the first member has all again")
        eventually(lambda: offset(shop, group, source) == 4000, what="all handled")
    assert rows(shop) == 0
    sent = everything(real.bootstrap, out)
    assert len(sent) == len(set(map(origin, sent))) == 4000, "each once"
    for number in range(4):
        own = [(m.value() or b"").decode() for m in sent if m.key() == str(number).encode()]
        assert own == [f"{number}:{n}" for n in range(500)] * 2, "in order"


# The outbox of a person


@contextmanager
def relaying(broker: Arena, group: str, shop: Shop) -> Iterator[None]:
    """An app that has nothing to do with what is sent, but its store."""
    app = broker.app(group, shop.url)
    app.consume(broker.topic(1))(ignore)
    with app.running():
        yield


def ignore(value: str) -> None: ...


def test_what_is_left_in_a_transaction_of_one_s_own_is_sent_once_if_it_commits(
    broker: Arena, group: str, shop: Shop
) -> None:
    out, outbox = broker.topic(1), Outbox(shop.url)
    insert = "insert into effects values ('order')"
    path = shop.url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path) if shop.is_sqlite else psycopg.connect(shop.url)) as connection:
        for name, end in (("first", connection.commit), ("never", connection.rollback), ("second", connection.commit)):
            connection.execute(insert)
            outbox.send(connection, out, {"id": name}, key="k", headers={"trace": "1"})
            end()
    with relaying(broker, group, shop):
        eventually(lambda: rows(shop) == 0, what="sent and deleted")
    outbox.close()
    sent = everything(broker.bootstrap, out)
    assert [(m.key(), m.value(), own_headers(m)) for m in sent] == [
        (b"k", b'{"id":"first"}', (("trace", b"1"),)),
        (b"k", b'{"id":"second"}', (("trace", b"1"),)),
    ]
    assert len(shop.effects()) == 2
    origins = list(map(origin, sent))
    assert all(each.startswith("outbox:") and each.endswith("#0") for each in origins)
    assert len(set(origins)) == 2


def test_transactions_of_postgresql_in_every_form_leave_rows(broker: Arena, group: str, postgres_url: str) -> None:
    shop, out, outbox = Shop(postgres_url), broker.topic(1), Outbox(postgres_url)
    url = postgres_url.replace("postgresql://", "postgresql+psycopg://", 1)

    async def awaited() -> None:
        async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
            await outbox.asend(connection, out, "psycopg, awaited")
            await connection.commit()
            await outbox.asend(connection, out, "never")
            await connection.rollback()
        engine = create_async_engine(url, poolclass=NullPool)
        async with AsyncSession(engine) as session:
            await outbox.asend(session, out, "session, awaited")
            await session.commit()
            await outbox.asend(session, out, "never")
        async with engine.begin() as begun:
            await outbox.asend(begun, out, "connection, awaited")

    asyncio.run(awaited())
    engine = create_engine(url)
    with Session(engine) as session:
        outbox.send(session, out, "session")
        session.commit()
        outbox.send(session, out, "never")
    with engine.begin() as begun:
        outbox.send(begun, out, "connection")
    with psycopg.connect(postgres_url) as connection, connection.cursor() as cursor:
        outbox.send(cursor, out, "cursor")
    engine.dispose()
    outbox.close()
    with relaying(broker, group, shop):
        eventually(lambda: rows(shop) == 0, what="sent and deleted")
    assert values(broker, out) == [
        "psycopg, awaited", "session, awaited", "connection, awaited", "session", "connection", "cursor"
    ]  # fmt: skip


@pytest.mark.dense
def test_the_transaction_of_a_handler_is_one_of_the_person_s_own_as_well(broker: Arena, group: str, shop: Shop) -> None:
    source, out, outbox = numbers(broker), broker.topic(1), Outbox(shop.url)
    app = broker.app(group, shop.url)

    def handle(value: str, tx: Any) -> None:
        outbox.send(tx, out, value)
        if value in BAD:
            raise LookupError(value)

    handle.__annotations__["tx"] = sqlite3.Connection if shop.is_sqlite else psycopg.Connection
    app.consume(source, on_error="skip")(handle)
    with app.running():
        eventually(lambda: offset(shop, group, source) == 30 and rows(shop) == 0, what="handled, sent and deleted")
    outbox.close()
    assert values(broker, out) == [str(n) for n in range(30) if str(n) not in BAD]


def test_of_two_apps_with_one_store_one_sends_what_is_nobody_s(broker: Arena, group: str, shop: Shop) -> None:
    out, outbox = broker.topic(1), Outbox(shop.url)
    with relaying(broker, group, shop), relaying(broker, unique("group"), shop):
        for n in range(20):
            path = shop.url.removeprefix("sqlite:///")
            with closing(sqlite3.connect(path, timeout=20) if shop.is_sqlite else psycopg.connect(shop.url)) as own:
                outbox.send(own, out, str(n))
                own.commit()
        eventually(lambda: rows(shop) == 0, what="sent and deleted")
    outbox.close()
    assert values(broker, out) == [str(n) for n in range(20)]


def test_what_cannot_be_a_transaction_of_the_store_is_refused(sqlite_url: str, postgres_url: str) -> None:
    in_sqlite, in_postgres = Outbox(sqlite_url), Outbox(postgres_url)
    url = postgres_url.replace("postgresql://", "postgresql+psycopg://", 1)
    engine, async_engine = create_engine(url), create_async_engine(url, poolclass=NullPool)
    with closing(sqlite3.connect(":memory:")) as file, psycopg.connect(postgres_url) as connection:
        for outbox, tx in (
            (in_sqlite, connection), (in_postgres, file), (in_postgres, engine), (in_sqlite, object()),
            (in_sqlite, None),
        ):  # fmt: skip
            with pytest.raises(InvalidHandler, match=r"is not a transaction of .*: give the connection, or "):
                outbox.send(tx, "orders", "x")
            with pytest.raises(InvalidHandler, match="is not a transaction of"):
                asyncio.run(outbox.asend(tx, "orders", "x"))
        with pytest.raises(InvalidHandler, match=r"the methods of a Connection are not awaited: call send\(\.\.\.\)"):
            asyncio.run(in_postgres.asend(connection, "orders", "x"))
        with pytest.raises(InvalidHandler, match=r"the methods of a Session are not awaited"):
            asyncio.run(in_postgres.asend(Session(engine), "orders", "x"))
    with pytest.raises(InvalidHandler, match=r"the methods of a AsyncSession are awaited: write await outbox\.asend"):
        in_postgres.send(AsyncSession(async_engine), "orders", "x")
    with pytest.raises(SendFailed, match="'no topic' is no topic name"), psycopg.connect(postgres_url) as connection:
        in_postgres.send(connection, "no topic", "x")

    async def unawaited() -> None:
        async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
            in_postgres.send(connection, "orders", "x")

    with pytest.raises(InvalidHandler, match="the methods of a AsyncConnection are awaited"):
        asyncio.run(unawaited())
    engine.dispose()
    for outbox in (in_sqlite, in_postgres):
        outbox.close()


@pytest.mark.parametrize("address", ["kafka://", "redis://localhost:1", "memory://"])
def test_a_store_that_is_no_database_has_no_outbox(address: str) -> None:
    with pytest.raises(ConfigurationError, match="has no outbox, because it is not a database: give postgresql://"):
        Outbox(open_store(address, brokers="nowhere:1"))


# The control: rows that are not a part of the transaction are noticed


def test_control_rows_that_are_written_beside_the_transaction_are_noticed(
    broker: Arena, group: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, delivered = Shop(sqlite_url), list[str]()

    def kept(self: Publisher, sent: Sequence[Outgoing], *_: Any) -> None:
        self._producer.deliver(sent).result()
        delivered.extend(str(each.topic) for each in sent)

    monkeypatch.setattr(Publisher, "keep", kept)
    with pytest.raises((AssertionError, KconsumeError)):
        test_what_was_put_into_the_outbox_never_leaves_when_its_transaction_is_undone(
            broker, group, shop, "tx", monkeypatch
        )
    assert delivered
