"""The decoder for a type: `str`, or JSON read by msgspec, or JSON read by pydantic for pydantic's models.

A decoder is the library's own method, so decoding a record calls no function of kconsume.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Callable, Sequence

import msgspec

from kconsume._handlers.annotations import bare, text_of, union_members
from kconsume._handlers.pydantic_models import first_error, is_pydantic, is_pydantic_1, pydantic_decoder
from kconsume.errors import InvalidHandler
from kconsume.records import Record

Decode = Callable[[bytes], object]


def json_decoder(handler: str, parameter: str, wanted: object) -> Decode:
    """Return the function that decodes the bytes of a value. Raises InvalidHandler if there is none for the type.

    Args:
        handler, parameter: their names, for errors.
        wanted: the annotation without None.
    """
    inner = bare(wanted)
    if inner is str:
        return bytes.decode
    if inner in (list, tuple, set) or typing.get_origin(inner) in (list, tuple, set, Sequence):
        raise InvalidHandler(
            f"{handler} asks for {text_of(wanted)}: one record cannot be decoded into it, so annotate {parameter} with "
            f"the type of one record, or with a list of that type for batches"
        )
    members = tuple(union_members(wanted))
    for member in members:
        _check_member(handler, parameter, bare(member), alone=len(members) == 1)
    if any(map(is_pydantic, members)):
        return pydantic_decoder(handler, parameter, wanted, members)
    return _msgspec_decoder(handler, parameter, wanted)


def is_json_type(member: object) -> bool:
    """Return whether a value of the type is read from JSON."""
    origin = typing.get_origin(member) or member
    return origin is dict or (
        isinstance(origin, type)
        and (
            issubclass(origin, msgspec.Struct)
            or dataclasses.is_dataclass(origin)
            or typing.is_typeddict(origin)
            or is_pydantic(origin)
        )
    )


def explain_decode(cause: BaseException) -> str:
    """Return why a value could not be decoded, as the end of "the value is not Placed: ..."."""
    core = sys.modules.get("pydantic_core")
    if core is not None and isinstance(cause, core.ValidationError):
        return first_error(cause.errors(include_url=False, include_context=False, include_input=False))
    return str(cause) or type(cause).__name__


def _check_member(handler: str, parameter: str, member: object, *, alone: bool) -> None:
    text = text_of(member)
    if member in (bytes, str, Record) and not alone:
        raise InvalidHandler(
            f"{handler} mixes {text} with other types in {parameter}: nothing tells them apart; "
            f"use {text} alone and decode in the handler"
        )
    if is_pydantic_1(member):
        own = f"{text}.parse_raw" if hasattr(member, "parse_raw") else " a function that makes it from the value"
        raise InvalidHandler(
            f"{handler} cannot get {parameter}: {text}: it is a model of pydantic 1, and kconsume reads those of "
            f"pydantic 2 only: derive it from pydantic 2's BaseModel, or pass decode={own}"
        )
    if not is_json_type(member):
        raise InvalidHandler(
            f"{handler} cannot get {parameter}: {text}: the first parameter is the payload; annotate it "
            f"as bytes, str, dict, a msgspec.Struct, a dataclass, a pydantic model, a union of tagged Structs, or "
            f"Record; or pass decode= a function that makes it from the value"
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
    except Exception as error:  # annotations of fields are expressions, and may raise anything
        raise InvalidHandler(
            f"{handler} cannot get {parameter}: {text}: the type of one of its fields cannot be read "
            f"({error}): define or import the types of its fields in its module, not in a function"
        ) from error
    if foreign is not None:
        raise InvalidHandler(
            f"{handler} cannot get {parameter}: {text}: it holds {text_of(foreign)}, a pydantic model, which only "
            f"pydantic can fill: make the whole a pydantic model (pydantic.RootModel[{text}] for a dict)"
        )
    return decode


def _first_pydantic_within(wanted: object) -> object | None:
    """Return a pydantic model inside a type that msgspec reads, or None.

    msgspec expects a hook for such a class, so it accepts the type and then cannot decode a single record.
    """
    if "pydantic" not in sys.modules:
        return None
    seen: set[int] = set()
    ahead: list[object] = [msgspec.inspect.type_info(wanted)]
    while ahead:
        part = ahead.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, msgspec.inspect.CustomType) and is_pydantic(part.cls):
            return part.cls
        if isinstance(part, tuple):
            ahead.extend(part)
        elif isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field):
            ahead.extend(getattr(part, name) for name in part.__struct_fields__)
    return None
