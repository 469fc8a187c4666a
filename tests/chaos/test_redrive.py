"""`kconsume dlq redrive`, killed at any moment and run again until it is done: each letter reaches its group once."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from kconsume import App, DeadLetter, Record
from kconsume.backends import PostgresStore, SqliteStore
from kconsume.failures.letter_headers import read_added_headers, redrive_topic
from kconsume.records import Partition
from kconsume.testing.services import KafkaService
from tests.chaos.fleet import REPOSITORY
from tests.chaos.form import PATIENCE, TIMEOUT, form, printed_seed
from tests.chaos.halting import CHUNK
from tests.cli.test_dlq import BAD, keep
from tests.cli.test_redrive import back
from tests.fix_kafka import MakeTopic, delete_topics
from tests.liveness import assert_app_lives
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(TIMEOUT)

LETTERS = form(short=1_200, long=40_000)
KILLS = form(short=2, long=40)
RATE = form(short=1_200, long=8_000)
PARTITIONS = 3
LAST = Counter({LETTERS: PARTITIONS})
"""What shows at the end that each partition goes on."""
SOON: dict[str, int] = {"session.timeout.ms": 6000}

COMMAND = "from kconsume.cli import main; main()"
FORGETFUL = f"from kconsume.cli.letter_topics import LetterTopics; LetterTopics.sent_to = lambda *_: set(); {COMMAND}"
"""The same without its guard: it does not look at what was sent back before."""


class Work:
    """A group with dead letters, and the command in a folder of its own."""

    def __init__(self, kafka: KafkaService, folder: Path, source: str, dead: str, offsets: str) -> None:
        """`dead` is what `DeadLetter` takes."""
        self.bootstrap, self.folder, self.source, self.group = kafka.bootstrap, folder, source, f"{source}-group"
        self.back = redrive_topic(source, self.group)
        self.letters = [
            replace(
                BAD, partition=Partition(source, n % PARTITIONS), offset=n, origin=f"{self.group}:T:0:{n}",
                group=self.group, key=b"k%d" % n, value=b"%d" % n, timestamp=datetime.now(UTC).replace(microsecond=0),
            )
            for n in range(LETTERS)
        ]  # fmt: skip
        module = f"""
            from kconsume import App, DeadLetter, Record

            app = App({self.bootstrap!r}, group={self.group!r}, offsets={offsets!r})

            @app.consume({source!r}, on_error=DeadLetter({dead}))
            def handle(record: Record) -> None: ...
        """
        (folder / "work.py").write_text(textwrap.dedent(module))

    def start(self, program: str = COMMAND) -> subprocess.Popen[str]:
        arguments = ["dlq", "redrive", "work:app", "--yes", "--rate", str(RATE)]
        return subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def kill_while_sending(self, chance: random.Random, places: Sequence[str]) -> None:
        """Kill it a few times, each where it stands still (`halting.py`), behind where the one before was killed. At
        the first chunk nothing would be there before the kill that could be sent again."""
        told = self.folder / "told"
        for number in range(KILLS):
            where, chunk = places[number % len(places)], chance.randint(2, LETTERS // KILLS // CHUNK)
            halts = f"from tests.chaos.halting import stand_still; stand_still({where!r}, {chunk}, {str(told)!r})"
            process = self.start(f"{halts}; {COMMAND}")
            try:
                come = partial(lambda process: told.exists() or process.poll() is not None, process)
                eventually(come, within=PATIENCE, what=f"it stands still, {where}")
                time.sleep(chance.random() * 0.1)  # of an outbox, more or less is sent on meanwhile
            finally:
                process.kill()
                said, _ = process.communicate()
            assert process.returncode == -9, f"it ended before kill {number}, {where}: {said}"
            told.unlink()

    def assert_liveness(self, app: App, offsets: str) -> None:
        """Of the topic that letters come back by."""
        assert_app_lives(
            app, bootstrap=self.bootstrap, topic=self.back, group=self.group, offsets=offsets, partitions=PARTITIONS,
            value=b"%d" % LETTERS,
        )  # fmt: skip

    def finish(self, program: str = COMMAND) -> str:
        process = self.start(program)
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, said
        return said


@pytest.fixture
def clean(kafka_admin: AdminClient) -> Iterator[list[str]]:
    """The topics that the command made."""
    made: list[str] = []
    yield made
    delete_topics(kafka_admin, made)


def test_the_letters_of_a_topic_reach_their_group_once_and_nobody_else(
    kafka: KafkaService, topic: MakeTopic, tmp_path: Path, clean: list[str]
) -> None:
    work = with_topic(kafka, topic, tmp_path, clean)
    seen, others = list[int](), list[int]()
    mine, theirs = App(kafka.bootstrap, group=work.group, kafka=SOON), App(kafka.bootstrap, group=f"{work.group}-2")

    @mine.consume(work.source, on_error=DeadLetter(f"{work.source}.dlq"))
    def handle(record: Record) -> None:
        seen.append(int(record.value or b""))

    @theirs.consume(work.source, on_error=DeadLetter(f"{work.source}.dlq"))
    def look(record: Record) -> None:
        others.append(int(record.value or b""))

    work.kill_while_sending(printed_seed(), ["committed", "in transaction"])
    work.finish()
    assert Counter(origins(work)) == Counter(letter.origin for letter in work.letters), "each once, read committed"
    with mine.running(), theirs.running():
        eventually(lambda: len(seen) >= LETTERS, within=PATIENCE, what="the group has all")
        assert "total 0 sent back" in work.finish()
        work.assert_liveness(mine, "kafka://")
    assert Counter(seen) == Counter(range(LETTERS)) + LAST
    assert others == [], "they never were in the topic that other groups read"


def test_without_a_look_at_what_was_sent_it_sends_twice(
    kafka: KafkaService, topic: MakeTopic, tmp_path: Path, clean: list[str]
) -> None:
    """The negative control."""
    work = with_topic(kafka, topic, tmp_path, clean)
    process = work.start(FORGETFUL)
    eventually(lambda: back(work.bootstrap, work.back), within=PATIENCE, what="some are sent")
    process.kill()
    process.communicate()
    work.finish(FORGETFUL)
    assert max(Counter(origins(work)).values()) == 2


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_the_letters_of_a_table_take_effect_once(
    kafka: KafkaService, topic: MakeTopic, tmp_path: Path, clean: list[str], store: str, request: pytest.FixtureRequest
) -> None:
    """With PostgreSQL the group runs all the while, and sends from the outbox as well; with SQLite only afterwards."""
    offsets = f"sqlite:///{tmp_path}/shop.db" if store == "sqlite" else request.getfixturevalue("postgres_url")
    ask = asked_of(offsets)
    ask("create table seen (number integer)")
    work = Work(kafka, tmp_path, topic(PARTITIONS), "table='dead'", offsets)
    clean.append(work.back)
    keep(SqliteStore(tmp_path / "shop.db") if store == "sqlite" else PostgresStore(offsets), work.letters, "dead")
    app = App(kafka.bootstrap, group=work.group, offsets=offsets, kafka=SOON)

    if store == "sqlite":

        @app.consume(work.source, on_error=DeadLetter(table="dead"))
        def handle(record: Record, tx: sqlite3.Connection) -> None:
            tx.execute("insert into seen values (?)", (int(record.value or b""),))

    else:

        @app.consume(work.source, on_error=DeadLetter(table="dead"))
        def insert(record: Record, tx: psycopg.Connection) -> None:
            tx.execute("insert into seen values (%s)", (int(record.value or b""),))

    def handled() -> Counter[int]:
        return Counter(number for (number,) in ask("select number from seen"))

    chance = printed_seed()
    if store == "postgres":
        with app.running():
            work.kill_while_sending(chance, ["in outbox"])
            work.finish()
    else:
        work.kill_while_sending(chance, ["relayed", "in outbox"])
        work.finish()
    with app.running():  # which finds the topic at its start
        eventually(lambda: len(handled()) == LETTERS, within=PATIENCE, what="the group has all")
        work.finish()
        work.assert_liveness(app, offsets)
    assert ask("select count(*) from kconsume_outbox") == [(0,)]
    assert ask("select distinct redriven from dead") == [(1,)]
    assert handled() == Counter(range(LETTERS)) + LAST, "each once"


def with_topic(kafka: KafkaService, topic: MakeTopic, folder: Path, clean: list[str]) -> Work:
    source = topic(PARTITIONS)
    dead = topic(2, name=f"{source}.dlq")
    work = Work(kafka, folder, source, repr(dead), "kafka://")
    clean.append(work.back)
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "linger.ms": 5, "transactional.id": dead})
    producer.init_transactions(60)
    producer.begin_transaction()
    for number, letter in enumerate(work.letters):
        if number in (1, 2, 3) or number % 100 == 50:  # markers between the letters, and behind the last
            producer.commit_transaction(60)
            producer.begin_transaction()
        moment = int(cast(datetime, letter.timestamp).timestamp() * 1000)
        headers: list[tuple[str, str | bytes | None]] = [*letter.headers, *letter.added_headers]
        producer.produce(dead, letter.value, letter.key, letter.offset % 2, headers=headers, timestamp=moment)
    producer.commit_transaction(60)
    return work


def origins(work: Work) -> list[str]:
    return [read_added_headers(cast(Any, message.headers()))["origin"] for message in back(work.bootstrap, work.back)]


def asked_of(offsets: str) -> Callable[[str], list[tuple[Any, ...]]]:
    def in_sqlite(query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(offsets.removeprefix("sqlite:///"), timeout=30)) as connection:
            return connection.execute(query).fetchall()

    def in_postgres(query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(offsets, autocommit=True) as connection:
            answer = connection.execute(query)
            return answer.fetchall() if answer.description else []

    return in_sqlite if offsets.startswith("sqlite") else in_postgres
