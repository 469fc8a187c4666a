"""Where the stored offsets of an app stand in their logs, for `kconsume check`. Claims nothing, and makes nothing: a
store without tables, or with those of an earlier version, has nothing to read yet.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple
from urllib.parse import quote

from kconsume.app import App
from kconsume.backends import KafkaStore, OffsetStore, SqliteStore
from kconsume.backends.sqlite_schema import is_up_to_date
from kconsume.cli.findings import Stored
from kconsume.cli.findings_postgres import is_postgres
from kconsume.cluster import Cluster
from kconsume.errors import KconsumeError
from kconsume.records import Partition
from kconsume.registration import Registration
from kconsume.settings import masked_address


class Rows(NamedTuple):
    """What the stores have."""

    found: Sequence[Stored] = ()
    unread: Mapping[str, str] = {}
    """Why the offsets of a store could not be read, by its address."""


def ask(app: App, cluster: Cluster) -> Rows:
    """Every stored offset of the topics that are there."""
    found: list[Stored] = []
    unread: dict[str, str] = {}
    for registration in app.registrations:
        store = KafkaStore(cluster.brokers, cluster=cluster) if _is_kafka(registration) else registration.store
        try:
            found += _of(registration, store, cluster)
        except KconsumeError as error:
            unread[masked_address(store.address)] = str(error)
        finally:
            store.close()
    return Rows(found, unread)


def _of(registration: Registration, store: OffsetStore, cluster: Cluster) -> Iterable[Stored]:
    topics = [topic for topic in cluster.all_topics() if registration.wanted.takes(topic)]
    if not topics or not _has_tables(store):
        return
    chosen = registration.partitions
    counts = cluster.topics(topics)
    every = [Partition(t, n) for t in topics for n in range(counts[t]) if chosen is None or n in chosen]
    rows = store.load(registration.group, every)
    if not rows:
        return
    # After the rows: a member that runs moves them on with its log.
    ids = cluster.topic_ids({partition.topic for partition in rows})
    first, end = cluster.edges(rows, "earliest"), cluster.edges(rows, "latest")
    for partition, position in sorted(rows.items()):
        topic_id = ids[partition.topic]
        yield Stored(registration.group, partition, position, topic_id, first[partition], end[partition])


def _is_kafka(registration: Registration) -> bool:
    return isinstance(registration.offsets, str) and isinstance(registration.store, KafkaStore)


def _has_tables(store: OffsetStore) -> bool:
    if isinstance(store, SqliteStore):
        return store.path.is_file() and _sqlite_has_tables(store)
    return not is_postgres(store) or _postgres_has_tables(store)


def _sqlite_has_tables(store: SqliteStore) -> bool:
    try:
        with closing(sqlite3.connect(f"file:{quote(str(store.path))}?mode=rw", timeout=1.0, uri=True)) as connection:
            return is_up_to_date(connection)
    except sqlite3.Error:
        return False  # `store-unusable` says so


def _postgres_has_tables(store: OffsetStore) -> bool:
    import psycopg

    from kconsume.backends.postgres import PostgresStore
    from kconsume.backends.postgres_faults import store_error
    from kconsume.backends.postgres_schema import state_of

    assert isinstance(store, PostgresStore)
    try:
        with closing(store._at.connect()) as connection:
            return state_of(connection, store._sql).is_ours
    except psycopg.Error as error:
        raise store_error(error, store.address) from error
