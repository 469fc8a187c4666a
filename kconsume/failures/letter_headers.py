"""A letter: a failed record with added headers that name the group, the place and the cause of the failure.

A *dead letter* is final; a letter with a `RetryTarget` goes to a retry topic of its own group, to be tried
again later. Key, value, timestamp and headers of the record are kept. The added headers begin with `kconsume-`. If
the record of a letter fails again, the next letter names the first place of the record and the latest error.

This file makes a letter from a record and an error. It writes nothing and reads no clock. The texts of causes are
cached.
"""

from __future__ import annotations

import linecache
import math
import re
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

from kconsume._kafka.outgoing import RESET, Outgoing, is_topic_name
from kconsume.records import Headers, Message, Partition, headers_of, moment_of

PREFIX = "kconsume-"
MOST_TEXT = 1_000
MOST_TRACE = 8_000
"""The highest number of characters of the error's text and of its trace. Longer ones could make a letter too large."""

_ORIGIN = re.compile(r"[^\x00-\x1f\ufffd]{1,1000}:\d{1,10}:\d{1,19}")
"""The form of `Record.id`."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_END = 253_402_300_800_000
"""The start of the year 10000, in milliseconds since 1970. `datetime` ends before it."""


_MOST_FRAMES = 1_000
_frames: dict[tuple[CodeType, int], str] = {}
"""The lines of a trace for a place in the code. Cached, because many records fail at the same few places."""
_MOST_CAUSES = 100
_causes: dict[tuple[object, ...], tuple[LetterCause, list[CodeType]]] = {}
"""Known causes. The key has the ids of code objects, because hashing code objects takes as long as all the rest. Each
entry keeps its code objects alive, so that no other object gets their ids."""


class RetryTarget(NamedTuple):
    """The next retry topic of a record."""

    topic: str
    number: int
    """The place of the topic in the chain, counted from 1: the header `kconsume-rung`."""
    due: float
    """The time before which the record must not be tried, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A record that failed, and why."""

    partition: Partition
    """The partition of the first place, where the record was read before any retry or re-drive."""
    offset: int
    group: str
    origin: str
    """`Record.id` at the first place: `group:topic_id:partition:offset`."""
    attempts: int
    exception: str
    """The dotted name of the error's class."""
    message: str
    trace: str
    key: bytes | None
    value: bytes | None
    timestamp: datetime | None
    headers: Headers = field(default=())
    """The record's own headers."""
    retry: RetryTarget | None = None
    """Where the record is tried again later; None for a dead letter."""
    redriven: int = 0
    """How often the record was sent back before (`kconsume dlq redrive`)."""
    reset_epoch: int = 0
    """The reset epoch of the partition when the record was read at its first place. After a reset of the partition, a
    record that fails again is a new failure, although its origin is the same."""
    here: tuple[Partition, int, str] | None = None
    """The place of the record when it failed, and its `Record.id`. Set only if the first place was read from headers,
    and the record was not on a retry or re-drive topic of its own group."""

    def with_own_origin(self) -> Letter:
        """Return the same letter with the place and origin at which the record failed, not those in its headers."""
        if self.here is None:
            return self
        partition, offset, origin = self.here
        return replace(self, partition=partition, offset=offset, origin=origin, here=None)

    def outgoing(self, topic: str | None) -> Outgoing:
        """Return the letter as a record of `topic`, or of its retry topic if it has one."""
        topic = topic if self.retry is None else self.retry.topic
        return Outgoing(self.value, self.key, self.headers + self.added_headers, topic, self.timestamp)

    @property
    def added_headers(self) -> Headers:
        place, moment = self.partition, self.timestamp
        added: Headers = (
            ("kconsume-topic", _utf8(place.topic)),
            ("kconsume-partition", b"%d" % place.number),
            ("kconsume-offset", b"%d" % self.offset),
            ("kconsume-timestamp", b"" if moment is None else b"%d" % ((moment - _EPOCH) // _MILLISECOND)),
            ("kconsume-group", _utf8(self.group)),
            ("kconsume-attempts", b"%d" % self.attempts),
            *_cause_headers(self.exception, self.message, self.trace),
            ("kconsume-origin", _utf8(self.origin)),
        )
        if self.reset_epoch:
            added += ((RESET, b"%d" % self.reset_epoch),)
        if self.redriven:
            added += (("kconsume-redriven", b"%d" % self.redriven),)
        if self.retry is not None:
            due = math.ceil(self.retry.due * 1000)
            added += (("kconsume-rung", b"%d" % self.retry.number), ("kconsume-due", b"%d" % due))
        return added


class LetterCause(NamedTuple):
    """What a letter says about the error. Unlike the error with its traceback, a cause keeps no object of the
    handler alive."""

    exception: str
    message: str
    trace: str
    headers: Headers
    """The three texts as headers."""


def cause_of(error: BaseException) -> LetterCause:
    """Return the cause of an error. Errors with the same text from the same place share one cause.

    Causes are cached, because many records fail in the same way.
    """
    text = str(error)
    if error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__):
        return _cause_of(error, text)
    place: list[object] = [type(error), text]
    codes: list[CodeType] = []
    at = error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        codes.append(code)
        place += (id(code), at.tb_lasti)
        at = at.tb_next
    alike = tuple(place)
    if (known := _causes.get(alike)) is not None:
        return known[0]
    if len(_causes) >= _MOST_CAUSES:
        _causes.clear()
    cause = _cause_of(error, text)
    _causes[alike] = cause, codes
    return cause


def _cause_of(error: BaseException, text: str) -> LetterCause:
    exception = f"{type(error).__module__}.{type(error).__qualname__}"
    message, trace = _short(text, MOST_TEXT), _short(trace_of(error), MOST_TRACE, keep_end=True)
    return LetterCause(exception, message, trace, _cause_headers(exception, message, trace))


def _cause_headers(exception: str, message: str, trace: str) -> Headers:
    return (
        ("kconsume-exception", _utf8(exception)),
        ("kconsume-message", _utf8(message)),
        ("kconsume-trace", _utf8(trace)),
    )


class LetterDraft:
    """The record and the cause of a letter that is not made yet. Smaller than a `Letter`: there may be many drafts."""

    __slots__ = ("attempts", "cause", "group", "message", "reset_epoch", "retry", "scope")

    def __init__(
        self,
        message: Message,
        cause: LetterCause,
        group: str,
        scope: str,
        attempts: int,
        retry: RetryTarget | None = None,
        reset_epoch: int = 0,
    ) -> None:
        self.message = message
        self.cause = cause
        self.group = group
        self.scope = scope
        self.attempts = attempts
        self.retry = retry
        self.reset_epoch = reset_epoch

    def letter(self) -> Letter:
        return letter_of(
            self.message,
            self.cause,
            group=self.group,
            scope=self.scope,
            attempts=self.attempts,
            retry=self.retry,
            reset_epoch=self.reset_epoch,
        )

    def outgoing(self, topic: str | None) -> Outgoing:
        """Return `Letter.outgoing` of this letter. For most records no `Letter` is made, which is faster."""
        message = self.message
        if self.retry is not None or self.reset_epoch or message.headers():
            return self.letter().outgoing(topic)
        number, offset, moment = message.partition(), message.offset(), moment_of(message)
        place, partition, group, attempts, origin = _common_headers(
            message.topic(), number, self.group, self.attempts, self.scope
        )
        headers = (
            place,
            partition,
            ("kconsume-offset", b"%d" % offset),
            ("kconsume-timestamp", b"" if moment is None else b"%d" % message.timestamp()[1]),
            group,
            attempts,
            *self.cause.headers,
            ("kconsume-origin", b"%b%d" % (origin, offset)),
        )
        return Outgoing(message.value(), message.key(), headers, topic, moment)


_Header = tuple[str, bytes]


@lru_cache(maxsize=1024)
def _common_headers(
    topic: str, partition: int, group: str, attempts: int, scope: str
) -> tuple[_Header, _Header, _Header, _Header, bytes]:
    """Return the headers that all letters about records of one partition share, and the beginning of their origins."""
    return (
        ("kconsume-topic", _utf8(topic)),
        ("kconsume-partition", b"%d" % partition),
        ("kconsume-group", _utf8(group)),
        ("kconsume-attempts", b"%d" % attempts),
        _utf8(f"{scope}:{partition}:"),
    )


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def letter_of(
    message: Message,
    error: BaseException | LetterCause,
    *,
    group: str,
    scope: str,
    attempts: int,
    retry: RetryTarget | None = None,
    reset_epoch: int = 0,
) -> Letter:
    """Return the letter about a record that failed.

    Any producer can write or copy `kconsume-` headers. So the place and origin in them are used in two cases: the
    record is on a retry or re-drive topic of this group, or the letter is a dead letter. A letter to a retry topic
    otherwise has the record's own place and origin: repeats are recognised by the origin there, and a record with
    copied headers would be dropped as a repeat. A table does the same with `Letter.with_own_origin`.

    Args:
        message: the record.
        error: the error that the handler raised, or its cause.
        group: the consumer group.
        scope: `group:topic_id`, the beginning of `Record.id`.
        attempts: how often the record was tried in this topic.
        retry: the retry topic that the letter goes to; None for a dead letter.
        reset_epoch: the reset epoch of the partition from which the record was read, used if that partition is the
            first place of the record.
    """
    partition, offset, headers, moment = message.partition(), message.offset(), headers_of(message), moment_of(message)
    added = read_added_headers(headers) if headers else {}
    is_ours = bool(added) and is_side_topic(message.topic(), group)
    trusted = added if is_ours or retry is None else {}
    first = _first_place(trusted) if trusted else None
    if "rung" in trusted:
        attempts += int(trusted["attempts"]) if is_number(trusted.get("attempts", ""), 10**9) else 0
        # In a topic with message.timestamp.type=LogAppendTime, the record's own timestamp is the time of its arrival.
        moment = _moment(trusted.get("timestamp", "")) or moment
    here = (Partition(message.topic(), partition), offset, f"{scope}:{partition}:{offset}")
    place, at, origin = first or here
    if first is not None:
        reset_epoch = reset_epoch_in(trusted)
    return Letter(
        place,
        at,
        group,
        origin,
        attempts,
        *(error if isinstance(error, LetterCause) else cause_of(error))[:3],
        message.key(),
        message.value(),
        moment,
        tuple(pair for pair in headers if not pair[0].startswith(PREFIX)) if added else headers,
        retry,
        int(trusted["redriven"]) if trusted and is_number(trusted.get("redriven", ""), 10**9) else 0,
        reset_epoch,
        here if first is not None and not is_ours else None,
    )


def reset_epoch_in(marks: dict[str, str]) -> int:
    """Return the header `kconsume-reset`; 0 if there is none, as in letters of earlier versions."""
    epoch = marks.get("reset", "")
    return int(epoch) if is_number(epoch, 2**63) else 0


def read_added_headers(headers: Headers) -> dict[str, str]:
    """Return the headers that kconsume added, by name without the prefix. Of equal names, the last header counts."""
    return {
        name.removeprefix(PREFIX): value.decode(errors="replace") for name, value in headers if name.startswith(PREFIX)
    }


def original_place(message: Message, *, comes_back: bool) -> tuple[Partition, int]:
    """Return the partition and the offset that `Letter.with_own_origin` gives to the letter of this record.

    Args:
        comes_back: True if the record is on a retry or re-drive topic of its own group.
    """
    if not comes_back:
        return Partition(message.topic(), message.partition()), message.offset()
    first = _first_place(read_added_headers(tuple((name, value or b"") for name, value in message.headers() or ())))
    return (Partition(message.topic(), message.partition()), message.offset()) if first is None else first[:2]


def trace_of(error: BaseException) -> str:
    """Return the traceback of an error and of its causes, as text.

    Python's own traceback module takes ten times as long, because it computes columns, and a broken deployment makes
    many traces.
    """
    parts: list[str] = []
    seen: set[int] = set()
    while True:
        seen.add(id(error))
        parts.append(f"Traceback (most recent call last):\n{_frames_of(error)}{type(error).__qualname__}: {error}\n")
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if earlier is None or id(earlier) in seen:
            return "\nThe error above led to this error:\n\n".join(reversed(parts))
        error = earlier


def _frames_of(error: BaseException) -> str:
    trace, at = "", error.__traceback__
    while at is not None:
        # Cached by the instruction, so that the line of an instruction is looked up only once.
        code, instruction = at.tb_frame.f_code, at.tb_lasti
        text = _frames.get((code, instruction))
        if text is None:
            text = _frame(code, at.tb_lineno, at.tb_frame.f_globals)
            if len(_frames) >= _MOST_FRAMES:  # code that is compiled again for each call would fill the memory
                _frames.clear()
            _frames[code, instruction] = text
        trace += text
        at = at.tb_next
    return trace


def _frame(code: CodeType, line: int, names: dict[str, Any]) -> str:
    text = linecache.getline(code.co_filename, line, names).strip()
    return f'  File "{code.co_filename}", line {line}, in {code.co_name}\n' + (f"    {text}\n" if text else "")


def redrive_topic(topic: str, group: str) -> str:
    """The topic to which `kconsume dlq redrive` sends records of `topic` back, read by this group only."""
    return f"{topic}.{group}.redrive"


def is_side_topic(topic: str, group: str) -> bool:
    """Return True if `topic` is a retry or a re-drive topic of this group. Only the name is compared."""
    return re.fullmatch(rf".+\.{re.escape(group)}\.(retry\.[0-9]+|redrive)", topic) is not None


def _first_place(marks: dict[str, str]) -> tuple[Partition, int, str] | None:
    """Return the first place that the headers of a letter name; None if their values cannot be a place.

    Any producer can write such headers.
    """
    topic, partition, offset = marks.get("topic", ""), marks.get("partition", ""), marks.get("offset", "")
    origin = marks.get("origin", "")
    is_place = is_topic_name(topic) and is_number(partition, 2**31) and is_number(offset, 2**63)
    if not is_place or not _ORIGIN.fullmatch(origin):
        return None
    return Partition(topic, int(partition)), int(offset), origin


def _moment(milliseconds: str) -> datetime | None:
    return _EPOCH + timedelta(milliseconds=int(milliseconds)) if is_number(milliseconds, _END) else None


def is_number(text: str, below: int) -> bool:
    """True if `text` is a whole number from 0, and below `below`."""
    return text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < below


def _short(text: str, most: int, *, keep_end: bool = False) -> str:
    if len(text) <= most:
        return text
    return f"… {text[-most:]}" if keep_end else f"{text[:most]} …"
