"""What is asked of a group's store from outside of a query: where to begin, and to stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kconsume.backends.abc import OffsetStore
from kconsume.backends.registry import open_store
from kconsume.cluster import Cluster
from kconsume.errors import ConfigurationError
from kconsume.records import Partition
from kconsume.settings import ClientValue
from kconsume.spark.ranges import offsets_json

_EARLIEST = -2
"""What Spark writes for it."""


def starting_offsets(
    store: str | OffsetStore,
    group: str,
    topics: Sequence[str],
    *,
    brokers: str,
    kafka: Mapping[str, ClientValue] | None = None,
) -> str:
    """For `startingOffsets` of a query of one's own: where the group stands in the store, and the beginning of
    partitions without an offset."""
    opened = open_store(store, brokers=brokers, kafka=kafka) if isinstance(store, str) else store
    counts = Cluster(brokers, kafka).topics(topics)
    partitions = [Partition(topic, number) for topic, count in counts.items() for number in range(count)]
    stored = opened.load(group, partitions)
    if opened is not store:
        opened.close()
    return offsets_json({p: stored[p].next_offset if p in stored else _EARLIEST for p in partitions})


def request_stop(store: str | OffsetStore, group: str, name: str | None = None) -> list[str]:
    """Ask the streams of a group to drain and end, from anywhere: their names. For where no signal reaches Python.
    `name`: those of this name alone. A query of your own has the name of its handler; the second of the name in its
    group has its topics behind that."""
    from kconsume.backends.postgres import PostgresStore
    from kconsume.spark.ledger_postgres import PostgresLedger

    opened = open_store(store) if isinstance(store, str) else store
    if not isinstance(opened, PostgresStore):
        raise ConfigurationError(f"{opened.address} keeps no word for streams: use postgresql://, or a signal")
    names = PostgresLedger(opened, group, name or "", "").ask_to_stop(name)
    if opened is not store:
        opened.close()
    return names
