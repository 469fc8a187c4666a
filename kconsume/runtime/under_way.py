"""Letters of a lane that are on their way to a broker, and the reports that wait for them (P1).

A course hands letters over and goes on with its records. What it reports from then on waits here, behind them, and is
reported in the order in which it came, as soon as all letters before it are confirmed: by the thread that learns of the
confirmation, so that nobody waits for it. When one could not be written, nothing behind it is reported; the lane is
told, and its course has it written again (`owing.py`).

Bounded: a lane whose letters are `full` runs nothing more until some are confirmed. Only counts and queues; no I/O.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from kconsume.failures.letters import Draft
from kconsume.records import Message
from kconsume.runtime.lanes import Lane, Progress, Report, Undelivered, Worked
from kconsume.runtime.pressure import Window

_ADDED = 1_000
"""Bytes of a letter beside its record, about."""


class Parcel:
    """Letters that were handed over together, and the records that they are about."""

    __slots__ = ("bytes", "confirmed", "drafts", "error", "messages")

    def __init__(self, messages: Sequence[Message], drafts: Sequence[Draft]) -> None:
        self.messages = messages
        self.drafts = drafts
        self.bytes = sum(map(len, messages)) + _ADDED * len(drafts)
        self.confirmed = False
        self.error: BaseException | None = None
        """Why it could not be written, until it is sent again."""


class UnderWay:
    """Of one lane. Its course puts in, on the thread that runs it; deliveries end on any."""

    MOST_LETTERS = 2_000
    MOST_BYTES = 4 * 2**20
    MOST_RECORDS = 2 * Window.MOST_RECORDS
    """That wait behind letters: a crash repeats them. With a quarter of this, a lane of a swift handler stood still for
    its letters some ten times while a million records passed (measured)."""

    def __init__(self, lane: Lane, report: Report) -> None:
        self._lane = lane
        self._report = report
        self._lock = threading.Lock()
        self._queue: deque[Parcel | Progress] = deque()
        """It begins with a parcel that is not confirmed, or is empty."""
        self._letters = self._bytes = self._records = self._failures = 0

    @property
    def empty(self) -> bool:
        """Whether all that was handed over is confirmed."""
        return not self._queue

    @property
    def moves(self) -> bool:
        """Whether something may be reported by itself, when a delivery ends."""
        with self._lock:
            head = self._queue[0] if self._queue else None
            return isinstance(head, Parcel) and head.error is None

    @property
    def holds(self) -> bool:
        """Whether the lane is to run nothing more for now: one could not be written, or too many are on their way."""
        return bool(
            self._failures
            or self._letters >= self.MOST_LETTERS
            or self._bytes >= self.MOST_BYTES
            or self._records >= self.MOST_RECORDS
        )

    @property
    def failed(self) -> list[Parcel]:
        """Those that could not be written, in order."""
        with self._lock:
            return [each for each in self._queue if isinstance(each, Parcel) and each.error is not None]

    def tell(self, progress: Progress) -> None:
        """Report it once everything that was handed over before is confirmed."""
        with self._lock:
            self._put(progress)

    def send(self, parcel: Parcel, delivery: Future[None], behind: Progress) -> None:
        """Letters were handed over; `behind` is what they, and the records since, come to."""
        with self._lock:
            self._queue.append(parcel)
            self._letters += len(parcel.drafts)
            self._bytes += parcel.bytes
            self._put(behind)
        delivery.add_done_callback(partial(self._ended, parcel))

    def send_again(self, parcel: Parcel, delivery: Future[None]) -> None:
        with self._lock:
            parcel.error = None
            self._failures -= 1
        delivery.add_done_callback(partial(self._ended, parcel))

    def _put(self, progress: Progress) -> None:
        if not self._queue:
            self._report(progress)
            return
        lane, first, upto, handled, skipped, epoch = progress[:6]
        self._records += handled + skipped
        self._report(Worked(lane, handled + skipped))
        # Without its records: they are many, and what is bounded here is letters.
        self._queue.append(Progress(lane, first, upto, handled, skipped, epoch, progress.stored, held=True))

    def _ended(self, parcel: Parcel, delivery: Future[None]) -> None:
        """On the thread that serves deliveries: it must not wait, nor send."""
        error = delivery.exception()
        with self._lock:
            if error is None:
                parcel.confirmed = True
                self._letters -= len(parcel.drafts)
                self._bytes -= parcel.bytes
                parcel.messages = parcel.drafts = ()  # it may stay behind another one for a while
                self._report_ready()
            else:
                parcel.error = error
                self._failures += 1
        if error is not None:
            self._report(Undelivered(self._lane))

    def _report_ready(self) -> None:
        """With the lock, so that what another thread reports meanwhile comes behind."""
        queue = self._queue
        while queue:
            head = queue[0]
            if isinstance(head, Progress):
                self._records -= head.handled + head.skipped
                self._report(head)
            elif not head.confirmed:
                return
            queue.popleft()
