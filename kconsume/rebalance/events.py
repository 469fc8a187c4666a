"""What happened in a rebalance, and the number and duration of the last rebalances.

Pure: no clock, no I/O, no threads. The caller measures each rebalance and then adds it. To get statistics, the caller
passes the current time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from kconsume.errors import ConfigurationError
from kconsume.records import Partition

JOINED: Final = "joined"
"""This member has joined the group: its first assignment."""
MEMBERS: Final = "members"
"""Another member joined, left or died. Also used if the reason is unknown: the client reports no reason."""
PARTITIONS: Final = "partitions"
"""A topic has more partitions than before."""
SUBSCRIPTION: Final = "subscription"
"""This member subscribed to other topics."""
LOST: Final = "lost"
"""The broker had removed this member and given its partitions to others without a revoke."""
LEFT: Final = "left"
"""This member left the group."""

_HOUR = timedelta(hours=1)
_MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Rebalance:
    """One rebalance as this member saw it. A listener gets the values known at the time of its call.

    Args:
        reason: one of `joined`, `members`, `partitions`, `subscription`, `lost`, `left`.
        protocol: `eager`, `cooperative` or `consumer` (KIP-848).
        gained: partitions that this member got.
        gone: partitions that this member gave up or lost.
        kept: partitions that stayed with this member all the time.
        began: the start of the rebalance, in UTC.
        duration: seconds until records of the gained partitions were fetched again.
        drained: records that were finished while their partition was being given up.
        dropped: records that were fetched and not started. The next owner handles them.
        abandoned: partitions whose handler did not end within the budget.
        success: False if a partition was lost, abandoned or held, or was given up again before its claim in the store
            had succeeded.
    """

    reason: str
    protocol: str
    gained: tuple[Partition, ...]
    gone: tuple[Partition, ...]
    kept: tuple[Partition, ...]
    began: datetime
    duration: float
    drained: int
    dropped: int
    abandoned: tuple[Partition, ...]
    success: bool

    @property
    def moved(self) -> tuple[Partition, ...]:
        """Partitions that came or went, sorted, each once. Under the eager protocol most partitions are in both
        groups."""
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
    """The rebalances that ended in the last hour, or since the start of the consumer if that was later.

    Args:
        count: the number of rebalances.
        per_hour: the number of rebalances per hour, at the rate of that time.
        mean_duration: seconds; 0 if there was no rebalance.
        share_of_time: the part of that time that rebalances took, from 0 to 1.
        success_rate: from 0 to 1; 1 if there was no rebalance.
    """

    count: int
    per_hour: float
    mean_duration: float
    share_of_time: float
    success_rate: float


class History:
    """The last rebalances, and the sums of the last hour.

    One thread writes and any thread reads, without a lock: `_snapshot` is one immutable value, and `add` replaces it by
    a single assignment. A reader reads `_snapshot` once, so the reader sees a rebalance completely or not at all.

    There can be more rebalances in an hour than `ring`. Older rebalances are added up by the minute in which they
    ended, so that count and rate stay right. For these older rebalances, the start of the hour is exact to one minute.
    """

    def __init__(self, since: datetime, ring: int = 128) -> None:
        """
        Args:
            since: the start of the consumer.
            ring: how many rebalances to keep individually.
        """
        if ring < 1:
            raise ConfigurationError(f"ring={ring} keeps no rebalance: give a number of at least 1")
        self._since = since
        self._ring = ring
        self._snapshot = _Snapshot((), ())

    def add(self, rebalance: Rebalance) -> None:
        """Add a rebalance. Called by one thread only."""
        snapshot = self._snapshot
        recent = (*snapshot.recent, rebalance)
        fallen, recent = recent[: -self._ring], recent[-self._ring :]
        self._snapshot = _Snapshot(recent, _added_up(snapshot.minutes, fallen, rebalance.ended - _HOUR))

    @property
    def recent(self) -> tuple[Rebalance, ...]:
        """The last rebalances, the newest last."""
        return self._snapshot.recent

    def statistics(self, now: datetime) -> Statistics:
        """The statistics of the hour before `now`."""
        snapshot, start = self._snapshot, max(self._since, now - _HOUR)
        # After a clock was set back, the start may be in the future.
        window = max(0.0, (now - start).total_seconds())
        sums = [_minute_of(r, start) for r in snapshot.recent if r.ended >= start]
        sums += [minute for minute in snapshot.minutes if minute.at + _MINUTE > start]
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
class _MinuteSum:
    """The sums of the rebalances that ended in one minute.

    Args:
        inside: the part of `seconds` that is inside the window of the statistics.
    """

    at: datetime
    count: int
    seconds: float
    inside: float
    successes: int

    def plus(self, other: _MinuteSum) -> _MinuteSum:
        return _MinuteSum(
            self.at,
            self.count + other.count,
            self.seconds + other.seconds,
            self.inside + other.inside,
            self.successes + other.successes,
        )


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The content of a history at one moment.

    Args:
        minutes: the sums of the rebalances that left the ring, one for each minute.
    """

    recent: tuple[Rebalance, ...]
    minutes: tuple[_MinuteSum, ...]


def _minute_of(rebalance: Rebalance, start: datetime | None = None) -> _MinuteSum:
    """The sum for one rebalance. With `start`, only the time of the rebalance after `start` counts as inside."""
    inside = rebalance.duration
    if start is not None:
        inside = min(inside, max(0.0, (rebalance.ended - start).total_seconds()))
    at = rebalance.ended.replace(second=0, microsecond=0)
    return _MinuteSum(at, 1, rebalance.duration, inside, int(rebalance.success))


def _added_up(minutes: Iterable[_MinuteSum], fallen: Iterable[Rebalance], oldest: datetime) -> tuple[_MinuteSum, ...]:
    """Return the sums with the rebalances that left the ring, and without the minutes that ended before `oldest`."""
    sums = {minute.at: minute for minute in minutes if minute.at + _MINUTE > oldest}
    for rebalance in fallen:
        one = _minute_of(rebalance)
        if one.at + _MINUTE > oldest:
            sums[one.at] = sums[one.at].plus(one) if one.at in sums else one
    return tuple(sums.values())


def _written(partitions: Iterable[Partition]) -> str:
    return ",".join(map(str, partitions)) or "-"
