"""The database or the broker goes away in the middle of work, by a restart or by `kill -9`: nothing is lost, nothing is
done twice, and work resumes by itself (P1, P2, P9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from kconsume.testing.services import LocalKafka, LocalPgBouncer, LocalPostgres, LocalRedis
from tests.chaos.effects import Effects, PostgresEffects, RedisEffects
from tests.chaos.fleet import Fleet, Job, Work, fill, fleet
from tests.chaos.form import PATIENCE, TIMEOUT, form, printed_seed
from tests.fix_kafka import create_topic, unique

pytestmark = pytest.mark.timeout(TIMEOUT)

PARTITIONS = 4
RECORDS = form(short=6_000, long=48_000)
FAULTS = form(short=2, long=12)
SLOW = "--work=0.002"
"""Seconds a record, so that the work lasts longer than the faults."""


@pytest.fixture
def own_postgres() -> Iterator[LocalPostgres]:
    """A server of the test's own, to break."""
    with LocalPostgres() as server:
        yield server


@pytest.fixture
def own_redis() -> Iterator[LocalRedis]:
    with LocalRedis() as server:
        yield server


def test_a_database_that_is_restarted_or_killed_costs_time_and_nothing_else(
    own_postgres: LocalPostgres, work: Work
) -> None:
    effects = PostgresEffects(own_postgres.url)
    break_while_working(
        work(effects.offsets, RECORDS, PARTITIONS, SLOW), effects, [own_postgres.restart, kill(own_postgres)]
    )


def test_a_database_that_is_killed_behind_pgbouncer_costs_time_and_nothing_else(
    own_postgres: LocalPostgres, work: Work
) -> None:
    with LocalPgBouncer(own_postgres.url) as bouncer:
        effects = PostgresEffects(own_postgres.url, bouncer.url)
        job = work(effects.offsets, RECORDS, PARTITIONS, SLOW)
        break_while_working(job, effects, [kill(own_postgres), bouncer.restart])


def test_a_redis_that_is_restarted_or_killed_costs_time_and_nothing_else(own_redis: LocalRedis, work: Work) -> None:
    """Because it writes before it answers: see `docs/redis.md` for what another `appendfsync` costs."""
    effects = RedisEffects(own_redis.url)
    break_while_working(work(effects.offsets, RECORDS, PARTITIONS, SLOW), effects, [own_redis.restart, kill(own_redis)])


def test_a_broker_that_is_restarted_costs_time_and_nothing_else(postgres_url: str, tmp_path: Path) -> None:
    with LocalKafka() as broker:
        name = unique("topic")
        create_topic(AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0}), name, PARTITIONS)
        effects = PostgresEffects(postgres_url)
        job = Job(broker.bootstrap, name, unique("group"), effects.offsets, tmp_path, (SLOW,))
        fill(job, RECORDS, PARTITIONS)
        break_while_working(job, effects, [broker.restart], faults=form(short=1, long=4), noticed="broker trouble")


def kill(server: LocalPostgres | LocalRedis) -> Callable[[], None]:
    def kill_and_start() -> None:
        server.kill()
        server.start()

    return kill_and_start


def break_while_working(
    job: Job,
    effects: Effects,
    ways: list[Callable[[], None]],
    *,
    faults: int = FAULTS,
    noticed: str = "as=StoreUnavailable",
) -> None:
    """Each fault when a certain number of records has been handled, the ways by turns."""
    chance = printed_seed()
    with fleet(job) as workers:
        workers.grow()
        workers.grow()
        for number in range(faults):
            due = int(RECORDS * (number + chance.random()) / (faults + 1))
            await_rows(workers, effects, due)
            assert effects.rows < RECORDS, "the work was done before the faults: give it more"
            ways[number % len(ways)]()
        while not any(noticed in worker.log for worker in workers.members):  # it was back before anybody asked
            assert effects.rows < RECORDS, "nobody noticed a fault"
            ways[-1]()
        await_rows(workers, effects, RECORDS)
        workers.await_work(lambda: effects.distinct == RECORDS, within=PATIENCE, what="every record has its effect")
        workers.assert_liveness(PARTITIONS)
    assert (effects.rows, effects.distinct) == (RECORDS + PARTITIONS,) * 2, "rows = distinct = produced"


def await_rows(workers: Fleet, effects: Effects, rows: int) -> None:
    workers.await_work(lambda: effects.rows >= rows, within=PATIENCE, what=f"{rows} records have an effect")
