"""Records that pass later, or never, while consumers are killed: each has one effect, or is dead, and never both."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TypeAlias

import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition

from kconsume.failures.retry_topics import retry_topic
from kconsume.testing.services import KafkaService
from tests.chaos.effects import PostgresEffects
from tests.chaos.fleet import Job, fill, fleet, kill_while_working
from tests.chaos.form import PATIENCE, TIMEOUT, form, printed_seed
from tests.chaos.phases import Phase
from tests.chaos.worker import failures_of
from tests.fix_kafka import MakeTopic, unique

pytestmark = pytest.mark.timeout(TIMEOUT)

PARTITIONS = form(short=4, long=12)
EACH = form(short=400, long=6_000)
"""Records a partition."""
KILLS = form(short=3, long=30)
INSIDE = (Phase.HANDLER, Phase.TRANSACTION, Phase.COMMIT)
DELAYS = (0.2, 0.5)

Place: TypeAlias = tuple[int, int]


class Scene:
    """A database with the effects, and the job of a fleet that leaves them there."""

    def __init__(self, kafka: KafkaService, topic: MakeTopic, group: str, url: str, folder: Path) -> None:
        self.effects = PostgresEffects(url)
        self.source = topic(PARTITIONS)
        self.rungs = [topic(PARTITIONS, retry_topic(self.source, group, n + 1)) for n in range(len(DELAYS))]
        self._told = (kafka.bootstrap, self.source, group, url, folder)

    def job(self, *flags: str) -> Job:
        return Job(*self._told, ("--dead-table=dead", f"--delays={','.join(map(str, DELAYS))}", *flags))

    def places(self, table: str, position: str) -> list[Place]:
        with psycopg.connect(self.effects.looked_at, autocommit=True) as connection:
            try:
                return [(p, offset) for p, offset in connection.execute(f"select partition, {position} from {table}")]
            except psycopg.errors.UndefinedTable:
                return []  # it is made with the first letter

    @property
    def dead(self) -> list[Place]:
        return self.places("dead", "record_offset")

    def is_done(self, records: int) -> bool:
        """All records are somewhere, and nothing is left that could still have an effect."""
        if self.effects.rows + len(self.dead) < records or self.effects.ask("select count(*) from kconsume_outbox"):
            return False
        passed = self.effects.ask(
            "select coalesce(sum(next_offset), 0) from kconsume_offsets where topic <> %s", self.source
        )
        return passed == sum(map(self._written, self.rungs))

    def _written(self, topic: str) -> int:
        reader = Consumer({"bootstrap.servers": self._told[0], "group.id": unique("reader"), "log_level": 0})
        try:
            places = [TopicPartition(topic, number) for number in range(PARTITIONS)]
            return sum(reader.get_watermark_offsets(place, timeout=20)[1] for place in places)
        finally:
            reader.close()


@pytest.fixture
def scene(kafka: KafkaService, topic: MakeTopic, group: str, postgres_url: str, tmp_path: Path) -> Scene:
    return Scene(kafka, topic, group, postgres_url, tmp_path)


def expected(each: int) -> tuple[set[Place], set[Place]]:
    """Those that pass in the end, and those that never do. The last of each partition shows that it goes on."""
    every = {(partition, offset) for partition in range(PARTITIONS) for offset in range(each)}
    dead = {place for place in every if failures_of(place[1]) > len(DELAYS)}
    return every - dead, dead


def test_whatever_is_killed_each_record_has_one_effect_or_is_dead(scene: Scene) -> None:
    job, (good, dead) = scene.job(), expected(EACH + 1)
    fill(job, EACH * PARTITIONS, PARTITIONS, gaps=False)
    with fleet(job) as workers:
        for _ in range(2):
            workers.grow()
        rows = scene.effects
        kill_while_working(workers, KILLS, lambda: rows.rows, len(good), printed_seed(), INSIDE, within=PATIENCE)
        workers.await_work(
            lambda: scene.is_done(EACH * PARTITIONS), within=PATIENCE, what="every record has passed or is dead"
        )
        workers.assert_liveness(PARTITIONS)
    assert Counter(scene.places("seen", "position")) == Counter(good), "each exactly once, at once or later"
    assert Counter(scene.dead) == Counter(dead), "and each of these, and nothing else, by its origin"


FEW = 48
"""Records a partition. The first that fails, and is sent, passes at its second attempt: so a repeat of it could."""


@pytest.mark.parametrize("flags", [(), ("--no-intake",)], ids=["intact", "control"])
def test_what_is_sent_again_by_the_next_owner_has_one_effect_because_it_is_taken_in_once(
    scene: Scene, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    died, (good, dead) = tmp_path / "died", expected(FEW + 1)
    job = scene.job(f"--die-once={died}", *flags)
    fill(job, FEW * PARTITIONS, PARTITIONS, gaps=False)
    with fleet(job) as workers:
        first = workers.grow()
        first.process.wait(PATIENCE)
        assert died.exists(), first.log
        workers.members.remove(first)
        workers.grow()
        workers.await_work(
            lambda: scene.is_done(FEW * PARTITIONS), within=PATIENCE, what="every record has passed or is dead"
        )
        workers.assert_liveness(PARTITIONS)
    written = sum(map(scene._written, scene.rungs))
    letters = sum(min(failures_of(offset), len(DELAYS)) for _, offset in good | dead)
    assert written > letters, "some were sent twice"
    effects = Counter(scene.places("seen", "position"))
    assert set(effects) == good
    assert set(scene.dead) == dead
    if flags:
        assert max(effects.values()) > 1, "without the intake, a repeat has an effect as well"
    else:
        assert effects == Counter(good)
