"""What a rebalance was, and how often and how long the last ones were.

Pure: no clock, no I/O, no threads. Whoever adds a rebalance has measured it; whoever asks for statistics says when now
is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from kconsume.errors import ConfigurationError
from kconsume.records import Partition

JOINED: Final = "joined"
"""We have joined the group: this is our first assignment."""
MEMBERS: Final = "members"
"""Somebody else joined, left or died. Also what cannot be told from here: the client never says why."""
PARTITIONS: Final = "partitions"
"""A topic has more partitions than before."""
SUBSCRIPTION: Final = "subscription"
"""We asked for other topics."""
LOST: Final = "lost"
"""The broker had put us out, and gave our partitions to others without asking."""
LEFT: Final = "left"
"""We left the group."""

_HOUR = timedelta(hours=1)
_MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Rebalance:
    """One rebalance as this member saw it. Listeners get it as it stands when they are called."""

    reason: str
    """One of `joined`, `members`, `partitions`, `subscription`, `lost`, `left`: the constants of this file."""
    protocol: str
    """`eager`, `cooperative` or `consumer` (KIP-848)."""
    gained: tuple[Partition, ...]
    gone: tuple[Partition, ...]
    kept: tuple[Partition, ...]
    """What stayed ours all the while."""
    began: datetime
    """In UTC."""
    duration: float
    """Seconds, until what was gained flowed."""
    drained: int
    """Records that were finished while their partition was being given up."""
    dropped: int
    """Records that were fetched and not started; the next owner handles them."""
    abandoned: tuple[Partition, ...]
    """Whose handler did not end inside the budget."""
    success: bool
    """False if a partition was lost, abandoned or held, or went again before its claim in the store had succeeded."""

    @property
    def moved(self) -> tuple[Partition, ...]:
        """What came or went, sorted, each once: under the eager protocol most partitions do both."""
        return tuple(sorted({*self.gained, *self.gone}))

    @property
    def ended(self) -> datetime:
        return self.began + timedelta(seconds=self.duration)

    def __str__(self) -> str:
        return (
            f"reason={self.reason} protocol={self.protocol} gained={_written(self.gained)} gone={_written(self.gone)} "
            f"kept={len(self.kept)} duration={self.duration:.3f}s drained={self.drained} dropped={self.dropped} "
            f"abandoned={_written(self.abandoned)} success={'yes' if self.success else 'no'}"
        )


@dataclass(frozen=True, slots=True)
class Statistics:
    """The rebalances that ended within the last hour, or since the start if that is less long ago."""

    count: int
    per_hour: float
    mean_duration: float
    """Seconds; 0 if there was none."""
    share_of_time: float
    """How much of that time went into rebalances, from 0 to 1."""
    success_rate: float
    """From 0 to 1; 1 if there was none."""


class History:
    """The last rebalances, and the sums of an hour.

    One thread adds, any may read, with no lock: all that is known is one immutable value, and `add` puts a new one in
    its place by a single assignment. A reader takes the value once, so it sees all of a rebalance or nothing of it.

    A storm can bring more rebalances an hour than the ring has room for. What falls out of the ring is added up by the
    minute in which it ended, so that count and rate stay right: exact for what is in the ring, to a minute at the far
    end of the hour for what is not.
    """

    def __init__(self, since: datetime, ring: int = 128) -> None:
        if ring < 1:
            raise ConfigurationError(f"a history of {ring} rebalances has room for none: let ring be at least 1")
        self._since = since
        self._ring = ring
        self._known = _Known((), ())

    def add(self, rebalance: Rebalance) -> None:
        """From one thread only."""
        known = self._known
        recent = (*known.recent, rebalance)
        fallen, recent = recent[: -self._ring], recent[-self._ring :]
        self._known = _Known(recent, _added_up(known.minutes, fallen, rebalance.ended - _HOUR))

    @property
    def recent(self) -> tuple[Rebalance, ...]:
        """The newest last."""
        return self._known.recent

    def statistics(self, now: datetime) -> Statistics:
        known, start = self._known, max(self._since, now - _HOUR)
        # A clock that was set back may say that we start in the future.
        window = max(0.0, (now - start).total_seconds())
        sums = [_sum_of(r, start) for r in known.recent if r.ended >= start]
        sums += [minute for minute in known.minutes if minute.at + _MINUTE > start]
        count = sum(each.count for each in sums)
        inside = sum(each.inside for each in sums)
        return Statistics(
            count=count,
            per_hour=count * _HOUR.total_seconds() / window if window else 0.0,
            mean_duration=sum(each.seconds for each in sums) / count if count else 0.0,
            share_of_time=min(1.0, inside / window) if window else 0.0,
            success_rate=sum(each.successes for each in sums) / count if count else 1.0,
        )


@dataclass(frozen=True, slots=True)
class _Sum:
    """Rebalances, added up."""

    at: datetime
    """The minute in which they ended."""
    count: int
    seconds: float
    inside: float
    """Of these seconds, those that count as time of the window that is asked about."""
    successes: int

    def plus(self, other: _Sum) -> _Sum:
        return _Sum(
            self.at,
            self.count + other.count,
            self.seconds + other.seconds,
            self.inside + other.inside,
            self.successes + other.successes,
        )


@dataclass(frozen=True, slots=True)
class _Known:
    """All that a history knows at one moment."""

    recent: tuple[Rebalance, ...]
    minutes: tuple[_Sum, ...]
    """What fell out of the ring, each minute once."""


def _sum_of(rebalance: Rebalance, start: datetime | None = None) -> _Sum:
    """One rebalance. With `start`, of its time only what came after counts as inside."""
    inside = rebalance.duration
    if start is not None:
        inside = min(inside, max(0.0, (rebalance.ended - start).total_seconds()))
    at = rebalance.ended.replace(second=0, microsecond=0)
    return _Sum(at, 1, rebalance.duration, inside, int(rebalance.success))


def _added_up(minutes: Iterable[_Sum], fallen: Iterable[Rebalance], oldest: datetime) -> tuple[_Sum, ...]:
    """The minutes with these rebalances, and without those minutes that ended before `oldest`."""
    sums = {minute.at: minute for minute in minutes if minute.at + _MINUTE > oldest}
    for rebalance in fallen:
        one = _sum_of(rebalance)
        if one.at + _MINUTE > oldest:
            sums[one.at] = sums[one.at].plus(one) if one.at in sums else one
    return tuple(sums.values())


def _written(partitions: Iterable[Partition]) -> str:
    return ",".join(map(str, partitions)) or "-"
