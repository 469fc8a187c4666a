"""What a topic takes: how many bytes at once, and whether each record must have a key.

A broker refuses a whole batch for one bad record, and the client goes on with the next batch: later rows would pass the
refused one. So rows that are surely taken leave together, and a row that may be refused leaves alone. What the brokers
do not tell is not limited here; then the producer is what stops at a refusal (`outlet.RelayOutlet`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, NamedTuple, Protocol, cast

from kconsume.backends.outbox_table import Posted

_FRESH = 10.0
"""Seconds for which an answer counts."""
_PATIENCE = 2.0
"""Seconds for which rows to a topic that nothing is known of wait for the first answer."""
_BATCH_FRAME = 100
_RECORD_FRAME = 40
_HEADER_FRAME = 12
"""Bytes on the wire, at most, beside the data itself."""


class Limit(NamedTuple):
    """What a topic takes."""

    most_bytes: int
    """Of a batch, `max.message.bytes`."""
    wants_keys: bool = False
    """It is compacted, and refuses a record without a key."""


NO_LIMITS: Final[Mapping[str, Limit]] = {}


def shared(limits: Mapping[str, Limit], among: int) -> Mapping[str, Limit]:
    """The part of each limit that one of so many partitions may use: their rows may come into one batch."""
    if not limits or among < 2:
        return limits
    return {topic: limit._replace(most_bytes=limit.most_bytes // among) for topic, limit in limits.items()}


def record_bytes(row: Posted) -> int:
    """Bytes of a row as a record, without compression, at most."""
    sent = row.outgoing
    value, key, headers = cast(Any, sent.value), cast(Any, sent.key), cast(Any, sent.headers)
    size = _RECORD_FRAME + (0 if value is None else len(value)) + (0 if key is None else len(key))
    return size + sum(len(name.encode()) + len(each) + _HEADER_FRAME for name, each in headers)


def refuses(limit: Limit, size: int, *, has_key: bool) -> bool:
    """Whether a record of so many bytes may be refused. Compressed it may be small enough all the same."""
    return size + _BATCH_FRAME > limit.most_bytes or (limit.wants_keys and not has_key)


def together(rows: Sequence[Posted], limits: Mapping[str, Limit]) -> tuple[Sequence[Posted], Collection[str]]:
    """The first rows that may leave at once, and the topics of which the next row must be tried alone.

    No row is passed by a later one to its topic: rows behind one that is left out are left out too.
    """
    if not limits or limits.keys().isdisjoint({row.outgoing.topic for row in rows}):
        return rows, ()
    lot: list[Posted] = []
    doubtful: dict[str, None] = {}
    used: dict[str, int] = {}
    for row in rows:
        topic = cast(str, row.outgoing.topic)
        if topic in doubtful:
            continue
        if (limit := limits.get(topic)) is not None:
            size = record_bytes(row)
            if refuses(limit, size, has_key=row.outgoing.key is not None):
                if topic in used:
                    break  # what is before it leaves first
                doubtful[topic] = None
                continue
            used[topic] = used.get(topic, _BATCH_FRAME) + size
            if used[topic] > limit.most_bytes:
                break
        lot.append(row)
    return lot, doubtful


class KnowsLimits(Protocol):
    """Asks the brokers what topics take; each future ends with None where they do not tell."""

    def ask_limits(self, topics: Sequence[str]) -> Mapping[str, Future[Limit | None]]: ...


class Limits:
    """The limits of the topics that one relay sends to. `of` is called by the relay's thread alone."""

    def __init__(self, cluster: KnowsLimits, most_at_once: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`most_at_once`: bytes of the largest batch that the producer makes."""
        self._cluster = cluster
        self._most = most_at_once
        self._clock = clock
        self._asked_at: dict[str, float] = {}
        self._asked: dict[str, Future[Limit | None]] = {}
        self._known: dict[str, Limit] = {}
        self._over = threading.Event()

    def of(self, topics: Iterable[str]) -> Mapping[str, Limit]:
        """The limits that a batch of ours could exceed. Waits a moment for topics that nothing is known of yet."""
        wanted, now = {*topics}, self._clock()
        due = [t for t in wanted if t not in self._asked and now - self._asked_at.get(t, -_FRESH) >= _FRESH]
        new = {t for t in due if t not in self._asked_at}
        if due:
            self._asked.update(self._cluster.ask_limits(due))
            self._asked_at.update(dict.fromkeys(due, now))
        if self._asked:
            deadline = self._clock() + _PATIENCE
            for topic in [t for t in wanted if t in self._asked]:
                self._take_in(topic, max(0.0, deadline - self._clock()) if topic in new else 0.0)
        return {t: self._known[t] for t in wanted if t in self._known}

    def _take_in(self, topic: str, patience: float) -> None:
        try:
            limit = self._asked[topic].result(patience)
        except FutureTimeout:
            return  # it is taken in when it comes
        del self._asked[topic]
        if limit is not None and (limit.wants_keys or limit.most_bytes < self._most):
            self._known[topic] = limit
        else:
            self._known.pop(topic, None)
