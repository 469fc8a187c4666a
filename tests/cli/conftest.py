"""A shop on the command line: a folder with modules, an embedded broker, and `kconsume` in real processes."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kconsume._embedded.named_broker import NamedBroker, attach
from tests.fix_kafka import produce
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0

APP = """
    import sqlite3
    import msgspec
    from kconsume import App, Record

    app = App("embedded://shop", group="shop", offsets="sqlite:///shop.db")

    class Order(msgspec.Struct):
        id: int

    @app.consume("orders")
    def reserve(order: Order, tx: sqlite3.Connection) -> None:
        tx.execute("insert into reserved values (?)", (order.id,))
"""
"""A good app: each order becomes a row, in one transaction with its offset."""


class Running:
    """A `kconsume` that runs; what it says goes to files."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self._folder = folder

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self._folder / "err").read_text()

    def await_err(self, words: str) -> None:
        eventually(lambda: words in self.err or self.process.poll() is not None, what=f"{words!r} in {self.err}")
        assert words in self.err

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(DEADLINE)


class Shop:
    """A folder of a person's own, with the command line in it."""

    def __init__(self, folder: Path, runtime: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        """In the environment of every process that was started here, and of those that they started."""
        self._runtime = runtime
        self._started: list[Running] = []

    def write(self, module: str, source: str = APP) -> None:
        """At once, as an editor saves: one who watches the folder must not find half of it."""
        saved = self.folder / f"{module}.saved"
        saved.write_text(textwrap.dedent(source))
        saved.rename(self.folder / f"{module}.py")

    def start(self, *arguments: str, **environment: str) -> Running:
        """`kconsume …` in the background."""
        logs = Path(tempfile.mkdtemp(dir=self._runtime))
        with (logs / "out").open("wb") as out, (logs / "err").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "kconsume", *arguments],
                cwd=self.folder,
                env=self._environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self._started.append(Running(process, logs))
        return self._started[-1]

    def run(self, *arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """`kconsume …` to its end."""
        return self.python("-m", "kconsume", *arguments, stdin=stdin, **environment)

    def python(self, *arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """`python …` to its end."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self._environment(environment),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )

    def broker(self, **topics: int) -> NamedBroker:
        """The embedded broker `shop` with these topics."""
        broker = attach("shop")
        for topic, partitions in topics.items():
            broker.create_topic(topic, partitions)
        return broker

    def order(self, *values: bytes | None, partition: int = 0) -> None:
        produce(attach("shop").bootstrap, "orders", values, partition=partition)

    def make_table(self) -> None:
        with closing(sqlite3.connect(self.folder / "shop.db")) as database:
            database.execute("create table reserved (id integer)")

    def reserved(self) -> list[int]:
        with closing(sqlite3.connect(self.folder / "shop.db")) as database:
            return [row[0] for row in database.execute("select id from reserved order by id")]

    def processes(self) -> list[str]:
        """What still runs of all that was started here, by command line; brokers that should outlive it too."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue  # it ended just now, or is not ours to read
        return found

    def close(self) -> None:
        for running in self._started:
            if running.process.poll() is None:
                running.process.kill()
                running.process.wait(DEADLINE)

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KCONSUME_")}
        ours = {"PYTHONPATH": str(ROOT), "KCONSUME_TEST_MARK": self.mark, "COLUMNS": "200"}
        return {**inherited, **ours, **more}


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """A shop of this test's own; what still runs of it at the end is killed."""
    with tempfile.TemporaryDirectory() as runtime:  # pytest's tmp_path is too long a path for a socket
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        opened = Shop(tmp_path, Path(runtime))
        yield opened
        opened.close()
        for pid in Path(runtime, "kconsume").glob("*.pid"):
            os.kill(int(pid.read_text()), signal.SIGKILL)
