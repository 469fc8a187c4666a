"""How much may be in flight, and what to do when it is too much.

Pure: values in, a decision out. A lane is *crowded* from a full window until half of it is worked off. While a
crowded lane will have room again soon, records are left in the client's own queue. A lane that will not is
paused, so that the others flow; that costs its prefetched records and up to a second when it is resumed
(librdkafka issue 5343), so it is resumed while it still has half a window to do.
"""

from __future__ import annotations

import enum

from kconsume.runtime.budget import Pace

# One record's worth of Python objects around its bytes.
RECORD_OVERHEAD = 450


class Advice(enum.Enum):
    FLOW = "flow"
    WAIT = "wait"
    PAUSE = "pause"


class Window:
    """The bounds of one lane."""

    MOST_RECORDS = 24_000
    FEW_RECORDS = 2_000
    FAST = 50e-6
    SOON = 1.0

    __slots__ = ("bytes",)

    def __init__(self, total_bytes: int, lanes: int) -> None:
        self.bytes = max(1, total_bytes // max(1, lanes))

    def share(
        self, records: int, size: int, seconds_each: float | None, *, waits: bool = False, batch: int = 0
    ) -> float:
        """How full a lane is: 1.0 is a full window.

        A fast handler never waits for more than two fetches, and more objects in memory only cost it: their
        way through the caches, and the garbage collector's through them (measured: a third of its speed). One that
        `waits`, as for a database, is held up more by lanes that have nothing to do while another is crowded. A swift
        one is run by the owner: until its lane has come to rest, nothing more is put into it.

        `batch`: how many records the handler is given at once. While it has one batch, the next may wait and the one
        behind it be fetched: else every partition would stand still for as long as one of them has a large batch.
        """
        if seconds_each is None:
            most = self.FEW_RECORDS  # enough to find out
        elif seconds_each < Pace.SWIFT and not waits:
            return max(float(records), self._weight(records, size))
        else:
            most = self.FEW_RECORDS if seconds_each < self.FAST and not waits else self.MOST_RECORDS
        # So that it is crowded with a third batch, and no more when one is left.
        return max(records / max(most, 2 * batch + 1), self._weight(records, size))

    def _weight(self, records: int, size: int) -> float:
        return (size + records * RECORD_OVERHEAD) / self.bytes

    def advise(
        self,
        records: int,
        size: int,
        *,
        crowded_for: float | None,
        seconds_each: float | None,
        waits: bool = False,
        batch: int = 0,
    ) -> Advice:
        """`crowded_for`: seconds since the window was full, None if it was not; `seconds_each`: the handler's
        time for a record, if known."""
        share = self.share(records, size, seconds_each, waits=waits, batch=batch)
        if share < (0.5 if crowded_for is not None else 1.0) or records == 0:
            return Advice.FLOW
        to_work_off = records * max(0.0, 1.0 - 0.5 / share)
        if (seconds_each or 0.0) * to_work_off > self.SOON or (crowded_for or 0.0) > self.SOON:
            return Advice.PAUSE
        return Advice.WAIT
