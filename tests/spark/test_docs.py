"""The samples of docs/spark.md are run, on a real Spark, Kafka and PostgreSQL: what they write is read back.

Addresses, folders, topics and groups are those of the test; else they are run as they stand on the page, those with a
`__main__` to its end. They are defined without Spark in `unit/test_spark_docs.py`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrameWriter, SparkSession

from kconsume import App
from kconsume.spark import foreach_batch, request_stop
from kconsume.testing.services import KafkaService
from tests.fix_kafka import MakeTopic, produce
from tests.spark.shop import AvailableNow
from tests.waiting import eventually

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]

PAGE = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
PIECES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SAMPLES = {
    "DataFrames": "def load(clicks: DataFrame",
    "session": "@app.resource",
    "sinks": "SparkSink(",
    "stream": "stream(app, spark",
    "query": "@for_each_partition",
    "versions": "txnVersion",
}
"""By words that only they have."""


class Samples:
    """The page's samples, with the addresses of this test in the place of those of the page."""

    def __init__(self, kafka: KafkaService, url: str, topic: MakeTopic, folder: Path, group: str) -> None:
        self.bootstrap, self.url, self.folder, self.group = kafka.bootstrap, url, folder, group
        self.topics = {name: topic(2) for name in ("clicks", "views", "orders", "clicks.dlq")}

    def run(self, name: str, scope: dict[str, Any] | None = None, module: str = "shown") -> dict[str, Any]:
        (code,) = [piece for piece in PIECES if SAMPLES[name] in piece]
        for there, here in (
            ("localhost:9092", self.bootstrap),
            ("postgresql://localhost/shop", self.url),
            ("/data/", f"{self.folder}/"),
            ('"clicks-etl"', f'"{self.group}"'),
            ('"orders-etl"', f'"{self.group}"'),
        ):
            code = code.replace(there, here)
        for there, here in self.topics.items():
            code = re.sub(f'(?<!table=)"{re.escape(there)}"', f'"{here}"', code)
        scope = {"__name__": module} if scope is None else scope
        exec(compile(code, "docs/spark.md", "exec", dont_inherit=True), scope)
        return scope

    def produce(self, name: str, *values: object) -> None:
        for partition in range(2):
            produce(self.bootstrap, self.topics[name], map(json.dumps, values[partition::2]), partition=partition)

    def table(self, columns: str) -> None:
        with self.look() as look:
            look.execute(f"create table {columns}".encode())

    def rows(self, query: str) -> list[Any]:
        with self.look() as look:
            return look.execute(query.encode()).fetchall()

    def look(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, autocommit=True)

    @contextmanager
    def until_stopped(self, name: str) -> Iterator[list[BaseException]]:
        """A sample's main runs meanwhile; then it is asked to stop, as the page says, and must end well. Gives what it
        has raised."""
        raised: list[BaseException] = []

        def main() -> None:
            try:
                self.run(name, module="__main__")
            except BaseException as error:  # noqa: BLE001  (raised below)
                raised.append(error)

        running = threading.Thread(target=main, daemon=True)
        running.start()
        try:
            yield raised
        finally:
            asked = eventually(lambda: request_stop(self.url, self.group) or raised, what="a stream to ask")
            running.join(120)
        assert raised == []
        assert not running.is_alive(), f"{asked} did not stop"


@pytest.fixture
def samples(kafka: KafkaService, postgres_url: str, topic: MakeTopic, tmp_path: Path, group: str) -> Samples:
    return Samples(kafka, postgres_url, topic, tmp_path, group)


def test_there_is_no_sample_that_is_not_known_here() -> None:
    assert [[name for name, words in SAMPLES.items() if words in piece] for piece in PIECES] == [[n] for n in SAMPLES]


def test_the_handler_of_data_frames_writes_a_folder_for_each_batch_in_the_session_that_is_declared(
    samples: Samples, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples.produce("clicks", *range(40))
    ended: list[SparkSession] = []
    monkeypatch.setattr(SparkSession, "stop", lambda self: ended.append(self))  # the other tests have the same session
    app = samples.run("session", samples.run("DataFrames"))["app"]
    assert isinstance(app, App)
    assert app.catch_up(idle=0.3).handled == 40
    assert ended == [spark]
    values = [row.value for row in spark.read.parquet(f"{samples.folder}/clicks/*").collect()]
    assert sorted(map(int, values)) == list(range(40))
    assert {folder.name for folder in (samples.folder / "clicks").iterdir()} == {"0-0", "1-0"}


def test_the_sinks_append_to_a_folder_and_to_a_table(samples: Samples, spark: SparkSession) -> None:
    samples.table("views (id bigint, page text)")
    samples.produce("clicks", *({"id": n, "word": f"w{n}"} for n in range(30)))
    samples.produce("views", *({"id": n, "page": f"/{n}"} for n in range(20)))
    app = samples.run("sinks")["app"]
    assert app.catch_up(idle=0.3).handled == 50
    written = spark.read.parquet(f"{samples.folder}/clicks").collect()
    assert sorted((row.id, row.word) for row in written) == [(n, f"w{n}") for n in range(30)]
    assert samples.rows("select id, page from views order by id") == [(n, f"/{n}") for n in range(20)]


def test_the_stream_of_an_app_adds_each_order_once(samples: Samples, spark: SparkSession) -> None:
    samples.table("revenue (sku text, cents bigint)")
    with samples.look() as look:
        look.execute("insert into revenue values ('cup', 100), ('pot', 0)")
    samples.produce("orders", *({"sku": ("cup", "pot")[n % 3 == 0], "cents": n} for n in range(30)))
    with samples.until_stopped("stream") as raised:
        added = "select sum(cents) from revenue"
        eventually(lambda: raised or samples.rows(added) == [(535,)], within=120, what="all of them")
    pots = sum(range(0, 30, 3))
    assert dict(samples.rows("select sku, cents from revenue")) == {"cup": 535 - pots, "pot": pots}
    assert samples.rows("select sum(next_offset) from kconsume_offsets") == [(30,)]


def test_the_query_of_ones_own_copies_each_click_once(samples: Samples, spark: SparkSession) -> None:
    samples.table("clicks (place bigint, value bytea)")
    samples.produce("clicks", *range(40))
    with samples.until_stopped("query") as raised:
        there = "select count(*) from clicks"
        eventually(lambda: raised or samples.rows(there) == [(40,)], within=120, what="all of them")
    copied = samples.rows("select place, value from clicks order by value, place")
    assert sorted((place, int(value)) for place, value in copied) == sorted((n // 2, n) for n in range(40))
    assert samples.rows("select sum(next_offset) from kconsume_offsets") == [(40,)]


def test_the_versions_of_a_table_that_skips_those_it_has_seen_rise_with_each_batch(
    samples: Samples, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delta is not installed here: parquet takes its place, and what Delta would be told is noted."""
    said: list[tuple[str, object]] = []
    choose, option = DataFrameWriter.format, DataFrameWriter.option

    def as_parquet(writer: DataFrameWriter, source: str) -> DataFrameWriter:
        return choose(writer, "parquet" if source == "delta" else source)

    def noted(writer: DataFrameWriter, key: str, value: Any) -> DataFrameWriter:
        said.append((key, value))
        return option(writer, key, value)

    monkeypatch.setattr(DataFrameWriter, "format", as_parquet)
    monkeypatch.setattr(DataFrameWriter, "option", noted)
    append: Callable[..., None] = samples.run("versions")["append"]
    batches = foreach_batch(append, store=samples.url, group=samples.group)
    source = spark.readStream.format("kafka").option("kafka.bootstrap.servers", samples.bootstrap)
    frame = source.option("subscribe", samples.topics["clicks"]).option("startingOffsets", "earliest").load()
    for values in (range(20), range(20, 30)):
        samples.produce("clicks", *values)
        writer = frame.writeStream.foreachBatch(batches).option("checkpointLocation", f"{samples.folder}/checkpoint")
        batches.wait(writer.trigger(**AvailableNow).start())
    assert [value for key, value in said if key == "txnAppId"] == ["clicks-etl append"] * 2
    first, second = (value for key, value in said if key == "txnVersion")
    assert isinstance(first, int)
    assert isinstance(second, int)
    assert first < second
    written = spark.read.parquet(f"{samples.folder}/clicks").collect()
    assert sorted(int(row.value) for row in written) == list(range(30))
