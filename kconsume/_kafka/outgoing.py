"""Records that a handler sends: `Outgoing`, `Sender`, and their encoding into bytes.

A record that Kafka would refuse (no topic, an invalid topic name, a value that cannot be encoded, too many bytes) is
refused here, while the handler runs: then the error belongs to the handler, and nothing was sent. This file must not
read a clock or call the client; `_kafka/producer.py` delivers.
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

_Encoder = Callable[[Any], bytes | None]
_BYTES = (bytearray, memoryview)
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A record to send.

    Attributes:
        value: bytes, str, None (a tombstone), or anything that msgspec or pydantic encodes as JSON.
        key: the key, which also chooses the partition.
        headers: a dict, or pairs of a name and a value.
        topic: the topic; None means the `to=` of the handler.
        timestamp: when the event happened, for a record that is passed on; None means now.
    """

    # `gc=False`: thousands of records are in flight at a time, and the collector would visit them again and again. A
    # value that refers to its own record would never be freed, but such a value cannot be encoded either.

    value: object
    key: bytes | str | None = None
    headers: OutgoingHeaders = ()
    topic: str | None = None
    timestamp: datetime | None = None


class Sender:
    """Sends records from inside a handler that has a parameter for it: `def reserve(order: Order, sender: Sender)`.

    Records are sent after the handler has returned. If the handler raises, no record is sent.
    """

    __slots__ = ("_buffer", "_closed", "_max_bytes")

    def __init__(self, buffer: list[Outgoing], max_bytes: int) -> None:
        self._buffer = buffer
        self._max_bytes = max_bytes
        self._closed = False

    def send(self, topic: str, value: object, key: bytes | str | None = None, headers: OutgoingHeaders = ()) -> None:
        """Send a record after the handler has returned. Raises `SendFailed` at once if it can never be sent.

        Args:
            topic: the topic.
            value: bytes, str, None for a tombstone, or anything that msgspec or pydantic encodes as JSON.
            key: the key, which also chooses the partition.
            headers: a dict, or pairs of a name and a value.
        """
        ready = encoded(Outgoing(value, key, headers, topic), None, self._max_bytes)
        if self._closed:  # checked last: the handler may return while another thread encodes
            raise SendFailed(
                f"a record to topic {topic!r} was sent after the handler had returned, and would be lost: send it "
                f"inside the handler, and wait there for the threads that it starts"
            )
        self._buffer.append(ready)

    def close(self) -> None:
        """Refuse further records: the handler has returned, and its buffer was taken."""
        self._closed = True


def returned(result: object, to: str, max_bytes: int) -> list[Outgoing]:
    """Return the encoded records of a return value: none for None, one for each item of a list, else one.

    A None in a list is no record either. A tombstone is `Outgoing(None, key=...)`, and a record whose value is a JSON
    array is `Outgoing([...])`.

    Args:
        result: what the handler returned.
        to: the topic of records without a topic of their own.
        max_bytes: the highest number of bytes of a record.
    """
    if not isinstance(result, list):
        return [] if result is None else [_one(result, to, max_bytes)]
    return [_one(each, to, max_bytes) for each in result if each is not None]


def _one(result: object, to: str, max_bytes: int) -> Outgoing:
    """Encode one result.

    Most results are plain values, and the topic was checked when the handler was decorated: only the value is encoded.
    """
    if isinstance(result, Outgoing):
        return encoded(result, to, max_bytes)
    try:
        value = encode(result)
    except SendFailed as error:
        raise _unsendable(to, error) from error.__cause__
    if value is not None and len(value) > max_bytes:
        check_size(to, value, None, (), max_bytes)
    return Outgoing(value, None, (), to)


def encoded(outgoing: Outgoing, to: str | None, max_bytes: int) -> Outgoing:
    """Return the record as it is sent: with a topic, key and value as bytes or None, headers as pairs with bytes.

    Args:
        outgoing: the record.
        to: the topic of a record without a topic of its own.
        max_bytes: the highest number of bytes of key, value and headers together.
    """
    topic = outgoing.topic if outgoing.topic is not None else to
    if topic is None:
        raise SendFailed("a record has no topic: give it one, as in Outgoing(value, topic='orders')")
    return _ready(outgoing.value, outgoing.key, outgoing.headers, topic, outgoing.timestamp, max_bytes)


def _ready(
    value: object, key: object, headers: object, topic: str, timestamp: datetime | None, max_bytes: int
) -> Outgoing:
    _check_topic(topic)
    try:
        value, key, pairs = encode(value), _key(key), _headers(headers) if headers else ()
        if timestamp is not None:
            _check_timestamp(timestamp)
    except SendFailed as error:
        raise _unsendable(topic, error) from error.__cause__
    check_size(topic, value, key, pairs, max_bytes)
    return Outgoing(value, key, pairs, topic, timestamp)


def _unsendable(topic: str, error: SendFailed) -> SendFailed:
    return SendFailed(f"a record to topic {topic!r} cannot be sent: {error}")


def check_size(topic: str | None, value: bytes | None, key: bytes | None, headers: Headers, max_bytes: int) -> None:
    """Raise SendFailed for a record of more than `max_bytes` bytes."""
    size = len(value or b"") + len(key or b"")
    if headers:
        size += sum(len(name.encode()) + len(each) for name, each in headers)
    if size > max_bytes:
        raise SendFailed(
            f"a record to topic {topic!r} has {size:,} bytes, and {max_bytes:,} are allowed: send a reference to the "
            f"data, or raise message.max.bytes in kafka={{...}} and max.message.bytes of the topic"
        )


ORIGIN = "kconsume-origin"
"""The header that names the handled record from which a record was made. Consumers recognise repeats by this header."""


RESET = "kconsume-reset"
"""The header with the reset epoch of the handled record's partition. With another epoch, a record is not a repeat."""


def origin_prefix(scope: str, message: Message) -> bytes:
    """Return the first part of the origins of all records that are made from this message's partition."""
    return f"{scope}:{message.partition()}:".encode("utf-8", "backslashreplace")


def stamp(sent: list[Outgoing], since: int, prefix: bytes, offset: int) -> None:
    """Add the origin header: the id of the handled record, and the number of the sent record, such as `#0`.

    This changes the sent records in place: `encoded` made them, and nothing else refers to them.

    Args:
        sent: the sent records.
        since: the index of the first one that was made from the handled record.
        prefix: `origin_prefix` of the handled record.
        offset: the offset of the handled record.
    """
    for index in range(since, len(sent)):
        each, origin = sent[index], (ORIGIN, b"%b%d#%d" % (prefix, offset, index - since))
        force_setattr(each, "headers", (*each.headers, origin) if each.headers else (origin,))


def stamp_reset(sent: Sequence[Outgoing], reset_epoch: int) -> None:
    """Add the reset header to the sent records, if the partition was reset."""
    if reset_epoch:
        mark = (RESET, b"%d" % reset_epoch)
        for each in sent:
            force_setattr(each, "headers", (*each.headers, mark))


def encode(value: object) -> bytes | None:
    """Return the bytes of a value: bytes as they are, text in UTF-8, anything else as JSON; None stays None."""
    try:
        return _encoder_for(type(value))(value)
    except SendFailed:
        raise
    except Exception as error:  # a field's own serializer may raise anything
        raise SendFailed(
            f"a value of type {type(value).__name__} cannot be encoded ({error}): send bytes, str, or what "
            f"msgspec encodes as JSON (dict, list, Struct, dataclass), or a pydantic model"
        ) from error


def _find_encoder(kind: type) -> _Encoder:
    if issubclass(kind, bytes | NoneType):
        return _unchanged
    if issubclass(kind, str):
        return kind.encode
    if issubclass(kind, _BYTES):
        return bytes
    if issubclass(kind, Outgoing):
        return _refuse_outgoing
    if hasattr(kind, "model_dump_json"):
        return _model_as_json
    return _as_json


_encoder_for: Callable[[type], _Encoder] = lru_cache(maxsize=1024)(_find_encoder)
"""Return the encoder of a type. Cached: it is called for each record, nearly always with the same few types."""


def _unchanged(value: bytes | None) -> bytes | None:
    return value


def _refuse_outgoing(_: Outgoing) -> NoReturn:
    raise SendFailed("its value is an Outgoing: give the value of that Outgoing, or return the Outgoing itself")


def _model_as_json(model: Any) -> bytes:
    """Encode a pydantic model by alias, as it is decoded."""
    text: str = model.model_dump_json(by_alias=True)
    return text.encode()


def _plain(value: object) -> object:
    """Return a pydantic model inside another value as plain values."""
    dump = getattr(type(value), "model_dump", None)
    if dump is None:
        raise NotImplementedError  # msgspec then raises an error that names the type
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


@lru_cache(maxsize=1024)  # called for each record, nearly always with the same few topics
def is_topic_name(topic: str) -> bool:
    """Return whether Kafka accepts the name of a topic."""
    return _TOPIC.fullmatch(topic) is not None and topic not in {".", ".."}
