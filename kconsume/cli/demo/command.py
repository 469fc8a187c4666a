"""`kconsume demo`: runs two consumers, kills one of them while orders arrive, and counts the rows at the end.

This module holds the steps, from the first process to the count. `stage` has the processes and the file, `screen`
prints, and `app` is the consumer.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

import click
import msgspec
from rich.console import Console

from kconsume._runtime.deadlines import Deadline
from kconsume.cli.demo.screen import Result, Screen, ScreenLine, View, screen, show_result
from kconsume.cli.demo.stage import PARTITIONS, ConsumerProcess, DemoDatabase, DemoFailed, Stage, open_stage, prepare

ORDERS = 24_000
SECONDS = 8.0
"""How long orders are produced."""
KILLED_AFTER = 0.4
"""The share of the orders that are produced before a consumer is killed."""

_TICK = 0.05
_PATIENCE = 15.0
"""Seconds without progress, before the demo stops waiting."""
_START = 60.0
"""Seconds for the consumers to start: each is a process, and the machine may be busy."""


@click.command(short_help="Watch a takeover: one of two consumers is killed, nothing is lost.")
@click.option(
    "--keep",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    default="kconsume-demo.db",
    metavar="FILE",
    help="The file for the rows and the offsets. The next demo replaces it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print only the counts, as one JSON document.")
@click.pass_context
def demo(context: click.Context, file: Path, as_json: bool) -> None:
    """Watch a takeover, in twenty seconds and with nothing to install.

    Starts a Kafka in memory, a producer of orders and two consumers, each a process of its own. A decorated function
    writes a row for each order, in one transaction with the offset, into one SQLite file. While orders arrive, one
    consumer is killed with kill -9, and the other takes over its partitions. Then the rows are counted.

    \b
      kconsume demo
      kconsume demo --keep orders.db

    Exit code 0 if there is exactly one row for each order produced, else 1.
    """
    console = Console(highlight=False, quiet=as_json)
    try:
        with _interruptible(), _opened(file) as (stage, database), screen(console) as shown:
            result = DemoRun(stage, database, shown, str(file)).run()
    except _Interrupted as interrupted:
        click.echo(f"Interrupted; all processes have ended. The rows that were written so far are in {file}.", err=True)
        context.exit(128 + interrupted.number)
    if as_json:
        click.echo(msgspec.json.encode(result))
    else:
        show_result(console, result)
    context.exit(0 if result.ok else 1)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Stage, DemoDatabase]]:
    prepare(file)
    with open_stage(file) as stage, closing(DemoDatabase(file)) as database:
        yield stage, database


class DemoRun:
    """The demo from its first process to the count."""

    def __init__(self, stage: Stage, database: DemoDatabase, shown: Screen, file: str) -> None:
        self._stage = stage
        self._database = database
        self._screen = shown
        self._file = file
        self._now = ""
        self._killed_at = 0.0
        self._lost_partitions: set[int] = set()
        """The partitions of the killed consumer."""

    def run(self) -> Result:
        self._start_consumers()
        self._stream()
        self._catch_up()
        return self._count(self._leave())

    # The steps

    def _start_consumers(self) -> None:
        """Start the consumers and wait until they share the partitions."""
        self._step("two consumers start, and share 4 partitions between them")
        for _ in range(2):
            self._stage.start_consumer()
        self._await(self._is_shared, "the consumers did not share the partitions")

    def _stream(self) -> None:
        """Produce at a steady pace; in the middle, kill one consumer."""
        self._step("orders arrive; each becomes a row, in one transaction with its offset")
        began = time.monotonic()
        while self._stage.sent < ORDERS:
            self._stage.send(min(ORDERS, int((time.monotonic() - began) / SECONDS * ORDERS)))
            if not self._lost_partitions and self._stage.sent >= KILLED_AFTER * ORDERS:
                self._kill(self._stage.consumers[-1])
            self._notice_take_over()
            self._update()
            time.sleep(_TICK)
        self._stage.flush()

    def _kill(self, victim: ConsumerProcess) -> None:
        self._step(f"killing {victim.name} with kill -9")
        self._lost_partitions = {partition for partition, pid in self._database.owners().items() if pid == victim.pid}
        self._killed_at = victim.kill()
        self._step(f"{victim.name} is dead; the group has not noticed it yet, and {self._lost_text} do not move")

    def _notice_take_over(self) -> None:
        survivor = self._stage.consumers[0]
        owners = self._database.owners()
        if self._lost_partitions and all(owners[partition] == survivor.pid for partition in self._lost_partitions):
            self._step(f"{survivor.name} has taken over {self._lost_text}, at the offsets where the rows end")

    def _catch_up(self) -> None:
        """Wait until all orders are handled, as long as there is progress. Orders without a row then count as lost."""
        produced, known = self._stage.produced(), -1
        deadline = Deadline(_PATIENCE)
        while (passed := self._database.passed()) < produced and not deadline.passed:
            if passed > known:
                known, deadline = passed, Deadline(_PATIENCE)
            self._notice_take_over()
            self._update()
            time.sleep(_TICK)

    def _leave(self) -> list[str]:
        """Stop the survivor with SIGTERM, as a deployment does. Returns what went wrong."""
        survivor = self._stage.consumers[0]
        self._step(f"all orders are handled; {survivor.name} is asked to stop (SIGTERM), drains and leaves")
        code = survivor.stop()
        self._update()
        return [] if code == 0 else [f"{survivor.name} ended with exit code {code}:\n{survivor.log_tail()}"]

    def _count(self, complaints: list[str]) -> Result:
        by_consumer = self._database.rows()
        produced, rows, distinct = self._stage.produced(), sum(by_consumer.values()), self._database.distinct()
        victim, survivor = self._stage.consumers[-1], self._stage.consumers[0]
        first = self._database.first_row_after(self._killed_at, survivor.name, self._lost_partitions)
        result = Result(
            produced=produced,
            handled=self._database.passed(),
            rows=rows,
            distinct=distinct,
            lost=produced - distinct,
            duplicated=rows - distinct,
            seconds=self._database.span(),
            take_over=None if first is None else first - self._killed_at,
            by_consumer=by_consumer,
            file=self._file,
            complaints=complaints,
        )
        complaints.extend(complaints_of(result, victim.name))
        return result

    # Helpers

    @property
    def _lost_text(self) -> str:
        return f"partitions {', '.join(map(str, sorted(self._lost_partitions)))}"

    def _is_shared(self) -> bool:
        owners = list(self._database.owners().values())
        return len(owners) == PARTITIONS and all(
            owners.count(consumer.pid) == PARTITIONS // 2 for consumer in self._stage.consumers
        )

    def _await(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = Deadline(_START)
        while not condition():
            if deadline.passed:
                raise DemoFailed(f"{otherwise} within {_START:g} s: the machine may be busy: try again")
            self._update()
            time.sleep(_TICK)

    def _step(self, now: str) -> None:
        if now != self._now:
            self._now = now
            self._update()

    def _update(self) -> None:
        for consumer in self._stage.consumers:
            if not consumer.running and not consumer.killed and not consumer.stopped:
                raise DemoFailed(f"{consumer.name} ended unexpectedly; the end of its log:\n{consumer.log_tail()}")
        rows, owners = self._database.rows(), self._database.owners()
        lines = [
            ScreenLine(
                consumer.name,
                consumer.pid,
                consumer.killed,
                sorted(partition for partition, pid in owners.items() if pid == consumer.pid),
                rows.get(consumer.name, 0),
            )
            for consumer in self._stage.consumers
        ]
        self._screen.show(View(self._now, self._stage.sent, ORDERS, lines))


def complaints_of(result: Result, victim: str) -> Iterator[str]:
    """A sentence for each count that is wrong."""
    if result.lost:
        yield f"{result.lost:,} orders were produced and have no row"
    if result.duplicated:
        yield f"{result.duplicated:,} rows are duplicates"
    if result.rows != result.produced:
        yield f"{result.rows:,} rows for {result.produced:,} orders"
    if result.handled != result.produced:
        yield f"offsets say {result.handled:,} of {result.produced:,} orders were handled"
    if result.take_over is None:
        yield f"no consumer took over the partitions of {victim}"


class _Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal end the demo and all its processes."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  (Python's signature)
        raise _Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
