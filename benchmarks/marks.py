"""The clock of a run: stopped by the records themselves, from inside the handler.

Both sides call the same handlers, so both pay the same for being measured: one look at the value, some
nanoseconds a record. Nothing of kconsume is patched, watched or asked for a time; start-up, group join, the
idle wait at the end and closing all lie outside the first and the last mark.

CPU time is the whole process's, the client's own threads included, between the same two moments.
"""

from __future__ import annotations

import sqlite3
import time
from typing import NamedTuple

from benchmarks.orders import MARKS, Order


class Moment(NamedTuple):
    wall: float
    cpu: float


class Span(NamedTuple):
    """From the first record handled to the last."""

    seconds: float
    cpu: float


_marks: list[Moment] = []


def mark() -> None:
    """A mark was handled. From any thread."""
    _marks.append(Moment(time.perf_counter(), time.process_time()))


def span() -> Span:
    """What was measured in this process; fails unless every mark of the topic came exactly once."""
    return between(_marks)


def between(marks: list[Moment]) -> Span:
    if len(marks) != MARKS:
        raise AssertionError(f"{len(marks)} marks were handled, and the topic has {MARKS}: lost or repeated records")
    walls, cpus = zip(*marks, strict=True)
    return Span(max(walls) - min(walls), max(cpus) - min(cpus))


# The handlers. They must do no more than they say: what they cost dilutes every ratio.


def noop(value: bytes) -> None:
    if not value:
        mark()


def typed_noop(order: Order) -> None:
    if not order.quantity:
        mark()


INSERT = "insert into effects (value) values (?)"


def insert(value: bytes, tx: sqlite3.Connection) -> None:
    if not value:
        mark()
    tx.execute(INSERT, (value,))
