"""What the log says of records that were passed over: each is counted in a line, and those alike share one.

A broken deployment fails on every record; a line for each would cost more than the records did, and say no more. So a
line has the first of them in full, how many there were besides, and which was the last.
"""

from __future__ import annotations

import logging
import math
import threading
import time

from kconsume.records import Message

_log = logging.getLogger("kconsume.failures")
_clock = time.monotonic


class PassedOver:
    """Those that the log has not told of yet, by what became of them and the class of their error."""

    __slots__ = ("_alike",)

    def __init__(self) -> None:
        self._alike: dict[tuple[str, type[BaseException]], _Alike] = {}

    def __bool__(self) -> bool:
        return bool(self._alike)

    def add(self, what: str, message: Message, error: BaseException) -> None:
        alike = self._alike.get((what, type(error)))
        if alike is None:
            self._alike[what, type(error)] = _Alike(_place(message), why(error))
        else:
            alike.more += 1
            alike.last = message

    def take(self, others: PassedOver) -> None:
        """Tell of those as well, which came later."""
        for key, those in others._alike.items():
            alike = self._alike.get(key)
            if alike is None:
                self._alike[key] = those
            else:
                alike.more += 1 + those.more
                alike.last = those.last or those.first
        others._alike = {}

    def say(self) -> None:
        for (what, _), alike in self._alike.items():
            more = "" if alike.last is None else f" more={alike.more} last={_place(alike.last)}"
            _log.warning("%s record=%s%s %s", what, alike.first, more, alike.cause)
        self._alike.clear()


class Tally:
    """Has the log tell of them at most once a second. Of one lane: its course adds to it, on the thread that runs it;
    what follows closely waits for the owner to have it told, or for the end of the lane."""

    EVERY = 1.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._untold = PassedOver()
        self._told_at = -math.inf
        self._closed = False

    def add(self, passed_over: PassedOver) -> None:
        with self._lock:
            self._untold.take(passed_over)
        self.tell()

    def tell(self) -> None:
        """Of what waits, if a second has gone by."""
        if not self._untold:
            return
        with self._lock:
            now = _clock()
            if not self._untold or (now - self._told_at < self.EVERY and not self._closed):
                return
            self._told_at = now
            due, self._untold = self._untold, PassedOver()
        due.say()

    def close(self) -> None:
        """Of all that waits, and from now on at once: nobody may come by any more."""
        self._closed = True
        self.tell()


class _Alike:
    __slots__ = ("cause", "first", "last", "more")

    def __init__(self, first: str, cause: str) -> None:
        self.first = first
        self.cause = cause
        self.more = 0
        self.last: Message | str | None = None


def where(message: Message) -> str:
    return f"record={_place(message)}"


def why(error: BaseException) -> str:
    """On one line, whatever it says."""
    return f"cause={type(error).__name__}: {' '.join(str(error).split())}"


def _place(message: Message | str) -> str:
    """Of one that was written as a place before, itself."""
    return message if isinstance(message, str) else f"{message.topic()}/{message.partition()}@{message.offset()}"
