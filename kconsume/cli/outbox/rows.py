"""Finds the rows of an outbox, tells what blocks them, and writes them as dead letters. Prints nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import click

from kconsume._config import environment
from kconsume._config.client_settings import ClientValue, check_group, masked_address
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.outgoing import encoded
from kconsume._kafka.producer import Producer, most_bytes, producer_settings
from kconsume._kafka.topic_limits import TopicLimit, may_refuse, record_bytes
from kconsume._kafka.topic_reader import RecordPlace
from kconsume.backends import open_store
from kconsume.backends.base import OffsetStore
from kconsume.backends.outbox.reader import MOST_ROW, OutboxReader, WaitingRow, outbox_in
from kconsume.backends.outbox.tables import Posted
from kconsume.cli.app_loader import VARIABLE, load
from kconsume.cli.broker_address import connect_address
from kconsume.cli.letter_topics import letter_in
from kconsume.errors import ConfigurationError, KconsumeError, SendFailed
from kconsume.failures.letter_headers import PREFIX, Letter
from kconsume.records import Partition, Record

_PATIENCE = 10.0


@dataclass(frozen=True)
class OutboxSource:
    """An outbox, and the cluster that its rows are sent to."""

    store: str
    reader: OutboxReader
    groups: frozenset[str] | None
    """Only rows of these groups; None for all."""
    cluster: Cluster | None
    kafka: Mapping[str, ClientValue]

    def rows(self) -> list[WaitingRow]:
        if not self.reader.exists():
            return []
        return [row for row in self.reader.rows() if self.groups is None or row.group in self.groups]

    def named(self, numbers: Sequence[int]) -> list[WaitingRow]:
        """The rows with these numbers. Raises `ConfigurationError` if one is missing."""
        there = {row.number: row for row in self.rows()}
        if missing := [number for number in numbers if number not in there]:
            raise ConfigurationError(
                f"{self.store} has no row {', '.join(map(str, missing))} in its outbox, or it was sent meanwhile: "
                f"choose from those that `kconsume outbox list` shows"
            )
        return [there[number] for number in dict.fromkeys(numbers)]


def source_of(app: str | None, brokers: str | None, group: str | None, offsets: str | None) -> OutboxSource:
    if app and (brokers or offsets):
        raise click.UsageError("APP, and --brokers or --offsets, both say where to look: give one of the two")
    if group is not None:
        check_group(group)
    name = app or (None if brokers or offsets else os.environ.get(VARIABLE))
    if name:
        return _source_of_app(name, group)
    variables = environment.read(os.environ)
    brokers, group, offsets = brokers or variables.brokers, group or variables.group, offsets or variables.offsets
    if not offsets:
        raise ConfigurationError(
            f"no outbox was named: write MODULE:APP, as in shop:app, or set {VARIABLE}, or give --offsets ADDRESS"
        )
    cluster = None
    if brokers:
        cluster = Cluster(connect_address(brokers), variables.kafka)
    return _source(open_store(offsets), None if group is None else frozenset((group,)), cluster, variables.kafka)


def _source_of_app(name: str, group: str | None) -> OutboxSource:
    found = load(name)
    plans = [plan for plan in found.plans() if group in (None, plan.group)]
    if not plans:
        raise ConfigurationError(f"the app has no group {group!r}: correct --group, or leave it out")
    stores = {id(plan.store): plan.store for plan in plans}
    with_outbox = [store for store in stores.values() if store.address.startswith(("sqlite", "postgres"))]
    if not with_outbox:
        addresses = ", ".join(sorted({masked_address(store.address) for store in stores.values()}))
        raise ConfigurationError(
            f"{addresses} has no outbox: the broker confirms what handlers send before the offset passes"
        )
    if len({store.address for store in with_outbox}) > 1:
        groups = " or ".join(sorted(plan.group for plan in plans))
        raise ConfigurationError(f"the app has several outboxes: choose one with --group {groups}")
    cluster = Cluster(connect_address(found.brokers), found.kafka)
    # Rows of `Outbox.send` have no group; the app sends them, too.
    wanted = frozenset(plan.group for plan in plans) | (frozenset() if group else {""})
    return _source(with_outbox[0], wanted, cluster, found.kafka)


def _source(
    store: OffsetStore, groups: frozenset[str] | None, cluster: Cluster | None, kafka: Mapping[str, ClientValue]
) -> OutboxSource:
    return OutboxSource(masked_address(store.address), outbox_in(store), groups, cluster, kafka)


def numbers_in(words: Sequence[str], command: str) -> tuple[str | None, list[int]]:
    """Split the arguments into the app, which may be missing, and the numbers of the rows."""
    numbers = [word for word in words if word.isdecimal() and word.isascii()]
    others = [word for word in words if word not in numbers]
    if not numbers or len(others) > 1 or any(int(number) > MOST_ROW for number in numbers):
        raise ConfigurationError(
            f"no rows were named: write kconsume outbox {command} APP ROW, with numbers that "
            f"`kconsume outbox list` shows"
        )
    return (others[0] if others else None), [int(number) for number in numbers]


# What blocks


class Reasons:
    """Why the cluster would refuse a row, as far as the cluster tells."""

    def __init__(self, source: OutboxSource, targets: Iterable[str]) -> None:
        self._topics = sorted(set(targets))
        self._there: set[str] | None = None
        self._limits: Mapping[str, TopicLimit | None] = {}
        self._most = most_bytes(source.kafka)
        self.trouble: str | None = None
        """Why no reason is known; None if the cluster answered."""
        if source.cluster is None:
            self.trouble = "give --brokers ADDRESS to learn what blocks"
        elif self._topics:
            try:
                self._ask(source.cluster)
            except KconsumeError as error:
                self.trouble = str(error)

    def _ask(self, cluster: Cluster) -> None:
        self._there = set(cluster.those_there(self._topics))
        cluster.topic_ids(self._there)  # learns whether this is a mock broker, which does not answer `ask_limits`
        asked = cluster.ask_limits(sorted(self._there)) if self._there else {}
        self._limits = {topic: limit.result(_PATIENCE + 1) for topic, limit in asked.items()}

    def of(self, row: WaitingRow) -> str | None:
        if self._there is None:
            return None
        if row.target not in self._there:
            return f"topic {row.target!r} does not exist: create it, or correct the name"
        if row.size > self._most:
            return f"the row has {row.size:,} bytes, and the client sends at most {self._most:,} (message.max.bytes)"
        limit, size = self._limits.get(row.target), record_bytes(Posted(row.number, row.outgoing(b"")))
        if limit is None or not may_refuse(limit, size + (row.value_bytes or 0), has_key=row.key is not None):
            return None
        if limit.wants_keys and row.key is None:
            return f"topic {row.target!r} is compacted, and the row has no key"
        return (
            f"the row has {row.size:,} bytes, and topic {row.target!r} takes {limit.most_bytes:,} (max.message.bytes), "
            f"counted after compression"
        )


# Letters


def letter_about(row: WaitingRow, value: bytes | None, cause: str) -> Letter:
    """The dead letter of a row.

    A row that is already a dead letter stays unchanged. For any other row, the letter names the row's target topic,
    without a partition and an offset. So `kconsume dlq redrive` does not take it for a letter of the record
    whose handler wrote the row.
    """
    record = Record(
        row.target, -1, -1, row.key, value, row.headers, row.timestamp, 1, row.origin or ""
    )  # fmt: skip
    if any(name == f"{PREFIX}exception" for name, _ in row.headers) and (letter := letter_in(record)) is not None:
        return letter
    place = "Outbox.send" if not row.group else str(row.partition)
    return Letter(
        Partition(row.target, -1), -1, row.group, row.origin or f"outbox:{row.number}#0", 1,
        f"{SendFailed.__module__}.{SendFailed.__qualname__}", cause,
        f"row {row.number} of the outbox, from {place}, written at {row.posted_at.isoformat()}",
        row.key, value, row.timestamp, tuple(pair for pair in row.headers if not pair[0].startswith(PREFIX)),
    )  # fmt: skip


def write_letters(
    source: OutboxSource, rows: Iterable[tuple[WaitingRow, str]], topic: str
) -> list[tuple[WaitingRow, str]]:
    """Write each row to a topic of dead letters, and remove it. Returns the rows with the places of their letters.

    A row that a running app has sent meanwhile is left out.

    Args:
        rows: each with the cause that its letter states.
        topic: an existing topic; a misspelt name is an error, not a new topic.
    """
    assert source.cluster is not None
    source.cluster.topics([topic])
    settings = {**source.kafka, "message.timeout.ms": _PATIENCE * 1000}
    producer = Producer(producer_settings(source.cluster.brokers, settings), "outbox")
    written = []
    try:
        for row, cause in rows:
            if (value := source.reader.value(row)) is None:
                continue
            sent = encoded(letter_about(row, value[0], cause).outgoing(topic), topic, producer.max_message_bytes)
            written.append((row, str(RecordPlace(*producer.write(sent).result()))))
            source.reader.delete([row])
        return written
    finally:
        producer.close(_PATIENCE)
