"""What a handler sends, as the bytes that leave: `Outgoing` values, the `Sender`, and their encoding.

Pure: no clock, no I/O, no client. Everything that Kafka would refuse for what it is (no topic, a name that is none, a
value that nobody can encode, too many bytes) is refused here, while the handler runs, so that the error is the
handler's and nothing of it has left. Delivery is `outlet.py`'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from types import NoneType
from typing import Any, NoReturn

import msgspec
from msgspec.structs import force_setattr

from kconsume.errors import SendFailed
from kconsume.records import Headers, Message

OutgoingHeaders = Mapping[str, bytes | str] | Sequence[tuple[str, bytes | str]]

_Way = Callable[[Any], bytes | None]
_BYTES = (bytearray, memoryview)
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A record to send. `topic=None` means the handler's `to=`.

    `value` is bytes, str, None (a tombstone), or anything that msgspec or pydantic encodes as JSON.
    """

    # `gc=False`: thousands are under way at a time, and the collector would go through them again and again. A value
    # that refers back to its record would never be freed; but nothing encodes one.

    value: object
    key: bytes | str | None = None
    headers: OutgoingHeaders = ()
    topic: str | None = None
    timestamp: datetime | None = None
    """When it happened, for a record that is passed on; None means now."""


class Sender:
    """Sends records from inside a handler that asks for it: `def reserve(order: Order, sender: Sender)`.

    Nothing leaves before the handler has returned, and nothing at all if it raises.
    """

    __slots__ = ("_buffer", "_closed", "_most")

    def __init__(self, buffer: list[Outgoing], most: int) -> None:
        self._buffer = buffer
        self._most = most
        self._closed = False

    def send(self, topic: str, value: object, key: bytes | str | None = None, headers: OutgoingHeaders = ()) -> None:
        """Send a record when the handler has returned; raises `SendFailed` now if it can never be sent."""
        ready = encoded(Outgoing(value, key, headers, topic), None, self._most)
        if self._closed:  # asked last, for the handler may return on another thread meanwhile
            raise SendFailed(
                f"a record to topic {topic!r} was sent after the handler had returned, and would be lost: send it "
                f"inside the handler, and wait there for the threads that it starts"
            )
        self._buffer.append(ready)

    def close(self) -> None:
        """The handler has returned and its buffer was taken: what is sent from now on is refused."""
        self._closed = True


def returned(result: object, to: str, most: int) -> list[Outgoing]:
    """What a handler with `to=` returned, encoded: nothing for None, one record each for a list, else one.

    A None in a list is nothing as well; a tombstone is `Outgoing(None, key=...)`, and one record that holds a JSON
    array is `Outgoing([...])`.
    """
    if not isinstance(result, list):
        return [] if result is None else [_one(result, to, most)]
    return [_one(each, to, most) for each in result if each is not None]


def _one(result: object, to: str, most: int) -> Outgoing:
    """Most results are plain values, to a topic that was looked at when the handler was decorated: only the value is in
    question."""
    if isinstance(result, Outgoing):
        return encoded(result, to, most)
    try:
        value = encode(result)
    except SendFailed as error:
        raise _unsendable(to, error) from error.__cause__
    if value is not None and len(value) > most:
        check_size(to, value, None, (), most)
    return Outgoing(value, None, (), to)


def encoded(outgoing: Outgoing, to: str | None, most: int) -> Outgoing:
    """The same record, ready to leave: its topic set, key and value as bytes or None, headers as pairs with bytes.

    `to` is the topic of a record that names none; `most` bounds the bytes of key, value and headers together.
    """
    topic = outgoing.topic if outgoing.topic is not None else to
    if topic is None:
        raise SendFailed("a record has no topic: give it one, as in Outgoing(value, topic='orders')")
    return _ready(outgoing.value, outgoing.key, outgoing.headers, topic, outgoing.timestamp, most)


def _ready(value: object, key: object, headers: object, topic: str, timestamp: datetime | None, most: int) -> Outgoing:
    _check_topic(topic)
    try:
        value, key, pairs = encode(value), _key(key), _headers(headers) if headers else ()
        if timestamp is not None:
            _check_timestamp(timestamp)
    except SendFailed as error:
        raise _unsendable(topic, error) from error.__cause__
    check_size(topic, value, key, pairs, most)
    return Outgoing(value, key, pairs, topic, timestamp)


def _unsendable(topic: str, error: SendFailed) -> SendFailed:
    return SendFailed(f"a record to topic {topic!r} cannot be sent: {error}")


def check_size(topic: str | None, value: bytes | None, key: bytes | None, headers: Headers, most: int) -> None:
    """Refuse a record of more than `most` bytes."""
    size = len(value or b"") + len(key or b"")
    if headers:
        size += sum(len(name.encode()) + len(each) for name, each in headers)
    if size > most:
        raise SendFailed(
            f"a record to topic {topic!r} has {size:,} bytes, and {most:,} are allowed: send a reference to the data, "
            f"or raise message.max.bytes in kafka={{...}} and max.message.bytes of the topic"
        )


ORIGIN = "kconsume-origin"
"""The header that says what a record came from; who gets it twice knows it by that."""


RESET = "kconsume-reset"
"""The header that says under which reset of the partition its origin was read. With another value it is no repeat."""


def place_of(scope: str, message: Message) -> bytes:
    """What the origins of all that comes of this message's partition begin with."""
    return f"{scope}:{message.partition()}:".encode("utf-8", "backslashreplace")


def stamp(sent: list[Outgoing], since: int, place: bytes, offset: int) -> None:
    """Say of what was sent since then which record it came from, and its place among those: `Record.id` and `#0`.

    In the values themselves: `encoded` has made them, and nobody else has seen them."""
    for index in range(since, len(sent)):
        each, origin = sent[index], (ORIGIN, b"%b%d#%d" % (place, offset, index - since))
        force_setattr(each, "headers", (*each.headers, origin) if each.headers else (origin,))


def stamp_reset(sent: Sequence[Outgoing], reset_epoch: int) -> None:
    """Say of what was sent that it was sent after a reset; nothing where there was none."""
    if reset_epoch:
        mark = (RESET, b"%d" % reset_epoch)
        for each in sent:
            force_setattr(each, "headers", (*each.headers, mark))


def encode(value: object) -> bytes | None:
    """The bytes of a value: its own, the text in UTF-8, or JSON; None stays None."""
    try:
        return _way_of(type(value))(value)
    except SendFailed:
        raise
    except Exception as error:  # a field's own serializer may raise anything
        raise SendFailed(
            f"a value of type {type(value).__name__} cannot be encoded ({error}): send bytes, str, or what "
            f"msgspec encodes as JSON (dict, list, Struct, dataclass), or a pydantic model"
        ) from error


def _find_way(kind: type) -> _Way:
    if issubclass(kind, bytes | NoneType):
        return _as_it_is
    if issubclass(kind, str):
        return kind.encode
    if issubclass(kind, _BYTES):
        return bytes
    if issubclass(kind, Outgoing):
        return _refuse_outgoing
    if hasattr(kind, "model_dump_json"):
        return _model_as_json
    return _as_json


_way_of: Callable[[type], _Way] = lru_cache(maxsize=1024)(_find_way)
"""How values of a type are encoded: asked for every record, and nearly always of the same few."""


def _as_it_is(value: bytes | None) -> bytes | None:
    return value


def _refuse_outgoing(_: Outgoing) -> NoReturn:
    raise SendFailed("its value is an Outgoing: give what that holds, or return the Outgoing itself")


def _model_as_json(model: Any) -> bytes:
    """A pydantic model; by alias, as it is read."""
    text: str = model.model_dump_json(by_alias=True)
    return text.encode()


def _plain(value: object) -> object:
    """A pydantic model inside something else, as plain values."""
    dump = getattr(type(value), "model_dump", None)
    if dump is None:
        raise NotImplementedError  # msgspec then names the type
    return dump(value, mode="json", by_alias=True)


_as_json = msgspec.json.Encoder(enc_hook=_plain).encode


def _key(key: object) -> bytes | None:
    if key is None or isinstance(key, bytes):
        return key
    if isinstance(key, str):
        return _utf8(key, "its key")
    raise SendFailed(f"its key is a {type(key).__name__}: give bytes or str, as in key=str(order.id)")


def _headers(headers: object) -> Headers:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    if not isinstance(pairs, Iterable) or isinstance(pairs, bytes | str):
        raise _no_headers(pairs)
    return tuple(map(_header, pairs))


def _header(pair: object) -> tuple[str, bytes]:
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
        raise _no_headers(pair)
    name, value = pair
    _utf8(name, "a header's name")
    if isinstance(value, bytes):
        return name, value
    if isinstance(value, str):
        return name, _utf8(value, f"header {name!r}")
    raise SendFailed(f"header {name!r} is a {type(value).__name__}: give bytes or str")


def _check_timestamp(timestamp: object) -> None:
    if not isinstance(timestamp, datetime) or timestamp.tzinfo is None:
        raise SendFailed(f"its timestamp is {timestamp!r}: give a datetime with a time zone, as in datetime.now(UTC)")


def _no_headers(found: object) -> SendFailed:
    return SendFailed(
        f"its headers hold a {type(found).__name__}, where pairs of a name and a value belong: give a dict or a list "
        f"of pairs, as in headers={{'trace': b'1'}}"
    )


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise SendFailed(f"{what} is no text that UTF-8 can hold ({error}): give the bytes") from error


def _check_topic(topic: object) -> None:
    if not isinstance(topic, str) or not is_topic_name(topic):
        raise SendFailed(f"{topic!r} is no topic name: use 1 to 249 of a-z A-Z 0-9 . _ -")


@lru_cache(maxsize=1024)  # asked for every record, and nearly always of the same few
def is_topic_name(topic: str) -> bool:
    return _TOPIC.fullmatch(topic) is not None and topic not in {".", ".."}
