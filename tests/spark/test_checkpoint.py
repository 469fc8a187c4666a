"""Checkpoint folders that are not on the local disk: on `viewfs`, which Hadoop mounts here over a local folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from kconsume import App, Batching
from kconsume.errors import CheckpointMismatch, ConfigurationError
from kconsume.spark import SparkSink, foreach_batch, stream
from kconsume.spark._stream.folders import Folder, open_folder, qualified_path
from tests.spark.shop import AvailableNow, Shop, load, load_table

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]


class Mounted:
    """A session in which `viewfs://NAME/NAME` is a folder of this machine, and `/NAME` is none."""

    def __init__(self, spark: SparkSession, name: str, folder: Path) -> None:
        self.session = spark.newSession()
        self.host = f"viewfs://{name}"
        self.path = f"/{name}"
        self.root = f"{self.host}{self.path}"
        self.folder = folder
        folder.mkdir()
        self.session.conf.set(f"fs.viewfs.mounttable.{name}.link.{self.path}", f"file:{folder}")


@pytest.fixture
def mounted(spark: SparkSession, group: str, tmp_path: Path) -> Mounted:
    return Mounted(spark, group, tmp_path / "mounted")


@pytest.fixture(params=["local", "viewfs"])
def files(request: pytest.FixtureRequest, mounted: Mounted) -> Folder:
    root = f"{mounted.root}/orders" if request.param == "viewfs" else f"{mounted.folder}/orders"
    return open_folder(mounted.session, qualified_path(mounted.session, root))


def test_files_are_read_and_written_alike_wherever_they_are(files: Folder) -> None:
    assert files.names("") == []
    assert files.names("gen-0001/offsets") == []
    assert files.read("gen-0001/offsets/0") is None
    files.write("kconsume.json", "grün")
    files.write("kconsume.json", "grün")  # by another, at the same time
    files.write("gen-0001/offsets/0", "v1")
    assert files.read("kconsume.json") == "grün"
    assert [name for name in files.names("") if not name.startswith(".")] == ["gen-0001", "kconsume.json"]
    assert files.read("gen-0001/offsets/0") == "v1"


def test_a_folder_has_the_name_that_spark_gives_it(mounted: Mounted, tmp_path: Path) -> None:
    session = mounted.session
    assert qualified_path(session, "relative/folder") == f"file:{Path.cwd()}/relative/folder"
    assert qualified_path(session, f"{tmp_path}/with space/100%") == f"file:{tmp_path}/with space/100%"
    assert qualified_path(session, f"{mounted.root}/orders/") == f"{mounted.root}/orders"
    session.conf.set("fs.defaultFS", f"{mounted.host}/")
    assert qualified_path(session, f"{mounted.path}/orders") == f"{mounted.root}/orders"
    assert qualified_path(session, f"file:{tmp_path}") == f"file:{tmp_path}"


def app_of(shop: Shop, group: str, handler: Any) -> App:
    app = App(shop.bootstrap, group=group, offsets=shop.url)
    app.consume(shop.topic)(handler)
    return app


@pytest.mark.parametrize("by_default", [False, True], ids=["viewfs-url", "viewfs-by-default"])
def test_a_stream_goes_on_in_a_checkpoint_that_is_not_local(
    shop: Shop, mounted: Mounted, group: str, by_default: bool
) -> None:
    if by_default:
        mounted.session.conf.set("fs.defaultFS", f"{mounted.host}/")
    checkpoint = f"{mounted.path if by_default else mounted.root}/orders"
    for round, handler in enumerate([load, load_table]):
        shop.fill(50, f"round {round}")
        stream(app_of(shop, group, handler), mounted.session, trigger=AvailableNow, checkpoint=checkpoint).wait(200)
        assert shop.is_exact()
    (generation,) = (mounted.folder / "orders").glob("gen-*")
    assert sorted(each.name for each in (generation / "commits").glob("[0-9]*")) == ["0", "1"]
    assert not Path(mounted.path).exists()
    with pytest.raises(CheckpointMismatch, match=rf"checkpoint='{mounted.root}/orders' belongs to another query"):
        stream(app_of(shop, f"{group}-2", load), mounted.session, checkpoint=checkpoint)


def test_a_query_of_ones_own_finds_its_ranges_in_a_checkpoint_that_is_not_local(
    shop: Shop, mounted: Mounted, group: str
) -> None:
    for round in range(2):
        shop.fill(50, f"round {round}")
        batches = foreach_batch(load, store=shop.url, group=group)
        writer = shop.source(mounted.session, maxOffsetsPerTrigger="100").writeStream.foreachBatch(batches)
        batches.wait(writer.option("checkpointLocation", f"{mounted.root}/own").trigger(**AvailableNow).start())
        assert shop.is_exact()
    assert (mounted.folder / "own" / "offsets" / "0").exists()


@pytest.mark.parametrize("checkpoint", ["nowhere://host/orders", "hdfs://127.0.0.1:1/orders"])
def test_a_folder_that_cannot_be_had_is_refused_before_anything_is_claimed(
    shop: Shop, mounted: Mounted, group: str, checkpoint: str
) -> None:
    mounted.session.conf.set("ipc.client.connect.max.retries", "0")
    with pytest.raises(ConfigurationError, match=f"checkpoint='{checkpoint}' cannot be used: "):
        stream(app_of(shop, group, load), mounted.session, checkpoint=checkpoint)
    assert shop.offsets(group) == {}


def test_a_sink_writes_into_the_folder_of_this_machine_whatever_the_default_file_system(
    shop: Shop, mounted: Mounted, group: str, tmp_path: Path
) -> None:
    shop.fill(20)
    mounted.session.conf.set("fs.defaultFS", f"{mounted.host}/")
    app = App(shop.bootstrap, group=group, offsets="memory://")

    @app.resource
    def spark() -> Iterator[SparkSession]:
        yield mounted.session

    app.consume(shop.topic, batch=Batching(100, 0.2))(SparkSink(path=tmp_path / "clicks"))
    app.catch_up()
    assert mounted.session.read.parquet(f"file:{tmp_path}/clicks").count() == 60
