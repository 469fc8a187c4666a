"""`foreach_batch` with offsets elsewhere than in PostgreSQL: at least once; what the store shows is not done again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from kconsume.backends import MemoryStore, SqliteStore
from kconsume.backends.base import OffsetStore, Positions
from kconsume.backends.kafka import KafkaStore
from kconsume.errors import StoreUnavailable
from kconsume.records import Partition
from kconsume.spark import foreach_batch
from tests.spark.shop import Shop, values_of

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]

Make = Callable[[Shop], OffsetStore]
STORES: dict[str, Make] = {
    "memory": lambda shop: MemoryStore(),
    "sqlite": lambda shop: SqliteStore(Path(shop.folder, "offsets.db")),
    "kafka": lambda shop: KafkaStore(shop.bootstrap),
}


class Crash(Exception):
    """The process ends here, for all that Spark can tell."""


def ends(store: OffsetStore, group: str, shop: Shop) -> dict[int, int]:
    loaded = store.load(group, [Partition(shop.topic, n) for n in range(shop.partitions)])
    return {p.number: position.next_offset for p, position in loaded.items()}


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
def test_what_a_crash_has_left_done_is_skipped_and_what_it_has_not_comes_again(
    shop: Shop, spark: SparkSession, group: str, make: Make
) -> None:
    shop.fill(100)
    store, seen = make(shop), list[str]()
    broken = True

    def load(df: DataFrame) -> None:
        seen.extend(values_of(df))
        if broken and len(seen) == 300:
            raise Crash("after the effect, before the offsets")

    batches = foreach_batch(load, store=store, group=group)
    with pytest.raises(Exception, match="after the effect"):
        batches.wait(shop.query(spark, batches, maxOffsetsPerTrigger="150"))
    assert ends(store, group, shop) == {0: 50, 1: 50, 2: 50}
    broken = False
    again = foreach_batch(load, store=store, group=group)

    def crashing(df: DataFrame, batch_id: int) -> None:
        again(df, batch_id)
        raise Crash("after the store's word, before Spark's")

    with pytest.raises(StreamingQueryException, match="Crash"):
        shop.query(spark, crashing, maxOffsetsPerTrigger="150").awaitTermination()
    again.close()
    assert len(seen) == 450  # the second batch came twice: at least once
    for checkpoint in ("own", "new"):  # all comes again, from the first offset in the second of them
        batches = foreach_batch(load, store=store, group=group)
        batches.wait(shop.query(spark, batches, checkpoint))
    assert len(seen) == 450
    assert sorted(set(seen)) == sorted(shop.written)
    assert ends(store, group, shop) == {0: 100, 1: 100, 2: 100}


class LosesAnswers(KafkaStore):
    """The first saving is done, and its answer lost."""

    lost = 0

    def save(self, group: str, positions: Positions) -> None:
        super().save(group, positions)
        if not self.lost:
            self.lost = 1
            raise StoreUnavailable("the answer was lost")


def test_a_store_without_epochs_that_was_away_is_asked_what_is_done(
    shop: Shop, spark: SparkSession, group: str
) -> None:
    shop.fill(50)
    store, seen = LosesAnswers(shop.bootstrap), list[Any]()

    def load(df: DataFrame) -> None:
        seen.extend(values_of(df))

    batches = foreach_batch(load, store=store, group=group)
    batches.wait(shop.query(spark, batches))
    assert store.lost == 1
    assert sorted(seen) == sorted(shop.written)
    assert ends(store, group, shop) == {0: 50, 1: 50, 2: 50}
