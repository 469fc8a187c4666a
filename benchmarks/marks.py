"""The clock of a run: stopped by the records themselves, from inside the handler.

Both sides call the same handlers, so both pay the same for being measured: one look at the value, some
nanoseconds a record. Nothing of kconsume is patched, watched or asked for a time; start-up, group join, the
idle wait at the end and closing all lie outside the first and the last mark.

CPU time is the whole process's, the client's own threads included, between the same two moments.

Handlers that get a table, or a list of messages, look at no value at all. Their clock is stopped by how many
records they have got: `tally` costs a microsecond a batch. Where a database is measured, what is tallied are the
transactions, when they have committed (`witness.py`).
"""

from __future__ import annotations

import sqlite3
import time
from typing import NamedTuple

from benchmarks.orders import MARKS, Order, counted


class Moment(NamedTuple):
    wall: float
    cpu: float


class Span(NamedTuple):
    """From the first record handled to the last."""

    seconds: float
    cpu: float


class Tally(NamedTuple):
    """A batch that was handed over, or a transaction that has committed."""

    records: int
    moment: Moment


_marks: list[Moment] = []


def mark() -> None:
    """A mark was handled. From any thread."""
    _marks.append(Moment(time.perf_counter(), time.process_time()))


def restart() -> None:
    """The topic is read once more in this process."""
    _marks.clear()


def span() -> Span:
    """What was measured in this process; fails unless every mark of the topic came exactly once."""
    return between(_marks)


def between(marks: list[Moment]) -> Span:
    if len(marks) != MARKS:
        raise AssertionError(f"{len(marks)} marks were handled, and the topic has {MARKS}: lost or repeated records")
    walls, cpus = zip(*marks, strict=True)
    return Span(max(walls) - min(walls), max(cpus) - min(cpus))


_tallies: list[Tally] = []


def tally(records: int) -> None:
    """So many records were handed over, or committed. From any thread."""
    _tallies.append(Tally(records, Moment(time.perf_counter(), time.process_time())))


def tallied() -> int:
    """How many records were handed over in this process, or committed."""
    return sum(batch.records for batch in _tallies)


def mean_tally() -> int:
    return max(1, tallied() // len(_tallies))


def stretch(records: int) -> tuple[Span, int]:
    """What was measured in this process by tallies, and for how many records."""
    return between_tallies(_tallies, records)


def between_tallies(tallies: list[Tally], records: int) -> tuple[Span, int]:
    """From the first batch to the one with which as many records were there as lie between the marks: what comes
    behind is the end of the topic. The first batch itself was made before the clock ran, and does not count."""
    first, *rest = sorted(tallies, key=lambda tally: tally.moment)
    count = 0
    for batch in rest:
        count += batch.records
        if first.records + count >= counted(records):
            return Span(batch.moment.wall - first.moment.wall, batch.moment.cpu - first.moment.cpu), count
    raise AssertionError(f"{first.records + count} records in {len(tallies)} batches: too few to measure {records}")


# The handlers. They must do no more than they say: what they cost dilutes every ratio.


def noop(value: bytes) -> None:
    if not value:
        mark()


def typed_noop(order: Order) -> None:
    if not order.quantity:
        mark()


def batch_noop(values: list[bytes]) -> None:
    if not all(values):
        for value in values:
            noop(value)


async def async_noop(value: bytes) -> None:
    if not value:
        mark()


class Stock:
    """A resource: something that a handler gets, and that it leaves alone."""


def stocked_noop(value: bytes, stock: Stock) -> None:  # noqa: ARG001  (that it is handed over is what is measured)
    if not value:
        mark()


INSERT = "insert into effects (value) values (?)"


def insert(value: bytes, tx: sqlite3.Connection) -> None:
    if not value:
        mark()
    tx.execute(INSERT, (value,))
