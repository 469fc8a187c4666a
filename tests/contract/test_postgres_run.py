"""Handlers in transactions of a real PostgreSQL: one effect a record, whatever the handler does in between."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import psycopg
import pytest

from kconsume import App, Record
from kconsume._embedded.controls import KafkaControls
from kconsume.backends import PostgresStore
from kconsume.errors import InvalidHandler, TransactionMisused
from kconsume.records import Partition
from tests.fix_arena import QUICK, Arena
from tests.fix_kafka import unique

EACH = 500


@pytest.fixture
def broker(embedded: KafkaControls) -> Iterator[Arena]:
    arena = Arena("embedded", embedded.bootstrap, embedded)
    yield arena
    arena.clean_up()


class Shop:
    """A topic of two partitions and a table `seen`, with an app between them."""

    def __init__(
        self, broker: Arena, url: str, database: psycopg.Connection, each: int = EACH, query: str = ""
    ) -> None:
        self.database = database
        self.topic, self.group = broker.topic(2), unique("group")
        self.expected = broker.fill(self.topic, each, 2)
        self.url = f"{url}{query}"
        self.app = App(broker.bootstrap, group=self.group, offsets=self.url, kafka=QUICK)
        database.execute("create table seen (value text)")

    def seen(self) -> list[str]:
        return [value for (value,) in self.database.execute("select value from seen").fetchall()]

    def offsets(self) -> dict[int, int]:
        rows = PostgresStore.from_url(self.url)
        try:
            stored = rows.load(self.group, [Partition(self.topic, 0), Partition(self.topic, 1)])
        finally:
            rows.close()
        return {partition.number: position.next_offset for partition, position in stored.items()}

    def catch_up(self) -> None:
        self.app.catch_up(idle=0.3)

    def assert_exactly_once(self) -> None:
        seen = self.seen()
        assert len(seen) == len(set(seen)) == len(self.expected)
        assert set(seen) == self.expected
        assert sum(self.offsets().values()) == len(self.expected)


@pytest.fixture
def shop(broker: Arena, postgres_url: str, database: psycopg.Connection) -> Shop:
    return Shop(broker, postgres_url, database)


class TestOneEffectARecord:
    @pytest.mark.dense
    def test_of_a_plain_function(self, shop: Shop) -> None:
        @shop.app.consume(shop.topic)
        def write(value: str, tx: psycopg.Connection) -> None:
            tx.execute("insert into seen values (%s)", (value,))

        shop.catch_up()
        shop.assert_exactly_once()

    @pytest.mark.dense
    def test_of_an_async_function(self, shop: Shop) -> None:
        @shop.app.consume(shop.topic)
        async def write(value: str, tx: psycopg.AsyncConnection) -> None:
            await tx.execute("insert into seen values (%s)", (value,))

        shop.catch_up()
        shop.assert_exactly_once()

    @pytest.mark.dense
    def test_of_a_batch_that_is_copied(self, shop: Shop) -> None:
        @shop.app.consume(shop.topic)
        def write(values: list[str], tx: psycopg.Connection) -> None:
            with tx.cursor() as cursor, cursor.copy("copy seen from stdin") as copy:
                for value in values:
                    copy.write_row((value,))

        shop.catch_up()
        shop.assert_exactly_once()

    def test_with_one_connection_for_all_partitions_in_a_schema_of_its_own(
        self, broker: Arena, postgres_url: str, database: psycopg.Connection
    ) -> None:
        shop = Shop(broker, postgres_url, database, query="?pool=1&schema=the+shop&isolation=serializable")

        @shop.app.consume(shop.topic)
        def write(value: str, tx: psycopg.Connection) -> None:
            tx.execute("insert into seen values (%s)", (value,))

        shop.catch_up()
        shop.assert_exactly_once()
        (offsets,) = database.execute('select sum(next_offset) from "the shop".kconsume_offsets').fetchone() or (0,)
        assert offsets == 2 * EACH

    @pytest.mark.dense
    def test_a_handler_that_asks_for_no_transaction_has_its_offsets_saved(self, shop: Shop) -> None:
        seen: list[str] = []

        @shop.app.consume(shop.topic)
        def look(value: str) -> None:
            seen.append(value)

        shop.catch_up()
        assert set(seen) == shop.expected
        assert sum(shop.offsets().values()) == len(shop.expected)


class TestInAPipeline:
    @pytest.mark.dense
    def test_what_a_cursor_says_is_as_without_one(self, shop: Shop) -> None:
        said: set[tuple[int, str | None, object]] = set()

        @shop.app.consume(shop.topic)
        def write(value: str, tx: psycopg.Connection) -> None:
            cursor = tx.execute("insert into seen values (%s) returning value", (value,))
            assert cursor.description is not None
            said.add((cursor.rowcount, cursor.statusmessage, cursor.description[0].name))
            assert cursor.fetchone() == (value,)

        shop.catch_up()
        shop.assert_exactly_once()
        assert said == {(1, "INSERT 0 1", "value")}

    @pytest.mark.dense
    def test_a_part_may_be_undone(self, shop: Shop) -> None:
        shop.database.execute("create unique index on seen (value)")

        @shop.app.consume(shop.topic)
        def write(value: str, tx: psycopg.Connection) -> None:
            tx.execute("insert into seen values (%s)", (value,))
            try:
                with tx.transaction():
                    tx.execute("insert into seen values (%s)", (value,))
            except psycopg.errors.UniqueViolation:
                return
            raise AssertionError("the second insert went through")

        shop.catch_up()
        shop.assert_exactly_once()

    @pytest.mark.dense
    def test_what_cannot_be_done_in_one_is_done_without(self, shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
        @shop.app.consume(shop.topic)
        def write(value: str, tx: psycopg.Connection) -> None:
            with tx.cursor() as cursor, cursor.copy("copy seen from stdin") as copy:
                copy.write_row((value,))

        with caplog.at_level(logging.WARNING, "kconsume.stores"):
            shop.catch_up()
        shop.assert_exactly_once()
        assert [record for record in caplog.records if record.message.startswith("pipeline off")]
        assert len(caplog.records) == 1

    @pytest.mark.dense
    @pytest.mark.parametrize("text", ["not a number", "7"])
    def test_the_record_whose_statement_fails_is_named_and_its_neighbours_stay(self, shop: Shop, text: str) -> None:
        bad = f"1:{EACH // 2}"

        @shop.app.consume(shop.topic, on_error="stop")
        def write(value: str, tx: psycopg.Connection) -> None:
            tx.execute("insert into seen values (%s)", (value,))
            if value == bad:
                tx.execute("select %s::int / 0", (text,))

        with pytest.raises(psycopg.Error, match=rf"write failed on {shop.topic}/1@{EACH // 2}"):
            shop.catch_up()
        seen = shop.seen()
        assert len(seen) == len(set(seen)) == sum(shop.offsets().values())
        assert bad not in seen
        assert shop.offsets()[1] == EACH // 2

    @pytest.mark.dense
    def test_records_that_fail_are_skipped_alone(self, shop: Shop) -> None:
        bad = {f"0:{n}" for n in range(0, EACH, 100)}

        @shop.app.consume(shop.topic, on_error="skip")
        def write(value: str, tx: psycopg.Connection) -> None:
            tx.execute("insert into seen values (%s)", (value if value not in bad else "\0",))

        shop.catch_up()
        assert sorted(shop.seen()) == sorted(shop.expected - bad)
        assert sum(shop.offsets().values()) == len(shop.expected)

    def test_a_constraint_that_is_checked_at_commit_finds_its_record(self, shop: Shop) -> None:
        bad = f"0:{EACH // 3}"
        shop.database.execute("create table known (value text primary key)")
        shop.database.execute("alter table seen add foreign key (value) references known deferrable initially deferred")

        @shop.app.consume(shop.topic, on_error="skip")
        def write(value: str, tx: psycopg.Connection) -> None:
            tx.execute("insert into seen values (%s)", (value,))
            if value != bad:
                tx.execute("insert into known values (%s)", (value,))

        shop.catch_up()
        assert sorted(shop.seen()) == sorted(shop.expected - {bad})


def _commits(tx: psycopg.Connection) -> None:
    tx.commit()


def _rolls_back(tx: psycopg.Connection) -> None:
    tx.rollback()


def _closes(tx: psycopg.Connection) -> None:
    tx.close()


def _rolls_back_in_sql(tx: psycopg.Connection) -> None:
    tx.execute("-- enough\n rollback")


def _commits_in_bytes(tx: psycopg.Connection) -> None:
    tx.execute(b"commit")


def _ends_among_others(tx: psycopg.Connection) -> None:
    tx.execute("select 1; rollback")


def _commits_among_others(tx: psycopg.Connection) -> None:
    tx.execute("insert into seen values ('more'); commit")


def _commits_behind_a_semicolon(tx: psycopg.Connection) -> None:
    tx.execute(";commit")


def _commits_behind_a_comment(tx: psycopg.Connection) -> None:
    tx.execute("/* a\n b */ commit")


def _commits_for_many(tx: psycopg.Connection) -> None:
    tx.cursor().executemany("commit", [()])


def _commits_in_a_stream(tx: psycopg.Connection) -> None:
    list(tx.cursor().stream("commit"))


def _commits_in_a_copy(tx: psycopg.Connection) -> None:
    with tx.cursor().copy("commit"):
        pass


def _commits_by_a_cursor_of_its_choice(tx: psycopg.Connection) -> None:
    tx.cursor_factory = psycopg.ClientCursor
    tx.execute("select %s; commit", ("a",))


def _goes_on_after_an_error(tx: psycopg.Connection) -> None:
    try:
        tx.execute("select 1 / 0").fetchone()
    except psycopg.Error:
        return


def _swallows_the_refusal(tx: psycopg.Connection) -> None:
    try:
        tx.commit()
    except TransactionMisused:
        return


class TestMisuse:
    """Nothing is passed, and the handler's failure says what to do."""

    @pytest.mark.dense
    @pytest.mark.parametrize(
        ("misuse", "words"),
        [
            (_commits, r"must not call commit\(\)"),
            (_rolls_back, r"must not call rollback\(\)"),
            (_closes, r"must not call close\(\)"),
            (_swallows_the_refusal, r"must not call commit\(\)"),
            (_rolls_back_in_sql, "must not call `rollback`"),
            (_commits_in_bytes, "must not call `commit`"),
            (_ends_among_others, "must not call `rollback`"),
            (_commits_among_others, "must not call `commit`"),
            (_commits_behind_a_semicolon, "must not call `commit`"),
            (_commits_behind_a_comment, "must not call `commit`"),
            (_commits_for_many, "must not call `commit`"),
            (_commits_in_a_stream, "must not call `commit`"),
            (_commits_in_a_copy, "must not call `commit`"),
            (_commits_by_a_cursor_of_its_choice, "must not call `commit`"),
            (_goes_on_after_an_error, "PostgreSQL had aborted the transaction"),
        ],
    )
    @pytest.mark.parametrize("chunk", [1, 100])
    def test_of_the_transaction(self, shop: Shop, misuse: object, words: str, chunk: int) -> None:
        assert callable(misuse)

        @shop.app.consume(shop.topic, chunk=chunk)
        def write(value: str, tx: psycopg.Connection) -> None:
            tx.execute("insert into seen values (%s)", (value,))
            if value.endswith(":20"):
                misuse(tx)

        with pytest.raises(TransactionMisused, match=words):
            shop.catch_up()
        assert max(shop.offsets().values()) <= 20
        assert not {"0:20", "1:20"} & set(shop.seen())
        assert len(shop.seen()) == sum(shop.offsets().values())

    @pytest.mark.dense
    def test_a_connection_that_was_kept_is_refused(self, shop: Shop) -> None:
        kept: list[psycopg.Connection] = []

        @shop.app.consume(shop.topic)
        def write(value: str, tx: psycopg.Connection) -> None:
            kept.append(tx)
            tx.execute("insert into seen values (%s)", (value,))

        shop.catch_up()
        for use in (kept[0], kept[-1]):
            with pytest.raises(TransactionMisused, match="has ended"):
                use.execute("insert into seen values ('late')")
        shop.assert_exactly_once()

    def test_a_connection_of_the_wrong_kind_is_refused_when_it_is_asked_for(self, shop: Shop) -> None:
        with pytest.raises(InvalidHandler, match="ask for Connection, or make it `async def`"):

            @shop.app.consume(shop.topic)
            def write(value: str, tx: psycopg.AsyncConnection) -> None: ...

        with pytest.raises(InvalidHandler, match="ask for AsyncConnection, or make it a plain `def`"):

            @shop.app.consume(shop.topic)
            async def write_async(value: str, tx: psycopg.Connection) -> None: ...


class TestTransactionsThatMeet:
    @pytest.mark.parametrize("isolation", ["read committed", "serializable"])
    def test_lose_nothing_and_repeat_nothing(
        self, broker: Arena, postgres_url: str, database: psycopg.Connection, isolation: str
    ) -> None:
        """Two partitions update two rows, each in its own order: deadlocks in the one, conflicts in the other."""
        shop = Shop(broker, postgres_url, database, each=60, query=f"?isolation={isolation.replace(' ', '+')}")
        database.execute("create table stock (sku int primary key, n int); insert into stock values (0, 0), (1, 0)")

        @shop.app.consume(shop.topic, chunk=5)
        def write(value: str, record: Record, tx: psycopg.Connection) -> None:
            for sku in (0, 1) if record.partition else (1, 0):
                tx.execute("update stock set n = n + 1 where sku = %s", (sku,))
            tx.execute("insert into seen values (%s)", (value,))

        database.execute(
            "do $$ begin execute format('alter database %I set deadlock_timeout = 50', current_database()); end $$"
        )
        shop.catch_up()
        shop.assert_exactly_once()
        assert database.execute("select array_agg(n) from stock").fetchone() == ([120, 120],)
