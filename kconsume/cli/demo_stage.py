"""What the demo plays with: a broker, a producer, two consumer processes, and the file they write.

Everything here ends with the process that opened the stage, however that ends; nothing is shown.
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
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
from confluent_kafka import KafkaError, Message, Producer

import kconsume
from kconsume import environment
from kconsume.cli import demo_app
from kconsume.cluster import Cluster
from kconsume.errors import ConfigurationError, KconsumeError
from kconsume.records import Partition
from kconsume.testing.broker import attach
from kconsume.testing.services import leash

TOPIC = "orders"
PARTITIONS = 4

_GROUP = "demo"
_MARK = 0x6B636F6E
"""SQLite's application_id of a file that the demo made, and may replace."""
_SKUS = ("apple", "pear", "plum", "quince", "cherry", "medlar", "sloe", "fig")
_STOP_SECONDS = 30.0


class DemoFailed(KconsumeError):
    """The demo could not be played to its end."""


# The file


def prepare(file: Path) -> None:
    """A new file with the table of orders. Replaces what an earlier demo has left, and nothing else."""
    if file.exists() and not _is_ours(file):
        raise ConfigurationError(f"{file} is not a file of the demo, and is not replaced: name another with --keep")
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
    """Remove what only writers need, after the last of them has ended."""
    Path(f"{file}-turnstile").unlink(missing_ok=True)


def _files(file: Path) -> list[Path]:
    return [Path(f"{file}{suffix}") for suffix in ("", "-wal", "-shm", "-journal", "-turnstile")]


def _is_ours(file: Path) -> bool:
    try:
        with closing(sqlite3.connect(file)) as opened:
            return bool(opened.execute("pragma application_id").fetchone() == (_MARK,))
    except sqlite3.Error:
        return False


class Books:
    """What the file says. Every number that the demo shows of the consumers' work comes from here."""

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
        """Records whose offsets are passed."""
        if not self._has_offsets():
            return 0
        return self._number("select coalesce(sum(next_offset), 0) from kconsume_offsets where group_id = ?", _GROUP)

    def owners(self) -> dict[int, int]:
        """The process that owns each partition; kconsume writes the owner as host:pid:random."""
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
        """When this consumer wrote its first row of these partitions after a moment."""
        marks = ",".join("?" * len(partitions))
        (at,) = self._connection.execute(
            f"select min(at) from orders where at > ? and consumer = ? and partition in ({marks})",
            (moment, consumer, *sorted(partitions)),
        ).fetchone()
        return None if at is None else float(at)

    def _number(self, query: str, *arguments: str) -> int:
        return int(self._connection.execute(query, arguments).fetchone()[0])

    def _has_offsets(self) -> bool:
        """The store makes its table when the first consumer claims."""
        return bool(self._number("select count(*) from sqlite_master where name = 'kconsume_offsets'"))


# The processes


class ConsumerProcess:
    """`kconsume run` in a process of its own, which dies with this one."""

    def __init__(self, name: str, environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.killed = False
        self.stopped = False
        self._log = log
        command = [sys.executable, "-P", "-m", "kconsume", "run", f"{demo_app.__name__}:app"]
        with log.open("wb") as written:
            self._leash = subprocess.Popen(
                [sys.executable, "-I", leash.__file__, str(os.getpid()), "-", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=written,
                env={**environment, "KCONSUME_DEMO_CONSUMER": name},
                start_new_session=True,  # Ctrl-C is for the demo, which stops its consumers itself
            )
        assert self._leash.stdout is not None
        with self._leash.stdout as said:
            self.pid = int(said.readline() or 0)

    @property
    def running(self) -> bool:
        return self._leash.poll() is None

    def kill(self) -> float:
        """`kill -9`; when that was, in seconds since 1970."""
        self.killed = True
        moment = time.time()
        os.kill(self.pid, signal.SIGKILL)
        self._leash.wait(_STOP_SECONDS)
        return moment

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        self.stopped = True
        if self.running:
            os.kill(self.pid, signal.SIGTERM)
        try:
            return self._leash.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGKILL)
            return self._leash.wait()

    def last_words(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])


class Stage:
    """The broker, the producer and the consumers of one demo."""

    def __init__(self, file: Path, folder: Path) -> None:
        self.broker = attach(f"demo-{uuid.uuid4().hex[:8]}", until_exit=True)
        self.broker.create_topic(TOPIC, PARTITIONS)
        self.consumers: list[ConsumerProcess] = []
        self._folder = folder
        self._environment = _environment(file, self.broker.name)
        self._producer = Producer(
            {"bootstrap.servers": self.broker.bootstrap, "enable.idempotence": True, "linger.ms": 20, "log_level": 0}
        )
        self._cluster = Cluster(self.broker.bootstrap)
        self._refused: KafkaError | None = None
        self.sent = 0

    def start_consumer(self) -> None:
        name = f"consumer {len(self.consumers) + 1}"
        log = self._folder / f"{name}.log"
        self.consumers.append(ConsumerProcess(name, self._environment, log))

    def send(self, upto: int) -> None:
        """Produce orders until so many were sent in all."""
        while self.sent < upto:
            order = {"id": self.sent, "sku": _SKUS[self.sent % len(_SKUS)], "quantity": 1 + self.sent % 5}
            customer = b"customer-%d" % (self.sent * 7919 % 997)
            self._producer.produce(TOPIC, msgspec.json.encode(order), customer, on_delivery=self._note)
            self.sent += 1
        self._producer.poll(0)

    def flush(self) -> None:
        left = self._producer.flush(_STOP_SECONDS)
        if left or self._refused is not None:
            raise DemoFailed(f"the broker did not take {left or 'all'} of the orders: {self._refused or 'no answer'}")

    def produced(self) -> int:
        """Records in the topic, as the broker counts them."""
        partitions = [Partition(TOPIC, number) for number in range(PARTITIONS)]
        return sum(self._cluster.edges(partitions, "latest").values())

    def close(self) -> None:
        for consumer in self.consumers:
            if consumer.running:
                consumer.stop()
        self.broker.stop()

    def _note(self, error: KafkaError | None, message: Message) -> None:  # noqa: ARG002  (the client's signature)
        self._refused = self._refused or error


@contextmanager
def stage(file: Path) -> Iterator[Stage]:
    """A stage that is cleared at the end, also of what the consumers logged."""
    with tempfile.TemporaryDirectory(prefix="kconsume-demo-") as folder:
        opened = Stage(file, Path(folder))
        try:
            yield opened
        finally:
            opened.close()
            tidy(file)


def _environment(file: Path, broker: str) -> dict[str, str]:
    """This environment, in which a consumer finds the kconsume that this process runs. Without what is said there of
    the person's own apps: the demo has its own broker, group and store."""
    here = str(Path(kconsume.__file__).parents[1])
    return {
        **{name: value for name, value in os.environ.items() if not environment.sets(name)},
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
        "KCONSUME_DEMO_FILE": str(file),
        "KCONSUME_DEMO_BROKERS": f"embedded://{broker}",
    }
