"""Kill the loop and the service after the same numbers of payments, start them again, and count the booked payments.

python -m examples.migration                              on an embedded broker
python -m examples.migration --brokers localhost:9092
"""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier

import click
from confluent_kafka import Producer
from rich.console import Console
from rich.table import Table

from examples.stage import PARTITIONS, clean_environment, new_stage, topics

ROOT = Path(__file__).parents[2]
LAST = -1
"""The number of the last payment of each partition. The last payments are sent after the last kill."""
LINGER = 0.6
"""The longest delay of every second kill, in seconds. Without a delay, each kill would come right after a write."""


@dataclass(frozen=True)
class Count:
    name: str
    kills: int
    rows: int
    distinct: int

    def lost(self, payments: int) -> int:
        return payments - self.distinct

    @property
    def twice(self) -> int:
        return self.rows - self.distinct


class Side:
    """One of the two programs, in a process that is killed and started again, with its own SQLite file."""

    def __init__(self, name: str, module: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self._command = [sys.executable, "-m", f"examples.migration.{module}"]
        self._books = folder / f"{module}.db"
        self._log = folder / f"{module}.log"
        self._environment = {**environment, "BOOKS": str(self._books)}

    def killed(self, kills: int, payments: int, last_kill: Barrier, deadline: float) -> Count:
        """Kill the process `kills` times while it books; then wait for the last payment of each partition."""
        dice = random.Random(kills)
        process = self._start()
        try:
            for kill in range(kills):
                self._wait(process, payments * (kill + 1) // (kills + 2), deadline)
                time.sleep(dice.random() * LINGER if kill % 2 else 0.0)
                process.kill()
                process.wait(30)
                process = self._start()
            last_kill.wait(max(0.0, deadline - time.monotonic()))
            self._wait(process, None, deadline)
        finally:
            last_kill.abort()  # after a failure here, the other side must not wait
            process.kill()
            process.wait(30)
        return Count(self.name, kills, *self._booked()[:2])

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=log)

    def _wait(self, process: subprocess.Popen[bytes], payments: int | None, deadline: float) -> None:
        """Wait until this many payments are booked; with None, until the last payment of each partition is booked."""
        while True:
            _, distinct, ends = self._booked()
            if ends == PARTITIONS if payments is None else distinct >= payments:
                return
            if process.poll() is not None or time.monotonic() > deadline:
                log = self._log.read_text(errors="replace")[-2000:]
                print(f"{self.name} makes no progress; the end of its log:\n{log}")
                raise SystemExit(1)
            time.sleep(0.02)

    def _booked(self) -> tuple[int, int, int]:
        """Return the rows, the distinct payments, and in how many partitions the last payment was booked."""
        with closing(sqlite3.connect(self._books, timeout=30)) as books:
            try:
                rows, distinct = books.execute(
                    "select count(*), count(distinct number) from booked where number >= 0"
                ).fetchone()
                (ends,) = books.execute(
                    "select count(distinct account) from booked where number = ?", (LAST,)
                ).fetchone()
            except sqlite3.OperationalError:
                return 0, 0, 0  # the table does not exist yet
        return int(rows), int(distinct), int(ends)


@click.command(help=__doc__.partition("\n")[0])
@click.option("--brokers", help="A Kafka. Without it, an embedded broker is used.")
@click.option("--payments", default=6000, show_default=True, help="How many payments there are.")
@click.option("--kills", default=4, show_default=True, help="How often each of the two programs is killed.")
@click.option("--session", default=6.0, show_default=True, help="Seconds until the group notices a killed member.")
@click.option("--within", default=300.0, show_default=True, help="Seconds within which every payment must be booked.")
def main(brokers: str | None, payments: int, kills: int, session: float, within: float) -> None:
    stage = new_stage()
    console = Console(highlight=False)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kconsume-migration-")))
        console.print("starting an embedded broker …" if brokers is None else "creating a topic …")
        address = opened.enter_context(topics(brokers, stage, [stage]))
        _send(address, stage, [_payment(number) for number in range(payments)])
        milliseconds = f"{1000 * session:.0f}"
        environment = {
            **clean_environment(),
            "PAYMENTS": stage,
            "BROKERS": address,
            "SESSION_MS": milliseconds,
            "KCONSUME_BROKERS": address,
            "KCONSUME_KAFKA_SESSION_TIMEOUT_MS": milliseconds,
        }
        sides = [
            Side("while True: poll()", "loop", folder, environment),
            Side("kconsume", "service", folder, environment),
        ]
        ends = [{"number": LAST, "account": f"end-{partition}", "cents": 1} for partition in range(PARTITIONS)]
        last_kill = Barrier(len(sides), action=lambda: _send(address, stage, ends))
        console.print(f"booking {payments:,} payments with both programs, {kills} kills each …")
        with ThreadPoolExecutor() as both:
            deadline = time.monotonic() + within
            counts = list(both.map(lambda side: side.killed(kills, payments, last_kill, deadline), sides))
    _show(counts, payments)
    ours = counts[1]
    sys.exit(0 if ours.lost(payments) == ours.twice == 0 else 1)


def _payment(number: int) -> dict[str, object]:
    return {"number": number, "account": f"account-{number % 97}", "cents": 100 + number % 900}


def _send(brokers: str, topic: str, payments: list[dict[str, object]]) -> None:
    producer = Producer({"bootstrap.servers": brokers, "enable.idempotence": True})
    for place, payment in enumerate(payments):
        producer.produce(topic, json.dumps(payment), partition=place % PARTITIONS)
    if producer.flush(60):
        raise SystemExit("the brokers did not confirm the payments within 60 s")


def _show(counts: list[Count], payments: int) -> None:
    table = Table("", "payments", "kills", "rows", "lost", "booked twice", title="Booked payments")
    for column in table.columns[1:]:
        column.justify = "right"
    for count in counts:
        lost, twice = count.lost(payments), count.twice
        table.add_row(
            count.name, f"{payments:,}", str(count.kills), f"{count.rows:,}", f"{lost:,}", f"{twice:,}",
            style="bold red" if lost or twice else "green",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
