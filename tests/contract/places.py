"""The places that our own stores are examined on: a `Subject` for each, and what a control does with one."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

from kconsume.backends import KafkaStore, SqliteStore
from kconsume.backends.sqlite import statements
from kconsume.errors import KconsumeError
from kconsume.testing.conformance import Bench, Subject, TransactionalSuite
from tests.contract.broken_stores import Broken, Case, Promise
from tests.fix_kafka import unique
from tests.waiting import eventually

FAILURES = (AssertionError, pytest.fail.Exception, KconsumeError, Broken, sqlite3.Error)
"""How a test fails on a broken store. Any other error would be one of the control itself."""


def fails(promise: Promise, place: Callable[[], Subject], case: Case | None = None) -> None:
    """The negative control: on a store whose guard is off, the test that watches it must not pass. One that is made of
    many cases must fail in this one, or in any."""
    cases = cases_of(promise) if case is None else [case]
    assert any(_fails(promise, place(), each) for each in cases), f"{promise.__name__} noticed nothing"


def _fails(promise: Promise, subject: Subject, case: Case) -> bool:
    try:
        with Bench(subject) as bench:
            promise(_Impatient(), bench, *case)
    except pytest.skip.Exception:
        pytest.fail("a control that is skipped controls nothing")
    except FAILURES:
        return True
    return False


class _Impatient(TransactionalSuite):
    """Stands for the suite of any level: a test of a lower one does not see the difference."""

    patience = 0.5


def cases_of(promise: Promise) -> Iterator[Case]:
    """What a test is called with, each time; once with nothing, if it has no parameters."""
    marks = [mark for mark in getattr(promise, "pytestmark", []) if mark.name == "parametrize"]
    if not marks:
        yield ()
    for mark in marks:
        names, values = mark.args
        for value in values:
            yield (value,) if isinstance(names, str) else value


def switch_off(monkeypatch: pytest.MonkeyPatch, statement: str, guard: str, instead: str) -> None:
    """Take a guard out of a statement of the SQLite store; one that is not in it would control nothing."""
    text: str = getattr(statements, statement)
    assert guard in text
    monkeypatch.setattr(statements, statement, text.replace(guard, instead))


class SqlitePlace:
    """A file with a table for effects, in a folder that can be taken away."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "here" / "shop.db"
        self.path.parent.mkdir(exist_ok=True)
        self._opened: list[SqliteStore] = []
        with self._outside() as connection:
            connection.execute("create table if not exists effects (number integer)")

    def subject(self) -> Subject:
        return Subject(open=self.open, write=self.write, effects=self.effects, away=self.away)

    def open(self) -> SqliteStore:
        self._opened.append(SqliteStore(self.path))
        return self._opened[-1]

    @staticmethod
    def write(connection: sqlite3.Connection, number: int) -> None:
        connection.execute("insert into effects values (?)", (number,))

    def effects(self) -> list[int]:
        with self._outside() as connection:
            return [number for (number,) in connection.execute("select number from effects")]

    @contextmanager
    def away(self) -> Iterator[None]:
        """What is open of a file stays usable when it is renamed, so it is let go of first."""
        for store in self._opened:
            store.close()
        here, there = self.path.parent, self.path.parent.with_name("there")
        here.rename(there)
        try:
            yield
        finally:
            there.rename(here)

    @contextmanager
    def _outside(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self.path, isolation_level=None)
        try:
            yield connection
        finally:
            connection.close()


def kafka_place(request: pytest.FixtureRequest) -> Subject:
    """A group and a topic of the test's own on the run's broker."""
    brokers = request.getfixturevalue("kafka").bootstrap
    topic = request.getfixturevalue("topic")(partitions=4)
    _await_coordinator(brokers)
    return Subject(open=lambda: KafkaStore(brokers), group=request.getfixturevalue("group"), topic=topic)


@functools.cache
def _await_coordinator(brokers: str) -> None:
    """A broker that has just been started makes its offsets topic when it is first asked."""
    consumer = Consumer({"bootstrap.servers": brokers, "group.id": unique("first"), "log_level": 0})

    def answers() -> bool:
        try:
            consumer.committed([TopicPartition("none", 0)], timeout=5)
        except KafkaException:
            return False
        return True

    try:
        eventually(answers, what="a group coordinator")
    finally:
        consumer.close()
