"""A store loses its offsets while consumers work: somebody truncates the table, or the server comes back empty. Nothing
is begun again and nothing is skipped: each partition is held with its cause until a user says where it goes on (P9)."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
import redis
from redis.client import Pipeline

from kconsume import App, Partition, Record
from kconsume._runtime.assignment import held_watch
from kconsume._runtime.assignment.partition import OwnedPartition
from kconsume.backends import open_store
from kconsume.errors import ConfigurationError, StoreError
from kconsume.testing.services import KafkaService
from tests.chaos.effects import PostgresEffects, RedisEffects
from tests.fix_arena import STEADY
from tests.fix_kafka import MakeTopic, produce
from tests.liveness import assert_app_lives, causes_of
from tests.waiting import eventually

PARTITIONS, EACH = 3, 100
DROP_ALL = """do $$ declare name text; begin
    for name in select tablename from pg_tables where tablename like 'kconsume%' loop
        execute 'drop table ' || name || ' cascade';
    end loop; end $$"""


def rows_of_postgres(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as database:
        database.execute("truncate kconsume_offsets")


def rows_of_redis(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.delete(*client.keys("kconsume:offset:*"))


def all_of_redis(url: str) -> None:
    """But the effects, by which the test counts."""
    with redis.Redis.from_url(url) as client:
        client.delete(*client.keys("kconsume:*"))


WIPES: dict[str, Callable[[str], None]] = {
    "postgres-rows": rows_of_postgres,
    "redis-rows": rows_of_redis,
    "redis-all": all_of_redis,
}


@pytest.mark.parametrize(
    ("wipe", "shown"), [("postgres-rows", True), ("postgres-rows", False), ("redis-rows", False), ("redis-all", True)]
)
def test_offsets_that_are_gone_hold_their_partitions_until_a_user_decides(
    kafka: KafkaService,
    topic: MakeTopic,
    group: str,
    wipe: str,
    shown: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`shown`: whether the Kafka group shows the offsets, too. It does not in the first second, nor where its rights
    refuse our commits."""
    if not shown:
        monkeypatch.setattr(OwnedPartition, "offset_to_mirror", None)
    monkeypatch.setattr(held_watch, "LOOK_EVERY", 0.1)
    store, _, _ = wipe.partition("-")
    url = request.getfixturevalue(f"{store}_url")
    effects = PostgresEffects(url) if store == "postgres" else RedisEffects(url)
    app, name = App(kafka.bootstrap, group=group, offsets=url, kafka=STEADY), topic(PARTITIONS)
    places = [Partition(name, number) for number in range(PARTITIONS)]

    def insert(record: Record, tx: psycopg.Connection) -> None:
        tx.execute("insert into seen values (%s, %s, 'me')", (record.partition, record.offset))

    def push(record: Record, tx: Pipeline) -> None:
        tx.rpush(f"seen:{record.partition}", f"{record.offset} me")

    def more() -> None:
        for place in places:  # without transaction markers: the test resets to offsets by their number
            produce(kafka.bootstrap, name, [b"x"] * EACH, partition=place.number)

    app.consume(name, start="latest")(insert if store == "postgres" else push)
    with app.running():
        more()
        eventually(lambda: effects.rows == PARTITIONS * EACH, what="they are handled")
        WIPES[wipe](url)
        more()
        eventually(
            lambda: all(causes_of([app]).get(p, "").startswith("store_mismatch") for p in places),
            what="each is held with its cause",
        )
        assert effects.rows == PARTITIONS * EACH, "nothing was begun again"
        opened = open_store(url)
        opened.reset(group, dict.fromkeys(places, EACH))
        opened.close()
        eventually(lambda: effects.rows >= 2 * PARTITIONS * EACH, what="they go on where the user said")
        assert_app_lives(app, bootstrap=kafka.bootstrap, topic=name, group=group, offsets=url, partitions=PARTITIONS)
    for place in places:
        assert effects.positions(place.number) == list(range(2 * EACH + 1)), "each once, and in order"


def test_tables_that_are_gone_end_the_process_and_the_next_one_skips_nothing(
    kafka: KafkaService, topic: MakeTopic, group: str, postgres_url: str
) -> None:
    effects, name = PostgresEffects(postgres_url), topic(1)

    def member() -> App:
        app = App(kafka.bootstrap, group=group, offsets=postgres_url, kafka=STEADY)

        @app.consume(name, start="latest")
        def insert(record: Record, tx: psycopg.Connection) -> None:
            tx.execute("insert into seen values (%s, %s, 'me')", (record.partition, record.offset))

        return app

    def drop_under(app: App) -> None:
        with app.running():
            assert_app_lives(app, bootstrap=kafka.bootstrap, topic=name, group=group, offsets="kafka://", partitions=1)
            effects.do(DROP_ALL)
            produce(kafka.bootstrap, name, [b"x"] * EACH, partition=0)
            eventually(lambda: False, what="the failure ends this")

    with pytest.raises(StoreError, match=r"kconsume_\w+\S* does not exist") as gone:
        drop_under(member())
    assert "restore the tables from a backup" in str(gone.value)
    assert "store.reset(group, {partition: offset})" in str(gone.value)
    with pytest.raises(ConfigurationError, match=rf"{name}/0 stands at 1 there and has no row here"):
        member().catch_up(idle=0.2)
    assert effects.rows == 1
