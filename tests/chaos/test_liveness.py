"""The negative control of the liveness helper: a partition that stands still is named with the cause of its app."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from kconsume import App, Partition
from kconsume.testing.services import KafkaService
from tests.chaos.effects import PostgresEffects
from tests.chaos.fleet import Work, fleet
from tests.fix_arena import STEADY
from tests.fix_kafka import MakeTopic
from tests.liveness import assert_app_lives, causes_of, publish, published, write_one_each
from tests.waiting import eventually


def test_a_partition_that_is_paused_or_held_is_reported_with_its_cause(
    kafka: KafkaService, topic: MakeTopic, group: str, sqlite_url: str, tmp_path: Path
) -> None:
    name, bad = topic(3), [True]
    app = App(kafka.bootstrap, group=group, offsets=sqlite_url, kafka=STEADY)

    @app.consume(name, on_error="hold")
    def handle(value: str) -> None:
        if value == "bad" and bad:
            raise LookupError("no such order")

    lives = partial(
        assert_app_lives, app, bootstrap=kafka.bootstrap, topic=name, group=group, offsets=sqlite_url, partitions=3
    )
    with app.running():
        lives()
        app.pause(Partition(name, 1))
        eventually(lambda: causes_of([app])[Partition(name, 1)] == "paused", what="it is paused")
        with pytest.raises(AssertionError, match=rf"{name}/1 stored=1 end=2 cause=paused"):
            lives(within=1.0)
        app.resume(Partition(name, 1))
        write_one_each(kafka.bootstrap, name, 3, "bad")
        eventually(lambda: causes_of([app])[Partition(name, 2)].startswith("held"), what="it is held")
        with pytest.raises(AssertionError, match=rf"{name}/2 stored=\d end=4 cause=held: .*no such order"):
            lives(within=1.0)
        publish([app], tmp_path / "causes")
        assert published(tmp_path / "causes")[Partition(name, 2)].startswith("held: ")
        bad.clear()
        app.resume(*(Partition(name, number) for number in range(3)))
        lives()


def test_a_worker_whose_handlers_do_not_end_is_reported_across_processes(postgres_url: str, work: Work) -> None:
    job = work(PostgresEffects(postgres_url).offsets, 2, 2, "--work=60", "--shutdown=1")
    with fleet(job) as workers:
        worker = workers.grow()
        eventually(lambda: "handler_running" in str(worker.causes), what="its handlers run")
        with pytest.raises(AssertionError, match=r"2 of 2 partitions stand still") as failed:
            workers.assert_liveness(2, within=1.0)
    assert len(re.findall(r"stored=0 end=3 cause=handler_running: .* in worker-1: .", str(failed.value))) == 2
