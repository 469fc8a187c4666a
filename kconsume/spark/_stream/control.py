"""Functions on a group's store for code outside of a query: where to begin, and a request to stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kconsume._config.client_settings import ClientValue
from kconsume._kafka.cluster import Cluster
from kconsume.backends.base import OffsetStore
from kconsume.backends.registry import open_store
from kconsume.errors import ConfigurationError
from kconsume.records import Partition
from kconsume.spark._batch.ranges import offsets_json

_EARLIEST = -2
"""Spark's number for the beginning of the log."""


def starting_offsets(
    store: str | OffsetStore,
    group: str,
    topics: Sequence[str],
    *,
    brokers: str,
    kafka: Mapping[str, ClientValue] | None = None,
) -> str:
    """The value of `startingOffsets` for a user's own query: the stored offsets of the group, and the beginning of the
    log for partitions without one.

    Args:
        store: where the offsets are kept, an address or a store.
        group: the consumer group.
        topics: the topics that the query reads.
        brokers: the Kafka cluster.
        kafka: properties of librdkafka, for brokers that require authentication.
    """
    opened = open_store(store, brokers=brokers, kafka=kafka) if isinstance(store, str) else store
    counts = Cluster(brokers, kafka).topics(topics)
    partitions = [Partition(topic, number) for topic, count in counts.items() for number in range(count)]
    stored = opened.load(group, partitions)
    if opened is not store:
        opened.close()
    return offsets_json({p: stored[p].next_offset if p in stored else _EARLIEST for p in partitions})


def request_stop(store: str | OffsetStore, group: str, name: str | None = None) -> list[str]:
    """Ask the streams of a group to drain and end, from any process. Use it where no signal reaches Python.

    Args:
        store: where the offsets are kept, an address or a store. Must be PostgreSQL.
        group: the consumer group.
        name: only the queries of this name. A query of `foreach_batch` has the name of its handler; a second query of
            that name in the group has its topics after the name. A query of `stream` has its topics or its pattern as
            the name.

    Returns the names of the queries that were asked to stop.
    """
    from kconsume.backends.postgres.store import PostgresStore
    from kconsume.spark._batch.ledger.postgres import PostgresLedger

    opened = open_store(store) if isinstance(store, str) else store
    if not isinstance(opened, PostgresStore):
        raise ConfigurationError(
            f"{opened.address} cannot keep a request to stop: keep the offsets in postgresql://, or send a signal"
        )
    names = PostgresLedger(opened, group, name or "", "").request_stop(name)
    if opened is not store:
        opened.close()
    return names
