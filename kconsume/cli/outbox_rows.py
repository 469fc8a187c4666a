"""Rows of an outbox: which are meant, what blocks them as far as it can be known from outside, and their letters.

Prints nothing; that is `outbox.py`'s.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import click

from kconsume import environment
from kconsume.backends import open_store
from kconsume.backends.abc import OffsetStore
from kconsume.backends.outbox_reading import MOST_ROW, OutboxReader, WaitingRow, outbox_in
from kconsume.backends.outbox_table import Posted
from kconsume.cli.dlq_topic import letter_in
from kconsume.cli.failed import _bootstrap
from kconsume.cli.rehearse import Place, _must_be_reachable
from kconsume.cli.target import VARIABLE, load
from kconsume.cluster import Cluster
from kconsume.errors import ConfigurationError, KconsumeError, SendFailed
from kconsume.failures.letters import PREFIX, Letter
from kconsume.outlet import Outlet, most_bytes, producer_settings
from kconsume.output import encoded
from kconsume.records import Partition, Record
from kconsume.runtime.limits import Limit, record_bytes, refuses
from kconsume.settings import ClientValue, check_group, masked_address

_PATIENCE = 10.0


@dataclass(frozen=True)
class Source:
    """An outbox, and the cluster that its rows go to."""

    store: str
    reader: OutboxReader
    groups: frozenset[str] | None
    """Rows of these groups; None for all."""
    cluster: Cluster | None
    kafka: Mapping[str, ClientValue]

    def rows(self) -> list[WaitingRow]:
        if not self.reader.is_there():
            return []
        return [row for row in self.reader.rows() if self.groups is None or row.group in self.groups]

    def named(self, numbers: Sequence[int]) -> list[WaitingRow]:
        """These rows; an error if one is not there."""
        there = {row.number: row for row in self.rows()}
        if missing := [number for number in numbers if number not in there]:
            raise ConfigurationError(
                f"{self.store} has no row {', '.join(map(str, missing))} in its outbox, or it was sent meanwhile: "
                f"choose from those that `kconsume outbox list` shows"
            )
        return [there[number] for number in dict.fromkeys(numbers)]


def source_of(app: str | None, brokers: str | None, group: str | None, offsets: str | None) -> Source:
    if app and (brokers or offsets):
        raise click.UsageError("an APP, and --brokers or --offsets, both name where to look: give one of the two")
    if group is not None:
        check_group(group)
    name = app or (None if brokers or offsets else os.environ.get(VARIABLE))
    if name:
        return _source_of_app(name, group)
    said = environment.read(os.environ)
    brokers, group, offsets = brokers or said.brokers, group or said.group, offsets or said.offsets
    if not offsets:
        raise ConfigurationError(
            f"in which outbox? Write MODULE:APP, as in shop:app, or set {VARIABLE}, or give --offsets ADDRESS"
        )
    cluster = None
    if brokers:
        _must_be_reachable(brokers)
        cluster = Cluster(_bootstrap(brokers), said.kafka)
    return _source(open_store(offsets), None if group is None else frozenset((group,)), cluster, said.kafka)


def _source_of_app(name: str, group: str | None) -> Source:
    found = load(name)
    plans = [plan for plan in found.plans() if group in (None, plan.group)]
    if not plans:
        raise ConfigurationError(f"the app has no group {group!r}: correct --group, or leave it out")
    stores = {id(plan.store): plan.store for plan in plans}
    with_outbox = [store for store in stores.values() if store.address.startswith(("sqlite", "postgres"))]
    if not with_outbox:
        addresses = ", ".join(sorted({masked_address(store.address) for store in stores.values()}))
        raise ConfigurationError(f"{addresses} has no outbox: what handlers send is confirmed before the offset passes")
    if len({store.address for store in with_outbox}) > 1:
        groups = " or ".join(sorted(plan.group for plan in plans))
        raise ConfigurationError(f"the app has several outboxes: say which, with --group {groups}")
    _must_be_reachable(found.brokers)
    cluster = Cluster(_bootstrap(found.brokers), found.kafka)
    # The app sends what is nobody's as well.
    wanted = frozenset(plan.group for plan in plans) | (frozenset() if group else {""})
    return _source(with_outbox[0], wanted, cluster, found.kafka)


def _source(
    store: OffsetStore, groups: frozenset[str] | None, cluster: Cluster | None, kafka: Mapping[str, ClientValue]
) -> Source:
    return Source(masked_address(store.address), outbox_in(store), groups, cluster, kafka)


def numbers_in(words: Sequence[str], command: str) -> tuple[str | None, list[int]]:
    """The app, which may be missing, and the numbers of rows."""
    numbers = [word for word in words if word.isdecimal() and word.isascii()]
    others = [word for word in words if word not in numbers]
    if not numbers or len(others) > 1 or any(int(number) > MOST_ROW for number in numbers):
        raise ConfigurationError(
            f"which rows? Write kconsume outbox {command} APP ROW, with numbers that `kconsume outbox list` shows"
        )
    return (others[0] if others else None), [int(number) for number in numbers]


# What blocks


class Reasons:
    """Why the cluster would refuse a row, as far as it tells."""

    def __init__(self, source: Source, targets: Iterable[str]) -> None:
        self._topics = sorted(set(targets))
        self._there: set[str] | None = None
        self._limits: Mapping[str, Limit | None] = {}
        self._most = most_bytes(source.kafka)
        self.trouble: str | None = None
        """Why nothing is known."""
        if source.cluster is None:
            self.trouble = "give --brokers ADDRESS to learn what blocks"
        elif self._topics:
            try:
                self._ask(source.cluster)
            except KconsumeError as error:
                self.trouble = str(error)

    def _ask(self, cluster: Cluster) -> None:
        self._there = set(cluster.those_there(self._topics))
        cluster.topic_ids(self._there)  # after that it is known whether such a cluster answers
        asked = cluster.ask_limits(sorted(self._there)) if self._there else {}
        self._limits = {topic: limit.result(_PATIENCE + 1) for topic, limit in asked.items()}

    def of(self, row: WaitingRow) -> str | None:
        if self._there is None:
            return None
        if row.target not in self._there:
            return f"topic {row.target!r} does not exist: create it, or correct the name"
        if row.size > self._most:
            return f"it has {row.size:,} bytes, and the client sends at most {self._most:,} (message.max.bytes)"
        limit, size = self._limits.get(row.target), record_bytes(Posted(row.number, row.outgoing(b"")))
        if limit is None or not refuses(limit, size + (row.value_bytes or 0), has_key=row.key is not None):
            return None
        if limit.wants_keys and row.key is None:
            return f"topic {row.target!r} is compacted, and the row has no key"
        return (
            f"it has {row.size:,} bytes, and topic {row.target!r} takes {limit.most_bytes:,} (max.message.bytes), "
            f"unless it is compressed below that"
        )


# Letters


def letter_about(row: WaitingRow, value: bytes | None, cause: str) -> Letter:
    """A row that is a letter already stays the letter that it is. Any other was to be a record of its target, so that
    is where the letter says it belongs, at no partition and no offset: `kconsume dlq redrive` must not take it for the
    record that it came from."""
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


def write_letters(source: Source, rows: Iterable[tuple[WaitingRow, str]], topic: str) -> list[tuple[WaitingRow, str]]:
    """Write each row, with its cause, to that topic; where each is, once the broker has confirmed it. A row that is
    gone meanwhile was sent, and is left out."""
    assert source.cluster is not None
    source.cluster.topics([topic])  # a misspelt name is an error, not a new topic
    settings = {**source.kafka, "message.timeout.ms": _PATIENCE * 1000}
    outlet = Outlet(producer_settings(source.cluster.brokers, settings), "outbox")
    written = []
    try:
        for row, cause in rows:
            if (value := source.reader.value(row)) is None:
                continue
            sent = encoded(letter_about(row, value[0], cause).outgoing(topic), topic, outlet.most)
            written.append((row, str(Place(*outlet.write(sent).result()))))
            source.reader.delete([row])
        return written
    finally:
        outlet.close(_PATIENCE)
