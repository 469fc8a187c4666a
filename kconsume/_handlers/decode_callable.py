"""The user's callable in `decode=`: its arguments, which callables are refused, and how its errors are wrapped.

A confluent-kafka Deserializer gets the value and a SerializationContext. Any other callable gets the value alone.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Awaitable, Callable

from kconsume._handlers.annotations import last_name
from kconsume._handlers.json_decoder import explain_decode, is_json_type
from kconsume.errors import DecodeError, InvalidHandler
from kconsume.records import Message


def guarded(decode: Callable[..., object], text: str) -> Callable[[bytes], object]:
    """Return the callable with its errors turned into DecodeError.

    Args:
        decode: the user's callable.
        text: the type of the payload, for the error.
    """

    def call(value: bytes) -> object:
        try:
            return decode(value)
        except Exception as cause:  # the user's callable may raise anything
            raise _undecodable(text, cause) from cause

    return call


def with_context(decode: Callable[..., object], text: str) -> Callable[[Message], object]:
    """Return a function that takes a message, and calls the Deserializer with its SerializationContext.

    Args:
        decode: the user's Deserializer.
        text: the type of the payload, for the error.
    """
    from confluent_kafka.serialization import MessageField, SerializationContext

    def call(message: Message) -> object:
        headers = message.headers()  # the headers may name the schema
        context = SerializationContext(message.topic(), MessageField.VALUE, headers)  # type: ignore[arg-type]
        try:
            return decode(message.value(), context)
        except Exception as cause:  # a deserializer may raise anything
            raise _undecodable(text, cause) from cause

    return call


def is_deserializer(decode: object) -> bool:
    from confluent_kafka.serialization import Deserializer

    return isinstance(decode, Deserializer)


def check_decode(handler: str, parameter: str, decode: object) -> None:
    """Raise InvalidHandler if the callable cannot decode a value.

    Args:
        handler, parameter: their names, for errors.
        decode: what the user passed as `decode=`.
    """
    name = _name_of(decode)
    if isinstance(decode, type):
        _check_class(handler, parameter, decode)
    if inspect.iscoroutine(decode):
        raise InvalidHandler(
            f"{handler} has a coroutine ({name}) as decode=, which cannot be called: pass a plain function, or a "
            f"deserializer without Async in its name"
        )
    if not callable(decode):
        raise InvalidHandler(
            f"{handler} has decode= of type {type(decode).__name__}, which cannot be called: pass a function that "
            f"takes the value (bytes), for example decode=json.loads"
        )
    if _is_async(decode):
        raise InvalidHandler(
            f"{handler} has decode={name}, which is async: pass a plain function, or a deserializer without Async in "
            f"its name, and await in the handler"
        )
    if is_deserializer(decode):
        if not _can_be_called(decode, b"", None):
            raise InvalidHandler(
                f"{handler} has decode={name}, a Deserializer that cannot be called with a value and its "
                f"SerializationContext: give its __call__ both parameters (value, ctx=None)"
            )
    elif not _can_be_called(decode, b""):
        raise InvalidHandler(
            f"{handler} has decode={name}, which cannot be called with one argument: it gets the value (bytes) alone, "
            f"so wrap it (decode=lambda value: ...), or derive it from confluent_kafka's Deserializer to get the "
            f"SerializationContext as well"
        )


def _check_class(handler: str, parameter: str, decode: type) -> None:
    name = _name_of(decode)
    if decode in (bytes, str) or is_json_type(decode):
        raise InvalidHandler(
            f"{handler} has decode={name}, a type, which cannot decode bytes: remove decode= and annotate "
            f"{parameter}: {name}"
        )
    if hasattr(decode, "FromString"):
        raise InvalidHandler(
            f"{handler} has decode={name}, a Protobuf message, which cannot decode bytes: write decode="
            f"{name}.FromString, or pass a ProtobufDeserializer if the values were written with a schema registry"
        )
    if any("__call__" in vars(base) for base in decode.__mro__):
        raise InvalidHandler(f"{handler} has decode={name}, a class where an object is meant: write decode={name}(...)")


def _is_async(decode: Callable[..., object]) -> bool:
    """Return whether the result must be awaited.

    Decorators are unwrapped, and the `__call__` of an object and annotations are examined too: the `__call__` of
    confluent-kafka's Async deserializers is a plain def that returns a coroutine, and only its annotation shows that.
    """
    function = decode.func if isinstance(decode, functools.partial) else decode
    layers = (function, inspect.unwrap(function), type(function).__call__)
    return any(
        inspect.iscoroutinefunction(layer) or inspect.isasyncgenfunction(layer) or _returns_awaitable(layer)
        for layer in layers
    )


def _returns_awaitable(function: object) -> bool:
    if not inspect.isroutine(function):
        return False
    try:
        returned = typing.get_type_hints(function).get("return")
    except Exception:  # noqa: BLE001  (an annotation is an expression; one that cannot be read shows nothing)
        return False
    kind = typing.get_origin(returned) or returned
    return isinstance(kind, type) and issubclass(kind, Awaitable)


def _can_be_called(decode: Callable[..., object], *arguments: object) -> bool:
    try:
        signature = inspect.signature(decode)
    except (TypeError, ValueError):
        return True  # written in C without a signature, as int is, so it cannot be checked here
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _name_of(decode: object) -> str:
    """Return a name for errors. The repr of an object is not used: it may hold a password."""
    return last_name(getattr(decode, "__qualname__", type(decode).__name__))


def _undecodable(text: str, cause: BaseException) -> DecodeError:
    return DecodeError(f"the value is not {text}: {explain_decode(cause)}")
