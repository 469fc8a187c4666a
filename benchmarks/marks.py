"""The clock of a run. Two marks, which are special records, start and stop it inside the handler.

Both sides call the same handlers, so the measurement costs both the same: one check of the value, some nanoseconds for
each record. The clock uses nothing of kconsume. Start, group join, the idle wait at the end and closing are before the
first mark or after the last one.

The CPU time is that of the whole process, including the client's threads, between the same two moments.

Handlers that get a table, or a list of messages, check no value. They count records instead: `tally` costs a
microsecond for each batch. For databases, the records of committed transactions are counted (`witness.py`).
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
    """The time from the first handled mark to the last one."""

    seconds: float
    cpu: float


class Tally(NamedTuple):
    """A batch that a handler got, or a transaction that has committed."""

    records: int
    moment: Moment


_marks: list[Moment] = []


def mark() -> None:
    """Note that a mark was handled. Can be called from any thread."""
    _marks.append(Moment(time.perf_counter(), time.process_time()))


def restart() -> None:
    """Delete all recorded marks, before the topic is read again in this process."""
    _marks.clear()


def span() -> Span:
    """Return the time between the marks. Raises unless every mark of the topic came exactly once."""
    return between(_marks)


def between(marks: list[Moment]) -> Span:
    if len(marks) != MARKS:
        raise AssertionError(f"{len(marks)} marks were handled, and the topic has {MARKS}: lost or repeated records")
    walls, cpus = zip(*marks, strict=True)
    return Span(max(walls) - min(walls), max(cpus) - min(cpus))


_tallies: list[Tally] = []


def tally(records: int) -> None:
    """Note that a handler got this many records, or that they were committed. Can be called from any thread."""
    _tallies.append(Tally(records, Moment(time.perf_counter(), time.process_time())))


def tallied() -> int:
    """Return how many records were counted in this process."""
    return sum(batch.records for batch in _tallies)


def mean_tally() -> int:
    return max(1, tallied() // len(_tallies))


def stretch(records: int) -> tuple[Span, int]:
    """Return the time by counted batches, and the number of records in that time."""
    return between_tallies(_tallies, records)


def between_tallies(tallies: list[Tally], records: int) -> tuple[Span, int]:
    """Measure from the first batch to the batch with which `records` records are complete.

    Later batches are the end of the topic. The records of the first batch do not count, because they were handled
    before the clock started.
    """
    first, *rest = sorted(tallies, key=lambda tally: tally.moment)
    count = 0
    for batch in rest:
        count += batch.records
        if first.records + count >= counted(records):
            return Span(batch.moment.wall - first.moment.wall, batch.moment.cpu - first.moment.cpu), count
    raise AssertionError(f"{first.records + count} records in {len(tallies)} batches: too few to measure {records}")


# The handlers. They must be as cheap as possible, because their cost moves every ratio towards 1.


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
    """A resource that a handler gets and does not use."""


def stocked_noop(value: bytes, stock: Stock) -> None:  # noqa: ARG001  (the cost of passing it is measured)
    if not value:
        mark()


INSERT = "insert into effects (value) values (?)"


def insert(value: bytes, tx: sqlite3.Connection) -> None:
    if not value:
        mark()
    tx.execute(INSERT, (value,))
