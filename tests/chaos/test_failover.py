"""The database fails over to a replica that is behind, while consumers work: its offsets and effects are those of a
moment ago, and what was done since is done again, once and in order (P1, P2, P4, P12).

Topics have a gap behind every few records, as those of an exactly-once producer do: there the stored offset and the
next record's differ, and what compares them by arithmetic passes over the tail that was lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from kconsume.testing.services import KafkaService
from tests.chaos.effects import Effects, PostgresEffects, RedisEffects
from tests.chaos.fleet import Fleet, Job, fleet
from tests.chaos.form import PATIENCE, TIMEOUT, form
from tests.chaos.replicas import PAIRS, Pair
from tests.fix_kafka import MakeTopic, unique

pytestmark = pytest.mark.timeout(TIMEOUT)

PARTITIONS = 3
RECORDS = form(short=1_200, long=15_000)
BETWEEN_GAPS = 10
TAIL = form(short=60, long=600)
"""Records at least whose effects the failover loses."""
SLOW = "--work=0.005"


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with PAIRS[request.param]() as pair:
        yield pair


def test_what_a_failover_lost_is_done_again_once_and_in_order(
    kafka: KafkaService, topic: MakeTopic, group: str, pair: Pair, tmp_path: Path
) -> None:
    job = Job(kafka.bootstrap, topic(PARTITIONS), group, pair.url, tmp_path, (SLOW,))
    with fleet(job) as workers:
        effects = fail_over_while_working(pair, job, workers)
        workers.await_work(lambda: effects.distinct >= RECORDS, within=PATIENCE, what="every record has its effect")
        workers.assert_liveness(PARTITIONS)
    assert (effects.rows, effects.distinct) == (RECORDS + PARTITIONS,) * 2, "rows = distinct = produced"
    for partition in range(PARTITIONS):
        assert (order := effects.positions(partition)) == sorted(order), f"partition {partition} is out of order"


@pytest.mark.parametrize("pair", ["redis"], indirect=True)
def test_control_a_worker_that_goes_on_from_its_memory_loses_them(
    kafka: KafkaService, topic: MakeTopic, group: str, pair: Pair, tmp_path: Path
) -> None:
    """It runs again what may be done, and nobody compares the offset."""
    flags = (SLOW, "--no-fence", "--retry-unknown")
    job = Job(kafka.bootstrap, topic(PARTITIONS), group, pair.url, tmp_path, flags)
    with fleet(job) as workers:
        effects = fail_over_while_working(pair, job, workers)
        workers.assert_liveness(PARTITIONS, within=PATIENCE)
    assert effects.distinct < RECORDS


def fail_over_while_working(pair: Pair, job: Job, workers: Fleet) -> Effects:
    """Answers with the effects that are left, and those that come."""
    kind = PostgresEffects if pair.url.startswith("postgresql") else RedisEffects
    before, after = effects_at(kind, pair)
    fill_with_gaps(job, RECORDS // 2)
    for _ in range(2):
        workers.grow()
    workers.await_work(lambda: after.rows > 0, within=PATIENCE, what="they work, and the replica follows")
    pair.replication.cut()
    behind = after.rows
    fill_with_gaps(job, RECORDS // 2)  # so that there is a tail, however swift they were
    workers.await_work(lambda: before.rows >= behind + TAIL, within=PATIENCE, what="the replica falls behind")
    assert before.rows - after.rows >= TAIL, "nothing was lost, so nothing was proven"
    pair.fail_over()
    return after


def effects_at(kind: type[PostgresEffects] | type[RedisEffects], pair: Pair) -> tuple[Effects, Effects]:
    """Of the one that workers begin on, and of the one that they end on, which has the same tables."""
    first = kind(pair.first)
    second = PostgresEffects.there(pair.second) if kind is PostgresEffects else RedisEffects(pair.second)
    return first, second


def fill_with_gaps(job: Job, records: int) -> None:
    """Transactions of a few records, so that a marker follows them."""
    producer = Producer({"bootstrap.servers": job.brokers, "transactional.id": unique("gaps"), "log_level": 0})
    producer.init_transactions(30)
    for _ in range(records // PARTITIONS // BETWEEN_GAPS):
        producer.begin_transaction()
        for partition in range(PARTITIONS):
            for _ in range(BETWEEN_GAPS):
                producer.produce(job.topic, b"x", partition=partition)
        producer.commit_transaction(30)
