"""The limits of a topic: how many bytes a batch may have, and whether each record must have a key.

A broker refuses a whole batch because of one bad record, and the client continues with the next batch: later rows would
pass the refused one. So rows that the topic surely accepts are sent together, and a row that it may refuse is sent
alone. Limits that the brokers do not report are not applied here; then the producer stops at a refusal
(`RelayProducer`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, NamedTuple, Protocol, cast

from kconsume.backends.outbox.tables import Posted

_FRESH = 10.0
"""Seconds after which the limits of a topic are requested again."""
_PATIENCE = 2.0
"""Seconds that the first rows to a topic wait for the limits of the topic."""
_BATCH_FRAME = 100
_RECORD_FRAME = 40
_HEADER_FRAME = 12
"""The highest number of bytes on the wire in addition to the data: of a batch, of a record, of a header."""


class TopicLimit(NamedTuple):
    """The limits of one topic."""

    most_bytes: int
    """The largest batch, `max.message.bytes`."""
    wants_keys: bool = False
    """Whether the topic is compacted, and so refuses a record without a key."""


NO_LIMITS: Final[Mapping[str, TopicLimit]] = {}


def divided(limits: Mapping[str, TopicLimit], among: int) -> Mapping[str, TopicLimit]:
    """Return the part of each limit that one partition may use, because rows of several partitions may share a batch.

    Args:
        limits: the limits, by topic.
        among: the number of partitions that send at the same time.
    """
    if not limits or among < 2:
        return limits
    return {topic: limit._replace(most_bytes=limit.most_bytes // among) for topic, limit in limits.items()}


def record_bytes(row: Posted) -> int:
    """Return the highest number of bytes of a row as a record, without compression."""
    sent = row.outgoing
    value, key, headers = cast(Any, sent.value), cast(Any, sent.key), cast(Any, sent.headers)
    size = _RECORD_FRAME + (0 if value is None else len(value)) + (0 if key is None else len(key))
    return size + sum(len(name.encode()) + len(each) + _HEADER_FRAME for name, each in headers)


def may_refuse(limit: TopicLimit, size: int, *, has_key: bool) -> bool:
    """Return whether the topic may refuse a record. A large record may be small enough once it is compressed.

    Args:
        size: the bytes of the record.
        has_key: whether the record has a key.
    """
    return size + _BATCH_FRAME > limit.most_bytes or (limit.wants_keys and not has_key)


def first_sendable(
    rows: Sequence[Posted], limits: Mapping[str, TopicLimit]
) -> tuple[Sequence[Posted], Collection[str]]:
    """Return the first rows that may be sent together, and the topics whose next row must be sent alone.

    No row passes an earlier row to its topic: if a row is left out, all later rows to its topic are left out too.
    """
    if not limits or limits.keys().isdisjoint({row.outgoing.topic for row in rows}):
        return rows, ()
    chosen: list[Posted] = []
    doubtful: dict[str, None] = {}
    used: dict[str, int] = {}
    for row in rows:
        topic = cast(str, row.outgoing.topic)
        if topic in doubtful:
            continue
        if (limit := limits.get(topic)) is not None:
            size = record_bytes(row)
            if may_refuse(limit, size, has_key=row.outgoing.key is not None):
                if topic in used:
                    break  # the rows before it are sent first
                doubtful[topic] = None
                continue
            used[topic] = used.get(topic, _BATCH_FRAME) + size
            if used[topic] > limit.most_bytes:
                break
        chosen.append(row)
    return chosen, doubtful


class LimitSource(Protocol):
    """Asks the brokers for the limits of topics."""

    def ask_limits(self, topics: Sequence[str]) -> Mapping[str, Future[TopicLimit | None]]:
        """Return a future for each topic; the future returns None if the brokers do not report the limits."""
        ...


class TopicLimits:
    """The limits of the topics to which one relay sends. Only the relay's thread calls `of`.

    Args:
        cluster: asks the brokers.
        largest_batch: bytes of the largest batch that the producer makes.
    """

    def __init__(self, cluster: LimitSource, largest_batch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._largest_batch = largest_batch
        self._clock = clock
        self._asked_at: dict[str, float] = {}
        self._asked: dict[str, Future[TopicLimit | None]] = {}
        self._known: dict[str, TopicLimit] = {}
        self._over = threading.Event()

    def of(self, topics: Iterable[str]) -> Mapping[str, TopicLimit]:
        """Return the limits that a batch could exceed. The first call for a topic waits up to two seconds."""
        wanted, now = {*topics}, self._clock()
        due = [t for t in wanted if t not in self._asked and now - self._asked_at.get(t, -_FRESH) >= _FRESH]
        new = {t for t in due if t not in self._asked_at}
        if due:
            self._asked.update(self._cluster.ask_limits(due))
            self._asked_at.update(dict.fromkeys(due, now))
        if self._asked:
            deadline = self._clock() + _PATIENCE
            for topic in [t for t in wanted if t in self._asked]:
                self._take_answer(topic, max(0.0, deadline - self._clock()) if topic in new else 0.0)
        return {t: self._known[t] for t in wanted if t in self._known}

    def _take_answer(self, topic: str, patience: float) -> None:
        try:
            limit = self._asked[topic].result(patience)
        except FutureTimeout:
            return  # a later call takes the answer
        del self._asked[topic]
        if limit is not None and (limit.wants_keys or limit.most_bytes < self._largest_batch):
            self._known[topic] = limit
        else:
            self._known.pop(topic, None)
