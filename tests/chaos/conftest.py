"""What the chaos tests share: the effects of each store, and a topic that is filled."""

from __future__ import annotations

from pathlib import Path

import pytest

from kconsume.testing.services import KafkaService
from tests.chaos.effects import Effects, EffectsOf, PostgresEffects, RedisEffects, SqliteEffects
from tests.chaos.fleet import Job, Work, fill
from tests.chaos.form import form
from tests.fix_kafka import MakeTopic

collect_ignore = form(short=["test_too_few_replicas.py"], long=[])
"""Two brokers take half a minute to start; what it shows is seen on the embedded one in `make test`."""


@pytest.fixture
def effects_of(request: pytest.FixtureRequest, tmp_path: Path) -> EffectsOf:
    """The effects in the store with this name; only its own service is started."""

    def make(store: str) -> Effects:
        if store == "sqlite":
            return SqliteEffects(tmp_path / "shop.db")
        if store == "postgres":
            return PostgresEffects(request.getfixturevalue("postgres_url"))
        return RedisEffects(request.getfixturevalue("redis_url"))

    return make


@pytest.fixture
def work(kafka: KafkaService, topic: MakeTopic, group: str, tmp_path: Path) -> Work:
    """`work(offsets, records, partitions, *flags)`: a topic with that many records, and the job to handle them."""

    def make(offsets: str, records: int, partitions: int, *flags: str) -> Job:
        job = Job(kafka.bootstrap, topic(partitions), group, offsets, tmp_path, flags)
        fill(job, records, partitions)
        return job

    return make
