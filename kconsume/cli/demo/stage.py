"""The parts of the demo: a broker, a producer, two consumer processes, and the file that they write.

All processes end with the process that started them, also if that process is killed. This module prints nothing.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path

import kconsume
from kconsume._config import environment
from kconsume._embedded.named_broker import attach
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.outgoing import Outgoing, encoded
from kconsume._kafka.producer import Producer, producer_settings
from kconsume.cli.demo import app as demo_app
from kconsume.errors import ConfigurationError, KconsumeError, SendFailed
from kconsume.records import Partition
from kconsume.testing.services import child_guard

TOPIC = "orders"
PARTITIONS = 4

_GROUP = "demo"
_MARK = 0x6B636F6E
"""The `application_id` of SQLite files that the demo has made, and may replace."""
_SKUS = ("apple", "pear", "plum", "quince", "cherry", "medlar", "sloe", "fig")
_STOP_SECONDS = 30.0


class DemoFailed(KconsumeError):
    """The demo could not run to its end."""


# The file


def prepare(file: Path) -> None:
    """Make a new file with the table of orders. Replaces the file of an earlier demo, and no other file."""
    if file.exists() and not _is_ours(file):
        raise ConfigurationError(f"{file} is not a file of the demo, so it is not replaced: name another with --keep")
    try:
        for path in _files(file):
            path.unlink(missing_ok=True)
        with closing(sqlite3.connect(file)) as made:
            made.execute(f"pragma application_id = {_MARK}")
            made.execute("pragma journal_mode = wal")
            made.execute(demo_app.TABLE)
    except (OSError, sqlite3.Error) as error:
        raise ConfigurationError(f"{file} cannot be written ({error}): name another with --keep") from error


def tidy(file: Path) -> None:
    """Remove the lock file, after the last writer has ended."""
    Path(f"{file}-turnstile").unlink(missing_ok=True)


def _files(file: Path) -> list[Path]:
    return [Path(f"{file}{suffix}") for suffix in ("", "-wal", "-shm", "-journal", "-turnstile")]


def _is_ours(file: Path) -> bool:
    try:
        with closing(sqlite3.connect(file)) as opened:
            return bool(opened.execute("pragma application_id").fetchone() == (_MARK,))
    except sqlite3.Error:
        return False


class DemoDatabase:
    """Reads the file. The demo takes every number about the consumers' work from here."""

    def __init__(self, file: Path) -> None:
        self._connection = sqlite3.connect(file, timeout=5.0)

    def close(self) -> None:
        self._connection.close()

    def rows(self) -> dict[str, int]:
        """Rows by consumer."""
        return dict(self._connection.execute("select consumer, count(*) from orders group by consumer"))

    def distinct(self) -> int:
        return self._number("select count(distinct id) from orders")

    def passed(self) -> int:
        """How many records are handled, by the stored offsets."""
        if not self._has_offsets():
            return 0
        return self._number("select coalesce(sum(next_offset), 0) from kconsume_offsets where group_id = ?", _GROUP)

    def owners(self) -> dict[int, int]:
        """The id of the process that owns each partition; kconsume writes the owner as host:pid:random."""
        if not self._has_offsets():
            return {}
        rows = self._connection.execute(
            "select partition, owner from kconsume_offsets where group_id = ? and owner is not null", (_GROUP,)
        )
        return {partition: int(owner.split(":")[-2]) for partition, owner in rows}

    def span(self) -> float:
        """Seconds from the first row to the last."""
        (seconds,) = self._connection.execute("select max(at) - min(at) from orders").fetchone()
        return float(seconds or 0.0)

    def first_row_after(self, moment: float, consumer: str, partitions: set[int]) -> float | None:
        """The time of this consumer's first row of these partitions after a moment; None if there is none."""
        marks = ",".join("?" * len(partitions))
        (at,) = self._connection.execute(
            f"select min(at) from orders where at > ? and consumer = ? and partition in ({marks})",
            (moment, consumer, *sorted(partitions)),
        ).fetchone()
        return None if at is None else float(at)

    def _number(self, query: str, *arguments: str) -> int:
        return int(self._connection.execute(query, arguments).fetchone()[0])

    def _has_offsets(self) -> bool:
        """False until a consumer claims its first partition: this creates the table."""
        return bool(self._number("select count(*) from sqlite_master where name = 'kconsume_offsets'"))


# The processes


class ConsumerProcess:
    """A process with `kconsume run`. It ends when this process ends."""

    def __init__(self, name: str, environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.killed = False
        self.stopped = False
        self._log = log
        command = [sys.executable, "-P", "-m", "kconsume", "run", f"{demo_app.__name__}:app"]
        with log.open("wb") as written:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", child_guard.__file__, str(os.getpid()), "-", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=written,
                env={**environment, "KCONSUME_DEMO_CONSUMER": name},
                start_new_session=True,  # Ctrl-C must not reach it: the demo stops its consumers itself
            )
        assert self._guard.stdout is not None
        with self._guard.stdout as output:
            self.pid = int(output.readline() or 0)

    @property
    def running(self) -> bool:
        return self._guard.poll() is None

    def kill(self) -> float:
        """Send SIGKILL. Returns the time of the kill, in seconds since 1970."""
        self.killed = True
        moment = time.time()
        os.kill(self.pid, signal.SIGKILL)
        self._guard.wait(_STOP_SECONDS)
        return moment

    def stop(self) -> int:
        """Send SIGTERM. Returns the exit code."""
        self.stopped = True
        if self.running:
            os.kill(self.pid, signal.SIGTERM)
        try:
            return self._guard.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGKILL)
            return self._guard.wait()

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])


class Stage:
    """The broker, the producer and the consumers of one demo."""

    def __init__(self, file: Path, folder: Path) -> None:
        self.broker = attach(f"demo-{uuid.uuid4().hex[:8]}", until_exit=True)
        self.broker.create_topic(TOPIC, PARTITIONS)
        self.consumers: list[ConsumerProcess] = []
        self._folder = folder
        self._environment = _environment(file, self.broker.name)
        self._producer = Producer(producer_settings(self.broker.bootstrap, {"linger.ms": 20}), "demo")
        self._unconfirmed: list[Future[None]] = []
        self._cluster = Cluster(self.broker.bootstrap)
        self.sent = 0

    def start_consumer(self) -> None:
        name = f"consumer {len(self.consumers) + 1}"
        log = self._folder / f"{name}.log"
        self.consumers.append(ConsumerProcess(name, self._environment, log))

    def send(self, upto: int) -> None:
        """Produce orders until `upto` were sent in all."""
        orders = [encoded(_order(number), TOPIC, self._producer.max_message_bytes) for number in range(self.sent, upto)]
        self._unconfirmed.append(self._producer.deliver(orders))
        self.sent = upto

    def flush(self) -> None:
        """Wait until the broker has confirmed all orders."""
        try:
            for delivery in self._unconfirmed:
                delivery.result(_STOP_SECONDS)
        except (SendFailed, TimeoutError) as error:
            raise DemoFailed(f"the broker did not take the orders: {str(error) or 'no answer'}") from error

    def produced(self) -> int:
        """How many records the topic has, by its end offsets."""
        partitions = [Partition(TOPIC, number) for number in range(PARTITIONS)]
        return sum(self._cluster.edges(partitions, "latest").values())

    def close(self) -> None:
        for consumer in self.consumers:
            if consumer.running:
                consumer.stop()
        self._producer.close(0)
        self.broker.stop()


def _order(number: int) -> Outgoing:
    value = {"id": number, "sku": _SKUS[number % len(_SKUS)], "quantity": 1 + number % 5}
    return Outgoing(value, b"customer-%d" % (number * 7919 % 997))


@contextmanager
def open_stage(file: Path) -> Iterator[Stage]:
    """A stage whose processes and log files are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="kconsume-demo-") as folder:
        opened = Stage(file, Path(folder))
        try:
            yield opened
        finally:
            opened.close()
            tidy(file)


def _environment(file: Path, broker: str) -> dict[str, str]:
    """The environment of a consumer, with the kconsume of this process on its path.

    The user's KCONSUME_* settings are left out, because the demo has its own broker, group and store.
    """
    here = str(Path(kconsume.__file__).parents[1])
    return {
        **{name: value for name, value in os.environ.items() if not environment.sets(name)},
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
        "KCONSUME_DEMO_FILE": str(file),
        "KCONSUME_DEMO_BROKERS": f"embedded://{broker}",
    }
