"""Records that are tried again later, on brokers and in databases: when, how often, by whom, and to what end."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psycopg
import pytest
import redis
from confluent_kafka import Message, Producer
from redis.client import Pipeline
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from kconsume import App, Batch, Batching, ConfigurationError, DeadLetter, Partition, Record, Retry, RetryTopics
from kconsume._embedded.controls import KafkaControls
from kconsume._runtime.processing.dedup import Deduplication
from kconsume.backends import PostgresStore, open_store
from kconsume.failures.letter_headers import read_added_headers
from kconsume.failures.retry_topics import RetryChain, retry_topic
from kconsume.records import record_of
from tests.contract.test_failures import UNDECODABLE
from tests.contract.test_failures_stores import Shop
from tests.contract.test_output import everything
from tests.fix_arena import QUICK, Arena
from tests.waiting import eventually

PLAIN = ["thread", "async", "batch"]
STORED = ["tx", "async tx", "batch tx", "without tx", "async without tx"]
FEW = [("kafka", "thread"), ("kafka", "async"), ("sqlite", "tx"), ("postgres", "batch tx")]
ALL = [*(("kafka", form) for form in PLAIN), *((store, form) for store in ("sqlite", "postgres") for form in STORED)]
CASES = [*(("real", *case) for case in ALL), *(("embedded", *case) for case in FEW)]
SOON = (0.3, 0.6)


class Call(NamedTuple):
    """A record that a handler was called with."""

    value: str
    topic: str
    at: float
    due: float


def call_of(record: Record) -> Call:
    due = int(dict(record.headers).get("kconsume-due", b"0")) / 1000
    return Call((record.value or b"").decode(), record.topic, time.time(), due)


@dataclass
class Stage:
    """A handler in one of the forms that fails where it is told to, and what it has done."""

    arena: Arena
    group: str
    form: str
    shop: Shop | None = None
    fails: Callable[[Record], bool] = lambda _: False
    calls: list[Call] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)

    def app(self, source: str, **options: Any) -> App:
        app = self.arena.app(self.group, "kafka://" if self.shop is None else self.shop.url)
        if "batch" in self.form:
            options = {"batch": Batching(7, wait=0.05), **options}
        app.consume(source, **options)(self.handler())
        return app

    def effects(self) -> list[str]:
        if self.shop is not None and "without" not in self.form:
            return self.shop.effects()
        # Without a transaction of its own, a record that shares one with a bad one is called again.
        return self.noted if self.shop is None else list(dict.fromkeys(self.noted))

    def effects_in_order(self) -> list[str]:
        """Of records that never fail."""
        return self.noted if "without" in self.form else self.effects()

    def early(self) -> list[Call]:
        return [call for call in self.calls if call.at < call.due]

    def rungs(self, source: str, count: int, partitions: int = 1) -> list[str]:
        """Their names. The embedded broker makes no topics for clients, so they are made here."""
        names = [retry_topic(source, self.group, n + 1) for n in range(count)]
        for name in names:
            if self.arena.embedded is not None:
                self.arena.topic(partitions, name)
            else:
                self.arena._made.add(name)
        return names

    def handler(self) -> Callable[..., Any]:
        def check(record: Record) -> None:
            self.calls.append(call_of(record))
            if self.fails(record):
                raise LookupError(f"not yet: {record.offset}")

        def one(value: str, record: Record) -> None:
            check(record)
            self.noted.append(value)

        async def later(value: str, record: Record) -> None:
            await asyncio.sleep(0)
            one(value, record)

        def many(values: list[str], batch: Batch) -> None:
            for record in batch:
                check(record)
            self.noted.extend(values)

        insert = f"insert into effects values ({'%s' if self.shop and not self.shop.is_sqlite else '?'})"

        def tx_one(value: str, record: Record, tx: Any) -> None:
            tx.execute(insert, (value,))
            check(record)

        async def tx_later(value: str, record: Record, tx: Any) -> None:
            done = tx.execute(insert, (value,))
            if inspect.isawaitable(done):
                await done
            check(record)

        def tx_many(values: list[str], batch: Batch, tx: Any) -> None:
            for value, record in zip(values, batch, strict=True):
                tx.execute(insert, (value,))
                check(record)

        forms: dict[str, Callable[..., Any]] = {
            "thread": one, "async": later, "batch": many, "without tx": one, "async without tx": later,
            "tx": tx_one, "async tx": tx_later, "batch tx": tx_many,
        }  # fmt: skip
        made = forms[self.form]
        if "tx" in made.__annotations__:
            assert self.shop is not None
            of_postgres = psycopg.AsyncConnection if self.form == "async tx" else psycopg.Connection
            made.__annotations__["tx"] = sqlite3.Connection if self.shop.is_sqlite else of_postgres
        return made

    def passed(self, topic: str, partitions: int = 1) -> int:
        """How many records of a topic the group is past."""
        places = [Partition(topic, number) for number in range(partitions)]
        address = "kafka://" if self.shop is None else self.shop.url
        with closing(open_store(address, brokers=self.arena.bootstrap)) as store:
            found = store.load(self.group, places)
        return sum(found[place].next_offset for place in places if place in found)


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case).replace(" ", "-"))
def stage(request: pytest.FixtureRequest, group: str) -> Stage:
    """Every store and form that there is, on the real broker; some on the embedded one as well."""
    broker, store, form = request.param
    arena = request.getfixturevalue("one_broker" if broker == "embedded" else "kafka_arena")
    return staged(request, arena, group, store, form)


@pytest.fixture
def kafka_arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    arena = Arena("real", request.getfixturevalue("kafka").bootstrap, None)
    yield arena
    arena.clean_up()


def staged(request: pytest.FixtureRequest, arena: Arena, group: str, store: str, form: str) -> Stage:
    shop = None if store == "kafka" else Shop(request.getfixturevalue(f"{store}_url"))
    return Stage(arena, group, form, shop)


def marks_of(message: Message) -> dict[str, str]:
    return read_added_headers(record_of(message, "").headers)  # type: ignore[arg-type]


@pytest.mark.dense
def test_what_fails_passes_when_its_time_has_come_or_ends_as_a_dead_letter_and_others_do_not_wait(stage: Stage) -> None:
    arena, source, dead = stage.arena, stage.arena.topic(1), stage.arena.topic(1)
    first, second = stage.rungs(source, 2)
    places = {"1": {source}, "4": {source, first}, "7": {source, first, second}}
    stage.fails = lambda record: record.topic in places.get((record.value or b"").decode(), ())
    values = [str(n).encode() for n in range(10)]
    values[8] = UNDECODABLE
    arena.produce(source, values, 0)
    with stage.app(source, retry=RetryTopics(SOON), on_error=DeadLetter(dead)).running():
        eventually(lambda: len(stage.effects()) >= 8, what="all that pass have passed")
        eventually(lambda: len(everything(arena.bootstrap, dead)) == 2, what="the others are dead")
    effects = stage.effects()
    assert stage.early() == []
    assert Counter(effects) == Counter(str(n) for n in range(10) if n not in (7, 8)), "each once"
    assert [value for value in effects if value not in places] == ["0", "2", "3", "5", "6", "9"], "in order"
    at = effects.index
    assert at("2") < at("1") < at("4"), "the one behind it does not wait"
    assert at("5") < at("4"), "nor does this one"
    letters = {letter.value(): marks_of(letter) for letter in everything(arena.bootstrap, dead)}
    assert (letters[UNDECODABLE]["attempts"], letters[UNDECODABLE]["exception"]) == ("1", "kconsume.errors.DecodeError")
    seven = letters[b"7"]
    assert (seven["topic"], seven["partition"], seven["offset"]) == (source, "0", "7")
    assert seven["origin"].endswith(":0:7")
    assert "batch" in stage.form or seven["attempts"] == "3"
    for rung, delay, expected in ((first, SOON[0], ["1", "4", "7"]), (second, SOON[1], ["4", "7"])):
        found = everything(arena.bootstrap, rung)
        assert [(message.value() or b"").decode() for message in found] == expected
        for message in found:
            said, before = marks_of(message), source if rung == first else first
            failed = max(c.at for c in stage.calls if c.value.encode() == message.value() and c.topic == before)
            assert int(said["due"]) / 1000 >= failed + delay, "the delay is counted from the failure"
            assert said["rung"] == rung[-1]
            assert said["topic"] == source
        assert stage.passed(rung) == len(expected)
    assert stage.passed(source) == 10


@pytest.fixture
def one_broker(embedded: KafkaControls) -> Arena:
    return Arena("embedded", embedded.bootstrap, embedded)


@pytest.fixture(params=FEW, ids=lambda case: "-".join(case).replace(" ", "-"))
def small_stage(request: pytest.FixtureRequest, one_broker: Arena, group: str) -> Stage:
    """What does not depend on the broker, with some of the forms."""
    store, form = request.param
    return staged(request, one_broker, group, store, form)


def test_rungs_do_not_wait_for_each_other_and_who_waits_ends_with_the_app_and_is_not_passed(small_stage: Stage) -> None:
    stage, source = small_stage, small_stage.arena.topic(1)
    first, second = stage.rungs(source, 2)
    stage.fails = lambda r: r.topic == source or (r.value == b"long" and r.topic == first)
    app = stage.app(source, retry=RetryTopics((0.2, 600)), concurrency=1)
    stage.arena.produce(source, ["long"], 0)
    with app.running():
        eventually(lambda: len(everything(stage.arena.bootstrap, second)) == 1, what="one waits on the second rung")
        eventually(lambda: rungs_held(app, second), what="its record is there")
        for n in range(3):
            stage.arena.produce(source, [f"short {n}"], 0)
            eventually(lambda: f"short {n}" in stage.effects(), what="the first rung flows")  # noqa: B023
        asked = time.monotonic()
    assert time.monotonic() - asked < 12.0, "at once, and not when its time has come"
    assert stage.early() == []
    assert stage.effects() == ["short 0", "short 1", "short 2"]
    assert (stage.passed(source), stage.passed(first), stage.passed(second)) == (4, 4, 0)


def rungs_held(app: App, topic: str) -> bool:
    """Whether records of the topic are in the hands of a lane."""
    assert app._supervisor is not None
    owned_partitions = [
        h for e in app._supervisor.consumers for p, h in e.assignment.partitions.items() if p.topic == topic
    ]
    return any(owned.lane is not None and owned.lane.queued_records for owned in owned_partitions)


@pytest.mark.dense
@pytest.mark.parametrize("end", ["skip", "stop", "table"])
def test_after_the_last_rung_comes_the_one_terminal_action(
    request: pytest.FixtureRequest, one_broker: Arena, group: str, end: str
) -> None:
    stage = staged(request, one_broker, group, "sqlite", "tx")
    assert stage.shop is not None
    source = one_broker.topic(1)
    (rung,) = stage.rungs(source, 1)
    stage.fails = lambda record: record.value == b"bad"
    one_broker.produce(source, ["a", "bad", "b"], 0)
    on_error: Any = DeadLetter(table="failed") if end == "table" else end
    app = stage.app(source, retry=(Retry(2, wait=0.0), RetryTopics((0.2,))), on_error=on_error)
    if end == "stop":
        with pytest.raises(LookupError, match="not yet") as caught, app.running():
            eventually(lambda: run_ended(app), what="it stops")
        assert any(f"{rung}/0@0" in note for note in caught.value.__notes__)
        assert stage.passed(rung) == 0
    else:
        with app.running():
            eventually(lambda: stage.passed(rung) == 1, what="it is passed in the end")
    assert stage.effects() == ["a", "b"]
    assert stage.early() == []
    if end == "table":
        (row,) = stage.shop.look("select topic, partition, record_offset, attempts from failed")
        assert row == (source, 0, 1, 4)
    assert len([call for call in stage.calls if call.value == "bad"]) >= 4


def run_ended(app: App) -> bool:
    return app._supervisor is None or not any(engine.join(0) is False for engine in app._supervisor.consumers)


@pytest.mark.dense
@pytest.mark.parametrize(("store", "form"), [("kafka", "thread"), ("postgres", "tx")])
def test_a_rebalance_while_records_wait_loses_nothing_and_runs_nothing_early(
    request: pytest.FixtureRequest, kafka_arena: Arena, group: str, store: str, form: str
) -> None:
    stage = staged(request, kafka_arena, group, store, form)
    source = kafka_arena.topic(4)
    (rung,) = stage.rungs(source, 1, 4)
    stage.fails = lambda record: record.topic == source
    expected = kafka_arena.fill(source, 20)
    apps = [stage.app(source, retry=RetryTopics((3.0,))) for _ in range(3)]
    with ExitStack() as rest:
        with apps[0].running():
            eventually(lambda: len({call.value for call in stage.calls}) == 80, what="all failed")
            eventually(lambda: len(everything(kafka_arena.bootstrap, rung)) >= 80, what="all wait")
            rest.enter_context(apps[1].running())
            eventually(apps[1].rebalances, what="the second has joined")
            rest.enter_context(apps[2].running())
            # The first leaves, while they wait or are worked off.
        eventually(lambda: set(stage.effects()) == expected, what="all passed")
    assert stage.early() == []
    assert stage.shop is None or Counter(stage.effects()) == Counter(expected), "each once"


@pytest.mark.dense
def test_topics_are_made_with_the_partitions_of_the_source_and_found_the_next_time(
    kafka_arena: Arena, group: str
) -> None:
    sources = [kafka_arena.topic(3), kafka_arena.topic(1)]
    stage = Stage(kafka_arena, group, "thread")
    names = [name for source in sources for name in stage.rungs(source, 2)]
    for _ in range(2):
        apps = [kafka_arena.app(group) for _ in range(2)]  # which make them at once
        for app in apps:
            app.consume(*sources, retry=RetryTopics((5, 60)))(stage.handler())
        with apps[0].running(), apps[1].running():
            for app in apps:
                eventually(app.rebalances, what="it has joined")
            known = kafka_arena.admin.list_topics(timeout=20).topics
            assert [len(known[name].partitions) for name in names] == [3, 3, 1, 1]


@pytest.mark.dense
@pytest.mark.parametrize("is_async", [False, True])
def test_sessions_of_sqlalchemy_have_retry_topics_and_drop_repeats_too(
    one_broker: Arena, group: str, postgres_url: str, is_async: bool
) -> None:
    source, shop = one_broker.topic(1), Shop(postgres_url)
    Stage(one_broker, group, "tx", shop).rungs(source, 1)
    send_with_origins(one_broker, source, [("a", "1"), ("bad", "2"), ("a", "1"), ("b", None)])
    url = postgres_url.replace("postgresql://", "postgresql+psycopg://", 1)
    plain_engine, async_engine = create_engine(url), create_async_engine(url, poolclass=NullPool)
    store = PostgresStore(engine=async_engine if is_async else plain_engine)
    app = App(one_broker.bootstrap, group=group, offsets=store, kafka=QUICK)
    insert = text("insert into effects values (:value)")

    def check(record: Record) -> None:
        if record.value == b"bad" and record.topic == source:
            raise LookupError("not yet")

    def one(value: str, record: Record, session: Session) -> None:
        session.execute(insert, {"value": value})
        check(record)

    async def later(value: str, record: Record, session: AsyncSession) -> None:
        await session.execute(insert, {"value": value})
        check(record)

    app.consume(source, retry=RetryTopics((2.0,)), repeats="drop")(later if is_async else one)
    with app.running():
        eventually(lambda: len(shop.effects()) == 3, what="all have passed")
    plain_engine.dispose()
    assert shop.effects() == ["a", "b", "bad"]


@pytest.mark.dense
def test_commands_on_a_pipeline_of_redis_are_tried_again_later(one_broker: Arena, group: str, redis_url: str) -> None:
    source, app, calls = one_broker.topic(1), one_broker.app(group, redis_url), list[Call]()
    Stage(one_broker, group, "tx").rungs(source, 1)
    one_broker.produce(source, ["a", "bad", "b"], 0)

    @app.consume(source, retry=RetryTopics((0.3,)))
    def push(value: str, record: Record, tx: Pipeline) -> None:
        calls.append(call_of(record))
        tx.rpush("effects", value)
        if value == "bad" and record.topic == source:
            raise LookupError("not yet")

    with redis.Redis.from_url(redis_url) as client, app.running():
        eventually(lambda: client.llen("effects") == 3, what="all have passed")
        assert client.lrange("effects", 0, -1) == [b"a", b"b", b"bad"]
    assert [call for call in calls if call.at < call.due] == []


@pytest.mark.dense
def test_where_a_client_may_not_make_topics_the_error_names_them(one_broker: Arena, group: str) -> None:
    source, other = one_broker.topic(2), one_broker.topic(1)
    app = one_broker.app(group)
    app.consume(source, other, retry=RetryTopics((5, 60)))(Stage(one_broker, group, "thread").handler())
    names = [f"{source}.{group}.retry.{n} (2 partitions)" for n in (1, 2)]
    with pytest.raises(ConfigurationError, match="create them, or give the principal Create") as caught:
        app.catch_up(idle=0.1)
    assert all(name in str(caught.value) for name in names)
    assert f"{other}.{group}.retry.2 (1 partitions)" in str(caught.value)


@pytest.mark.dense
def test_those_that_are_there_need_not_be_made(one_broker: Arena, group: str) -> None:
    stage, source = Stage(one_broker, group, "thread"), one_broker.topic(1)
    stage.rungs(source, 2)
    one_broker.produce(source, ["a"], 0)
    assert stage.app(source, retry=RetryTopics((5, 60))).catch_up(idle=0.1).handled == 1


@pytest.mark.dense
def test_a_topic_that_is_not_there_is_said_to_be_the_one_that_is_missing(one_broker: Arena, group: str) -> None:
    app = Stage(one_broker, group, "thread").app("nowhere", retry=RetryTopics((5, 60)))
    with pytest.raises(ConfigurationError, match="topic 'nowhere' is not on the cluster"):
        app.catch_up(idle=0.1)


@pytest.mark.dense
@pytest.mark.parametrize("start", ["latest", "error"])
def test_retry_topics_are_read_from_their_beginning_whatever_start_says(arena: Arena, group: str, start: str) -> None:
    stage, source = Stage(arena, group, "thread"), arena.topic(1)
    (rung,) = stage.rungs(source, 1)
    if arena.embedded is None:
        arena.topic(1, rung)
    arena.produce(source, ["old"], 0)
    arena.produce(rung, ["waits"], 0)
    if start == "error":  # of the source it must be known where to go on
        stage.app(source).catch_up(idle=0.1)
    with stage.app(source, retry=RetryTopics((0.2,)), start=start).running():
        eventually(lambda: "waits" in stage.noted, what="what waits is read")
    assert stage.noted == (["waits"] if start == "latest" else ["old", "waits"])


@pytest.mark.dense
def test_other_topics_are_refused_while_it_runs(one_broker: Arena, group: str) -> None:
    stage, source = Stage(one_broker, group, "thread"), one_broker.topic(1)
    stage.rungs(source, 1)
    app = stage.app(source, retry=RetryTopics((5,)))
    with app.running(), pytest.raises(ConfigurationError, match="are created for the handler's topics when"):
        app.subscribe(source, one_broker.topic(1))


@pytest.mark.dense
def test_attempts_in_place_come_before_each_rung_and_only_they_hold_the_partition(arena: Arena, group: str) -> None:
    stage, source, dead = Stage(arena, group, "thread"), arena.topic(1), arena.topic(1)
    stage.rungs(source, 2)
    stage.fails = lambda record: record.value == b"bad"
    arena.produce(source, ["bad", "good"], 0)
    app = stage.app(source, retry=(Retry(2, wait=0.1), RetryTopics((0.2, 0.2))), on_error=DeadLetter(dead))
    with app.running():
        eventually(lambda: everything(arena.bootstrap, dead), what="it is dead")
    assert [call.value for call in stage.calls] == ["bad", "bad", "good", "bad", "bad", "bad", "bad"]
    (letter,) = everything(arena.bootstrap, dead)
    assert marks_of(letter)["attempts"] == "6"
    assert stage.early() == []


def test_control_a_ladder_that_does_not_wait_is_noticed(
    request: pytest.FixtureRequest, one_broker: Arena, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RetryChain, "seconds_left", lambda *_: 0.0)
    with pytest.raises(AssertionError, match="Call"):
        test_what_fails_passes_when_its_time_has_come_or_ends_as_a_dead_letter_and_others_do_not_wait(
            staged(request, one_broker, group, "kafka", "thread")
        )


# Repeats


def send_with_origins(arena: Arena, topic: str, pairs: list[tuple[str, str | None]]) -> None:
    """As another's outbox would after a kill: some of them twice."""
    producer = Producer({"bootstrap.servers": arena.bootstrap, "enable.idempotence": True, "log_level": 0})
    for value, origin in pairs:
        headers: list[tuple[str, str | bytes | None]] = []
        headers += [] if origin is None else [("kconsume-origin", origin.encode())]
        producer.produce(topic, value.encode(), partition=0, headers=headers)
    assert producer.flush(20) == 0


@pytest.mark.dense
@pytest.mark.parametrize(
    ("store", "form"),
    [
        *(("sqlite", form) for form in ("tx", "batch tx", "async without tx")),
        *(("postgres", form) for form in ("tx", "async tx", "batch tx", "without tx")),
    ],
)
def test_a_record_that_was_sent_twice_is_handled_once_if_repeats_are_dropped(
    request: pytest.FixtureRequest, one_broker: Arena, group: str, store: str, form: str
) -> None:
    stage, source = staged(request, one_broker, group, store, form), one_broker.topic(1)
    sent = [("a", "g:T:0:1#0"), ("b", "g:T:0:1#1"), ("a", "g:T:0:1#0"), ("c", None), ("c", None), ("d", "g\0:T:0:2#0")]
    send_with_origins(one_broker, source, [*sent, ("e", "x" * 4000)])
    report = stage.app(source, repeats="drop").catch_up(idle=0.2)
    assert stage.effects_in_order() == ["a", "b", "c", "c", "d", "e"]
    send_with_origins(one_broker, source, [*sent, ("e", "x" * 4000), ("f", "g:T:0:3#0")])
    again = stage.app(source, repeats="drop").catch_up(idle=0.2)  # another run of the group
    assert stage.effects_in_order() == ["a", "b", "c", "c", "d", "e", "c", "c", "f"]
    assert stage.passed(source) == 15
    assert (report.skipped, again.skipped) == (0, 0)


@pytest.mark.dense
def test_another_group_takes_it_in_by_itself_and_who_did_not_ask_takes_all(
    request: pytest.FixtureRequest, one_broker: Arena, group: str
) -> None:
    stage, source = staged(request, one_broker, group, "sqlite", "tx"), one_broker.topic(1)
    send_with_origins(one_broker, source, [("a", "o"), ("a", "o")])
    stage.app(source, repeats="drop").catch_up(idle=0.2)
    stage.group = f"{group}-2"
    stage.app(source, repeats="drop").catch_up(idle=0.2)
    assert stage.effects() == ["a", "a"]
    stage.group = f"{group}-3"
    stage.app(source).catch_up(idle=0.2)
    assert stage.effects() == ["a"] * 4


@pytest.mark.dense
def test_what_was_rolled_back_was_not_taken_in(request: pytest.FixtureRequest, one_broker: Arena, group: str) -> None:
    stage, source = staged(request, one_broker, group, "postgres", "tx"), one_broker.topic(1)
    send_with_origins(one_broker, source, [("a", "o1"), ("bad", "o2"), ("b", "o3")])
    stage.fails = lambda record: record.value == b"bad"
    with pytest.raises(LookupError):
        stage.app(source, repeats="drop").catch_up(idle=0.2)
    assert stage.effects() == ["a"]
    stage.fails = lambda _: False
    stage.app(source, repeats="drop").catch_up(idle=0.2)
    assert stage.effects() == ["a", "bad", "b"]


def test_control_an_intake_that_takes_everything_is_noticed(
    request: pytest.FixtureRequest, one_broker: Arena, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Deduplication, "applies_to", lambda *_: False)
    with pytest.raises(AssertionError, match="At index 2 diff: 'a' != 'c'"):
        test_a_record_that_was_sent_twice_is_handled_once_if_repeats_are_dropped(
            request, one_broker, group, "sqlite", "tx"
        )
