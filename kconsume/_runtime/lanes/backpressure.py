"""Decides how many records of a lane may be in flight, and what to do with a full lane. Pure.

A lane becomes *full* when its window is full, and stays full until half of the window is finished. If a full lane will
soon have room again, its next records stay in the client's queue. Otherwise its partition is paused, so that the other
lanes get records. A pause costs the prefetched records of the partition, and the resume takes up to a second
(librdkafka issue 5343). So the partition is resumed while its lane still has half a window to do.
"""

from __future__ import annotations

import enum

# Bytes of the Python objects of one record, in addition to the record's own bytes.
RECORD_OVERHEAD = 450


class Advice(enum.Enum):
    FLOW = "flow"
    WAIT = "wait"
    PAUSE = "pause"


class Backpressure:
    """The limits of one lane."""

    MOST_RECORDS = 24_000
    FEW_RECORDS = 2_000
    """The window of a handler that is not measured yet, or that needs less than `SHORT` for a record."""
    SHORT = 50e-6
    SOON = 1.0
    """Seconds. A lane that is full for longer, or will be, is paused."""

    __slots__ = ("bytes",)

    def __init__(self, total_bytes: int, lanes: int) -> None:
        """
        Args:
            total_bytes: how many bytes all lanes together may hold.
            lanes: how many lanes share these bytes.
        """
        self.bytes = max(1, total_bytes // max(1, lanes))

    def fullness(
        self, records: int, size: int, seconds_each: float | None, *, waits: bool = False, batch: int = 0
    ) -> float:
        """How full a lane is: 1.0 is a full window.

        For a handler that needs less than `SHORT` for a record, two fetches are enough. More objects in memory would
        only slow it down, because of the CPU caches and the garbage collector (measured: a third of its speed). A
        handler that `waits`, for example for a database, gets the larger window: it loses more if its other lanes have
        nothing to do while one lane is full.

        Args:
            records: how many records are in flight.
            size: their bytes.
            seconds_each: the handler's time for a record, None if unknown.
            waits: True if the handler waits for something.
            batch: how many records the handler gets at once, 0 for one by one. While the handler has one batch, the
                next batch may wait and a third may be fetched. Otherwise every partition would stand still while one of
                them has a large batch.
        """
        few = seconds_each is None or (seconds_each < self.SHORT and not waits)
        most = self.FEW_RECORDS if few else self.MOST_RECORDS
        # Full with a third batch, and no longer full when one batch is left.
        return max(records / max(most, 2 * batch + 1), (size + records * RECORD_OVERHEAD) / self.bytes)

    def advise(
        self,
        records: int,
        size: int,
        *,
        full_for: float | None,
        seconds_each: float | None,
        waits: bool = False,
        batch: int = 0,
    ) -> Advice:
        """What to do with a lane now.

        Args:
            full_for: seconds since the window was full, None if it was not.
            records, size, seconds_each, waits, batch: as in `fullness`.
        """
        fullness = self.fullness(records, size, seconds_each, waits=waits, batch=batch)
        if fullness < (0.5 if full_for is not None else 1.0) or records == 0:
            return Advice.FLOW
        until_half = records * max(0.0, 1.0 - 0.5 / fullness)
        if (seconds_each or 0.0) * until_half > self.SOON or (full_for or 0.0) > self.SOON:
            return Advice.PAUSE
        return Advice.WAIT
