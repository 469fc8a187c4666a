"""The record of a log line: topic, partition, offset and attempt for each line that is logged inside a handler.

The code that calls a handler calls `enter` before, and `leave` after, each slice of messages. The current message is
computed only when something is logged. `install` adds the four values to all log records. This file must not format,
write or configure a log.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextvars import Context, ContextVar, Token
from operator import length_hint
from typing import NamedTuple, Protocol

from kconsume.records import Message


class LogContext(NamedTuple):
    """The place of a record, written `orders/3@1042`, and the number of the attempt."""

    topic: str
    partition: int
    offset: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset}"


_Slice = tuple[Sequence[Message], Iterator[Message] | None, int]

# A context variable, because on an event loop several tasks share one thread.
_slice: ContextVar[_Slice | None] = ContextVar("kconsume_slice", default=None)


def enter(messages: Sequence[Message], turn: Iterator[Message] | None, attempt: int = 1) -> Token[_Slice | None]:
    """Start a slice: until `leave`, handlers of this context are called for these messages.

    A caller that runs several handlers at the same time calls `enter` once for each record, with `turn=None`. With
    `turn`, a line that such a handler logs later would name the record that the iterator has reached by then.

    Args:
        messages: the messages of the slice.
        turn: the iterator over `messages` with which the caller goes from one message to the next; its position gives
            the current message. None for a batch or a single message: the first message is the current one.
        attempt: the number of the attempt.
    """
    return _slice.set((messages, turn, attempt))


leave = _slice.reset
"""`leave(token)` ends the slice and restores the state before `enter`. Must be called in the context of `enter`."""


def here() -> LogContext | None:
    """Return the current record; None outside handlers."""
    current = _slice.get()
    return None if current is None else _place(current)


def walked(context: Context) -> int | None:
    """Return the index of the message that is being handled in another context. None outside `enter` and `leave`.

    Args:
        context: the context in which the handlers are called, possibly of another thread.
    """
    current = context.get(_slice)
    if current is None:
        return None
    messages, turn, _ = current
    return 0 if turn is None else max(0, len(messages) - 1 - length_hint(turn))


def install() -> None:
    """Add the current record to each log record from now on. A second call has no effect.

    The log record factory of the program still makes the log records. A program that sets another factory later must
    call the present factory from it.
    """
    current = logging.getLogRecordFactory()
    if not isinstance(current, _PlacingFactory):
        logging.setLogRecordFactory(_PlacingFactory(current))


def place_of(record: logging.LogRecord) -> LogContext | None:
    """Return the Kafka record of a log record; None outside handlers, and for a copied or pickled log record."""
    fields = vars(record)
    return fields.place if isinstance(fields, _Fields) else None


def _place(current: _Slice) -> LogContext | None:
    messages, turn, attempt = current
    at = 0 if turn is None else len(messages) - 1 - length_hint(turn)
    if not 0 <= at < len(messages):  # the first message has not been taken yet
        return None
    message = messages[at]
    return LogContext(message.topic(), message.partition(), message.offset(), attempt)


class _Factory(Protocol):
    def __call__(self, *args: object, **kwargs: object) -> logging.LogRecord: ...


class _PlacingFactory:
    """Makes log records with the factory that was set before, and adds to each the place of the Kafka record that is
    being handled.

    A formatter could not add it: a line may be formatted later, on another thread, where that place is not known.
    """

    def __init__(self, before: _Factory) -> None:
        self._before = before

    def __call__(self, *args: object, **kwargs: object) -> logging.LogRecord:
        record = self._before(*args, **kwargs)
        current = _slice.get()
        if current is not None and (place := _place(current)) is not None:
            record.__dict__ = _Fields(record, place)
        return record


class _Fields(dict[str, object]):
    """The attributes of a log record, including those of a `LogContext`.

    `Logger.makeRecord` raises KeyError when `extra=` has a name that the log record has already, and users log with
    `extra={"topic": ...}`. Therefore the names of the context are hidden from `makeRecord`. It finds no conflict, and
    the user's value replaces the value of the context. All other code that reads `vars(record)` sees the names.
    """

    __slots__ = ("place",)

    def __init__(self, record: logging.LogRecord, place: LogContext) -> None:
        super().__init__(zip(LogContext._fields, place, strict=True))
        self.update(vars(record))  # values of another factory have priority
        self.place = place

    def __contains__(self, name: object) -> bool:
        if name in LogContext._fields and sys._getframe(1).f_code.co_name == "makeRecord":
            return False
        return super().__contains__(name)

    def __reduce__(self) -> tuple[type, tuple[dict[str, object]]]:
        """Pickle as a plain dict, which a process without kconsume can read."""
        return dict, (dict(self),)
