"""Reads the stored offsets of an app and the limits of their logs, for `kconsume check`.

Claims no partition and makes no table: a store without tables, or with tables of an earlier version, is not read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple
from urllib.parse import quote

from kconsume._config.client_settings import masked_address
from kconsume._handlers.registration import Registration
from kconsume._kafka.cluster import Cluster
from kconsume.app import App
from kconsume.backends import KafkaStore, OffsetStore, SqliteStore
from kconsume.backends.sqlite.schema import is_up_to_date
from kconsume.cli.check.findings import Stored
from kconsume.cli.store_kind import is_postgres
from kconsume.errors import KconsumeError
from kconsume.records import Partition


class Rows(NamedTuple):
    """The stored offsets of all stores."""

    found: Sequence[Stored] = ()
    unread: Mapping[str, str] = {}
    """For each store whose offsets could not be read, by its address: the reason."""


def ask(app: App, cluster: Cluster) -> Rows:
    """Read every stored offset of the app's topics, if the topic exists."""
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
    # Read after the rows, because a running member moves its offsets: an earlier end of a log could be below them.
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
        return False  # the finding `store-unusable` reports the error


def _postgres_has_tables(store: OffsetStore) -> bool:
    import psycopg

    from kconsume.backends.postgres.errors import store_error
    from kconsume.backends.postgres.schema import schema_state
    from kconsume.backends.postgres.store import PostgresStore

    assert isinstance(store, PostgresStore)
    try:
        with closing(store.database.address.connect()) as connection:
            return schema_state(connection, store.database.statements).is_current
    except psycopg.Error as error:
        raise store_error(error, store.address) from error
