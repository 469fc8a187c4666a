"""How far each sink of a table has come, on a real PostgreSQL: sinks do not meet, and older rows are gone on with."""

from __future__ import annotations

import logging
import threading

import psycopg
import pytest

from kconsume.spark._sink.postgres_copy import RangeTable
from kconsume.spark._sink.ranged_files import RangeSource, SinkId

CLICKS = RangeSource("clicks", 3, "Xb3k")
ETL, OTHER, NAMED = SinkId("etl"), SinkId("other"), SinkId("etl", "odd")

# As the version before has it.
MAKE = """create table kconsume_sink_ranges (
    target text not null, topic text not null, partition integer not null, topic_id text not null,
    next_offset bigint not null, updated_at timestamptz not null default now(),
    primary key (target, topic, partition, topic_id))"""
WHERE = "where target = 'seen' and topic = 'clicks' and partition = 3 and topic_id = 'Xb3k'"


@pytest.fixture
def seen(database: psycopg.Connection) -> psycopg.Connection:
    database.execute("create table seen (sink text, value bigint)")
    return database


def write(url: str, sink: SinkId, first: int, last: int) -> None:
    """What a process that has just started does with a batch."""
    with RangeTable(url, "seen").transaction(CLICKS, sink, last) as (connection, end):
        insert(connection, sink.group + sink.name, max(first, end), last)


def write_as_before(connection: psycopg.Connection, first: int, last: int) -> None:
    """The statements of the version before, of the group `etl`."""
    with connection.transaction():
        connection.execute(
            "insert into kconsume_sink_ranges (target, topic, partition, topic_id, next_offset) "
            "values ('seen', 'clicks', 3, 'Xb3k', 0) on conflict do nothing"
        )
        row = connection.execute(f"select next_offset from kconsume_sink_ranges {WHERE} for update").fetchone()
        assert row is not None
        insert(connection, "etl", max(first, row[0]), last)
        connection.execute(f"update kconsume_sink_ranges set next_offset = greatest(next_offset, {last + 1}) {WHERE}")


def insert(connection: psycopg.Connection, sink: str, first: int, last: int) -> None:
    connection.execute("insert into seen select %s, generate_series(%s::bigint, %s)", (sink, first, last))


def values(seen: psycopg.Connection, sink: str) -> list[int]:
    return [value for (value,) in seen.execute("select value from seen where sink = %s order by 1", (sink,))]


def test_each_sink_writes_all_of_its_rows_and_knows_what_it_has_written(
    seen: psycopg.Connection, postgres_url: str
) -> None:
    for first, last in ((0, 4), (0, 9), (3, 9)):
        for sink in (ETL, OTHER, NAMED):
            write(postgres_url, sink, first, last)
    for name in ("etl", "other", "etlodd"):
        assert values(seen, name) == list(range(10))


def test_control_without_the_sink_in_the_key_the_second_one_loses_its_rows(
    seen: psycopg.Connection, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        RangeTable, "_key", lambda self, connection, source, sink: (self._target, "clicks", 3, source.topic_id)
    )
    for sink in (ETL, OTHER):
        write(postgres_url, sink, 0, 9)
    assert values(seen, "other") == []


def test_sinks_that_begin_at_the_same_time_share_no_row(seen: psycopg.Connection, postgres_url: str) -> None:
    write(postgres_url, ETL, 0, 0)  # the tables are there
    seen.execute("delete from kconsume_sink_owners; delete from kconsume_sink_ranges; delete from seen")
    together = threading.Barrier(4)

    def begin(sink: SinkId) -> None:
        together.wait(20)
        write(postgres_url, sink, 0, 4)

    threads = [threading.Thread(target=begin, args=(SinkId(f"group-{n}"),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [values(seen, f"group-{n}") for n in range(4)] == [[0, 1, 2, 3, 4]] * 4
    assert seen.execute("select count(*) from kconsume_sink_owners").fetchone() == (1,)
    assert seen.execute("select count(*) from kconsume_sink_ranges").fetchone() == (4,)


def test_rows_of_the_version_before_are_gone_on_with_by_old_and_new_processes_side_by_side(
    seen: psycopg.Connection, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen.execute(MAKE)
    write_as_before(seen, 0, 4)
    with caplog.at_level(logging.WARNING):
        write(postgres_url, ETL, 0, 6)  # of a partition that came over before its offset had passed
    assert "earlier ranges taken over table=seen" in caplog.text
    write_as_before(seen, 5, 9)  # and went back
    write(postgres_url, ETL, 8, 11)
    write(postgres_url, OTHER, 0, 11)
    assert values(seen, "etl") == values(seen, "other") == list(range(12))


def test_a_batch_that_fails_leaves_the_range_where_it_was(seen: psycopg.Connection, postgres_url: str) -> None:
    ranges = RangeTable(postgres_url, "seen")

    def fail(sink: SinkId) -> None:
        with ranges.transaction(CLICKS, sink, 9) as (connection, _):
            insert(connection, sink.group, 0, 9)
            raise ConnectionError

    for sink in (ETL, OTHER):
        with pytest.raises(ConnectionError):
            fail(sink)
        with ranges.transaction(CLICKS, sink, 9) as (_, end):
            assert end == 0
    assert values(seen, "etl") == []
