"""Dead letters beside offsets that a database keeps; how many may be written; and what is refused, or only fed."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from kconsume import App, Batch, Batching, ConfigurationError, DeadLetter, DecodeError, Partition, Record, Retry
from kconsume._embedded.controls import KafkaControls
from kconsume._kafka.outgoing import Outgoing
from kconsume._runtime.output.publisher import Publisher
from kconsume.backends import PostgresStore, open_store
from kconsume.backends.base import Tx
from kconsume.backends.sqlite.transaction import SqliteTx
from kconsume.errors import StoreUnavailable, TooManyFailures
from kconsume.failures.letter_headers import Letter
from kconsume.testing import Fed, afeed, feed
from tests.contract.test_failures import AN_HOUR_AGO, UNDECODABLE, consume, marks, write
from tests.contract.test_output import everything, stored, texts
from tests.fix_arena import QUICK, Arena
from tests.waiting import eventually

BAD = {"0", "5", "6", "29"}
DEAD = sorted(BAD, key=int)
GOOD = [str(n) for n in range(30) if str(n) not in BAD]
FORMS = ["tx", "async tx", "batch tx", "without tx", "async without tx"]


@pytest.fixture
def broker(embedded: KafkaControls) -> Arena:
    return Arena("embedded", embedded.bootstrap, embedded)


class Shop:
    """A database that has the offsets and a table `effects`, and a look at it from outside."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_sqlite = url.startswith("sqlite")
        self.look("create table effects (value text)")

    def look(self, query: str) -> list[tuple[Any, ...]]:
        if self.is_sqlite:
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), isolation_level=None)) as connection:
                return connection.execute(query).fetchall()
        with psycopg.connect(self.url, autocommit=True) as database:
            answer = database.execute(query)
            return answer.fetchall() if answer.description else []

    def letters(self) -> list[tuple[Any, ...]]:
        return self.look("select record_offset, value from failed order by id")

    def effects(self) -> list[str]:
        return [value for (value,) in self.look("select value from effects")]

    def seen(self, form: str, effects: list[str]) -> list[str]:
        """What handlers did. Without a transaction of their own they may do it again, when a neighbour has failed."""
        return list(dict.fromkeys(effects)) if "without" in form else self.effects()

    def offset(self, group: str, topic: str) -> int:
        with closing(open_store(self.url)) as store:
            return store.load(group, [Partition(topic, 0)])[Partition(topic, 0)].next_offset

    def handler(self, form: str, effects: list[str]) -> Callable[..., Any]:
        """Writes, and then fails on what is bad. Without a transaction it can only note what it has done."""
        insert = f"insert into effects values ({'?' if self.is_sqlite else '%s'})"

        def tx_one(value: str, tx: Any) -> None:
            tx.execute(insert, (value,))
            must_be_good(value)

        async def async_one(value: str, tx: Any) -> None:
            done = tx.execute(insert, (value,))
            if inspect.isawaitable(done):
                await done
            must_be_good(value)

        def tx_many(values: list[str], tx: Any) -> None:
            for value in values:
                tx_one(value, tx)

        def plain(value: str) -> None:
            must_be_good(value)
            effects.append(value)

        async def plain_later(value: str) -> None:
            await asyncio.sleep(0)
            plain(value)

        forms: dict[str, Callable[..., Any]] = {
            "tx": tx_one, "async tx": async_one, "batch tx": tx_many, "without tx": plain,
            "async without tx": plain_later,
        }  # fmt: skip
        made = forms[form]
        if "tx" in made.__annotations__:
            of_postgres = psycopg.AsyncConnection if form == "async tx" else psycopg.Connection
            made.__annotations__["tx"] = sqlite3.Connection if self.is_sqlite else of_postgres
        return made


def must_be_good(value: str) -> None:
    if value in BAD:
        raise LookupError(f"no such order: {value}")


@pytest.fixture(params=["sqlite", "postgres"])
def shop(request: pytest.FixtureRequest) -> Shop:
    return Shop(request.getfixturevalue(f"{request.param}_url"))


def thirty(broker: Arena) -> str:
    source = broker.topic(1)
    write(broker, source, [str(n).encode() for n in range(30)])
    return source


# In a table, with the offset


@pytest.mark.dense
@pytest.mark.parametrize("form", FORMS)
def test_each_dead_letter_is_one_row_and_what_its_handler_wrote_is_undone(
    broker: Arena, group: str, shop: Shop, form: str
) -> None:
    source, effects = thirty(broker), list[str]()
    for handled, skipped in ((26, 4), (0, 0)):  # the second run finds nothing more to do
        app = broker.app(group, shop.url)
        app.consume(source, on_error=DeadLetter(table="failed"))(shop.handler(form, effects))
        report = app.catch_up(idle=0.2)
        assert (report.handled, report.skipped) == (handled, skipped)
        assert shop.seen(form, effects) == GOOD, "each once, in order"
        assert [(n, bytes(value)) for n, value in shop.letters()] == [
            (int(n), n.encode()) for n in sorted(BAD, key=int)
        ]
        assert shop.offset(group, source) == 30


def test_a_row_has_all_of_its_record_and_says_what_happened(broker: Arena, group: str, shop: Shop) -> None:
    source, app, ids = broker.topic(1), broker.app(group, shop.url), list[str]()
    write(broker, source, [b"\x00\xff", UNDECODABLE])

    @app.consume(source, on_error=DeadLetter(table="failed"), retry=Retry(2, wait=0.0))
    def handle(record: Record) -> None:
        ids.append(record.id)
        raise LookupError("a \0 is no text")

    app.catch_up(idle=0.2)
    row = shop.look(
        "select group_id, topic, partition, record_offset, origin, attempts, exception, message, key, value, headers, "
        "record_timestamp, redriven, trace from failed where record_offset = 0"
    )[0]
    *told, message, key, value, headers, moment, redriven, trace = row
    assert told == [group, source, 0, 0, ids[0], 2, "builtins.LookupError"]
    assert message == "a \\x00 is no text"
    assert (bytes(key), bytes(value), redriven) == (b"key-0", b"\x00\xff", 0)
    assert headers == '[["trace","AIA="],["trace","dHdpY2U="],["n","MA=="]]'
    at = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    assert at == datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=AN_HOUR_AGO)
    assert "LookupError" in trace


@pytest.mark.dense
@pytest.mark.parametrize("form", ["tx", "async tx", "without tx"])
def test_a_letter_whose_offset_could_not_be_passed_is_undone_with_it(
    broker: Arena, group: str, shop: Shop, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_between: list[list[tuple[Any, ...]]] = []
    keep, keep_async = Publisher.keep, Publisher.keep_async

    def fail_once() -> None:
        if not found_between:
            found_between.append([("not looked yet",)])
            raise StoreUnavailable("the server went away")
        if found_between[0] == [("not looked yet",)]:
            # Now the record has failed again, under a new claim; its letter is not committed yet.
            there = "sqlite_master where name = 'failed'" if shop.is_sqlite else "pg_class where relname = 'failed'"
            found_between[0] = shop.letters() if shop.look(f"select 1 from {there}") else []

    def kept(self: Publisher, sent: Sequence[Outgoing], letters: Sequence[Letter], tx: Tx) -> None:
        keep(self, sent, letters, tx)
        if letters:
            fail_once()

    async def kept_async(self: Publisher, sent: Sequence[Outgoing], letters: Sequence[Letter], tx: Any) -> None:
        await keep_async(self, sent, letters, tx)
        if letters:
            fail_once()

    monkeypatch.setattr(Publisher, "keep", kept)
    monkeypatch.setattr(Publisher, "keep_async", kept_async)
    source, effects = thirty(broker), list[str]()
    app = broker.app(group, shop.url)
    app.consume(source, on_error=DeadLetter(table="failed"))(shop.handler(form, effects))
    app.catch_up(idle=0.5)
    assert found_between == [[]], "nothing was left of the first attempt to write it"
    assert [n for n, _ in shop.letters()] == [0, 5, 6, 29]
    assert shop.seen(form, effects) == GOOD
    assert shop.offset(group, source) == 30


def test_control_letters_that_are_not_kept_are_noticed(
    broker: Arena, group: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, keep = Shop(sqlite_url), SqliteTx.keep
    monkeypatch.setattr(SqliteTx, "keep", lambda self, table, letters: keep(self, table, letters[1:]))
    with pytest.raises(AssertionError, match=r"\[\] == \[\(0, b'0'\)"):
        test_each_dead_letter_is_one_row_and_what_its_handler_wrote_is_undone(broker, group, shop, "tx")


def test_partitions_that_make_the_table_at_once_do_not_get_in_each_other_s_way(
    broker: Arena, group: str, postgres_url: str
) -> None:
    source, app, shop = broker.topic(8), broker.app(group, postgres_url), Shop(postgres_url)
    expected = broker.fill(source, 5, 8)

    @app.consume(source, concurrency=8, on_error=DeadLetter(table="failed"))
    def handle(value: str) -> None:
        raise LookupError(value)

    assert app.catch_up(idle=0.3).skipped == 40
    assert sorted(bytes(value).decode() for _, value in shop.letters()) == sorted(expected)


@pytest.mark.parametrize("is_async", [False, True])
def test_sessions_of_sqlalchemy_keep_letters_too(broker: Arena, group: str, postgres_url: str, is_async: bool) -> None:
    source, shop = thirty(broker), Shop(postgres_url)
    url = postgres_url.replace("postgresql://", "postgresql+psycopg://", 1)
    plain_engine, async_engine = create_engine(url), create_async_engine(url, poolclass=NullPool)
    store = PostgresStore(engine=async_engine if is_async else plain_engine)
    app = App(broker.bootstrap, group=group, offsets=store, kafka=QUICK)
    insert = text("insert into effects values (:value)")

    def one(value: str, session: Session) -> None:
        session.execute(insert, {"value": value})
        must_be_good(value)

    async def later(value: str, session: AsyncSession) -> None:
        await session.execute(insert, {"value": value})
        must_be_good(value)

    app.consume(source, on_error=DeadLetter(table="failed"))(later if is_async else one)
    report = app.catch_up(idle=0.2)
    plain_engine.dispose()
    assert (report.handled, report.skipped) == (26, 4)
    assert shop.effects() == GOOD
    assert [n for n, _ in shop.letters()] == [0, 5, 6, 29]
    assert shop.offset(group, source) == 30


# In a topic, before the offset


@pytest.mark.dense
@pytest.mark.parametrize("form", FORMS)
def test_a_letter_to_a_topic_is_written_before_the_database_has_the_offset(
    broker: Arena, group: str, shop: Shop, form: str
) -> None:
    source, dead, effects = thirty(broker), broker.topic(1), list[str]()
    app = broker.app(group, shop.url)
    app.consume(source, on_error=DeadLetter(dead), retry=Retry(2, wait=0.0))(shop.handler(form, effects))
    app.catch_up(idle=0.2)
    assert shop.seen(form, effects) == GOOD
    letters = everything(broker.bootstrap, dead)
    assert [letter.value() for letter in letters] == [n.encode() for n in DEAD]
    assert form == "batch tx" or {marks(letter)["kconsume-attempts"] for letter in letters} == {"2"}
    assert shop.offset(group, source) == 30


# How many


@pytest.mark.dense
@pytest.mark.parametrize("form", ["thread", "async", "batch", "named batch"])
def test_more_dead_letters_than_the_limit_stop_the_app_and_the_next_is_neither_written_nor_passed(
    arena: Arena, group: str, form: str
) -> None:
    source, dead = arena.topic(1), arena.topic(1)
    arena.produce(source, [str(n) for n in range(20)], 0)
    app = arena.app(group)

    def check(record: Record) -> None:
        raise LookupError("all are bad")

    consume(app, source, form, check, [], on_error=DeadLetter(dead, limit=3))
    with pytest.raises(TooManyFailures, match="more records than limit=3") as caught:
        app.catch_up(idle=0.2)
    assert isinstance(caught.value.__cause__, LookupError)
    passed = 0 if form == "named batch" else 3  # one that names seven at once is over the limit with the first
    place = f"{source}/0@6" if form == "named batch" else f"{source}/0@3"
    assert [f"failed on {place}: TooManyFailures" in note for note in caught.value.__notes__] == [True]
    assert texts(arena, dead) == [str(n) for n in range(passed)]
    assert stored(arena, group, source) in ((None, 0) if not passed else (3,))


@pytest.mark.dense
def test_a_limit_that_is_not_reached_stops_nothing(arena: Arena, group: str) -> None:
    source, dead = arena.topic(1), arena.topic(1)
    arena.produce(source, [str(n) for n in range(300)], 0)
    app = arena.app(group)

    def check(record: Record) -> None:
        if record.offset % 10 == 0:
            raise LookupError("a tenth is bad")

    consume(app, source, "thread", check, [], on_error=DeadLetter(dead, limit=0.2))
    assert app.catch_up(idle=0.2).skipped == 30


# What is refused when the handler is decorated


def handle_bytes(value: bytes) -> None: ...


@pytest.mark.parametrize(
    ("topics", "options", "said"),
    [
        (["orders"], {"on_error": DeadLetter("orders")}, "come back for ever"),
        (["shipped", "orders"], {"on_error": DeadLetter("orders")}, "come back for ever"),
        ([], {"pattern": "orders.*", "on_error": DeadLetter("orders.dlq")}, "come back for ever"),
        (["orders"], {"on_error": DeadLetter(table="failed")}, "has no tables"),
        (["orders"], {"on_error": DeadLetter(table="failed"), "offsets": "redis://localhost"}, "has no tables"),
        (["orders"], {"on_error": DeadLetter("dead"), "executor": "inline"}, "has a DeadLetter, so it waits"),
        (["orders"], {"retry": Retry(2), "executor": "inline"}, "has retry=, so it waits"),
        (["orders"], {"retry": 5}, r"retry=Retry\(attempts=5\)"),
        (["orders"], {"on_error": "dead"}, "choose 'stop', 'hold', 'skip' or DeadLetter"),
    ],
    ids=["same", "one of two", "pattern", "kafka", "redis", "inline letter", "inline retry", "number", "word"],
)
def test_what_cannot_work_is_refused_at_the_decorator(topics: list[str], options: dict[str, Any], said: str) -> None:
    app = App("nowhere.invalid:1", group="shop")
    with pytest.raises(ConfigurationError, match=said):
        app.consume(*topics, **options)(handle_bytes)


def test_what_is_close_to_it_is_allowed() -> None:
    app = App("nowhere.invalid:1", group="shop")
    app.consume("orders", on_error=DeadLetter("orders.dlq"), retry=Retry(5))(handle_bytes)
    app.consume(pattern="shipped-[0-9]+", on_error=DeadLetter("shipped.dlq"), group="b")(handle_bytes)
    app.consume("more", on_error=DeadLetter(table="a.failed"), offsets="sqlite:///x.db", group="c")(handle_bytes)


# Fed


def fed_in(form: str, app: App, value: bytes, **options: Any) -> Fed:
    if form == "afeed":
        return asyncio.run(afeed(app, "orders", value, **options))
    return feed(app, "orders", value, **options)


@pytest.mark.parametrize("how", ["feed", "afeed"])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("to", [DeadLetter("orders.dlq"), DeadLetter(table="failed")], ids=["topic", "table"])
def test_what_is_fed_has_its_dead_letter_and_waits_for_nothing(
    tmp_path: Path, to: DeadLetter, is_async: bool, how: str
) -> None:
    app = App("nowhere.invalid:1", group="shop", offsets=f"sqlite:///{tmp_path}/never.db")
    attempts: list[int] = []

    def handle(record: Record) -> None:
        attempts.append(record.attempt)
        raise LookupError("no such order")

    async def later(record: Record) -> None:
        handle(record)

    # Ten minutes each: what waited would not end.
    app.consume("orders", on_error=to, retry=Retry(4, wait=600.0))(later if is_async else handle)
    fed = fed_in(how, app, b"7", key="k", headers={"trace": "1"})
    assert fed.outcome == "dead_lettered"
    assert isinstance(fed.error, LookupError)
    assert attempts == [1, 2, 3, 4]
    (letter,) = fed.dead_letters
    assert (letter.key, letter.value) == (b"k", b"7")
    headers = dict(letter.headers)
    assert headers["trace"] == b"1"
    assert (headers["kconsume-attempts"], headers["kconsume-message"]) == (b"4", b"no such order")
    assert not list(tmp_path.iterdir())


def test_what_is_fed_and_cannot_be_decoded_is_dead_at_once_and_what_passes_in_the_end_is_not() -> None:
    app, attempts = App("nowhere.invalid:1", group="shop"), list[int]()

    @app.consume("orders", on_error=DeadLetter("orders.dlq"), retry=Retry(4, wait=600.0))
    def handle(value: str, record: Record) -> None:
        attempts.append(record.attempt)
        if record.attempt < 3:
            raise LookupError(value)

    fed = feed(app, "orders", UNDECODABLE)
    assert (fed.outcome, attempts) == ("dead_lettered", [])
    assert isinstance(fed.error, DecodeError)
    fed = feed(app, "orders", b"good")
    assert (fed.outcome, fed.dead_letters, attempts) == ("handled", [], [1, 2, 3])


# Attempts, over a change of owner


@pytest.mark.parametrize("form", ["tx", "async tx", "batch tx"])
def test_attempts_of_an_earlier_owner_count(broker: Arena, group: str, shop: Shop, form: str) -> None:
    """The first owner stops while a record waits for its third attempt; the second makes the other two, and no more."""
    source = broker.topic(1)
    write(broker, source, [b"7", b"0", b"8"])
    attempts: list[int] = []

    def owner(*, wait: float) -> App:
        app = broker.app(group, shop.url)
        inner = shop.handler(form, [])
        kinds = inner.__annotations__

        def one(value: str, record: Record, tx: Any) -> None:
            if value == "0":
                attempts.append(record.attempt)
            inner(value, tx)

        async def later(value: str, record: Record, tx: Any) -> None:
            if value == "0":
                attempts.append(record.attempt)
            await inner(value, tx)

        def many(values: list[str], batch: Batch, tx: Any) -> None:
            if values[0] == "0":
                attempts.append(batch.attempt)
            inner(values, tx)

        forms: dict[str, Callable[..., Any]] = {"tx": one, "async tx": later, "batch tx": many}
        handler = forms[form]
        handler.__annotations__["tx"] = kinds["tx"]
        one_by_one: dict[str, Any] = {"batch": Batching(1)} if form == "batch tx" else {"chunk": 1}
        app.consume(source, retry=Retry(4, wait=wait), on_error=DeadLetter(table="failed"), **one_by_one)(handler)
        return app

    with owner(wait=1.0).running():
        eventually(lambda: len(attempts) == 2, within=20, what="two attempts")
    assert attempts == [1, 2]
    owner(wait=0.0).catch_up(idle=0.3)
    assert attempts == [1, 2, 3, 4]
    assert shop.look("select attempts from failed") == [(4,)]
    assert shop.effects() == ["7", "8"]
