"""Two deployments of one group, their offsets in two places: the second is refused at start, the first goes on."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
import redis

from kconsume import App, ConfigurationError, Partition
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.commit_metadata import name_of
from kconsume._runtime.assignment import held_watch, store_check
from kconsume._runtime.assignment.store_identity import StoreVerdict
from kconsume.backends import OffsetStore, open_store
from kconsume.errors import RowLost
from tests.fix_arena import Arena
from tests.fix_kafka import unique
from tests.waiting import eventually


def deployment(arena: Arena, group: str, topic: str, offsets: str) -> tuple[App, list[str]]:
    app, seen = arena.app(group, offsets), list[str]()

    @app.consume(topic)
    def note(value: str) -> None:
        seen.append(value)

    return app, seen


def stands(cluster: Cluster, group: str, partition: Partition) -> int | None:
    """What the Kafka group shows."""
    committed = cluster.committed(group, [partition]).get(partition)
    return None if committed is None else committed.offset


def files(folder: Path) -> tuple[str, str]:
    return f"sqlite:///{folder}/one.db", f"sqlite:///{folder}/two.db"


@pytest.mark.dense
def test_the_second_is_refused_with_the_choices_and_the_first_goes_on(arena: Arena, group: str, tmp_path: Path) -> None:
    topic, (here, there) = arena.topic(2), files(tmp_path)
    one, first = deployment(arena, group, topic, here)
    two, second = deployment(arena, group, topic, there)
    place, cluster = Partition(topic, 0), Cluster(arena.bootstrap)
    arena.produce(topic, ["a", "b"], 0)
    with one.running():
        eventually(lambda: stands(cluster, group, place) == 2, what="the first says where it stands")
        with pytest.raises(ConfigurationError, match=rf"another store than {there}.*{topic}/0 stands at 2 there"):
            two.catch_up()
        arena.produce(topic, ["c"], 0)
        arena.produce(topic, ["d"], 1)
        eventually(lambda: len(first) == 4, what="the first has all")
    assert (sorted(first), second) == (["a", "b", "c", "d"], [])


@pytest.mark.dense
def test_a_group_that_was_moved_with_its_offsets_goes_on_in_the_other_store(
    arena: Arena, group: str, tmp_path: Path
) -> None:
    topic, (here, there) = arena.topic(1), files(tmp_path)
    one, _ = deployment(arena, group, topic, here)
    two, second = deployment(arena, group, topic, there)
    arena.produce(topic, ["a", "b"])
    one.catch_up(idle=0.1)
    store = open_store(there)
    store.reset(group, {Partition(topic, 0): 2})
    store.close()
    arena.produce(topic, ["c"])
    two.catch_up(idle=0.1)
    assert second == ["c"]
    arena.produce(topic, ["d"])
    with pytest.raises(ConfigurationError, match=f"another store than {here}"):
        one.catch_up(idle=0.1)  # the old one, started again by mistake


@pytest.mark.dense
def test_control_without_the_look_the_second_begins_again(
    arena: Arena, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    off(monkeypatch)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_the_second_is_refused_with_the_choices_and_the_first_goes_on(arena, group, tmp_path)


def off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's name is not compared with what the group shows."""
    monkeypatch.setattr(store_check, "source_in", lambda _: None)


def latest(arena: Arena, group: str, topic: str, offsets: str) -> list[str]:
    """What is handled by a start that would pass over what it has no offset of."""
    app, seen = arena.app(group, offsets), list[str]()
    app.consume(topic, start="latest")(noted(seen))
    app.catch_up(idle=0.2)
    return seen


def noted(seen: list[str]) -> Callable[[str], None]:
    def note(value: str) -> None:
        seen.append(value)

    return note


@pytest.fixture
def real(request: pytest.FixtureRequest) -> Iterator[Arena]:
    arena = Arena("real", request.getfixturevalue("kafka").bootstrap, None)
    yield arena
    arena.clean_up()


@pytest.fixture
def behind(real: Arena, group: str) -> Callable[[str], str]:
    """A topic of which a run has handled two records, and five more are to be handled."""

    def behind(offsets: str) -> str:
        topic = real.topic(1)
        real.produce(topic, ["1", "2"])
        app, seen = deployment(real, group, topic, offsets)
        app.catch_up(idle=0.2)
        assert seen == ["1", "2"]
        assert stands(Cluster(real.bootstrap), group, Partition(topic, 0)) == 2
        real.produce(topic, ["3", "4", "5", "6", "7"])
        return topic

    return behind


def unlinked(folder: Path) -> None:
    for file in folder.glob("one.db*"):
        file.unlink()


THE_REST = ["3", "4", "5", "6", "7"]
Behind = Callable[[str], str]


@pytest.mark.dense
def test_a_file_that_is_gone_skips_nothing(real: Arena, group: str, tmp_path: Path, behind: Behind) -> None:
    here, _ = files(tmp_path)
    topic = behind(here)
    unlinked(tmp_path)
    with pytest.raises(ConfigurationError, match=rf"{topic}/0 stands at 2 there and has no row here.*store\.reset"):
        latest(real, group, topic, here)
    with opened(here) as store:
        store.reset(group, {Partition(topic, 0): 2})
    assert latest(real, group, topic, here) == THE_REST


@pytest.mark.dense
def test_control_without_the_look_it_skips_five_records(
    real: Arena, group: str, tmp_path: Path, behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = files(tmp_path)
    topic = behind(here)
    unlinked(tmp_path)
    off(monkeypatch)
    assert latest(real, group, topic, here) == []


@pytest.mark.dense
@pytest.mark.parametrize("store", ["postgres", "redis", "sqlite"])
def test_a_row_that_is_gone_skips_nothing_and_one_that_was_deleted_begins_where_start_says(
    request: pytest.FixtureRequest, real: Arena, group: str, store: str, behind: Behind
) -> None:
    url = request.getfixturevalue(f"{store}_url")
    topic = behind(url)
    lose_rows(url)
    with pytest.raises(RowLost, match=rf"it had {topic}/0 at 2, has no row now"):
        latest(real, group, topic, url)
    with opened(url) as opened_store:
        opened_store.delete(group)
    assert latest(real, group, topic, url) == []


def lose_rows(url: str) -> None:
    if url.startswith("redis"):
        client = redis.Redis.from_url(url)
        client.delete(*client.keys("kconsume:offset:*"))
        client.close()
    elif url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as connection:
            connection.execute("delete from kconsume_offsets")
    else:
        with psycopg.connect(url, autocommit=True) as database:
            database.execute("delete from kconsume_offsets")


@pytest.mark.dense
def test_a_row_that_is_gone_holds_its_partition_alone_until_somebody_chooses(
    real: Arena, group: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_watch, "LOOK_EVERY", 0.1)
    topic = real.topic(2)
    written = real.fill(topic, 3, partitions=2)
    app, seen = deployment(real, group, topic, sqlite_url)
    app.catch_up(idle=0.2)
    assert set(seen) == written
    lost = Partition(topic, 0)
    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)) as connection:
        connection.execute("delete from kconsume_offsets where partition = 0")
    real.fill(topic, 1, partitions=2)
    with app.running():
        eventually(lambda: held(app) == {lost: "store_mismatch"}, what="it is held")
        eventually(lambda: seen.count("1:0") == 2, what="the other goes on")
        with opened(sqlite_url) as store:
            store.reset(group, {lost: 3})
        eventually(lambda: seen.count("0:0") == 2, what="it goes on by itself")
        eventually(lambda: held(app) == {}, what="nothing is held")
    assert sorted(seen) == sorted([*written, "0:0", "1:0"])


def held(app: App) -> dict[Partition, str]:
    supervisor = app._supervisor
    consumers = supervisor.consumers if supervisor is not None else ()
    return {p: trouble.code for consumer in consumers for p, trouble in consumer.loop.snapshot.held.items()}


@pytest.mark.dense
def test_a_redis_that_was_emptied_skips_nothing(real: Arena, group: str, redis_url: str, behind: Behind) -> None:
    topic = behind(redis_url)
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
    with pytest.raises(ConfigurationError, match=rf"{topic}/0 stands at 2 there and has no row here"):
        latest(real, group, topic, redis_url)


@pytest.mark.dense
@pytest.mark.parametrize("store", ["postgres", "redis"])
def test_a_standby_that_lacked_the_last_commits_is_gone_on_with(
    request: pytest.FixtureRequest,
    real: Arena,
    group: str,
    store: str,
    behind: Behind,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = request.getfixturevalue(f"{store}_url")
    topic = behind(url)
    if store == "redis":
        with redis.Redis.from_url(url) as client:
            client.hset(client.keys(f"kconsume:offset:{group}:*")[0], "next", "1")
    else:
        with psycopg.connect(url, autocommit=True) as database:
            database.execute("update kconsume_offsets set next_offset = 1")
    with caplog.at_level("WARNING", logger="kconsume"):
        assert latest(real, group, topic, url) == ["2", *THE_REST]
    assert f"stored={topic}/0@1 committed={topic}/0@2" in caplog.text


@pytest.mark.dense
def test_rows_that_were_deleted_after_a_run_begin_where_start_says(
    real: Arena, group: str, postgres_url: str, behind: Behind, caplog: pytest.LogCaptureFixture
) -> None:
    topic = behind(postgres_url)
    with opened(postgres_url) as store:
        store.delete(group)
    app, seen = deployment(real, group, topic, postgres_url)
    with caplog.at_level("INFO", logger="kconsume"):
        app.catch_up(idle=0.2)
    assert seen == ["1", "2", *THE_REST]
    assert f'starts_at={topic}/0@0 committed={topic}/0@2 reason="{StoreVerdict.DELETED.value}"' in caplog.text


@pytest.mark.dense
def test_a_restored_backup_of_a_file_is_gone_on_with(
    real: Arena, group: str, tmp_path: Path, behind: Behind, caplog: pytest.LogCaptureFixture
) -> None:
    here, _ = files(tmp_path)
    topic = behind(here)
    backup = {file: file.read_bytes() for file in tmp_path.glob("one.db*")}
    assert latest(real, group, topic, here) == THE_REST
    unlinked(tmp_path)
    for file, content in backup.items():
        file.write_bytes(content)
    with caplog.at_level("WARNING", logger="kconsume"):
        assert latest(real, group, topic, here) == THE_REST
    assert f"stored={topic}/0@2 committed={topic}/0@7" in caplog.text


@pytest.mark.dense
@pytest.mark.parametrize("is_behind", [False, True])
def test_a_copy_of_a_file_is_gone_on_with_unless_it_is_behind(
    real: Arena, group: str, tmp_path: Path, behind: Behind, *, is_behind: bool
) -> None:
    here, there = files(tmp_path)
    topic = behind(here)
    for file in tmp_path.glob("one.db*"):
        file.with_name(file.name.replace("one", "two")).write_bytes(file.read_bytes())
    if is_behind:
        assert latest(real, group, topic, here) == THE_REST
        with pytest.raises(ConfigurationError, match=f"another store than {there}"):
            latest(real, group, topic, there)
    else:
        assert latest(real, group, topic, there) == THE_REST


@pytest.mark.dense
def test_two_databases_behind_one_address_are_two_stores(
    real: Arena, group: str, postgres_url: str, behind: Behind
) -> None:
    """As after a DNS name, or a port that is forwarded, has changed where it points to."""
    topic = behind(postgres_url)
    with psycopg.connect(postgres_url, autocommit=True) as database:
        database.execute("alter schema public rename to before; create schema public")
    with pytest.raises(ConfigurationError, match="has no row here"):
        latest(real, group, topic, postgres_url)
    with psycopg.connect(postgres_url, autocommit=True) as database:
        database.execute("drop schema public cascade; alter schema before rename to public")
    assert latest(real, group, topic, postgres_url) == THE_REST


@pytest.mark.dense
def test_a_database_that_was_copied_to_another_address_is_gone_on_with(
    real: Arena, group: str, postgres_url: str, behind: Behind
) -> None:
    topic, name = behind(postgres_url), unique("copy").replace("-", "_")
    address, _, database_name = postgres_url.rpartition("/")
    with psycopg.connect(f"{address}/postgres", autocommit=True) as server:
        server.execute(f"create database {name} template {database_name}")
    try:
        assert latest(real, group, topic, f"{address}/{name}") == THE_REST
    finally:
        with psycopg.connect(f"{address}/postgres", autocommit=True) as server:
            server.execute(f"drop database {name} with (force)")


@pytest.mark.dense
def test_kafka_beside_a_database_is_refused_and_the_database_goes_on(
    real: Arena, group: str, postgres_url: str, behind: Behind
) -> None:
    topic = behind(postgres_url)
    with pytest.raises(ConfigurationError, match=r"another store than kafka://"):
        latest(real, group, topic, "kafka://")
    assert latest(real, group, topic, postgres_url) == THE_REST


@pytest.mark.dense
def test_a_database_beside_kafka_is_refused_and_kafka_goes_on(
    real: Arena, group: str, postgres_url: str, behind: Behind
) -> None:
    topic = behind("kafka://")
    with pytest.raises(ConfigurationError, match=rf"{topic}/0 stands at 2 there and has no row here"):
        latest(real, group, topic, postgres_url)
    assert latest(real, group, topic, "kafka://") == THE_REST


@pytest.mark.dense
def test_offsets_of_a_bare_loop_are_named_where_they_are_not_taken(
    real: Arena, group: str, postgres_url: str, behind: Behind, caplog: pytest.LogCaptureFixture
) -> None:
    topic = behind("kafka://")
    with opened("kafka://", real.bootstrap) as store:
        store.reset(group, {Partition(topic, 0): 2})  # which leaves no word beside it, as every other tool
    with caplog.at_level("WARNING", logger="kconsume"):
        assert latest(real, group, topic, postgres_url) == []
    assert f"starts_at={topic}/0@7 committed={topic}/0@2" in caplog.text


@pytest.mark.dense
def test_a_note_of_the_version_before_is_understood(real: Arena, group: str, tmp_path: Path, behind: Behind) -> None:
    here, _ = files(tmp_path)
    topic = behind(here)
    with opened(here) as store:
        name = name_of(store)
    assert name is not None
    cluster, place = Cluster(real.bootstrap), Partition(topic, 0)
    cluster.set_committed(group, {place: (2, f"kconsume/1 topic=A store={name.place}")})
    assert latest(real, group, topic, here) == THE_REST
    unlinked(tmp_path)
    cluster.set_committed(group, {place: (2, f"kconsume/1 topic=A store={name.place}")})
    with pytest.raises(RowLost, match=f"it had {topic}/0 at 2, has no row now"):
        latest(real, group, topic, here)


@contextmanager
def opened(url: str, brokers: str = "") -> Iterator[OffsetStore]:
    store = open_store(url, brokers=brokers)
    try:
        yield store
    finally:
        store.close()
