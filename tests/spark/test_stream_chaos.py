"""Streams whose processes are killed, on a real Spark with real executors: rows = distinct = produced (P1, P2)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pyspark
import pytest
from pyspark.sql import SparkSession

from kconsume.errors import StreamTaken
from kconsume.spark import Stream, foreach_batch, stream
from tests.chaos.form import form, printed_seed
from tests.fix_spark import CLUSTER, LOCAL, driver_environment, spark_settings
from tests.spark import driver as driver_program
from tests.spark.conftest import OpenShop
from tests.spark.driver import Orders
from tests.spark.shop import AvailableNow, Shop, load, load_rows
from tests.waiting import eventually

PATIENCE = form(short=600, long=1800)
# A start of Spark takes some seconds, and minutes where four tests share two cores.
pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(2 * PATIENCE)]

PARTITIONS = 4
RECORDS = form(short=8_000, long=200_000)
KILLS = form(short=1, long=10)
EXECUTOR_KILLS = form(short=1, long=10)
# So many batches that all kills hit before the work is done, which the tests look at.
BATCH = form(short=800, long=2_000)
PAUSE = form(short=0.5, long=0.7)
# In the short form each kind once: a start of a cluster costs more than the rest of its test.
DRIVERS = form(
    short=[("driver", LOCAL), ("executors", LOCAL)],
    long=[(where, master) for master in (LOCAL, CLUSTER) for where in ("driver", "executors")],
)
EXECUTORS = form(short=["executors"], long=["executors", "driver"])


class Driver:
    """A process that runs the stream."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._mark = f"KCONSUME_TEST_DRIVER={uuid.uuid4().hex}"
        self._log = Path(orders.folder, "driver.log").open("a")  # noqa: SIM115  (as long as its processes)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._run([sys.executable, "-m", "tests.spark.driver"])

    def submit(self) -> None:
        """By spark-submit, where the JVM is the parent, and gets the signal."""
        settings = spark_settings(Path(self._orders.folder, "scratch"))
        given = [f"--conf={name}={value}" for name, value in settings.items()]
        spark_submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
        self._run([spark_submit, f"--master={self._orders.master}", *given, driver_program.__file__])

    def _run(self, program: list[str]) -> None:
        command = [*program, msgspec.json.encode(self._orders).decode()]
        self.process = subprocess.Popen(
            command, env={**driver_environment(), **dict([self._mark.split("=")])}, stdout=self._log, stderr=self._log,
            start_new_session=True, cwd=self._orders.folder,
        )  # fmt: skip

    def kill(self) -> None:
        """The driver alone: its JVM, and the tasks in it, live on for as long as they do not notice."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def executors(self) -> list[int]:
        """The processes that run tasks, of this driver."""
        return [pid for pid in self._family() if "CoarseGrainedExecutorBackend" in _read(pid, "cmdline")]

    def terminate(self) -> bool:
        """As a person or Kubernetes stops `python app.py`; whether it has drained."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120) == 0 and self.log().rstrip().endswith("drained")

    def end(self) -> None:
        for pid in self._family():
            _kill(pid)
        if self.process is not None:
            self.process.wait(30)
        self._log.close()

    def _family(self) -> list[int]:
        """All that descend from drivers of this object, also when their parents are gone: by a mark that they inherit.
        By the number of a process alone one might meet another that has it now."""
        processes = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]
        return [pid for pid in processes if self._mark in _read(pid, "environ").split("\0")]

    def log(self) -> str:
        return Path(self._orders.folder, "driver.log").read_text()


def _read(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_text(errors="replace")
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@contextmanager
def driving(orders: Orders) -> Iterator[Driver]:
    driver = Driver(orders)
    try:
        yield driver
    except BaseException:
        print(driver.log()[-6000:])  # noqa: T201
        raise
    finally:
        driver.end()


def count(shop: Shop) -> int:
    with shop.look() as look:
        (rows,) = look.execute("select count(*) from seen").fetchone() or (0,)
        return int(rows)


def reaches(shop: Shop, rows: int, driver: Driver) -> Callable[[], bool]:
    def looked() -> bool:
        assert driver.process is not None
        assert driver.process.poll() is None, "the driver has ended by itself"
        return count(shop) >= rows

    return looked


def counted(shop: Shop) -> tuple[int, int]:
    seen = shop.seen()
    return len(seen), len(set(seen))


def succeeding(orders: Orders, spark: SparkSession) -> Stream | None:
    """The stream of a driver that is gone, until all is read; None while the database still has its connection."""
    try:
        return stream(driver_program.app_of(orders), spark, trigger=AvailableNow, checkpoint=orders.checkpoint)
    except StreamTaken:
        return None


@pytest.mark.parametrize(("where", "master"), DRIVERS)
def test_a_killed_driver_loses_nothing_and_repeats_nothing(
    open_shop: OpenShop, spark: SparkSession, group: str, where: str, master: str
) -> None:
    shop = open_shop(PARTITIONS)
    shop.fill(RECORDS // PARTITIONS)
    chance = printed_seed()
    orders = Orders(shop.bootstrap, shop.topic, shop.url, group, where, str(shop.folder), master, BATCH)
    with driving(orders) as driver:
        for _ in range(KILLS):
            before = count(shop)
            driver.start()
            eventually(reaches(shop, before + 1, driver), within=PATIENCE, what="a batch of this driver")
            time.sleep(chance.uniform(0, PAUSE))  # any moment will do
            driver.kill()
            assert count(shop) < RECORDS, "the work was done before the kill"
        # The last one, which nobody kills, is this process: another start of Spark would show nothing more.
        last = eventually(lambda: succeeding(orders, spark), what="the database to miss the driver")
        assert last is not None
        with last:
            assert last.wait(PATIENCE)
    assert counted(shop) == (RECORDS, RECORDS)
    assert sum(shop.offsets(group).values()) == RECORDS
    batches = foreach_batch(load if where == "driver" else load_rows, store=shop.url, group=group)
    batches.wait(shop.query(spark, batches))  # the whole job again, from the first offset, in a query of its own
    assert counted(shop) == (RECORDS, RECORDS)


@pytest.mark.parametrize("where", EXECUTORS)
def test_killed_executors_lose_nothing_and_repeat_nothing(open_shop: OpenShop, group: str, where: str) -> None:
    shop = open_shop(PARTITIONS)
    shop.fill(RECORDS // PARTITIONS)
    chance = printed_seed()
    orders = Orders(shop.bootstrap, shop.topic, shop.url, group, where, str(shop.folder), CLUSTER, BATCH)
    with driving(orders) as driver:
        driver.start()
        for _ in range(EXECUTOR_KILLS):
            eventually(reaches(shop, count(shop) + 1, driver), within=PATIENCE, what="a batch between two kills")
            victims = eventually(driver.executors, within=PATIENCE, what="an executor")
            time.sleep(chance.uniform(0, 0.3))
            _kill(chance.choice(victims))
            assert count(shop) < RECORDS, "the work was done before the kill"
        eventually(reaches(shop, RECORDS, driver), within=PATIENCE, what=f"all of {RECORDS} rows")
        assert driver.terminate()
    assert counted(shop) == (RECORDS, RECORDS)
    assert sum(shop.offsets(group).values()) == RECORDS


@pytest.mark.parametrize(
    ("started", "what", "said"),
    [
        (Driver.submit, "driver", "stop requested by=jvm"),
        (Driver.submit, "own", "stop requested by=jvm"),
        (Driver.start, "driver", "stop requested by=signal"),
    ],
    ids=["stream under spark-submit", "own query under spark-submit", "stream under python"],
)
def test_a_query_that_is_asked_to_end_under_load_drains(
    open_shop: OpenShop, group: str, started: Callable[[Driver], None], what: str, said: str
) -> None:
    """SIGTERM, as Kubernetes sends it. Under spark-submit it goes to the JVM, and Python hears nothing by itself."""
    shop = open_shop(PARTITIONS)
    shop.fill(RECORDS // PARTITIONS)
    (shop.folder / "scratch").mkdir()
    orders = Orders(shop.bootstrap, shop.topic, shop.url, group, what, str(shop.folder), LOCAL, 200)
    with driving(orders) as driver:
        started(driver)
        eventually(reaches(shop, 1, driver), within=PATIENCE, what="a batch")
        drained = driver.terminate()
        log = driver.log()
    assert said in log
    assert drained or started is Driver.submit  # the JVM that was asked does not say how Python ended
    last = re.findall(r"batch done .* batch=(\d+) ", log)[-1]
    assert (shop.folder / "checkpoint/gen-0001/commits" / last).exists()  # handled, and committed by Spark
    assert count(shop) == sum(shop.offsets(group).values()) < RECORDS
