"""Handlers that take a DataFrame, and `SparkSink`, as far as they can be told without a Spark that runs."""

from __future__ import annotations

import importlib.metadata
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from kconsume import App, Batch, Batching
from kconsume._console import guarantee
from kconsume._handlers.arrow import table_of
from kconsume.errors import ConfigurationError, InvalidHandler, MissingExtra
from kconsume.spark import jars, java_home
from kconsume.spark._sink.dataframes import cut
from kconsume.spark._sink.spark_sink import SparkSink, _rows_from
from kconsume.spark.session import connector_mismatch
from kconsume.testing import feed
from tests.unit.fakes import FakeMessage, messages_at


@dataclass
class Click:
    id: int
    word: str


def new_app(offsets: str = "memory://") -> App:
    return App("embedded://", group="clicks", offsets=offsets)


class TestTheSignature:
    def test_the_session_is_there_without_being_declared(self) -> None:
        app = new_app()

        @app.consume("clicks", batch=Batching(10))
        def load(df: DataFrame, batch: Batch, spark: SparkSession) -> None: ...

        (registration,) = app.registrations
        assert set(registration.binding.resources.values()) == {SparkSession}
        assert app.declared.resources[SparkSession].is_default

    def test_one_that_works_in_spark_is_never_run_by_the_thread_that_fetches(self, tmp_path: Path) -> None:
        """However little a record takes: the interpreter is free while the JVM works, and the next ones can come."""
        app = new_app()

        @app.consume("clicks", batch=Batching(10))
        def load(df: DataFrame) -> None: ...

        @app.consume("clicks", batch=Batching(10), group="tables")
        def tabulate(table: pa.Table) -> None: ...

        app.consume("clicks", batch=Batching(10), group="files")(SparkSink(path=tmp_path, name="files"))
        waits = {each.binding.name: each.plan().waits for each in app.registrations}
        assert [waits[name] for name in sorted(waits)] == [True, True, False], waits

    @pytest.mark.parametrize("before", [True, False])
    def test_a_declared_session_is_taken_wherever_it_is_declared(self, before: bool) -> None:
        app = new_app()

        def spark() -> Iterator[SparkSession]:
            yield  # type: ignore[misc]

        if before:
            app.resource(spark)

        @app.consume("clicks")
        def load(df: DataFrame) -> None: ...

        if not before:
            app.resource(spark)
        assert app.declared.resources[SparkSession].make is spark

    def test_async_is_refused(self) -> None:
        with pytest.raises(InvalidHandler, match="block the event loop"):

            @new_app().consume("clicks")
            async def load(df: DataFrame) -> None: ...

    def test_inline_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="waits for Spark"):

            @new_app().consume("clicks", executor="inline")
            def load(df: DataFrame) -> None: ...

    def test_tombstones_have_no_columns(self) -> None:
        with pytest.raises(InvalidHandler, match="a tombstone has none"):

            @new_app().consume("clicks")
            def load(df: Annotated[DataFrame, Click | None]) -> None: ...

    def test_the_columns_of_a_model_say_so(self) -> None:
        app = new_app()

        @app.consume("clicks")
        def load(df: Annotated[DataFrame, Click]) -> None: ...

        assert app.registrations[0].binding.payload == "DataFrame of Click"


class TestTypedTables:
    def test_the_columns_are_those_of_the_model(self) -> None:
        app, seen = new_app(), list[pa.Table]()

        @app.consume("clicks")
        def load(rows: Annotated[pa.Table, Click]) -> None:
            seen.append(rows)

        fed = feed(app, "clicks", [{"id": 1, "word": "a"}, {"id": 2, "word": "b"}])
        assert fed.outcome == "handled"
        assert seen[0].to_pydict() == {"id": [1, 2], "word": ["a", "b"]}

    def test_a_value_that_is_not_of_the_model_fails_by_itself(self) -> None:
        app, seen = new_app(), list[object]()

        @app.consume("clicks", on_error="skip")
        def load(rows: Annotated[pa.Table, Click]) -> None:
            seen.extend(rows["id"].to_pylist())

        fed = feed(app, "clicks", [{"id": 1, "word": "a"}, {"id": "x"}, {"id": 3, "word": "c"}])
        assert seen == [1, 3]
        assert "the value is not" in str(fed.error)

    def test_a_value_that_no_column_holds_fails_by_itself(self) -> None:
        app, seen = new_app(), list[object]()

        @app.consume("clicks", on_error="skip")
        def load(rows: Annotated[pa.Table, Click]) -> None:
            seen.extend(rows["id"].to_pylist())

        feed(app, "clicks", [{"id": 1, "word": "a"}, {"id": 2**63, "word": "b"}, {"id": 3, "word": "c"}])
        assert seen == [1, 3]


class TestCutting:
    def parts(self, table: pa.Table, parts: int, part_bytes: int = 1 << 30) -> list[pa.RecordBatch]:
        """As Spark makes them."""
        chunks, rows = cut(table, parts, part_bytes)
        assert chunks.equals(table.combine_chunks())
        return chunks.to_batches(max_chunksize=rows)

    def test_about_as_many_parts_as_cores(self) -> None:
        assert [part.num_rows for part in self.parts(pa.table({"n": range(1000)}), 4)] == [250] * 4

    def test_many_small_chunks_become_few(self) -> None:
        assert len(self.parts(pa.concat_tables([pa.table({"n": [n]}) for n in range(100)]), 2)) == 2

    def test_a_part_has_no_more_rows_than_is_fast(self) -> None:
        assert max(part.num_rows for part in self.parts(pa.table({"n": [0] * 120_000}), 1)) <= 50_000

    def test_large_records_in_a_row_do_not_make_a_heavy_part(self) -> None:
        values = [b"x"] * 5000 + [b"y" * 100_000] * 40
        parts = self.parts(pa.table({"value": values}), 2, part_bytes=1_000_000)
        assert max(part.nbytes for part in parts) <= 1_000_000
        assert len(parts) < 20

    def test_one_record_above_the_bound_is_a_part_of_its_own(self) -> None:
        parts = self.parts(pa.table({"value": [b"y" * 5000] * 3}), 1, part_bytes=1000)
        assert [part.num_rows for part in parts] == [1, 1, 1]

    def test_no_rows(self) -> None:
        assert self.parts(pa.table({"n": [1]}).slice(1), 2) == []

    def test_a_heavy_chunk_is_a_copy_because_pyspark_cannot_convert_a_slice_with_nulls(self) -> None:
        heavy, _ = cut(table_of([FakeMessage(b"y" * 500, offset=n) for n in range(9)]), 2, part_bytes=1000)
        assert {chunk.offset for chunk in heavy["headers"].chunks} == {0}
        assert heavy["headers"].num_chunks > 2

    def test_the_rest_of_a_batch_is_a_copy_for_the_same_reason(self) -> None:
        rest = table_of([FakeMessage(b"y", offset=n) for n in range(9)]).slice(4)
        chunks, _ = cut(rest, 2)
        assert chunks.equals(rest)
        assert {chunk.offset for column in chunks.columns for chunk in column.chunks} == {0}


class TestTheSink:
    @pytest.mark.parametrize(
        ("build", "said"),
        [
            (lambda: SparkSink(), "one of path= and table="),
            (lambda: SparkSink(path="a", table="b"), "one of path= and table="),
            (lambda: SparkSink(path="a", format="avro"), "not offered: choose parquet, orc, jdbc"),
            (lambda: SparkSink(path="a", format="jdbc"), "give its name, table='clicks'"),
            (lambda: SparkSink(table="a", format="parquet"), "files go into a folder"),
            (lambda: SparkSink(path="a", url="postgresql://x"), "database of format='jdbc'"),
            (lambda: SparkSink(path="s3a://bucket/clicks"), "not on a file system of this machine"),
            (lambda: SparkSink(path="hdfs:///clicks"), "not on a file system of this machine"),
            (lambda: SparkSink(table="a", format="jdbc", url="jdbc:mysql://x"), "names no PostgreSQL"),
            (lambda: SparkSink(table="a", format="jdbc", options={"a": "b"}), "written by COPY"),
            (
                lambda: SparkSink(path="a", options={"partitionBy": "day"}),
                r"'partitionBy': …\}\) is not offered: a range",
            ),
            (lambda: SparkSink(path="a", options={"maxRecordsPerFile": "9"}), "of your own"),
            (
                lambda: SparkSink(path="a", options={"compresion": "zstd"}),
                "Spark would ignore it: give compression, or",
            ),
            (lambda: SparkSink(path="a", options={"mode": "overwrite"}), "Spark would ignore it"),
        ],
    )
    def test_what_cannot_work_is_refused_where_it_is_written(self, build: Callable[[], object], said: str) -> None:
        with pytest.raises(ConfigurationError, match=said):
            build()

    def test_an_address_in_a_refusal_has_no_password(self) -> None:
        with pytest.raises(ConfigurationError) as refused:
            SparkSink(table="a", format="jdbc", url="jdbc:mysql://me:secret@host/db")
        assert "secret" not in str(refused.value)

    def test_each_says_what_is_promised(self, tmp_path: Path) -> None:
        app = new_app()
        app.consume("a")(SparkSink(path=tmp_path / "clicks"))
        app.consume("b")(SparkSink(table="clicks", url="postgresql://host/db"))
        promises = [guarantee(registration) for registration in app.registrations]
        assert [promise.partition(":")[0] for promise in promises] == ["exactly once"] * 2
        assert [registration.name for registration in app.registrations] == ["sink_clicks"] * 2

    def test_rows_in_the_stores_transaction_need_such_a_store(self) -> None:
        app = new_app("kafka://")
        with pytest.raises(InvalidHandler, match="use offsets='postgresql"):
            app.consume("clicks")(SparkSink(table="clicks", format="jdbc"))


class TestJava:
    @pytest.fixture
    def fake_java(self, tmp_path: Path) -> Callable[[str, str], Path]:
        def make(name: str, version: str) -> Path:
            executable = tmp_path / name / "bin" / "java"
            executable.parent.mkdir(parents=True)
            executable.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
            executable.chmod(0o755)
            return tmp_path / name

        return make

    @pytest.fixture(autouse=True)
    def nothing_else(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(java_home, "HOMES", tmp_path / "jvm")
        monkeypatch.delenv("JAVA_HOME", raising=False)
        monkeypatch.setattr(shutil, "which", lambda name: None)

    def test_none_at_all_is_said_with_what_to_install(self) -> None:
        with pytest.raises(ConfigurationError, match=r"no java on the PATH.*openjdk-17-jre-headless"):
            java_home.spark_java()

    @pytest.mark.parametrize("version", ["11.0.2", "24.0.1"])
    def test_the_wrong_one_in_java_home_is_said(
        self, version: str, fake_java: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake_java("jvm/java-17", "17.0.1")  # not looked at: Spark would take JAVA_HOME
        monkeypatch.setenv("JAVA_HOME", str(fake_java("wrong", version)))
        with pytest.raises(ConfigurationError, match=rf"JAVA_HOME .* Java {version[:2]}\)"):
            java_home.spark_java()

    def test_where_distributions_keep_theirs_is_looked_at_last(self, fake_java: Callable[[str, str], Path]) -> None:
        fake_java("jvm/java-11", "11.0.2")
        home = fake_java("jvm/java-21", "21.0.1")
        assert java_home.home_of(java_home.spark_java()) == home


class TestVersions:
    @pytest.mark.parametrize("version", ["4.2.0", "4.2.1", "4.3.0"])
    def test_those_that_were_run_are_taken(self, version: str) -> None:
        jars.check_version(version)

    @pytest.mark.parametrize("version", ["3.5.4", "4.1.1", "4.4.0", "5.0.0.dev1"])
    def test_others_are_refused(self, version: str) -> None:
        with pytest.raises(ConfigurationError, match=rf"PySpark {version} is installed"):
            jars.check_version(version)

    def test_without_pyspark_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", missing)
        with pytest.raises(MissingExtra, match=r"pip install 'kconsume\[spark\]'"):
            SparkSink(path="clicks")


class TestAConnectorThatDoesNotFit:
    """What was seen with the connector of Spark 4.0.0, and one for Scala 2.12, on PySpark 4.2.0."""

    @pytest.mark.parametrize(
        "said",
        [
            "java.lang.NoSuchMethodError: 'void org.apache.spark.sql.execution.streaming.SerializedOffset.<init>'",
            "java.lang.NoClassDefFoundError: scala/Serializable",
            "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: kafka.",
        ],
    )
    def test_is_said_with_the_list_that_does(self, said: str) -> None:
        refusal = connector_mismatch(RuntimeError(f"An error occurred while calling o1.start.\n: {said}\n\tat x"))
        assert refusal is not None
        assert said[:60] in str(refusal)
        assert all(jar.coordinate in str(refusal) for jar in jars.CONNECTOR)

    def test_is_found_in_the_trace_of_a_query_that_says_the_method_alone(self) -> None:
        error = RuntimeError("[STREAM_FAILED] terminated with exception: 'void SerializedOffset.<init>(String)'")
        error._stackTrace = "at x\nCaused by: java.lang.NoSuchMethodError: 'void SerializedOffset.<init>'"  # type: ignore[attr-defined]
        assert "(java.lang.NoSuchMethodError: 'void SerializedOffset.<init>')" in str(connector_mismatch(error))

    def test_an_error_of_another_kind_is_left_alone(self) -> None:
        assert connector_mismatch(RuntimeError("UnknownTopicOrPartitionException")) is None


def test_nobody_imports_pyspark_or_pyarrow_who_does_not_ask_for_it() -> None:
    program = (
        "import sys, kconsume\n"
        "app = kconsume.App('embedded://', group='g', offsets='memory://')\n"
        "@app.consume('t')\n"
        "def handle(value: bytes) -> None: ...\n"
        "import kconsume.spark, kconsume.spark._sink.frame_provider, kconsume.app, kconsume._handlers.compiled\n"
        "print(sorted({'pyspark', 'pyarrow', 'py4j', 'psycopg', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_range_that_is_skipped_is_said(caplog: pytest.LogCaptureFixture) -> None:
    batch = Batch(messages_at([10, 11, 15]), "group:topic")
    with caplog.at_level(logging.INFO, "kconsume.spark"):
        assert _rows_from(12, pa.table({"n": [0, 1, 2]}), batch).to_pydict() == {"n": [2]}
    assert "records=2" in caplog.text
    assert _rows_from(10, pa.table({"n": [0, 1, 2]}), batch).num_rows == 3
