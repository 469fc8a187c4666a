"""Records that fail or hang, while consumers are killed: good and dead are disjoint, and together they are all."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
import pytest

from kconsume.failures.letters import read_marks
from kconsume.records import record_of
from kconsume.testing.services import KafkaService
from tests.chaos.effects import EffectsOf, FileEffects, PostgresEffects, SqliteEffects
from tests.chaos.fleet import UNREADABLE, Job, fill, fleet, kill_while_working
from tests.chaos.form import PATIENCE, TIMEOUT, form, printed_seed
from tests.chaos.phases import Phase
from tests.chaos.worker import is_hanging, is_poison
from tests.contract.test_output import everything
from tests.fix_kafka import MakeTopic

pytestmark = pytest.mark.timeout(TIMEOUT)

PARTITIONS = form(short=4, long=12)
EACH = form(short=1_500, long=16_700)
"""Records a partition: 200,000 in the long form."""
KILLS = form(short=4, long=30)
INSIDE = (Phase.HANDLER, Phase.TRANSACTION, Phase.COMMIT)

Place: TypeAlias = tuple[int, int]


def is_unreadable(offset: int) -> bool:
    """One of a thousand."""
    return offset % 1000 == 500


def value_at(offset: int) -> bytes:
    return UNREADABLE if is_unreadable(offset) else b"x"


ALL = {(partition, offset) for partition in range(PARTITIONS) for offset in range(EACH)}
DEAD = {place for place in ALL if is_poison(place[1]) or is_unreadable(place[1]) or is_hanging(place[1])}


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_in_a_table_each_dead_letter_is_there_once_whatever_is_killed(
    kafka: KafkaService, topic: MakeTopic, group: str, tmp_path: Path, effects_of: EffectsOf, store: str
) -> None:
    effects = effects_of(store)
    assert isinstance(effects, SqliteEffects | PostgresEffects)
    rows = reader_of(effects)

    def places(table: str, position: str) -> list[Place]:
        return rows(f"select partition, {position} from {table}")

    def dead() -> list[Place]:
        return places("dead", "record_offset")

    job = Job(kafka.bootstrap, topic(PARTITIONS), group, effects.offsets, tmp_path, ("--dead-table=dead",))
    kill_and_finish(job, lambda: effects.rows, lambda: effects.rows + len(dead()) >= len(ALL))
    good, buried = places("seen", "position"), dead()
    assert Counter(buried) == Counter(DEAD), "each exactly once"
    assert Counter(good) == Counter(ALL - DEAD), "nothing of a record that failed stays, and all others are there once"


def test_in_a_topic_each_is_there_by_its_origin_and_no_record_is_lost(
    kafka: KafkaService, topic: MakeTopic, group: str, tmp_path: Path
) -> None:
    effects, letters = FileEffects(tmp_path / "seen.txt"), topic(1)

    def buried() -> set[Place]:
        found = (marks_of(message) for message in everything(kafka.bootstrap, letters))
        return {(int(marks["partition"]), int(marks["offset"])) for marks in found}

    job = Job(kafka.bootstrap, topic(PARTITIONS), group, effects.offsets, tmp_path, (f"--dead-topic={letters}",))
    kill_and_finish(
        job,
        lambda: effects.rows,
        lambda: effects.distinct + len(DEAD) >= len(ALL) and buried() == DEAD,
        phases=(Phase.HANDLER,),
    )
    good = {tuple(map(int, line.split())) for line in effects.path.read_bytes().splitlines()}
    assert good == ALL - DEAD
    origins = {marks_of(message)["origin"] for message in everything(kafka.bootstrap, letters)}
    assert len(origins) == len(DEAD), "repeated ones, if there are any, have the same origin"


def marks_of(message: Any) -> dict[str, str]:
    return read_marks(record_of(message, "").headers)


def kill_and_finish(
    job: Job, counted: Callable[[], int], done: Callable[[], bool], *, phases: tuple[Phase, ...] = INSIDE
) -> None:
    fill(job, EACH * PARTITIONS, PARTITIONS, value_at)
    with fleet(job) as workers:
        for _ in range(2):
            workers.grow()
        kill_while_working(workers, KILLS, counted, len(ALL) - len(DEAD), printed_seed(), phases, within=PATIENCE)
        workers.await_work(done, within=PATIENCE, what="every record is done or dead")


def reader_of(effects: SqliteEffects | PostgresEffects) -> Callable[[str], list[Place]]:
    def in_sqlite(query: str) -> list[Place]:
        assert isinstance(effects, SqliteEffects)
        with closing(sqlite3.connect(effects.path, timeout=30)) as connection:
            try:
                return [(partition, offset) for partition, offset in connection.execute(query)]
            except sqlite3.OperationalError:
                return []  # the table is made with the first letter

    def in_postgres(query: str) -> list[Place]:
        assert isinstance(effects, PostgresEffects)
        with psycopg.connect(effects.looked_at, autocommit=True) as connection:
            try:
                return [(partition, offset) for partition, offset in connection.execute(query)]
            except psycopg.errors.UndefinedTable:
                return []

    return in_sqlite if isinstance(effects, SqliteEffects) else in_postgres
