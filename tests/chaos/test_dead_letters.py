"""Records that fail or hang, while consumers are killed: good and dead are disjoint, and together they are all."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeAlias, cast

import psycopg
import pytest
from confluent_kafka import Message

from kconsume.failures.letter_headers import read_added_headers
from kconsume.records import Headers
from kconsume.testing.services import KafkaService
from tests.chaos.effects import EffectsOf, FileEffects, PostgresEffects, SqliteEffects
from tests.chaos.fleet import Hits, Job, fill, fleet, kill_one_in, kill_while_working, numbered
from tests.chaos.form import PATIENCE, TIMEOUT, form, printed_seed
from tests.chaos.log import Place, ends_of, offsets_in, read_log
from tests.chaos.phases import Phase
from tests.chaos.test_outbox import waiting
from tests.chaos.worker import is_hanging, is_poison
from tests.contract.test_output import everything
from tests.fix_kafka import MakeTopic

# SQLite has one transaction at a time: in the long form, its two hundred hanging calls are waited for one by one.
pytestmark = pytest.mark.timeout(form(short=TIMEOUT, long=2 * TIMEOUT))

PARTITIONS = form(short=4, long=12)
KILLS = form(short=4, long=30)
INSIDE = (Phase.TRANSACTION, Phase.COMMIT)
"""Handlers that may hang have threads of their own: their lane is in the transaction meanwhile."""
IN_TRANSACTION = form(short=1, long=15)
"""So many kills, of those above, are inside one at the least."""

Database: TypeAlias = SqliteEffects | PostgresEffects


UNREADABLE = b"\xff"
"""A value that no handler can decode."""


def value_of(number: int) -> bytes:
    """One of a thousand cannot be read."""
    return UNREADABLE if number % 1000 == 500 else numbered(number)


def is_dead(value: bytes) -> bool:
    return value == UNREADABLE or is_poison(value.decode()) or is_hanging(value.decode())


@dataclass(frozen=True)
class Records:
    """What is in the topic. At the end, each partition has one more, which shows that it goes on."""

    log: dict[Place, bytes]

    @classmethod
    def read(cls, job: Job, each: int, *more: bytes) -> Self:
        """So many, and these, are in each partition, in this order."""
        log = read_log(job.brokers, job.topic, PARTITIONS, each + len(more))
        for partition in range(PARTITIONS):
            values = [log[partition, offset] for offset in offsets_in(log, partition)]
            assert values == [*map(value_of, range(each)), *more], "each record is in the topic once"
        return cls(log)

    @property
    def all(self) -> set[Place]:
        return set(self.log)

    @property
    def dead(self) -> set[Place]:
        return {place for place, value in self.log.items() if is_dead(value)}


MANY = form(short=1_500, long=16_700)
"""Records a partition: 200,000 in all in the long form."""
FEW = 400
"""For the control: none of them hangs."""


# In a table


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_in_a_table_each_dead_letter_is_there_once_whatever_is_killed(
    kafka: KafkaService, topic: MakeTopic, group: str, tmp_path: Path, effects_of: EffectsOf, store: str
) -> None:
    effects = cast(Database, effects_of(store))
    job = Job(kafka.bootstrap, topic(PARTITIONS), group, effects.offsets, tmp_path, ("--dead-table=dead",))
    records, hits = kill_and_finish(
        job, MANY, lambda: effects.rows, lambda _: has_passed(effects, job),
        kills=KILLS - 1, first_in=(Phase.TRANSACTION,),
    )  # fmt: skip
    assert hits.in_transaction >= IN_TRANSACTION, f"too few kills inside a transaction: {hits}"
    check_the_table(effects, records)


def check_the_table(effects: Database, records: Records) -> None:
    good, buried = places(effects, "seen", "position"), places(effects, "dead", "record_offset")
    check_none_is_missing(buried, records)
    assert Counter(buried) == Counter(records.dead), "each exactly once"
    check_good(good, records, exactly=True)


# In a topic


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_in_a_topic_by_the_outbox_each_is_there_by_its_origin_whatever_is_killed(
    kafka: KafkaService, topic: MakeTopic, group: str, tmp_path: Path, effects_of: EffectsOf, store: str
) -> None:
    effects, letters = cast(Database, effects_of(store)), topic(2)
    job = Job(kafka.bootstrap, topic(PARTITIONS), group, effects.offsets, tmp_path, (f"--dead-topic={letters}",))
    each = form(short=800, long=MANY)
    records, hits = kill_and_finish(
        job, each, lambda: effects.rows, lambda _: has_passed(effects, job) and waiting(effects) == 0,
        kills=form(short=1, long=KILLS), phases=(*INSIDE, Phase.RELAY), first_in=(Phase.RELAY, Phase.TRANSACTION),
    )  # fmt: skip
    assert hits.in_transaction >= IN_TRANSACTION, f"too few kills inside a transaction: {hits}"
    check_good(places(effects, "seen", "position"), records, exactly=True)
    check_the_topic(kafka, letters, records)


def test_in_a_topic_each_is_there_by_its_origin_and_no_record_is_lost(
    kafka: KafkaService, topic: MakeTopic, group: str, tmp_path: Path
) -> None:
    """With Kafka's own offsets: at least once."""
    effects, letters = FileEffects(tmp_path / "seen.txt"), topic(2)

    def is_done(filled: Records) -> bool:
        if effects.distinct + len(filled.dead) < len(filled.all):
            return False
        return {place_of(message) for message in everything(kafka.bootstrap, letters)} >= filled.dead

    job = Job(kafka.bootstrap, topic(PARTITIONS), group, effects.offsets, tmp_path, (f"--dead-topic={letters}",))
    records, hits = kill_and_finish(job, MANY, lambda: effects.rows, is_done, phases=(Phase.HANDLER,))
    assert hits[Phase.HANDLER] > 0, f"no kill inside a handler: {hits}"
    good = [cast(Place, tuple(map(int, line.split()))) for line in effects.path.read_bytes().splitlines()]
    check_good(good, records, exactly=False)
    check_the_topic(kafka, letters, records)


def check_the_topic(kafka: KafkaService, letters: str, records: Records) -> None:
    """Some may be there twice, after a kill of who sent them: they have the same origin, and by that are one."""
    found, by_origin = everything(kafka.bootstrap, letters), dict[str, Place]()
    for message in found:
        origin, place = marks_of(message)["origin"], place_of(message)
        assert origin.endswith(":{}:{}".format(*place)), "an origin is a place"
        assert by_origin.setdefault(origin, place) == place, "and that of one record"
    print(f"letters={len(found)} repeated={len(found) - len(by_origin)}")  # noqa: T201  (shown when the test fails)
    check_none_is_missing(by_origin.values(), records)
    assert Counter(by_origin.values()) == Counter(records.dead), "nothing else is there, and nothing by two origins"


def marks_of(message: Message) -> dict[str, str]:
    return read_added_headers(cast(Headers, message.headers()))


def place_of(message: Message) -> Place:
    marks = marks_of(message)
    return int(marks["partition"]), int(marks["offset"])


# Both


@pytest.mark.parametrize("way", ["table", "topic"])
def test_control_letters_that_are_written_when_their_offset_has_passed_are_lost_by_a_kill(
    kafka: KafkaService, topic: MakeTopic, group: str, tmp_path: Path, effects_of: EffectsOf, way: str
) -> None:
    """The same kills, and the same look at what is there."""
    effects, letters = cast(Database, effects_of("postgres")), topic(2)
    flags = ("--dead-table=dead" if way == "table" else f"--dead-topic={letters}", "--letters-apart")
    job = Job(kafka.bootstrap, topic(PARTITIONS), group, effects.offsets, tmp_path, flags)
    records, _ = kill_and_finish(
        job, FEW, lambda: effects.rows, lambda _: has_passed(effects, job),
        kills=0, first_in=(Phase.APART,), in_peace=True,
    )  # fmt: skip
    check_good(places(effects, "seen", "position"), records, exactly=True)
    look = partial(check_the_table, effects) if way == "table" else partial(check_the_topic, kafka, letters)
    with pytest.raises(AssertionError, match="nothing is missing"):
        look(records)


def check_none_is_missing(buried: Iterable[Place], records: Records) -> None:
    missing = records.dead - set(buried)
    assert not missing, f"nothing is missing: {sorted(missing)[:10]} and {len(missing)} in all"


def check_good(good: Sequence[Place], records: Records, *, exactly: bool) -> None:
    assert not set(good) & records.dead, "nothing of a record that failed stays"
    assert set(good) | records.dead == records.all, "and all others are there"
    assert not exactly or len(good) == len(set(good)), "once"


def kill_and_finish(
    job: Job,
    each: int,
    counted: Callable[[], int],
    done: Callable[[Records], bool],
    *,
    kills: int = KILLS,
    phases: tuple[Phase, ...] = INSIDE,
    first_in: tuple[Phase, ...] = (),
    in_peace: bool = False,
) -> tuple[Records, Hits]:
    """`each`: records a partition. `done`: of those that were there before the kills. `first_in`: where one each is hit
    before the others, whatever comes. `in_peace`: those that are left may end what they have begun."""
    fill(job, each * PARTITIONS, PARTITIONS, value_of)
    filled = Records.read(job, each)
    chance, hits, expected = printed_seed(), Hits(), len(filled.all - filled.dead)
    with fleet(job) as workers:
        for _ in range(2):
            workers.grow()
        for phase in first_in:
            hits += kill_one_in(workers, phase, counted, expected // 8, chance, within=PATIENCE)
        hits += kill_while_working(workers, kills, counted, expected, chance, phases, within=PATIENCE)
        workers.await_work(lambda: done(filled), within=PATIENCE, what="every record is done or dead")
        workers.assert_liveness(PARTITIONS)
        if in_peace:
            workers.stop()
    return Records.read(job, each, b"x"), hits


def has_passed(effects: Database, job: Job) -> bool:
    """All partitions to the ends of their logs, behind the last transaction marker."""
    ends = ends_of(job.brokers, job.topic, PARTITIONS)
    return effects.ask("select sum(next_offset) from kconsume_offsets") == sum(ends)


def places(effects: Database, table: str, position: str) -> list[Place]:
    query = f"select partition, {position} from {table}"
    if isinstance(effects, SqliteEffects):
        with closing(sqlite3.connect(effects.path, timeout=30)) as connection:
            return connection.execute(query).fetchall()
    with psycopg.connect(effects.looked_at, autocommit=True) as connection:
        return [(partition, offset) for partition, offset in connection.execute(query)]
