"""Three real brokers, and the group's coordinator is killed while a member gives partitions up: the revoke ends, the
group goes on with another coordinator, and each record has one effect (P1, P2, P6, P12)."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import psycopg
import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from kconsume import App, Partition, Record
from kconsume._config.client_settings import ClientValue
from kconsume._kafka.cluster import Cluster
from kconsume.errors import BrokerUnavailable
from kconsume.testing.services import LocalKafka
from tests.chaos.brokers import create, three_brokers
from tests.chaos.effects import PostgresEffects
from tests.chaos.form import PATIENCE, TIMEOUT, form
from tests.fix_arena import PROTOCOLS, QUICK
from tests.fix_kafka import produce, unique
from tests.liveness import assert_app_lives
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(2 * TIMEOUT)

PARTITIONS, EACH = 4, 100


def test_a_coordinator_that_is_killed_during_a_revoke_costs_no_record_and_no_partition(postgres_url: str) -> None:
    with three_brokers() as brokers:
        bootstrap = ",".join(broker.bootstrap for broker in brokers.values())
        admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        for protocol in form(short=["cooperative"], long=list(PROTOCOLS)):
            list(map(LocalKafka.start, brokers.values()))  # the one that was killed before
            scene = Scene(bootstrap, admin, postgres_url, protocol)
            scene.run(brokers[scene.coordinator])


class Scene:
    """Two members of one group, whose coordinator is not the broker that has the controller."""

    def __init__(self, bootstrap: str, admin: AdminClient, url: str, protocol: str) -> None:
        self.bootstrap, self.url, self.protocol = bootstrap, url, protocol
        self.topic, self.records = unique("topic"), 0
        create(admin, self.topic, [[1, 2, 3], [2, 3, 1], [3, 1, 2], [1, 3, 2]])
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("drop table if exists seen, counter")
        self.effects = PostgresEffects(url)
        found = eventually(lambda: elsewhere(admin), what="a coordinator that may be lost")
        assert found is not None
        self.group, self.coordinator = found
        self.revoking, self.killed = threading.Event(), threading.Event()

    def run(self, coordinator: LocalKafka) -> None:
        one, two = self.member(), self.member()
        two.startup = 0  # or its block is entered only when the revoke is over

        @one.on_revoked
        def hold_up(partitions: Sequence[Partition]) -> None:
            self.revoking.set()
            self.killed.wait(10)

        with one.running():
            self.write()
            eventually(lambda: self.effects.rows > 0, within=PATIENCE, what="it works")
            with two.running():
                eventually(self.revoking.is_set, within=PATIENCE, what="it gives partitions up")
                asked = self.clusters_that_ask(self.coordinator)
                coordinator.kill()
                self.killed.set()
                self.write()
                eventually(lambda: self.effects.distinct >= self.records, within=PATIENCE, what="all are handled")
                for cluster in asked:
                    eventually(lambda: is_answered(cluster, self.topic), within=60, what="another answers")  # noqa: B023
                eventually(lambda: shares(one, two) == [2, 2], within=PATIENCE, what="they share")
                assert_app_lives(
                    one, two, bootstrap=self.bootstrap, topic=self.topic, group=self.group, offsets=self.url,
                    partitions=PARTITIONS,
                )  # fmt: skip
        assert (self.effects.rows, self.effects.distinct) == (self.records + PARTITIONS,) * 2, "one effect each"
        for partition in range(PARTITIONS):
            assert self.effects.positions(partition) == list(range(2 * EACH + 1)), "in order"

    def clusters_that_ask(self, broker: int) -> list[Cluster]:
        """Who ask this broker for topic ids, as claims do: each answer of a broker names another as the controller."""
        clusters = [Cluster(self.bootstrap) for _ in range(4)]
        for cluster in clusters:
            assert is_answered(cluster, self.topic)
        for cluster in clusters:
            admin = cluster._admin()
            eventually(lambda: admin.list_topics(timeout=20).controller_id == broker, what="it is told to ask it")  # noqa: B023
        return clusters

    def member(self) -> App:
        quick: dict[str, ClientValue] = {} if self.protocol == "consumer" else dict(QUICK)
        app = App(self.bootstrap, group=self.group, offsets=self.url, kafka={**quick, **PROTOCOLS[self.protocol]})

        @app.consume(self.topic)
        def insert(record: Record, tx: psycopg.Connection) -> None:
            tx.execute("insert into seen values (%s, %s, 'me')", (record.partition, record.offset))
            tx.execute("select pg_sleep(0.003)")

        return app

    def write(self) -> None:
        # Without transactions: their coordinator may be the broker that is killed.
        for partition in range(PARTITIONS):
            self.records += produce(self.bootstrap, self.topic, [b"x"] * EACH, partition=partition)


def elsewhere(admin: AdminClient) -> tuple[str, int] | None:
    """A group, and its coordinator's number."""
    group = unique("group")
    (described,) = admin.describe_consumer_groups([group]).values()
    try:
        coordinator = described.result(timeout=20).coordinator
    except KafkaException:  # it moves, or its topic is being made
        return None
    return (group, coordinator.id) if coordinator is not None and coordinator.id > 1 else None


def is_answered(cluster: Cluster, topic: str) -> bool:
    try:
        return bool(cluster.topic_ids([topic]))
    except BrokerUnavailable:
        return False


def shares(*apps: App) -> list[int]:
    supervisors = [app._supervisor for app in apps if app._supervisor is not None]
    return [sum(len(consumer.loop.snapshot.assigned) for consumer in each.consumers) for each in supervisors]
