"""Records that pass later, or never, while consumers are killed: each has one effect, or is dead, and never both."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import psycopg
import pytest

from kconsume.failures.retry_topics import retry_topic
from kconsume.testing.services import KafkaService
from tests.chaos.effects import PostgresEffects
from tests.chaos.fleet import Job, fill, fleet, kill_while_working, numbered
from tests.chaos.form import PATIENCE, TIMEOUT, form, printed_seed
from tests.chaos.log import Place, ends_of, offsets_in, read_log
from tests.chaos.phases import Phase
from tests.chaos.worker import failures_of
from tests.fix_kafka import MakeTopic

pytestmark = pytest.mark.timeout(TIMEOUT)

PARTITIONS = form(short=4, long=12)
EACH = form(short=400, long=6_000)
"""Records a partition."""
KILLS = form(short=3, long=30)
INSIDE = (Phase.HANDLER, Phase.TRANSACTION, Phase.COMMIT)
DELAYS = (0.2, 0.5)

PASSING = PARTITIONS * sum(failures_of(str(number)) <= len(DELAYS) for number in range(EACH))
"""Records that have an effect in the end."""


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
        """Letters on a retry topic. The outbox writes no transactions, so each offset is a letter's."""
        return sum(ends_of(self._told[0], topic, PARTITIONS))


@pytest.fixture
def scene(kafka: KafkaService, topic: MakeTopic, group: str, postgres_url: str, tmp_path: Path) -> Scene:
    return Scene(kafka, topic, group, postgres_url, tmp_path)


def read_expected(job: Job, each: int) -> tuple[dict[Place, int], set[Place]]:
    """How often each record fails, and those that never pass. The last of each partition shows that it goes on."""
    log = read_log(job.brokers, job.topic, PARTITIONS, each + 1)
    for partition in range(PARTITIONS):
        values = [log[partition, offset] for offset in offsets_in(log, partition)]
        assert values == [*map(numbered, range(each)), b"x"], "each record is in the topic once"
    fails = {place: failures_of(value.decode()) for place, value in log.items()}
    return fails, {place for place, failures in fails.items() if failures > len(DELAYS)}


def test_whatever_is_killed_each_record_has_one_effect_or_is_dead(scene: Scene) -> None:
    job = scene.job()
    fill(job, EACH * PARTITIONS, PARTITIONS)
    with fleet(job) as workers:
        for _ in range(2):
            workers.grow()
        rows = scene.effects
        kill_while_working(workers, KILLS, lambda: rows.rows, PASSING, printed_seed(), INSIDE, within=PATIENCE)
        workers.await_work(
            lambda: scene.is_done(EACH * PARTITIONS), within=PATIENCE, what="every record has passed or is dead"
        )
        workers.assert_liveness(PARTITIONS)
    fails, dead = read_expected(job, EACH)
    good = fails.keys() - dead
    assert Counter(scene.places("seen", "position")) == Counter(good), "each exactly once, at once or later"
    assert Counter(scene.dead) == Counter(dead), "and each of these, and nothing else, by its origin"


FEW = 48
"""Records a partition. The first that fails, and is sent, passes at its second attempt: so a repeat of it could."""


@pytest.mark.parametrize("flags", [(), ("--no-intake",)], ids=["intact", "control"])
def test_what_is_sent_again_by_the_next_owner_has_one_effect_because_it_is_taken_in_once(
    scene: Scene, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    died = tmp_path / "died"
    job = scene.job(f"--die-once={died}", *flags)
    fill(job, FEW * PARTITIONS, PARTITIONS)
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
    fails, dead = read_expected(job, FEW)
    good = fails.keys() - dead
    written = sum(map(scene._written, scene.rungs))
    letters = sum(min(failures, len(DELAYS)) for failures in fails.values())
    assert written > letters, "some were sent twice"
    effects = Counter(scene.places("seen", "position"))
    assert set(effects) == good
    assert set(scene.dead) == dead
    if flags:
        assert max(effects.values()) > 1, "without the intake, a repeat has an effect as well"
    else:
        assert effects == Counter(good)
