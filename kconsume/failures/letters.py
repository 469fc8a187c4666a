"""A letter: a record that failed, as it was, and beside it who failed on it, where and why. A dead one, or one that is
sent to itself, to be tried again later.

Pure: a record and an error in, a letter out. Key, value, timestamp and headers are kept as they are. What is added are
headers that begin with `kconsume-`. A letter that fails again says where it came from first, and why it failed now.
Writing one anywhere is not done here.
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

from kconsume.output import RESET, Outgoing, is_topic_name
from kconsume.records import Headers, Message, Partition, headers_of, moment_of

PREFIX = "kconsume-"
MOST_TEXT = 1_000
MOST_TRACE = 8_000
"""Characters: what a letter says of the error must not make it too large to be written."""

_ORIGIN = re.compile(r"[^\x00-\x1f\ufffd]{1,1000}:\d{1,10}:\d{1,19}")
"""`Record.id`."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_END = 253_402_300_800_000
"""The year 10000 in milliseconds: Python's times end there."""


_MOST_FRAMES = 1_000
_frames: dict[tuple[CodeType, int], str] = {}
"""What a trace says of a place in the code: many records fail at the same few."""
_MOST_CAUSES = 100
_causes: dict[tuple[object, ...], tuple[Cause, list[CodeType]]] = {}
"""By the ids of code, whose hash takes as long as all the rest; beside each cause that code, so that its id stays."""


class Rung(NamedTuple):
    """Where a record goes to be tried again later."""

    topic: str
    number: int
    """Counted from 1."""
    due: float
    """The time before which it must not be tried, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Letter:
    """What failed, and why."""

    partition: Partition
    """Where the record stood first."""
    offset: int
    group: str
    origin: str
    """`Record.id` of the first record: `group:topic_id:partition:offset`."""
    attempts: int
    exception: str
    """The dotted name of the error's class."""
    message: str
    trace: str
    key: bytes | None
    value: bytes | None
    timestamp: datetime | None
    headers: Headers = field(default=())
    """Those of the record itself."""
    rung: Rung | None = None
    """Of a record that is tried again later; None if it failed for good."""
    redriven: int = 0
    """How often it was sent back before (`kconsume dlq redrive`)."""
    reset_epoch: int = 0
    """That of the partition's row when the record was read there first: a record that fails again after a reset is
    another failure, although its origin is the same."""
    here: tuple[Partition, int, str] | None = None
    """Where the record stood when it failed, and its `Record.id`, if the first place is what headers on a topic of
    others say."""

    def as_it_stood(self) -> Letter:
        """The same, told from others by the record's own origin, whatever its headers said."""
        if self.here is None:
            return self
        partition, offset, origin = self.here
        return replace(self, partition=partition, offset=offset, origin=origin, here=None)

    def outgoing(self, topic: str | None) -> Outgoing:
        """As a record of that topic, or of its rung's."""
        topic = topic if self.rung is None else self.rung.topic
        return Outgoing(self.value, self.key, self.headers + self.marks, topic, self.timestamp)

    @property
    def marks(self) -> Headers:
        """The headers that are added, as they are pinned."""
        place, moment = self.partition, self.timestamp
        said: Headers = (
            ("kconsume-topic", _utf8(place.topic)),
            ("kconsume-partition", b"%d" % place.number),
            ("kconsume-offset", b"%d" % self.offset),
            ("kconsume-timestamp", b"" if moment is None else b"%d" % ((moment - _EPOCH) // _MILLISECOND)),
            ("kconsume-group", _utf8(self.group)),
            ("kconsume-attempts", b"%d" % self.attempts),
            *_cause_marks(self.exception, self.message, self.trace),
            ("kconsume-origin", _utf8(self.origin)),
        )
        if self.reset_epoch:
            said += ((RESET, b"%d" % self.reset_epoch),)
        if self.redriven:
            said += (("kconsume-redriven", b"%d" % self.redriven),)
        if self.rung is not None:
            due = math.ceil(self.rung.due * 1000)
            said += (("kconsume-rung", b"%d" % self.rung.number), ("kconsume-due", b"%d" % due))
        return said


class Cause(NamedTuple):
    """What a letter says of the error. It holds nothing of the handler, as the error does by its traceback."""

    exception: str
    message: str
    trace: str
    marks: Headers
    """The three as headers."""


def cause_of(error: BaseException) -> Cause:
    """Made once for errors that say the same and were raised at the same place: many records fail alike."""
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


def _cause_of(error: BaseException, text: str) -> Cause:
    exception = f"{type(error).__module__}.{type(error).__qualname__}"
    message, trace = _short(text, MOST_TEXT), _short(trace_of(error), MOST_TRACE, keep_end=True)
    return Cause(exception, message, trace, _cause_marks(exception, message, trace))


def _cause_marks(exception: str, message: str, trace: str) -> Headers:
    return (
        ("kconsume-exception", _utf8(exception)),
        ("kconsume-message", _utf8(message)),
        ("kconsume-trace", _utf8(trace)),
    )


class Draft:
    """A letter that is not made yet: the record and the cause. It has few parts, and there may be many of them."""

    __slots__ = ("attempts", "cause", "group", "message", "reset_epoch", "rung", "scope")

    def __init__(
        self,
        message: Message,
        cause: Cause,
        group: str,
        scope: str,
        attempts: int,
        rung: Rung | None = None,
        reset_epoch: int = 0,
    ) -> None:
        self.message = message
        self.cause = cause
        self.group = group
        self.scope = scope
        self.attempts = attempts
        self.rung = rung
        self.reset_epoch = reset_epoch

    def letter(self) -> Letter:
        return letter_of(
            self.message,
            self.cause,
            group=self.group,
            scope=self.scope,
            attempts=self.attempts,
            rung=self.rung,
            reset_epoch=self.reset_epoch,
        )

    def outgoing(self, topic: str | None) -> Outgoing:
        """As a record of that topic, or of its rung's: what the letter is, by a shorter way for most records."""
        message = self.message
        if self.rung is not None or self.reset_epoch or message.headers():
            return self.letter().outgoing(topic)
        number, offset, moment = message.partition(), message.offset(), moment_of(message)
        place, partition, group, attempts, origin = _same_marks(
            message.topic(), number, self.group, self.attempts, self.scope
        )
        headers = (
            place,
            partition,
            ("kconsume-offset", b"%d" % offset),
            ("kconsume-timestamp", b"" if moment is None else b"%d" % message.timestamp()[1]),
            group,
            attempts,
            *self.cause.marks,
            ("kconsume-origin", b"%b%d" % (origin, offset)),
        )
        return Outgoing(message.value(), message.key(), headers, topic, moment)


_Mark = tuple[str, bytes]


@lru_cache(maxsize=1024)
def _same_marks(
    topic: str, partition: int, group: str, attempts: int, scope: str
) -> tuple[_Mark, _Mark, _Mark, _Mark, bytes]:
    """What letters about records of one partition have in common; last, how their origins begin."""
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
    error: BaseException | Cause,
    *,
    group: str,
    scope: str,
    attempts: int,
    rung: Rung | None = None,
    reset_epoch: int = 0,
) -> Letter:
    """The letter about a record that failed. `scope` is the beginning of its `Record.id`; `reset_epoch` is that of the
    partition it was read from, and counts if it stood there first.

    Anybody can write `kconsume-` headers, or copy them. On this group's own retry and re-drive topics they are
    believed. On any other topic they are only handed on, in a letter to a topic: where repeats are told by the origin
    (on a rung, in a table), the letter has the record's own, or a second record would be dropped for the first.
    """
    partition, offset, headers, moment = message.partition(), message.offset(), headers_of(message), moment_of(message)
    said = read_marks(headers) if headers else {}
    is_ours = bool(said) and is_side_topic(message.topic(), group)
    marks = said if is_ours or rung is None else {}
    first = _first_place(marks) if marks else None
    if "rung" in marks:
        attempts += int(marks["attempts"]) if is_number(marks.get("attempts", ""), 10**9) else 0
        # Of a topic with message.timestamp.type=LogAppendTime, the record's own is when it came there.
        moment = _moment(marks.get("timestamp", "")) or moment
    here = (Partition(message.topic(), partition), offset, f"{scope}:{partition}:{offset}")
    place, at, origin = first or here
    if first is not None:
        reset_epoch = reset_epoch_in(marks)
    return Letter(
        place,
        at,
        group,
        origin,
        attempts,
        *(error if isinstance(error, Cause) else cause_of(error))[:3],
        message.key(),
        message.value(),
        moment,
        tuple(pair for pair in headers if not pair[0].startswith(PREFIX)) if said else headers,
        rung,
        int(marks["redriven"]) if marks and is_number(marks.get("redriven", ""), 10**9) else 0,
        reset_epoch,
        here if first is not None and not is_ours else None,
    )


def reset_epoch_in(marks: dict[str, str]) -> int:
    """What `kconsume-reset` says; 0 where it is not there, as in what earlier versions wrote."""
    said = marks.get("reset", "")
    return int(said) if is_number(said, 2**63) else 0


def read_marks(headers: Headers) -> dict[str, str]:
    """What the headers that kconsume added say, by their names without the prefix. The last of a name counts."""
    return {
        name.removeprefix(PREFIX): value.decode(errors="replace") for name, value in headers if name.startswith(PREFIX)
    }


def place_of(message: Message, *, comes_back: bool) -> tuple[Partition, int]:
    """What its letter says of where the record stood, as it stood (`Letter.as_it_stood`). `comes_back`: it is on one of
    its group's own topics."""
    if not comes_back:
        return Partition(message.topic(), message.partition()), message.offset()
    first = _first_place(read_marks(tuple((name, value or b"") for name, value in message.headers() or ())))
    return (Partition(message.topic(), message.partition()), message.offset()) if first is None else first[:2]


def trace_of(error: BaseException) -> str:
    """Where it was raised, and what it was raised from. Python's own words take ten times as long to make, since they
    point at columns, and a broken deployment makes many."""
    parts: list[str] = []
    seen: set[int] = set()
    while True:
        seen.add(id(error))
        parts.append(f"Traceback (most recent call last):\n{_frames_of(error)}{type(error).__qualname__}: {error}\n")
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if earlier is None or id(earlier) in seen:
            return "\nand because of it:\n\n".join(reversed(parts))
        error = earlier


def _frames_of(error: BaseException) -> str:
    told, at = "", error.__traceback__
    while at is not None:
        # By the instruction: its line is looked up only once.
        code, instruction = at.tb_frame.f_code, at.tb_lasti
        said = _frames.get((code, instruction))
        if said is None:
            said = _frame(code, at.tb_lineno, at.tb_frame.f_globals)
            if len(_frames) >= _MOST_FRAMES:  # code that is made anew for each call would fill the memory
                _frames.clear()
            _frames[code, instruction] = said
        told += said
        at = at.tb_next
    return told


def _frame(code: CodeType, line: int, names: dict[str, Any]) -> str:
    text = linecache.getline(code.co_filename, line, names).strip()
    return f'  File "{code.co_filename}", line {line}, in {code.co_name}\n' + (f"    {text}\n" if text else "")


def redrive_topic(topic: str, group: str) -> str:
    """Where records of a topic are sent back to, for this group alone."""
    return f"{topic}.{group}.redrive"


def is_side_topic(topic: str, group: str) -> bool:
    """Whether it is a retry or a re-drive topic of this group. Its name is all that says so."""
    return re.fullmatch(rf".+\.{re.escape(group)}\.(retry\.[0-9]+|redrive)", topic) is not None


def _first_place(marks: dict[str, str]) -> tuple[Partition, int, str] | None:
    """Where a letter that failed again says that it came from. Anybody can write such headers: what cannot be a place
    is none."""
    topic, partition, offset = marks.get("topic", ""), marks.get("partition", ""), marks.get("offset", "")
    origin = marks.get("origin", "")
    is_place = is_topic_name(topic) and is_number(partition, 2**31) and is_number(offset, 2**63)
    if not is_place or not _ORIGIN.fullmatch(origin):
        return None
    return Partition(topic, int(partition)), int(offset), origin


def _moment(milliseconds: str) -> datetime | None:
    return _EPOCH + timedelta(milliseconds=int(milliseconds)) if is_number(milliseconds, _END) else None


def is_number(text: str, below: int) -> bool:
    """Whether it is a whole number from 0, and below that one."""
    return text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < below


def _short(text: str, most: int, *, keep_end: bool = False) -> str:
    if len(text) <= most:
        return text
    return f"… {text[-most:]}" if keep_end else f"{text[:most]} …"
