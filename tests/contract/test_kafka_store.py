"""What only the group's own offsets can be asked, on the real broker; `test_conformance.py` says that it is a store."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer

from kconsume._kafka.cluster import Cluster
from kconsume.backends import KafkaStore, OffsetStore, Position
from kconsume.errors import KconsumeError, StoreUnavailable
from kconsume.records import Partition
from kconsume.testing.conformance import Bench
from tests.contract.places import kafka_place
from tests.waiting import eventually

_ROOT = Path(__file__).parent.parent.parent
GROUP, ORDERS = "shop", Partition("orders", 0)

METHODS: dict[str, Callable[[OffsetStore], object]] = {
    "load": lambda store: store.load(GROUP, [ORDERS]),
    "save": lambda store: store.save(GROUP, {ORDERS: Position(1)}),
    "reset": lambda store: store.reset(GROUP, {ORDERS: 1}),
    "delete": lambda store: store.delete(GROUP),
    "groups": lambda store: store.groups(),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_broker_that_does_not_answer(method: Callable[[OffsetStore], object]) -> None:
    nowhere = "127.0.0.1:1"
    store = KafkaStore(nowhere, cluster=Cluster(nowhere, {}, patience=0.5))
    with pytest.raises(StoreUnavailable, match=nowhere):
        method(store)


class TestTheGroup:
    """What only the group's own offsets can be asked."""

    @pytest.fixture
    def bench(self, request: pytest.FixtureRequest) -> Iterator[Bench]:
        with Bench(kafka_place(request)) as bench:
            yield bench

    def test_a_reset_while_the_group_runs_is_an_error_and_not_a_silent_nothing(self, bench: Bench) -> None:
        """The broker refuses it; a person who believes that it was done would wait for records in vain."""
        first, *_ = bench.partitions
        bench.move({first: 10})
        with member_of(bench), pytest.raises(KconsumeError, match=bench.group):
            bench.store.reset(bench.group, {first: 3})
        assert bench.offsets() == {first: 10}

    def test_deleting_while_the_group_runs_is_an_error_that_says_why(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        bench.move({first: 10})
        with member_of(bench), pytest.raises(KconsumeError) as refused:
            bench.store.delete(bench.group)
        assert "no broker answered" not in str(refused.value)

    @pytest.mark.parametrize("error", ["NOT_COORDINATOR", "COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS"])
    def test_a_coordinator_that_moves_is_not_the_end_of_the_process(self, error: str) -> None:
        """In a process of its own: librdkafka's admin client crashes on the first two (its issue 5040)."""
        done = subprocess.run(
            [sys.executable, "-c", _COORDINATOR_MOVES, error],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stdout.strip()) in [(0, "{}"), (0, "StoreUnavailable")], done

    def test_the_metadata_of_another_tool_is_read_as_no_topic_id(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        assert isinstance(bench.store, KafkaStore)
        bench.store._cluster.set_committed(bench.group, {first: (7, "written by flink")})
        row = bench.rows()[first]
        assert (row.next_offset, row.topic_id) == (7, None)


_COORDINATOR_MOVES = """
import sys
from confluent_kafka import KafkaError
from kconsume.backends import KafkaStore
from kconsume._kafka.cluster import Cluster
from kconsume.errors import StoreUnavailable
from kconsume.records import Partition
from kconsume.testing import EmbeddedKafka

with EmbeddedKafka({"orders": 1}) as kafka:
    store = KafkaStore(kafka.bootstrap, cluster=Cluster(kafka.bootstrap, {}, patience=5.0))
    assert store.load("shop", [Partition("orders", 0)]) == {}
    kafka.fail_next("OffsetFetch", getattr(KafkaError, sys.argv[1]))
    try:
        print(store.load("shop", [Partition("orders", 0)]))
    except StoreUnavailable as error:
        print(type(error).__name__)
"""


@contextmanager
def member_of(bench: Bench) -> Iterator[None]:
    """A consumer of the group that has its partitions."""
    assert isinstance(bench.store, KafkaStore)
    consumer = Consumer(
        {
            "bootstrap.servers": bench.store._cluster.brokers,
            "group.id": bench.group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    try:
        consumer.subscribe([bench.partitions[0].topic])
        eventually(lambda: consumer.poll(0.05) or consumer.assignment(), what="a member with partitions")
        yield
    finally:
        consumer.close()
