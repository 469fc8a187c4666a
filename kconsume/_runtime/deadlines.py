"""Deadlines, and the table of how a shutdown and a revocation divide their time.

A share is a part of the time that is *left* when its step begins. Apart from the clock that `Deadline` is given, this
module is pure.

    shutdown   drain ─► last commits ─► close: client, outbox, saves, resources, producers ─► report
    revoked    running handlers ─► outbox ─► offsets and listeners (the rest)
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kconsume._config.group_protocol import GroupProtocol

Clock = Callable[[], float]

# Shutdown, in the order of its steps

DRAIN_SHARE = 0.7
"""Part of the shutdown deadline in which running handlers may finish."""
LAST_COMMIT_SHARE = 0.5
"""Part of the time after the drain for commits, until nothing is unsaved."""
MIRROR_SHARE = 0.1
"""Part of the time of the last commits in which the mirror in the Kafka group catches up. Only lag tools read the
mirror."""
OUTBOX_CLOSE_SHARE = 0.5
"""Part of the remaining time in which the closing outbox relay sends the rows of the partitions that it still has. Half
of the rest goes to deliveries whose answers are under way."""
LAST_SAVE_SHARE = 0.5
"""Part of the remaining time, when a consumer closes its threads, for saves to the store that are under way."""
LEAST_CLOSE_SECONDS = 0.5
"""Seconds that the closing of a resource or a producer gets at least, even after the deadline."""
LEAST_LOOP_END_SECONDS = 1.0
"""Seconds that the thread of the event loop gets at least to end, even after the deadline."""
TASKS_END_SECONDS = 1.0
"""Seconds at most in which cancelled tasks on the event loop clean up."""
SECOND_SIGNAL_SECONDS = 1.0
"""Seconds after a second signal in which all consumers together may still end."""

# Revocation

REVOKED_HANDLERS_SHARE = 0.5
"""Part of the revoke budget in which running handlers of revoked partitions may finish."""
REVOKED_OUTBOX_SHARE = 0.5
"""Part of the revoke budget left after the handlers and their offsets, in which the outbox sends its rows."""
_LONG_REVOKE = 10.0
_SHORT_REVOKE = 1.0
_AFTER_REVOKE = 5.0
"""Seconds of the shutdown that are kept for the steps after revocation."""


class Deadline:
    """A point in time that several steps share. Each step uses the time that is left."""

    __slots__ = ("_clock", "_end", "seconds")

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - self._clock())

    @property
    def passed(self) -> bool:
        return self._clock() >= self._end

    def part(self, share: float) -> Deadline:
        """An earlier deadline for one step, so that the next steps have time too."""
        return Deadline(self.left * share, self._clock)


def revoke_budget(protocol: GroupProtocol, *, fenced: bool, poll_interval: float, shutdown: float) -> float:
    """Seconds within which revoked partitions are given up: handlers finish, offsets are sent, listeners are called.

    Nothing is fetched during this time. Under *eager* all members wait for the slowest anyway. Under *consumer* the
    partitions are handed over at the end of the callback, so a longer wait is better where no fence guards the store.
    The budget must fit into the poll interval, after which the broker evicts the member, and into the shutdown.

    Args:
        fenced: whether the store refuses writes of an earlier owner.
        poll_interval: `max.poll.interval.ms`, in seconds.
        shutdown: seconds of the whole shutdown.
    """
    most = min(_LONG_REVOKE, poll_interval / 4, max(_SHORT_REVOKE, shutdown - _AFTER_REVOKE))
    short = protocol is GroupProtocol.COOPERATIVE or (protocol is GroupProtocol.CONSUMER and fenced)
    return min(_SHORT_REVOKE, most) if short else most
