"""What the log says of records that were passed over: each is counted in a line, and those alike share one.

A broken deployment fails on every record; a line for each would cost more than the records did, and say no more. So a
line has the first of them in full, how many there were besides, and which was the last.
"""

from __future__ import annotations

import logging

from kconsume.records import Message

_log = logging.getLogger("kconsume.failures")


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
