"""Pydantic's models: how they are recognised, decoded, and distinguished in a union.

This module must not import pydantic before the user's code has imported it: pydantic is optional and slow to import.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Sequence

from kconsume._handlers.annotations import annotated, bare, metadata_of, text_of
from kconsume.errors import InvalidHandler


def is_pydantic(member: object) -> bool:
    """Return whether the type is a model or a dataclass of pydantic 2. Does not import pydantic."""
    origin = typing.get_origin(bare(member)) or bare(member)
    return isinstance(origin, type) and hasattr(origin, "__pydantic_validator__")


def is_pydantic_1(member: object) -> bool:
    """Return whether the type is a model or a dataclass of pydantic 1, which kconsume does not read."""
    origin = typing.get_origin(member) or member
    if not isinstance(origin, type) or is_pydantic(origin):
        return False
    bases = {(base.__module__, base.__name__) for base in origin.__mro__}
    models = {("pydantic.main", "BaseModel"), ("pydantic.v1.main", "BaseModel")}
    return bool(bases & models) or hasattr(origin, "__pydantic_model__")


def pydantic_decoder(
    handler: str, parameter: str, wanted: object, members: Sequence[object]
) -> Callable[[bytes], object]:
    """Return the function that decodes the bytes of a value. Raises InvalidHandler if there is none for the type.

    Args:
        handler, parameter: their names, for errors.
        wanted: the annotation without None.
        members: the types of the union, or the one type.
    """
    text = text_of(wanted)
    if not all(map(is_pydantic, members)):
        raise InvalidHandler(
            f"{handler} mixes pydantic models with other types in {parameter}: {text}: one library has to tell them "
            f"apart; make all of them pydantic models, or all of them msgspec.Structs with a tag"
        )
    if sys.modules.get("pydantic") is None:
        raise InvalidHandler(
            f"{handler} cannot get {parameter}: {text}: it is a pydantic model, and there is no pydantic to read it: "
            f"pip install pydantic"
        )
    import pydantic

    if len(members) > 1 and not any(map(_names_discriminator, metadata_of(wanted))):
        field = _distinguishing_field(members)
        if field is None:
            raise InvalidHandler(
                f"{handler} cannot get {parameter}: {text}: nothing tells them apart; give each a field of the same "
                f'name with a value of its own (kind: Literal["placed"]), or name the field that does: '
                f'Annotated[{text}, pydantic.Field(discriminator="kind")]'
            )
        wanted = annotated(typing.Union[tuple(members)], (pydantic.Field(discriminator=field),))  # noqa: UP007
    try:
        adapter = pydantic.TypeAdapter[object](typing.cast(typing.Any, wanted))
        if hasattr(adapter, "rebuild"):  # since pydantic 2.10
            adapter.rebuild()  # without it, a type that cannot be read would fail at the first record
        return adapter.validator.validate_json  # the adapter's own method would cost one more frame for each record
    except Exception as error:  # annotations of fields are expressions, and may raise anything
        raise InvalidHandler(
            f"{handler} cannot get {parameter}: {text}: pydantic cannot read it ({_first_line(error)}): correct the "
            f"model, or import the types of its fields in its module"
        ) from error


def first_error(errors: Sequence[typing.Mapping[str, object]]) -> str:
    """Return the first error of a pydantic ValidationError in one line, and the number of the others.

    Args:
        errors: what `ValidationError.errors()` returns.
    """
    first = errors[0]
    place = ".".join(map(str, typing.cast(tuple[object, ...], first["loc"])))
    words = " ".join(str(first["msg"]).split())
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{place}: {words}{more}" if place else f"{words}{more}"


def _names_discriminator(metadata: object) -> bool:
    """Return True for `Field(discriminator=...)` and for `Discriminator(...)`, which both have this attribute."""
    return getattr(metadata, "discriminator", None) is not None


def _distinguishing_field(members: Sequence[object]) -> str | None:
    """Return the first field that all models have as a Literal, with values that no two of them share."""
    choices = [_literals(bare(member)) for member in members]
    for name in choices[0]:
        values = [value for fields in choices for value in fields.get(name, ())]
        if all(name in fields for fields in choices) and len(values) == len(set(values)):
            return name
    return None


def _literals(model: object) -> dict[str, tuple[object, ...]]:
    if getattr(model, "__pydantic_root_model__", False):
        return {}  # a root model has a single field, which has no name in the JSON
    kind = typing.get_origin(model) or model
    fields = getattr(kind, "__pydantic_fields__", None) or getattr(kind, "model_fields", {})  # (before pydantic 2.10)
    values = {
        name: typing.get_args(field.annotation)
        for name, field in fields.items()
        if typing.get_origin(field.annotation) is typing.Literal
    }
    # JSON cannot hold a member of a plain Enum, but can hold a member of a StrEnum or IntEnum.
    return {name: given for name, given in values.items() if all(isinstance(value, str | int) for value in given)}


def _first_line(error: BaseException) -> str:
    """Return the first line of an error. Pydantic's errors for developers end with the address of a web page."""
    return (str(error) or type(error).__name__).partition("\n")[0]
