"""`StreamBatch.number` as the version of a table that skips versions it has seen, as Delta does with `txnVersion`.

Delta is not installed here. `Versioned` has its rule, on a real PostgreSQL: rows and version commit together, on a
connection that is not the handler's transaction; a write whose version is not above the last one of its application is
skipped before its rows are read, and nothing is raised.
"""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from kconsume import DeadLetter, Retry
from kconsume.errors import OffsetError
from kconsume.spark import StreamBatch, foreach_batch
from kconsume.spark._batch.ledger.postgres import PostgresLedger
from tests.fix_kafka import produce
from tests.spark.shop import Shop, is_bad, values_of

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]


class Killed(OffsetError):
    """The query ends here. An error of the offsets is not the handler's: no record is blamed for it."""


class Versioned:
    """A table with Delta's rule."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        with shop.look() as look:
            look.execute("create table versioned (value text)")
            look.execute("create table versions (app text primary key, version bigint)")

    def append(self, df: DataFrame, app: str, version: int | None) -> None:
        assert version is not None
        with self._shop.look() as look, look.transaction():
            last = look.execute("select version from versions where app = %s for update", (app,)).fetchone()
            if last is not None and version <= last[0]:
                return
            values = values_of(df)
            if bad := [value for value in values if is_bad(value)]:
                raise ValueError(f"cannot load {bad[0]}")
            with look.cursor().copy("copy versioned from stdin") as copy:
                for value in values:
                    copy.write_row((value,))
            look.execute(
                "insert into versions values (%s, %s) on conflict (app) do update set version = excluded.version",
                (app, version),
            )

    @property
    def rows(self) -> list[str]:
        with self._shop.look() as look:
            return sorted(value for (value,) in look.execute("select value from versioned"))


def run(shop: Shop, spark: SparkSession, handler: Any, group: str, checkpoint: str = "own", **options: Any) -> None:
    batches = foreach_batch(handler, store=shop.url, group=group, **options)
    batches.wait(shop.query(spark, batches, checkpoint))


def letters(shop: Shop) -> list[bytes]:
    with shop.look() as look:
        return [value for (value,) in look.execute("select value from failed")]


def with_a_bad_record(shop: Shop) -> None:
    """1,000 records, the bad one in the middle of partition 1."""
    shop.fill(150)
    produce(shop.bootstrap, shop.topic, ["bad:1"], partition=1)
    shop.fill(183, "more")
    assert len(shop.written) == 999


def test_no_part_of_a_batch_with_a_bad_record_is_skipped_by_a_table_that_skips_versions(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    with_a_bad_record(shop)
    table, numbers = Versioned(shop), list[int | None]()

    def append(df: DataFrame, batch: StreamBatch) -> None:
        numbers.append(batch.number)
        table.append(df, group, batch.number)

    run(shop, spark, append, group, on_error=DeadLetter(table="failed"))
    assert table.rows == sorted(shop.written)
    assert letters(shop) == [b"bad:1"]
    assert shop.offsets(group) == {0: 333, 1: 334, 2: 333}
    assert len(set(numbers)) == len(numbers) > 3


def test_control_with_one_number_for_all_parts_rows_are_lost(
    shop: Shop, spark: SparkSession, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the dead letter, because the table skips the part with the bad record before it reads it."""

    class Stuck(int):
        def __add__(self, other: int) -> Stuck:
            return self

    reserve = PostgresLedger.reserve_numbers
    monkeypatch.setattr(PostgresLedger, "reserve_numbers", lambda self, count: Stuck(reserve(self, count)))
    with_a_bad_record(shop)
    table = Versioned(shop)

    def append(df: DataFrame, batch: StreamBatch) -> None:
        table.append(df, group, batch.number)

    run(shop, spark, append, group, on_error=DeadLetter(table="failed"))
    assert len(table.rows) < len(shop.written)
    with shop.look() as look:
        assert look.execute("select to_regclass('failed')").fetchone() == (None,)
    assert shop.offsets(group) == {0: 333, 1: 334, 2: 333}


def test_a_search_that_was_interrupted_begins_again_and_no_row_is_skipped(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    """The second search finds another bad record, so its parts are not those of the first."""
    with_a_bad_record(shop)
    table, first = Versioned(shop), True

    def append(df: DataFrame, batch: StreamBatch) -> None:
        if first and table.rows:
            raise Killed("in the middle of the search")
        if not first:
            df = df.selectExpr(
                "topic", "partition", "offset",
                "if(cast(value as string) = 'v:2:0', cast('bad:2' as binary), "
                "if(cast(value as string) = 'bad:1', cast('good now' as binary), value)) value",
            )  # fmt: skip
        table.append(df, group, batch.number)

    with pytest.raises(Killed):
        run(shop, spark, append, group, on_error=DeadLetter(table="failed"))
    assert 0 < len(table.rows) < 999
    assert shop.offsets(group) == {0: 0, 1: 0, 2: 0}
    first = False
    run(shop, spark, append, group, on_error=DeadLetter(table="failed"))
    assert set(table.rows) == {*shop.written, "good now"} - {"v:2:0"}  # some of them twice, as documented
    assert letters(shop) == [b"v:2:0"]
    shop.fill(10, "most")
    run(shop, spark, append, group, on_error=DeadLetter(table="failed"))
    assert {value for value in shop.written if value.startswith("most")} <= set(table.rows)


def test_without_a_search_each_row_is_there_once_whatever_was_killed(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    """Killed after the table's commit and before the store's; and an attempt that fails there and is made again."""
    shop.fill(100)
    table, calls = Versioned(shop), 0

    def append(df: DataFrame, batch: StreamBatch) -> None:
        nonlocal calls
        calls += 1
        table.append(df, group, batch.number)
        if calls == 1:
            raise Killed("behind the write")
        if calls == 2:
            raise ConnectionError("behind the write, again")

    with pytest.raises(Killed):
        run(shop, spark, append, group)
    assert shop.offsets(group) == {0: 0, 1: 0, 2: 0}
    run(shop, spark, append, group, retry=Retry(2, wait=0))
    shop.fill(50, "more")
    run(shop, spark, append, group)
    assert table.rows == sorted(shop.written)
    assert calls == 4
    assert shop.offsets(group) == {0: 150, 1: 150, 2: 150}
