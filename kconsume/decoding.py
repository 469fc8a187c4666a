"""From an annotation to the one call that turns a value into it.

The annotation is read once, when the handler is decorated; what cannot work is refused there, with the fix. What
comes out is a `Decoding`. A type is read by msgspec, or by pydantic if it is a pydantic model, and `call` is the
library's own method: no frame of ours stands between a record and its decoder. With `decode=` the person's callable
reads the value, and the annotation is for the reader and for `None`.

It must not import pydantic or a schema registry that the person has not imported, and it knows no batches, no
`Record` and no null values: the reader of the signature has taken those away before it asks here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec

from kconsume.errors import DecodeError, InvalidHandler
from kconsume.records import Message, Record

Decode = Callable[[bytes], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Decoding:
    """How the value of a record becomes what the handler asked for."""

    text: str
    """The type as a person reads it: `Placed | None`."""
    call: Callable[..., object] | None
    """Never called for a null value. None: the value is handed over as it is.

    A decoder of ours is pure and raises what its library raises; a person's callable may not be pure, so what it
    raises is a `DecodeError` already.
    """
    of_message: bool
    """Whether `call` takes the message (`kconsume.records.Message`) or its value alone."""
    optional: bool
    """Whether a null value (a tombstone) is handed over as None."""
    pure: bool = True
    """Whether it is ours, and may be asked again to tell its failure from the handler's."""


def decoding_of(handler: str, parameter: str, hint: object, decode: Callable[..., object] | None = None) -> Decoding:
    """The decoding for a parameter of a handler; both names are for the sentence of a refusal."""
    wanted, optional = without_none(hint)
    text = text_of(hint)
    if decode is not None:
        return _by_callable(handler, parameter, decode, text, optional)
    if bare(wanted) is bytes:
        return Decoding(text, None, of_message=False, optional=optional)
    return Decoding(text, _decoder(handler, parameter, wanted), of_message=False, optional=optional)


def explain_decode(cause: BaseException) -> str:
    """Why a value could not be decoded, as the end of "the value is not Placed: ..."."""
    core = sys.modules.get("pydantic_core")
    if core is not None and isinstance(cause, core.ValidationError):
        return _first_error(cause.errors(include_url=False, include_context=False, include_input=False))
    return str(cause) or type(cause).__name__


def text_of(hint: object) -> str:
    """A type as a person reads it."""
    hint = bare(hint)
    if isinstance(hint, type) and not typing.get_args(hint):
        return _last_name(hint.__qualname__)
    if is_union(hint):
        return " | ".join("None" if m is type(None) else text_of(m) for m in typing.get_args(hint))
    return str(hint).replace("typing.", "")


def full_name(hint: object) -> str:
    """With its module."""
    return f"{getattr(hint, '__module__', '')}.{getattr(hint, '__qualname__', '')}"


def told_apart(hint: object, offered: Sequence[object]) -> tuple[str, list[str]]:
    """What was asked for and what is offered, with their modules where they have one name: half of the types of
    transactions are called Connection."""
    alike = [each for each in offered if text_of(each) == text_of(hint)]
    return (full_name(hint) if alike else text_of(hint)), [full_name(e) if e in alike else text_of(e) for e in offered]


def without_none(hint: object) -> tuple[object, bool]:
    """The hint without None, and whether None was in it. What `Annotated` says of it stays."""
    inner = bare(hint)
    if not is_union(inner):
        return hint, False
    members = typing.get_args(inner)
    rest = tuple(member for member in members if member is not type(None))
    if not rest or len(rest) == len(members):
        return hint, False
    return _annotated(typing.Union[rest], _metadata(hint)), True  # noqa: UP007  (built from a tuple at run time)


def is_union(hint: object) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def bare(hint: object) -> object:
    """The hint without what `Annotated` says of it."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def _metadata(hint: object) -> tuple[object, ...]:
    return typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()


def _annotated(hint: object, metadata: tuple[object, ...]) -> object:
    return typing.Annotated[(hint, *metadata)] if metadata else hint


def _members(hint: object) -> Iterator[object]:
    """The alternatives of a union, also of unions within it; a type that is none is its own only one."""
    inner = bare(hint)
    if not is_union(inner):
        yield hint
        return
    for member in typing.get_args(inner):
        yield from _members(member)


def _last_name(qualified: str) -> str:
    return qualified.rpartition("<locals>.")[2]


def _decoder(handler: str, parameter: str, wanted: object) -> Decode:
    inner = bare(wanted)
    if inner is str:
        return bytes.decode
    if inner in (list, tuple, set) or typing.get_origin(inner) in (list, tuple, set, Sequence):
        raise InvalidHandler(
            f"{handler} asks for {text_of(wanted)}: nothing reads one record into it, so annotate {parameter} with "
            f"the type of one record, or with a list of that type for batches"
        )
    members = tuple(_members(wanted))
    for member in members:
        _check_member(handler, parameter, bare(member), alone=len(members) == 1)
    if any(map(_is_pydantic, members)):
        return _pydantic_decoder(handler, parameter, wanted, members)
    return _msgspec_decoder(handler, parameter, wanted)


def _check_member(handler: str, parameter: str, member: object, *, alone: bool) -> None:
    text = text_of(member)
    if member in (bytes, str, Record) and not alone:
        raise InvalidHandler(
            f"{handler} mixes {text} with other types in {parameter}: nothing tells them apart; "
            f"use {text} alone and decode in the handler"
        )
    if _is_pydantic_1(member):
        own = f"{text}.parse_raw" if hasattr(member, "parse_raw") else " a function that makes it of the value"
        raise InvalidHandler(
            f"{handler} cannot get {parameter}: {text}: it is a model of pydantic 1, and kconsume reads those of "
            f"pydantic 2 only: derive it from pydantic 2's BaseModel, or pass decode={own}"
        )
    if not _says_how_it_is_read(member):
        raise InvalidHandler(
            f"{handler} cannot get {parameter}: {text}: the first parameter is the payload; annotate it "
            f"as bytes, str, dict, a msgspec.Struct, a dataclass, a pydantic model, a union of tagged Structs, or "
            f"Record; or pass decode= a function that makes it of the value"
        )


def _says_how_it_is_read(member: object) -> bool:
    origin = typing.get_origin(member) or member
    return origin is dict or (
        isinstance(origin, type)
        and (
            issubclass(origin, msgspec.Struct)
            or dataclasses.is_dataclass(origin)
            or typing.is_typeddict(origin)
            or _is_pydantic(origin)
        )
    )


def _msgspec_decoder(handler: str, parameter: str, wanted: object) -> Decode:
    text = text_of(wanted)
    try:
        decode = msgspec.json.Decoder(wanted).decode
        foreign = _first_pydantic_within(wanted)
    except TypeError as error:
        raise InvalidHandler(
            f"{handler} cannot get {parameter}: {text}: {error}; in a union give each "
            f"msgspec.Struct a tag (class Placed(msgspec.Struct, tag=True))"
        ) from error
    except Exception as error:  # the annotations of its fields are expressions, and may raise anything
        raise InvalidHandler(
            f"{handler} cannot get {parameter}: {text}: the type of one of its fields cannot be read "
            f"({error}): define or import what its fields name in its module, not in a function"
        ) from error
    if foreign is not None:
        raise InvalidHandler(
            f"{handler} cannot get {parameter}: {text}: it holds {text_of(foreign)}, a pydantic model, which only "
            f"pydantic can fill: make the whole a pydantic model (pydantic.RootModel[{text}] for a dict)"
        )
    return decode


def _first_pydantic_within(wanted: object) -> object | None:
    """A pydantic model inside a type that msgspec reads. msgspec takes it for a class that it will be given a hook
    for, so that nothing is refused, and then not one record can be decoded."""
    if "pydantic" not in sys.modules:
        return None
    seen: set[int] = set()
    ahead: list[object] = [msgspec.inspect.type_info(wanted)]
    while ahead:
        part = ahead.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, msgspec.inspect.CustomType) and _is_pydantic(part.cls):
            return part.cls
        if isinstance(part, tuple):
            ahead.extend(part)
        elif isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field):
            ahead.extend(getattr(part, name) for name in part.__struct_fields__)
    return None


def _is_pydantic(member: object) -> bool:
    """Whether it is a model or a dataclass of pydantic 2. Asked of the class itself: pydantic may not be there."""
    origin = typing.get_origin(bare(member)) or bare(member)
    return isinstance(origin, type) and hasattr(origin, "__pydantic_validator__")


def _is_pydantic_1(member: object) -> bool:
    origin = typing.get_origin(member) or member
    if not isinstance(origin, type) or _is_pydantic(origin):
        return False
    bases = {(base.__module__, base.__name__) for base in origin.__mro__}
    models = {("pydantic.main", "BaseModel"), ("pydantic.v1.main", "BaseModel")}
    return bool(bases & models) or hasattr(origin, "__pydantic_model__")


def _pydantic_decoder(handler: str, parameter: str, wanted: object, members: Sequence[object]) -> Decode:
    text = text_of(wanted)
    if not all(map(_is_pydantic, members)):
        raise InvalidHandler(
            f"{handler} mixes pydantic models with other types in {parameter}: {text}: one library has to tell them "
            f"apart; make all of them pydantic models, or all of them msgspec.Structs with a tag"
        )
    if sys.modules.get("pydantic") is None:
        raise InvalidHandler(
            f"{handler} cannot get {parameter}: {text}: it is a pydantic model, and there is no pydantic to read it: "
            f"pip install pydantic"
        )
    import pydantic  # not at the top: it is optional, and slow to import

    if len(members) > 1 and not any(map(_names_discriminator, _metadata(wanted))):
        field = _field_that_tells_apart(members)
        if field is None:
            raise InvalidHandler(
                f"{handler} cannot get {parameter}: {text}: nothing tells them apart; give each a field of the same "
                f'name with a value of its own (kind: Literal["placed"]), or name the field that does: '
                f'Annotated[{text}, pydantic.Field(discriminator="kind")]'
            )
        wanted = _annotated(typing.Union[tuple(members)], (pydantic.Field(discriminator=field),))  # noqa: UP007
    try:
        adapter = pydantic.TypeAdapter[object](typing.cast(typing.Any, wanted))
        if hasattr(adapter, "rebuild"):  # since pydantic 2.10
            adapter.rebuild()  # else what cannot be read would come to light with the first record
        return adapter.validator.validate_json  # not the adapter's method around it: that is a frame more a record
    except Exception as error:  # the annotations of its fields are expressions, and may raise anything
        raise InvalidHandler(
            f"{handler} cannot get {parameter}: {text}: pydantic cannot read it ({_first_line(error)}): correct the "
            f"model, or import what its fields name in its module"
        ) from error


def _names_discriminator(metadata: object) -> bool:
    """`Field(discriminator=...)`, or `Discriminator(...)`, which has the attribute too."""
    return getattr(metadata, "discriminator", None) is not None


def _field_that_tells_apart(members: Sequence[object]) -> str | None:
    """The first field that all models have as a Literal, with values that no two of them share."""
    choices = [_literals(bare(member)) for member in members]
    for name in choices[0]:
        values = [value for fields in choices for value in fields.get(name, ())]
        if all(name in fields for fields in choices) and len(values) == len(set(values)):
            return name
    return None


def _literals(model: object) -> dict[str, tuple[object, ...]]:
    if getattr(model, "__pydantic_root_model__", False):
        return {}  # its one field is no name in the JSON
    kind = typing.get_origin(model) or model
    fields = getattr(kind, "__pydantic_fields__", None) or getattr(kind, "model_fields", {})  # (before pydantic 2.10)
    values = {
        name: typing.get_args(field.annotation)
        for name, field in fields.items()
        if typing.get_origin(field.annotation) is typing.Literal
    }
    # A member of a plain Enum is never found in JSON; one of a StrEnum or IntEnum is.
    return {name: given for name, given in values.items() if all(isinstance(value, str | int) for value in given)}


def _first_error(errors: Sequence[typing.Mapping[str, object]]) -> str:
    first = errors[0]
    place = ".".join(map(str, typing.cast(tuple[object, ...], first["loc"])))
    words = " ".join(str(first["msg"]).split())
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{place}: {words}{more}" if place else f"{words}{more}"


def _first_line(error: BaseException) -> str:
    """pydantic's errors for programmers end with an address, lines below the sentence."""
    return (str(error) or type(error).__name__).partition("\n")[0]


def _by_callable(handler: str, parameter: str, decode: Callable[..., object], text: str, optional: bool) -> Decoding:
    from confluent_kafka.serialization import Deserializer

    _check_callable(handler, parameter, decode, Deserializer)
    if isinstance(decode, Deserializer):
        return Decoding(text, _with_context(decode, text), of_message=True, optional=optional, pure=False)
    return Decoding(text, _guarded(decode, text), of_message=False, optional=optional, pure=False)


def _guarded(decode: Callable[..., object], text: str) -> Decode:
    def call(value: bytes) -> object:
        try:
            return decode(value)
        except Exception as cause:  # whatever a person's callable raises
            raise _undecodable(text, cause) from cause

    return call


def _with_context(decode: Callable[..., object], text: str) -> Callable[[Message], object]:
    from confluent_kafka.serialization import MessageField, SerializationContext

    def call(message: Message) -> object:
        headers = message.headers()  # a schema may be named there
        context = SerializationContext(message.topic(), MessageField.VALUE, headers)  # type: ignore[arg-type]
        try:
            return decode(message.value(), context)
        except Exception as cause:  # whatever a deserializer raises
            raise _undecodable(text, cause) from cause

    return call


def _undecodable(text: str, cause: BaseException) -> DecodeError:
    return DecodeError(f"the value is not {text}: {explain_decode(cause)}")


def _check_callable(handler: str, parameter: str, decode: object, deserializer: type) -> None:
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
            f"its name; what has to be awaited belongs in the handler"
        )
    if isinstance(decode, deserializer):
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
    if decode in (bytes, str) or _says_how_it_is_read(decode):
        raise InvalidHandler(
            f"{handler} has decode={name}, a type, which makes nothing of bytes: remove decode= and annotate "
            f"{parameter}: {name}"
        )
    if hasattr(decode, "FromString"):
        raise InvalidHandler(
            f"{handler} has decode={name}, a Protobuf message, which makes nothing of bytes: write decode="
            f"{name}.FromString, or pass a ProtobufDeserializer if the values were written with a schema registry"
        )
    if any("__call__" in vars(base) for base in decode.__mro__):
        raise InvalidHandler(f"{handler} has decode={name}, a class where an object is meant: write decode={name}(...)")


def _is_async(decode: Callable[..., object]) -> bool:
    """Also behind a decorator, in an object's `__call__`, and where only the annotation says so, as in
    confluent-kafka's Async deserializers, whose `__call__` is a plain def that returns a coroutine."""
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
    except Exception:  # noqa: BLE001  (an annotation is an expression; one that cannot be read says nothing)
        return False
    kind = typing.get_origin(returned) or returned
    return isinstance(kind, type) and issubclass(kind, Awaitable)


def _can_be_called(decode: Callable[..., object], *arguments: object) -> bool:
    try:
        signature = inspect.signature(decode)
    except (TypeError, ValueError):
        return True  # written in C without a signature, as int is: its own error will tell
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _name_of(decode: object) -> str:
    """Not the repr: an object may hold a password in it."""
    return _last_name(getattr(decode, "__qualname__", type(decode).__name__))
