"""Decoded values as typed columns of a `pyarrow.Table`: one row for each value, one column for each field of its model.

The model is read once, when the handler is decorated. A field whose type no column can hold is refused then. pyarrow is
imported when the first table is made. This module must not decode values or know Spark. Spark can read all
column types that this module makes.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec.inspect as look

from kconsume._handlers.annotations import text_of
from kconsume.errors import InvalidHandler

if TYPE_CHECKING:
    import pyarrow

Convert = Callable[[typing.Any], object]

_DECIMAL = (38, 18)
"""The number of all digits, and of digits after the point. Spark uses the same for a decimal of unknown size."""


@dataclasses.dataclass(frozen=True, slots=True)
class ColumnKind:
    """How the values of one field are stored in a column."""

    arrow: Callable[[typing.Any], pyarrow.DataType]
    """Returns the type of the column. Called with the module pyarrow."""
    convert: Convert | None = None
    """Turns a value into a cell. None if the value is the cell."""


class Columns:
    """The columns of a model: a Struct, a dataclass, a TypedDict or a pydantic model.

    Args:
        handler: the name of the handler, for errors.
        model: the type whose fields are the columns. A field that no column can hold raises InvalidHandler.
    """

    def __init__(self, handler: str, model: object) -> None:
        self._kinds = _fields(handler, look.type_info(model), text_of(model))

    @property
    def names(self) -> list[str]:
        return list(self._kinds)

    @cached_property
    def schema(self) -> pyarrow.Schema:
        from kconsume._handlers.arrow import schema

        schema()  # raises the error that says what to install if there is no pyarrow
        import pyarrow as pa

        return pa.schema({name: kind.arrow(pa) for name, kind in self._kinds.items()})

    def table(self, values: Sequence[object]) -> pyarrow.Table:
        """Return the values as a table. Raises if a column cannot hold a value, such as an integer over 64 bits."""
        schema = self.schema
        import pyarrow as pa

        arrays = [
            pa.array(_cells(kind, _field_values(name, values)), field.type)
            for (name, kind), field in zip(self._kinds.items(), schema, strict=True)
        ]
        return pa.Table.from_arrays(arrays, schema=schema)


def _field_values(name: str, values: Sequence[object]) -> Iterable[object]:
    """Return one field of all values. A value may be a dict: a TypedDict is a dict, and `decode=` often returns one."""
    if values and isinstance(values[0], Mapping):
        return (typing.cast(Mapping[str, object], value).get(name) for value in values)
    return map(attrgetter(name), values)


def _cells(kind: ColumnKind, values: Iterable[object]) -> list[object]:
    convert = kind.convert
    if convert is None:
        return list(values)
    return [None if value is None else convert(value) for value in values]


# From a type to its column


def _fields(handler: str, model: look.Type, text: str) -> dict[str, ColumnKind]:
    kinds = {}
    for name, hint in _members(model, handler, text):
        try:
            kind = _kind(hint)
        except RecursionError:  # a model that contains itself
            kind = None
        if kind is None:
            raise InvalidHandler(
                f"{handler} cannot have {text} as columns: no column holds its field {name!r}; use int, float, bool, "
                f"str, bytes, datetime, date, Decimal, UUID, an Enum, a list, a dict with str as its keys, a model, "
                f"or one of these | None"
            )
        kinds[name] = kind
    if not kinds:
        raise InvalidHandler(f"{handler} cannot have {text} as columns: it has no field; give it one")
    return kinds


def _members(model: look.Type, handler: str, text: str) -> list[tuple[str, look.Type]]:
    found = _model_fields(model)
    if found is None:
        raise InvalidHandler(
            f"{handler} cannot have {text} as columns: name a msgspec.Struct, a dataclass, a TypedDict or a pydantic "
            f"model, whose fields become the columns"
        )
    return found


def _model_fields(model: look.Type) -> list[tuple[str, look.Type]] | None:
    if isinstance(model, look.StructType | look.DataclassType | look.TypedDictType):
        return [(field.name, field.type) for field in model.fields]
    if isinstance(model, look.CustomType) and hasattr(model.cls, "__pydantic_validator__"):
        fields = getattr(model.cls, "__pydantic_fields__", {})
        return [(name, look.type_info(field.annotation)) for name, field in fields.items()]
    return None


_PLAIN: Mapping[type[look.Type], ColumnKind] = {
    look.IntType: ColumnKind(lambda pa: pa.int64()),
    look.FloatType: ColumnKind(lambda pa: pa.float64()),
    look.BoolType: ColumnKind(lambda pa: pa.bool_()),
    look.StrType: ColumnKind(lambda pa: pa.string()),
    look.BytesType: ColumnKind(lambda pa: pa.binary()),
    look.DateTimeType: ColumnKind(lambda pa: pa.timestamp("us", "UTC")),
    look.DateType: ColumnKind(lambda pa: pa.date32()),
    look.DecimalType: ColumnKind(lambda pa: pa.decimal128(*_DECIMAL)),
    look.UUIDType: ColumnKind(lambda pa: pa.string(), str),
}


def _kind(hint: look.Type) -> ColumnKind | None:
    """Return how values of the type are stored, or None if no column can hold them."""
    if isinstance(hint, look.Metadata):
        return _kind(hint.type)
    if isinstance(hint, look.UnionType):
        others = [member for member in hint.types if not isinstance(member, look.NoneType)]
        return _kind(others[0]) if len(others) == 1 else None
    if isinstance(hint, look.EnumType):
        return _kind_of_values([member.value for member in hint.cls], attrgetter("value"))
    if isinstance(hint, look.LiteralType):
        return _kind_of_values(hint.values, None)
    if isinstance(hint, look.ListType | look.SetType | look.FrozenSetType | look.VarTupleType):
        return _list_of(_kind(hint.item_type))
    if isinstance(hint, look.DictType):
        return _map_of(_kind(hint.value_type)) if isinstance(hint.key_type, look.StrType) else None
    if type(hint) in _PLAIN:
        return _PLAIN[type(hint)]
    return _struct_of(hint)


def _kind_of_values(values: Iterable[object], convert: Convert | None) -> ColumnKind | None:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {str}:
        return ColumnKind(lambda pa: pa.string(), convert)
    return ColumnKind(lambda pa: pa.int64(), convert) if kinds == {int} else None


def _list_of(item: ColumnKind | None) -> ColumnKind | None:
    if item is None:
        return None
    return ColumnKind(lambda pa: pa.list_(item.arrow(pa)), lambda values: _cells(item, values))


def _map_of(item: ColumnKind | None) -> ColumnKind | None:
    if item is None:
        return None
    return ColumnKind(
        lambda pa: pa.map_(pa.string(), item.arrow(pa)),
        lambda values: list(zip(values.keys(), _cells(item, values.values()), strict=True)),
    )


def _struct_of(model: look.Type) -> ColumnKind | None:
    members = _model_fields(model)
    if not members:
        return None
    kinds = {name: _kind(hint) for name, hint in members}
    known = {name: kind for name, kind in kinds.items() if kind is not None}
    if len(known) < len(kinds):
        return None

    def convert(value: object) -> dict[str, object]:
        return {name: _cells(kind, _field_values(name, [value]))[0] for name, kind in known.items()}

    return ColumnKind(lambda pa: pa.struct({name: kind.arrow(pa) for name, kind in known.items()}), convert)
