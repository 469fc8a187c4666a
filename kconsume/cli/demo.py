"""`kconsume demo`: two consumers, one of them killed in mid-stream, and the rows counted at the end.

Here is the play, from the first process to the count. The props are `demo_stage.py`'s, the looks `demo_screen.py`'s,
the consumer is `demo_app.py`.
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

from kconsume.cli.demo_screen import Line, Result, Screen, View, screen, show_result
from kconsume.cli.demo_stage import PARTITIONS, Books, ConsumerProcess, DemoFailed, Stage, prepare, stage
from kconsume.runtime.budget import Deadline

ORDERS = 24_000
SECONDS = 8.0
"""How long the stream of orders takes."""
KILLED_AFTER = 0.4
"""The share of the orders after which a consumer is killed."""

_TICK = 0.05
_PATIENCE = 15.0
"""Seconds in which nothing goes on, before the rest is given up."""
_START = 60.0
"""Seconds that the consumers have to start: each is a process, and the machine may be busy."""


@click.command(short_help="See it work: one of two consumers is killed, nothing is lost.")
@click.option(
    "--keep",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    default="kconsume-demo.db",
    metavar="FILE",
    help="Where the rows and the offsets go; kconsume-demo.db unless said otherwise. Replaced by the next demo.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the counts as one JSON document, and nothing else.")
@click.pass_context
def demo(context: click.Context, file: Path, as_json: bool) -> None:
    """See it work, in twenty seconds and with nothing to install.

    Starts a Kafka in memory, a producer of orders and two consumers, each a process of its own. A decorated
    function writes a row for each order; the rows and the offsets go to one SQLite file in one transaction. In
    mid-stream one consumer is killed with kill -9, and the other takes over. Then the rows are counted.

    \b
      kconsume demo
      kconsume demo --keep orders.db

    Exit code 0 if there is exactly one row for each order produced, else 1.
    """
    console = Console(highlight=False, quiet=as_json)
    try:
        with _interruptible(), stage_of(file) as (props, books), screen(console) as shown:
            result = Play(props, books, shown, str(file)).play()
    except _Interrupted as interrupted:
        click.echo(f"Interrupted; no process is left. What was written so far is in {file}.", err=True)
        context.exit(128 + interrupted.number)
    if as_json:
        click.echo(msgspec.json.encode(result))
    else:
        show_result(console, result)
    context.exit(0 if result.ok else 1)


@contextmanager
def stage_of(file: Path) -> Iterator[tuple[Stage, Books]]:
    prepare(file)
    with stage(file) as props, closing(Books(file)) as books:
        yield props, books


class Play:
    """The demo from its first process to the count."""

    def __init__(self, props: Stage, books: Books, shown: Screen, file: str) -> None:
        self._props = props
        self._books = books
        self._screen = shown
        self._file = file
        self._now = ""
        self._killed_at = 0.0
        self._orphans: set[int] = set()
        """Partitions of the consumer that was killed."""

    def play(self) -> Result:
        self._gather()
        self._stream()
        self._catch_up()
        return self._count(self._leave())

    # The acts

    def _gather(self) -> None:
        """Start the consumers and wait until they share the partitions."""
        self._tell("two consumers start, and share 4 partitions between them")
        for _ in range(2):
            self._props.start_consumer()
        self._await(self._is_shared, "the consumers did not share the partitions")

    def _stream(self) -> None:
        """Produce at a steady pace; in the middle, kill one consumer."""
        self._tell("orders stream in; each becomes a row, in one transaction with its offset")
        began = time.monotonic()
        while self._props.sent < ORDERS:
            self._props.send(min(ORDERS, int((time.monotonic() - began) / SECONDS * ORDERS)))
            if not self._orphans and self._props.sent >= KILLED_AFTER * ORDERS:
                self._kill(self._props.consumers[-1])
            self._notice_take_over()
            self._look()
            time.sleep(_TICK)
        self._props.flush()

    def _kill(self, victim: ConsumerProcess) -> None:
        self._tell(f"killing {victim.name} with kill -9")
        self._orphans = {partition for partition, pid in self._books.owners().items() if pid == victim.pid}
        self._killed_at = victim.kill()
        self._tell(f"{victim.name} is dead; the group has not noticed yet, and {self._orphaned} stand still")

    def _notice_take_over(self) -> None:
        survivor = self._props.consumers[0]
        owners = self._books.owners()
        if self._orphans and all(owners[partition] == survivor.pid for partition in self._orphans):
            self._tell(f"{survivor.name} has taken over {self._orphaned}, at the offsets where the rows end")

    def _catch_up(self) -> None:
        """Wait until every offset is passed, for as long as that goes on. What is missing after that is lost, and
        counted so."""
        produced, known = self._props.produced(), -1
        deadline = Deadline(_PATIENCE)
        while (passed := self._books.passed()) < produced and not deadline.passed:
            if passed > known:
                known, deadline = passed, Deadline(_PATIENCE)
            self._notice_take_over()
            self._look()
            time.sleep(_TICK)

    def _leave(self) -> list[str]:
        """Stop the survivor as a deployment would; what there is to complain of."""
        survivor = self._props.consumers[0]
        self._tell(f"all is handled; {survivor.name} is asked to stop (SIGTERM), drains and leaves")
        code = survivor.stop()
        self._look()
        return [] if code == 0 else [f"{survivor.name} ended with exit code {code}:\n{survivor.last_words()}"]

    def _count(self, complaints: list[str]) -> Result:
        by_consumer = self._books.rows()
        produced, rows, distinct = self._props.produced(), sum(by_consumer.values()), self._books.distinct()
        victim, survivor = self._props.consumers[-1], self._props.consumers[0]
        first = self._books.first_row_after(self._killed_at, survivor.name, self._orphans)
        result = Result(
            produced=produced,
            handled=self._books.passed(),
            rows=rows,
            distinct=distinct,
            lost=produced - distinct,
            duplicated=rows - distinct,
            seconds=self._books.span(),
            take_over=None if first is None else first - self._killed_at,
            by_consumer=by_consumer,
            file=self._file,
            complaints=complaints,
        )
        complaints.extend(complaints_of(result, victim.name))
        return result

    # Steps

    @property
    def _orphaned(self) -> str:
        return f"its partitions {', '.join(map(str, sorted(self._orphans)))}"

    def _is_shared(self) -> bool:
        owners = list(self._books.owners().values())
        return len(owners) == PARTITIONS and all(
            owners.count(consumer.pid) == PARTITIONS // 2 for consumer in self._props.consumers
        )

    def _await(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = Deadline(_START)
        while not condition():
            if deadline.passed:
                raise DemoFailed(f"{otherwise} within {_START:g} s: is the machine very busy? Try again")
            self._look()
            time.sleep(_TICK)

    def _tell(self, now: str) -> None:
        if now != self._now:
            self._now = now
            self._look()

    def _look(self) -> None:
        for consumer in self._props.consumers:
            if not consumer.running and not consumer.killed and not consumer.stopped:
                raise DemoFailed(f"{consumer.name} ended by itself; its last words were\n{consumer.last_words()}")
        rows, owners = self._books.rows(), self._books.owners()
        lines = [
            Line(
                consumer.name,
                consumer.pid,
                consumer.killed,
                sorted(partition for partition, pid in owners.items() if pid == consumer.pid),
                rows.get(consumer.name, 0),
            )
            for consumer in self._props.consumers
        ]
        self._screen.show(View(self._now, self._props.sent, ORDERS, lines))


def complaints_of(result: Result, victim: str) -> Iterator[str]:
    """Which counts do not agree."""
    if result.lost:
        yield f"{result.lost:,} orders were produced and have no row"
    if result.duplicated:
        yield f"{result.duplicated:,} rows are there twice"
    if result.rows != result.produced:
        yield f"{result.rows:,} rows for {result.produced:,} orders"
    if result.handled != result.produced:
        yield f"offsets say {result.handled:,} of {result.produced:,} orders were handled"
    if result.take_over is None:
        yield f"nobody took over the partitions of {victim}"


class _Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal end the play, and the stage is cleared."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  (Python's signature)
        raise _Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
