"""The store is down when partitions are assigned, in work, at COMMIT and at shutdown: nothing is consumed without it,
the reason is in the log, and work resumes by itself when it is back (P8, P9)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psycopg
import pytest

from kconsume import App, Record
from kconsume.testing.services import KafkaService, LocalPostgres
from tests.chaos.effects import Effects, PostgresEffects
from tests.chaos.fleet import Fleet, Job, Worker, fleet
from tests.chaos.proxy import Cut, CuttingProxy, pass_all
from tests.fix_arena import QUICK
from tests.fix_kafka import MakeTopic, produce
from tests.liveness import assert_app_lives
from tests.waiting import eventually

PARTITIONS, EACH = 2, 600
RECORDS = PARTITIONS * EACH
NO_ENCRYPTION = "sslmode=disable&gssencmode=disable"
SHUTDOWN = 6.0


@pytest.fixture
def filled(kafka: KafkaService, topic: MakeTopic) -> str:
    name = topic(PARTITIONS)
    for partition in range(PARTITIONS):
        produce(kafka.bootstrap, name, (b"x" for _ in range(EACH)), partition=partition)
    return name


@pytest.fixture
def hurry() -> threading.Event:
    """Set when the store has been down. Until then the second half of the work takes its time: on a busy machine all of
    it might be done before the test comes to its fault."""
    return threading.Event()


def take_time(record: Record, hurry: threading.Event) -> None:
    time.sleep(0.0005 if hurry.is_set() or record.offset < EACH // 2 else 0.02)


@pytest.fixture
def effects(postgres_url: str, cutting_proxy: CuttingProxy) -> PostgresEffects:
    return PostgresEffects(postgres_url, f"{cutting_proxy.url}?{NO_ENCRYPTION}")


@pytest.fixture
def app(kafka: KafkaService, filled: str, group: str, effects: PostgresEffects, hurry: threading.Event) -> App:
    """Whose handler leaves a row for each record."""
    app = App(kafka.bootstrap, group=group, offsets=effects.offsets, kafka=QUICK)

    @app.consume(filled)
    def insert(record: Record, tx: psycopg.Connection) -> None:
        tx.execute("insert into seen values (%s, %s, 'here')", (record.partition, record.offset))
        take_time(record, hurry)

    return app


@pytest.fixture
def lives(kafka: KafkaService, filled: str, group: str, postgres_url: str) -> Callable[[App], None]:
    """That each partition goes on: one more record in each is handled, and its offset passes."""
    return partial(
        assert_app_lives, bootstrap=kafka.bootstrap, topic=filled, group=group, offsets=postgres_url,
        partitions=PARTITIONS,
    )  # fmt: skip


def test_nothing_is_consumed_while_the_store_is_down_at_assign(
    app: App,
    effects: PostgresEffects,
    cutting_proxy: CuttingProxy,
    caplog: pytest.LogCaptureFixture,
    hurry: threading.Event,
    lives: Callable[[App], None],
) -> None:
    cutting_proxy.down()
    app.startup = 0  # or the block would not be entered
    with app.running():
        eventually(lambda: "claim failed partitions=" in caplog.text, what="the reason is in the log")
        assert "cannot be reached" in caplog.text
        assert effects.rows == 0
        hurry.set()
        cutting_proxy.up()
        eventually(lambda: effects.rows >= RECORDS, what="work begins by itself")
        lives(app)
    assert (effects.rows, effects.distinct) == (RECORDS + PARTITIONS,) * 2


def test_work_stops_while_the_store_is_down_and_resumes_by_itself(
    app: App,
    effects: PostgresEffects,
    cutting_proxy: CuttingProxy,
    caplog: pytest.LogCaptureFixture,
    hurry: threading.Event,
    lives: Callable[[App], None],
) -> None:
    with app.running():
        eventually(lambda: effects.rows > 20, what="work is under way")
        cutting_proxy.down()
        eventually(lambda: caplog.text.count("stopped partition=") >= PARTITIONS, what="each partition stops")
        done = effects.rows
        eventually(lambda: "claim failed partitions=" in caplog.text, what="it is tried again, and says so")
        assert effects.rows == done < RECORDS
        hurry.set()
        cutting_proxy.up()
        eventually(lambda: effects.rows >= RECORDS, what="work resumes by itself")
        lives(app)
    assert (effects.rows, effects.distinct) == (RECORDS + PARTITIONS,) * 2


@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.AFTER])
def test_a_store_that_goes_down_at_commit_is_asked_what_it_has_when_it_is_back(
    app: App,
    effects: PostgresEffects,
    cutting_proxy: CuttingProxy,
    caplog: pytest.LogCaptureFixture,
    hurry: threading.Event,
    lives: Callable[[App], None],
    cut: Cut,
) -> None:
    hit = threading.Event()

    def cut_once(number: int) -> Cut:
        if hit.is_set():
            return Cut.PASS
        hit.set()
        return cut

    with app.running():
        eventually(lambda: effects.rows > 20, what="work is under way")
        cutting_proxy.decide = cut_once
        assert hit.wait(20)
        cutting_proxy.down()
        cutting_proxy.decide = pass_all
        eventually(lambda: "claim failed partitions=" in caplog.text, what="it is asked, and does not answer")
        hurry.set()
        cutting_proxy.up()
        eventually(lambda: effects.rows >= RECORDS, what="work resumes by itself")
        lives(app)
    assert (effects.rows, effects.distinct) == (RECORDS + PARTITIONS,) * 2


# At shutdown: a process, because its end is what counts


def test_a_process_whose_store_is_down_ends_in_time_with_a_report(
    kafka: KafkaService,
    filled: str,
    group: str,
    effects: PostgresEffects,
    cutting_proxy: CuttingProxy,
    tmp_path: Path,
) -> None:
    with fleet(job(kafka, filled, group, effects, tmp_path)) as workers:
        worker = workers.grow()
        workers.await_work(lambda: effects.rows > 20, within=60, what="work is under way")
        cutting_proxy.down()
        eventually(lambda: "stopped partition=" in worker.log, what="it has noticed")
        assert stop_in_time(workers, worker) == 0, worker.log
        cutting_proxy.up()
        workers.grow()
        workers.await_work(lambda: effects.rows >= RECORDS, within=60, what="the next process does the rest")
    assert (effects.rows, effects.distinct) == (RECORDS, RECORDS)


def test_a_process_that_cannot_claim_ends_in_time_with_a_report(
    kafka: KafkaService,
    filled: str,
    group: str,
    effects: PostgresEffects,
    cutting_proxy: CuttingProxy,
    tmp_path: Path,
) -> None:
    cutting_proxy.down()
    with fleet(job(kafka, filled, group, effects, tmp_path)) as workers:
        worker = workers.grow()
        workers.await_work(lambda: "claim failed" in worker.log, within=60, what="it tries to claim")
        assert stop_in_time(workers, worker) == 0, worker.log
    assert effects.rows == 0


def test_a_process_whose_store_does_not_answer_ends_in_time_and_says_what_it_abandoned(
    kafka: KafkaService, filled: str, group: str, tmp_path: Path
) -> None:
    with LocalPostgres() as server:
        effects = PostgresEffects(server.url)
        with fleet(job(kafka, filled, group, effects, tmp_path)) as workers:
            worker = workers.grow()
            workers.await_work(lambda: effects.rows > 20, within=60, what="work is under way")
            server.freeze()
            time.sleep(0.3)  # the fault's own timing: handlers run into the silence
            assert stop_in_time(workers, worker) == 3, worker.log
            assert f"abandoned {filled}/" in worker.log
            server.thaw()
            workers.grow()
            workers.await_work(lambda: effects.rows >= RECORDS, within=60, what="the next process does the rest")
        assert (effects.rows, effects.distinct) == (RECORDS, RECORDS)


def job(kafka: KafkaService, topic: str, group: str, effects: Effects, folder: Path) -> Job:
    return Job(kafka.bootstrap, topic, group, effects.offsets, folder, (f"--shutdown={SHUTDOWN:g}", "--work=0.006"))


def stop_in_time(workers: Fleet, worker: Worker) -> int:
    """SIGTERM; the exit code, of a process that has kept to its deadline and has reported."""
    workers.members.remove(worker)
    code = worker.stop(within=SHUTDOWN + 8)  # the interpreter's own end, on a busy machine
    assert "kconsume stopped in" in worker.log
    return code
