"""Which record a log line is about: topic, partition, offset and attempt on whatever is logged inside a handler.

A runner says once a slice what it walks over (`enter`, `leave`); the record in hand is worked out only when
something is logged. Nothing here formats, writes or configures a log: `install` adds the four values to the log
records of whatever is set up.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextvars import Context, ContextVar, Token
from operator import length_hint
from typing import NamedTuple, Protocol

from kconsume.records import Message


class Place(NamedTuple):
    """Where a record stands, and which attempt on it this is; written `orders/3@1042`."""

    topic: str
    partition: int
    offset: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset}"


_Walk = tuple[Sequence[Message], Iterator[Message] | None, int]

# Of the context, not of the thread: on an event loop, tasks take turns in one thread.
_walk: ContextVar[_Walk | None] = ContextVar("kconsume_walk", default=None)


def enter(messages: Sequence[Message], turn: Iterator[Message] | None, attempt: int = 1) -> Token[_Walk | None]:
    """Handlers are called for these messages from now on, in this context, until `leave`.

    `turn` is the iterator over `messages` by which the caller goes from one to the next: where it stands is the
    message in hand. None for a batch, or a single message: the place is that of the first one. A task that outlives
    its record reads where `turn` is *then*, so a caller that lets handlers run at the same time enters once for
    each record, with None.
    """
    return _walk.set((messages, turn, attempt))


leave = _walk.reset
"""`leave(token)`: what was before `enter` holds again. In the context that entered."""


def here() -> Place | None:
    """The place of the record in hand, None outside handlers."""
    walk = _walk.get()
    return None if walk is None else _place(walk)


def walked(context: Context) -> int | None:
    """Which of its messages a runner has in hand that works in this context, from another thread; None before it has
    begun, and when it has ended."""
    walk = context.get(_walk)
    if walk is None:
        return None
    messages, turn, _ = walk
    return 0 if turn is None else max(0, len(messages) - 1 - length_hint(turn))


def install() -> None:
    """Have the place added to every log record made from now on. Once is enough, and twice does no more.

    A factory that the program has set stays and makes the records; one that is set later and calls the one before
    keeps the place.
    """
    current = logging.getLogRecordFactory()
    if not isinstance(current, _PlacingFactory):
        logging.setLogRecordFactory(_PlacingFactory(current))


def place_of(record: logging.LogRecord) -> Place | None:
    """Where a log record was made, whatever came as its `extra=`; None outside handlers, and of a copy."""
    fields = vars(record)
    return fields.place if isinstance(fields, _Fields) else None


def _place(walk: _Walk) -> Place | None:
    messages, turn, attempt = walk
    at = 0 if turn is None else len(messages) - 1 - length_hint(turn)
    if not 0 <= at < len(messages):  # not begun
        return None
    message = messages[at]
    return Place(message.topic(), message.partition(), message.offset(), attempt)


class _Factory(Protocol):
    def __call__(self, *args: object, **kwargs: object) -> logging.LogRecord: ...


class _PlacingFactory:
    """Makes log records as the factory before it does, and adds the place if there is one.

    Here, not in a formatter: a line may be formatted later, in another thread.
    """

    def __init__(self, before: _Factory) -> None:
        self._before = before

    def __call__(self, *args: object, **kwargs: object) -> logging.LogRecord:
        record = self._before(*args, **kwargs)
        walk = _walk.get()
        if walk is not None and (place := _place(walk)) is not None:
            record.__dict__ = _Fields(record, place)
        return record


class _Fields(dict[str, object]):
    """The attributes of a log record with those of a place among them.

    `Logger.makeRecord` raises KeyError when `extra=` has a name that the record has already, and people log with
    `extra={"topic": ...}`. It alone does not find the place here, so that theirs is put over it. Whoever else looks,
    formatters, filters, handlers that read `vars(record)` and never ask for the message, sees what is there.
    """

    __slots__ = ("place",)

    def __init__(self, record: logging.LogRecord, place: Place) -> None:
        super().__init__(zip(Place._fields, place, strict=True))
        self.update(vars(record))  # another factory's own values of these names win
        self.place = place

    def __contains__(self, name: object) -> bool:
        if name in Place._fields and sys._getframe(1).f_code.co_name == "makeRecord":
            return False
        return super().__contains__(name)

    def __reduce__(self) -> tuple[type, tuple[dict[str, object]]]:
        """Pickled as a plain dict, which a process without kconsume can read."""
        return dict, (dict(self),)
