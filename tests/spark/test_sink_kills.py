"""A driver with a sink, killed with `kill -9` again and again: rows = distinct = produced."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psycopg
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from kconsume.testing.services import KafkaService
from tests.chaos.form import PATIENCE, form, printed_seed
from tests.fix_kafka import MakeTopic, produce
from tests.fix_spark import driver_environment
from tests.spark import sink_program
from tests.spark.sink_program import Told
from tests.waiting import eventually

RECORDS = form(short=20_000, long=200_000)
PARTITIONS = 4
SIZES = form(short=(700, 1000, 1300), long=(3000, 5000, 7000))
START = 200
"""Seconds in which a driver must have come to its first batch: a JVM starts, on cores that others use too."""

pytestmark = pytest.mark.timeout(PATIENCE + 600)


@pytest.fixture
def told(kafka: KafkaService, topic: MakeTopic, group: str) -> Told:
    name = topic(PARTITIONS)
    for partition in range(PARTITIONS):
        each = RECORDS // PARTITIONS
        values = (b'{"id": %d}' % (partition * each + n) for n in range(each))
        produce(kafka.bootstrap, name, values, partition=partition)
    return Told(kafka.bootstrap, name, group, "kafka://", 0)


@contextmanager
def driver(told: Told, scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    """What it says is in a file: a pipe that nobody reads would stop it."""
    command = [sys.executable, "-m", "tests.spark.sink_program", msgspec.json.encode(told).decode(), str(scratch)]
    with (scratch / "driver.log").open("ab") as log:
        process = subprocess.Popen(command, env=driver_environment(), stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run(told: Told, scratch: Path, kills: int, seen: Callable[[], int], chance: random.Random) -> None:
    """Kill the driver so often, each time when it has gone a little further; the last one, which nobody kills, is this
    process."""
    for _ in range(kills):
        told = msgspec.structs.replace(told, records=chance.choice(SIZES))
        goal = seen() + chance.randrange(1, 4)
        with driver(told, scratch) as process:
            eventually(lambda: seen() >= goal or process.poll() is not None, within=START, what=f"progress to {goal}")  # noqa: B023
            assert process.poll() is None, f"it ended before it was killed: {tail(scratch)}"
            os.kill(process.pid, signal.SIGKILL)
    sink_program.main(msgspec.structs.replace(told, records=chance.choice(SIZES)), scratch)


def tail(scratch: Path) -> str:
    return (scratch / "driver.log").read_text()[-3000:]


def test_parquet_read_back_after_kills_has_every_record_once(told: Told, tmp_path: Path, spark: SparkSession) -> None:
    chance = printed_seed()
    folder, scratch = tmp_path / "clicks", tmp_path / "scratch"
    scratch.mkdir()

    ever: set[str] = set()

    def steps() -> int:
        """Files that were ever seen: being written, written, decided on, in their place."""
        with suppress(FileNotFoundError):  # one that was listed is somewhere else by now
            ever.update(str(path) for path in folder.rglob("*") if path.is_file())
        return len(ever)

    run(msgspec.structs.replace(told, path=str(folder)), scratch, form(short=1, long=10), steps, chance)
    ids = [value for file in folder.glob("offsets-*.parquet") for value in pq.read_table(file)["id"].to_pylist()]
    assert len(ids) == len(set(ids)) == RECORDS


@pytest.mark.parametrize("in_the_stores_transaction", [False, True], ids=["range table", "store's transaction"])
def test_rows_in_postgres_after_kills_are_every_record_once(
    in_the_stores_transaction: bool, told: Told, tmp_path: Path, postgres_url: str, database: psycopg.Connection
) -> None:
    chance = printed_seed()
    database.execute("create table clicks (id bigint)")

    def thousands() -> int:
        row = database.execute("select count(*) from clicks").fetchone()
        assert row is not None
        return int(row[0]) // 1000

    to_rows = msgspec.structs.replace(told, table="clicks", url=postgres_url)
    if in_the_stores_transaction:
        to_rows = msgspec.structs.replace(told, table="clicks", offsets=postgres_url)
    run(to_rows, tmp_path, form(short=3, long=10), thousands, chance)
    row = database.execute("select count(*), count(distinct id) from clicks").fetchone()
    assert row == (RECORDS, RECORDS)
