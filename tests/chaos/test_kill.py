"""Processes killed and frozen on the real broker, effects counted: expected = distinct = rows (P1, P2, P3)."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kconsume.runtime.pressure import Window
from kconsume.testing.services import KafkaService
from tests.fix_kafka import MakeTopic, produce
from tests.waiting import eventually

WORKER = Path(__file__).with_name("worker.py")


class Fleet:
    """Worker processes that are killed, frozen and replaced."""

    def __init__(self, start: Callable[[str], subprocess.Popen[bytes]]) -> None:
        self._start = start
        self._names = 0
        self.members: list[subprocess.Popen[bytes]] = []

    def grow(self) -> subprocess.Popen[bytes]:
        self._names += 1
        process = self._start(f"worker-{self._names}")
        self.members.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait(10)
        self.members.remove(process)

    def end(self) -> None:
        for process in self.members:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(10)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path, isolation_level=None) as connection:
        connection.execute("pragma journal_mode = wal")
        connection.execute("create table seen (partition integer, position integer, worker text)")
    connection.close()
    return path


@contextmanager
def fleet(kafka: KafkaService, topic: str, group: str, offsets: str, out: Path, *flags: str) -> Iterator[Fleet]:
    log = open(out.with_suffix(".log"), "wb")  # noqa: SIM115  (the processes' own, closed with the fleet)

    def start(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(WORKER), kafka.bootstrap, topic, group, offsets, str(out), name, *flags]
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=WORKER.parents[2])

    fleet = Fleet(start)
    try:
        yield fleet
    finally:
        fleet.end()
        log.close()


def seen_in(database: Path) -> tuple[int, int]:
    """Rows, and distinct records among them."""
    connection = sqlite3.connect(database, timeout=30)
    try:
        rows: tuple[int, int] = connection.execute(
            "select count(*), (select count(*) from (select distinct partition, position from seen)) from seen"
        ).fetchone()
        return rows
    finally:
        connection.close()


def kill_at_random(fleet: Fleet, kills: int, done: Callable[[], bool]) -> int:
    """Kill and replace a random member at random moments, while there is work."""
    seed = random.randrange(2**32)
    print(f"seed={seed}")  # noqa: T201  (shown when the test fails)
    chance = random.Random(seed)
    for _ in range(3):
        fleet.grow()
    hit = 0
    while hit < kills and not done():
        time.sleep(chance.uniform(0.3, 2.0))  # the fault's own timing, not a wait for anything
        fleet.kill(chance.choice(fleet.members))
        fleet.grow()
        hit += 1
    return hit


def test_killed_consumers_lose_nothing_and_repeat_nothing_with_sqlite(
    kafka: KafkaService, topic: MakeTopic, group: str, database: Path
) -> None:
    name, expected = topic(6), 24_000
    for partition in range(6):
        produce(kafka.bootstrap, name, (b"x" for _ in range(expected // 6)), partition=partition)
    with fleet(kafka, name, group, f"sqlite:///{database}", database) as workers:
        kills = kill_at_random(workers, 8, lambda: seen_in(database)[1] >= expected)
        eventually(lambda: seen_in(database)[1] == expected, within=90, what="every record has its effect")
    assert kills == 8, "the work was done before the faults: give it more"
    assert seen_in(database) == (expected, expected), "rows = distinct = produced"


def test_killed_consumers_lose_nothing_with_kafka_offsets_and_repeat_a_window_at_most(
    kafka: KafkaService, topic: MakeTopic, group: str, tmp_path: Path
) -> None:
    name, expected, out = topic(6), 24_000, tmp_path / "seen.txt"
    out.touch()
    for partition in range(6):
        produce(kafka.bootstrap, name, (b"x" for _ in range(expected // 6)), partition=partition)

    def lines() -> list[str]:
        return out.read_text().splitlines()

    with fleet(kafka, name, group, "kafka://", out) as workers:
        kills = kill_at_random(workers, 4, lambda: len(set(lines())) >= expected)
        eventually(lambda: len(set(lines())) == expected, within=90, what="every record is handled")
    assert kills > 0
    repeated = len(lines()) - expected
    # The handler does about 1,500 records a second in a process and offsets are committed once a second.
    assert repeated <= kills * Window.MOST_RECORDS


def test_a_frozen_consumer_that_wakes_after_its_partitions_moved_writes_nothing(
    kafka: KafkaService, topic: MakeTopic, group: str, database: Path
) -> None:
    assert freeze_and_wake(kafka, topic, group, database) == 0


def test_without_the_fence_the_same_zombie_writes_twice(
    kafka: KafkaService, topic: MakeTopic, group: str, database: Path
) -> None:
    assert freeze_and_wake(kafka, topic, group, database, "--no-fence") > 0


def freeze_and_wake(kafka: KafkaService, topic: MakeTopic, group: str, database: Path, *flags: str) -> int:
    """Freeze the only owner outside a transaction, let another take over and finish, wake it; the repeated rows."""
    name, expected = topic(2), 6_000
    for partition in range(2):
        produce(kafka.bootstrap, name, (b"x" for _ in range(expected // 2)), partition=partition)
    with fleet(kafka, name, group, f"sqlite:///{database}", database, "--slow-to-notice", *flags) as workers:
        zombie = workers.grow()
        eventually(lambda: seen_in(database)[0] > 200, what="the first owner works")
        freeze_between_transactions(zombie, database)
        workers.grow()
        eventually(lambda: seen_in(database)[1] == expected, within=60, what="the second owner takes over and finishes")
        zombie.send_signal(signal.SIGCONT)
        extra = [b"y"] * 200
        for partition in range(2):
            produce(kafka.bootstrap, name, extra, partition=partition)
        total = expected + 2 * len(extra)
        eventually(lambda: seen_in(database)[1] == total, within=60, what="both go on, and the new records are handled")
        log = database.with_suffix(".log")
        eventually(lambda: "lost partitions" in log.read_text(), what="the zombie has learnt that it is one")
        rows, distinct = seen_in(database)
        return rows - distinct


def freeze_between_transactions(process: subprocess.Popen[bytes], database: Path) -> None:
    """SQLite has one writer: a process frozen inside its transaction would hold everybody, and nobody can evict it.
    So we go through the turnstile first and freeze the process while it waits behind us."""
    turnstile = os.open(f"{database}-turnstile", os.O_RDWR)
    try:
        fcntl.flock(turnstile, fcntl.LOCK_EX)
        process.send_signal(signal.SIGSTOP)
        # Every thread of it: one that has not noticed yet would take the turnstile with it into the freeze.
        tasks = Path(f"/proc/{process.pid}/task")
        eventually(lambda: {state_of(task) for task in tasks.iterdir()} == {"T"}, what="the process is stopped")
    finally:
        os.close(turnstile)


def state_of(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]
