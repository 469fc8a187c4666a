"""What a case is: two sides that do the same work, and the bar that they must meet when they are compared.

A side runs in a fresh process (`side.py`), gets a `Task` and answers with a `Measured`; it must check its own
counts and raise when a record is missing or came twice. The two sides of a case must be measured alike.
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
    """What one side is to do in one run."""

    bootstrap: str
    topic: str
    records: int
    """Orders between the marks; `orders.total` says what lies around them."""
    group: str = ""
    """A new one for each run."""
    transaction: int | None = None
    """How many records kconsume had in a transaction, for a side that is to do the same."""
    postgres: str = ""
    redis: str = ""
    """Addresses, for a case that needs them."""


class Measured(msgspec.Struct, frozen=True):
    """What one run came to."""

    figure: float
    """In the case's unit; compared is ours with theirs."""
    cpu: float
    """Seconds of CPU, all threads of the process."""
    records: int
    """What the CPU time is divided by."""
    transaction: int | None = None


class Unit(NamedTuple):
    """How figures are written: `text.format(figure)`; CPU as `cpu` seconds times `cpu_scale` a record."""

    text: str
    cpu: str = "{:.2f} µs"
    cpu_scale: float = 1e6

    def figure(self, measured: Measured) -> str:
        return self.text.format(measured.figure)

    def cost(self, measured: Measured) -> str:
        return self.cpu.format(measured.cpu / measured.records * self.cpu_scale)


class Topics(Protocol):
    """Topics with orders, made when first asked for and then shared."""

    def orders(self, records: int, form: Form = "bytes") -> Task:
        """A task on a topic with so many orders in it."""
        ...


class Case(ABC):
    """One line of the table."""

    name: ClassVar[str]
    about: ClassVar[str]
    bar: ClassVar[Bar]
    unit: ClassVar[Unit] = Unit("{:,.0f}/s")
    names: ClassVar[tuple[str, str]] = ("kconsume", "bare loop")
    """What the sides are called."""
    most_rounds: ClassVar[int | None] = None
    """For a case whose rounds are long and alike."""
    warm_up: ClassVar[bool] = True
    """Whether a first round is run and thrown away: it pays for cold caches and for the broker's JIT."""

    needs: ClassVar[tuple[Database, ...]] = ()
    """What must be there besides the broker; its address is in the task."""

    own_topics: ClassVar[bool] = False
    """Whether its topics are too large to keep until the end of the run."""

    def tasks(self, topics: Topics, records: int) -> tuple[Task, Task]:
        """Ours and theirs; the same unless the case is about the difference."""
        task = topics.orders(records)
        return task, task

    @abstractmethod
    def ours(self, task: Task) -> Measured: ...

    @abstractmethod
    def theirs(self, task: Task) -> Measured: ...
