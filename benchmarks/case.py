"""A case: two sides that do the same work, and the bar that their comparison must meet.

A side runs in a fresh process (`side.py`), gets a `Task` and returns a `Measured`. It must check its own counts, and
raise if a record is missing or came twice. The two sides of a case must be measured alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, NamedTuple, Protocol

import msgspec

from benchmarks.orders import Form
from benchmarks.ratios import Bar

Side = Literal["ours", "theirs"]
Database = Literal["postgres", "redis"]


class Task(msgspec.Struct, frozen=True):
    """The work of one side in one run."""

    bootstrap: str
    topic: str
    records: int
    """The number of orders between the marks. `orders.total` is the number of all records."""
    group: str = ""
    """A new one for each run."""
    transaction: int | None = None
    """How many records kconsume had in a transaction, for a side that must do the same."""
    postgres: str = ""
    redis: str = ""
    """Addresses, for a case that needs them."""


class Measured(msgspec.Struct, frozen=True):
    """The result of one side in one run."""

    figure: float
    """In the unit of the case. The figures of both sides are compared."""
    cpu: float
    """Seconds of CPU time of all threads of the process."""
    records: int
    """The number of records by which the CPU time is divided."""
    transaction: int | None = None


class Unit(NamedTuple):
    """How figures are shown: `text.format(figure)`; the CPU seconds of a record, times `cpu_scale`, by `cpu`."""

    text: str
    cpu: str = "{:.2f} µs"
    cpu_scale: float = 1e6

    def figure(self, measured: Measured) -> str:
        return self.text.format(measured.figure)

    def cost(self, measured: Measured) -> str:
        return self.cpu.format(measured.cpu / measured.records * self.cpu_scale)


class Topics(Protocol):
    """Topics with orders, created at the first request and then shared."""

    def orders(self, records: int, form: Form = "bytes") -> Task:
        """Return a task on a topic with this many orders."""
        ...


class Case(ABC):
    """One line of the table."""

    name: ClassVar[str]
    about: ClassVar[str]
    bar: ClassVar[Bar]
    unit: ClassVar[Unit] = Unit("{:,.0f}/s")
    names: ClassVar[tuple[str, str]] = ("kconsume", "bare loop")
    """The names of the sides in the table."""
    most_rounds: ClassVar[int | None] = None
    """A limit for a case whose rounds are long and alike."""
    warm_up: ClassVar[bool] = True
    """True if a first round is run and discarded: it pays for cold caches and for the broker's JIT."""

    needs: ClassVar[tuple[Database, ...]] = ()
    """The databases that the case needs besides the broker. Their addresses are in the task."""

    own_topics: ClassVar[bool] = False
    """True if its topics are too large to keep until the end of the run."""

    def tasks(self, topics: Topics, records: int) -> tuple[Task, Task]:
        """Return the tasks of both sides. They are the same, unless the case is about their difference."""
        task = topics.orders(records)
        return task, task

    @abstractmethod
    def ours(self, task: Task) -> Measured: ...

    @abstractmethod
    def theirs(self, task: Task) -> Measured: ...
