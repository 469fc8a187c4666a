"""Tasks that are run twice at once, or die after their COMMIT, on executors of their own: rows = distinct = produced.

In a file of its own: going from one kind of Spark to another costs seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame, SparkSession

from kconsume.spark import foreach_batch
from tests.spark.conftest import OpenShop
from tests.spark.shop import Shop, load_rows
from tests.spark.twins import Bare, Dying, Frame, Twice, loading_beside_a_twin

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]

EACH = 2_000


def run(shop: Shop, spark: SparkSession, handle: Callable[[DataFrame, int], None], wrong: type[Frame]) -> None:
    """In batches of half the topic, each handed over in a frame whose tasks go wrong."""

    def handed(df: DataFrame, batch_id: int) -> None:
        handle(cast("DataFrame", wrong(df)), batch_id)

    shop.query(spark, handed, handle.__class__.__name__, maxOffsetsPerTrigger=str(EACH // 2)).awaitTermination()


def counted(shop: Shop) -> tuple[int, int]:
    return len(shop.seen()), len(set(shop.seen()))


def bare(url: str) -> Callable[[DataFrame, int], None]:
    def handle(df: DataFrame, batch_id: int) -> None:
        df.mapInArrow(cast(Any, Bare(url)), "done long").collect()

    return handle


def test_a_task_that_is_run_twice_at_once_is_applied_once(
    open_shop: OpenShop, spark_cluster: SparkSession, group: str
) -> None:
    shop = open_shop(1)
    shop.fill(EACH)
    with shop.look() as look:
        look.execute("create table calls (number bigserial)")
    batches = foreach_batch(loading_beside_a_twin(shop.url), store=shop.url, group=group)
    run(shop, spark_cluster, batches, Twice)
    batches.close()
    assert counted(shop) == (EACH, EACH)
    with shop.look() as look:  # both twins of both batches had come to the end of the handler
        assert look.execute("select count(*) from calls").fetchone() == (4,)
    run(shop, spark_cluster, bare(shop.url), Twice)  # the control
    assert counted(shop) == (3 * EACH, EACH)


def test_a_task_that_dies_after_its_commit_is_not_applied_again(
    open_shop: OpenShop, spark_cluster: SparkSession, group: str
) -> None:
    shop = open_shop(1)
    shop.fill(EACH)
    batches = foreach_batch(load_rows, store=shop.url, group=group)
    run(shop, spark_cluster, batches, Dying)
    batches.close()
    assert counted(shop) == (EACH, EACH)
    run(shop, spark_cluster, bare(shop.url), Dying)  # the control
    assert counted(shop) == (3 * EACH, EACH)
