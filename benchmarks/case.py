"""A case: two sides that do the same work, and the bar that their comparison must meet.

A side runs in a new process (`side.py`), gets a `Task` and returns a `Measured`. It must check its own counts, and
raise if a record is missing or came twice. Both sides of a case must be measured in the same way.
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
    """The consumer group: a new one for each run."""
    transaction: int | None = None
    """Records in each transaction, for the side without kconsume: the mean of kconsume's transactions."""
    postgres: str = ""
    redis: str = ""
    """Addresses of the databases that the case needs."""


class Measured(msgspec.Struct, frozen=True):
    """The result of one side in one run."""

    figure: float
    """The result, in the unit of the case. It is compared with the figure of the other side."""
    cpu: float
    """Seconds of CPU time of all threads of the process."""
    records: int
    """The number of records by which the CPU time is divided."""
    transaction: int | None = None


class Unit(NamedTuple):
    """Format strings of a figure: `text` for the figure; `cpu` for the CPU seconds of a record times `cpu_scale`."""

    text: str
    cpu: str = "{:.2f} µs"
    cpu_scale: float = 1e6

    def figure(self, measured: Measured) -> str:
        return self.text.format(measured.figure)

    def cost(self, measured: Measured) -> str:
        return self.cpu.format(measured.cpu / measured.records * self.cpu_scale)


class Topics(Protocol):
    """Creates topics with orders. A topic is created at the first request, and shared by later requests."""

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
    """The highest number of rounds, for a case whose rounds take long and differ little."""
    warm_up: ClassVar[bool] = True
    """True if the first round is discarded, because caches are cold and the broker's JIT has not run."""

    needs: ClassVar[tuple[Database, ...]] = ()
    """The databases that the case needs besides the broker. Their addresses are in the task."""

    own_topics: ClassVar[bool] = False
    """True if the topics of the case are deleted after the case, because they are large."""

    def tasks(self, topics: Topics, records: int) -> tuple[Task, Task]:
        """Return the tasks of both sides. They differ only if the case compares two tasks, as `memory` does."""
        task = topics.orders(records)
        return task, task

    @abstractmethod
    def ours(self, task: Task) -> Measured: ...

    @abstractmethod
    def theirs(self, task: Task) -> Measured: ...
