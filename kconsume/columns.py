"""Decoded values as the typed columns of a `pyarrow.Table`: one row a value, one column a field of its model.

The model is read once, where the handler is decorated: a field whose type no column can hold is refused there. pyarrow
is imported when the first table is made, and not before. Nothing here decodes, and nothing knows Spark; the types are
those that Spark can read.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec.inspect as look

from kconsume.decoding import text_of
from kconsume.errors import InvalidHandler

if TYPE_CHECKING:
    import pyarrow

Convert = Callable[[typing.Any], object]

_DECIMAL = (38, 18)
"""Digits in all, and after the point: Spark's own for a decimal of unknown size."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """The type of a column, as a function of pyarrow's module, and what makes a cell of a value that is no cell yet."""

    arrow: Callable[[typing.Any], pyarrow.DataType]
    convert: Convert | None = None


class Columns:
    """The columns of a model: a Struct, a dataclass, a TypedDict or a pydantic model."""

    def __init__(self, handler: str, model: object) -> None:
        """`handler` is for the sentence of a refusal."""
        self._kinds = _fields(handler, look.type_info(model), text_of(model))

    @property
    def names(self) -> list[str]:
        return list(self._kinds)

    @cached_property
    def schema(self) -> pyarrow.Schema:
        from kconsume.tables import schema

        schema()  # says what to install where there is no pyarrow
        import pyarrow as pa

        return pa.schema({name: kind.arrow(pa) for name, kind in self._kinds.items()})

    def table(self, values: Sequence[object]) -> pyarrow.Table:
        """The values as a table. A value that its column cannot hold (an integer of more than 64 bits) raises."""
        schema = self.schema
        import pyarrow as pa

        arrays = [
            pa.array(_cells(kind, _gotten(name, values)), field.type)
            for (name, kind), field in zip(self._kinds.items(), schema, strict=True)
        ]
        return pa.Table.from_arrays(arrays, schema=schema)


def _gotten(name: str, values: Sequence[object]) -> Iterable[object]:
    """Of dicts too: a TypedDict is one, and what a person's own `decode=` makes often is."""
    if values and isinstance(values[0], Mapping):
        return (typing.cast(Mapping[str, object], value).get(name) for value in values)
    return map(attrgetter(name), values)


def _cells(kind: Kind, values: Iterable[object]) -> list[object]:
    convert = kind.convert
    if convert is None:
        return list(values)
    return [None if value is None else convert(value) for value in values]


# From a type to its column


def _fields(handler: str, model: look.Type, text: str) -> dict[str, Kind]:
    kinds = {}
    for name, hint in _members(model, handler, text):
        try:
            kind = _kind(hint)
        except RecursionError:  # a model that holds itself
            kind = None
        if kind is None:
            raise InvalidHandler(
                f"{handler} cannot have {text} as columns: nothing holds its field {name!r}; use int, float, bool, "
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


_PLAIN: Mapping[type[look.Type], Kind] = {
    look.IntType: Kind(lambda pa: pa.int64()),
    look.FloatType: Kind(lambda pa: pa.float64()),
    look.BoolType: Kind(lambda pa: pa.bool_()),
    look.StrType: Kind(lambda pa: pa.string()),
    look.BytesType: Kind(lambda pa: pa.binary()),
    look.DateTimeType: Kind(lambda pa: pa.timestamp("us", "UTC")),
    look.DateType: Kind(lambda pa: pa.date32()),
    look.DecimalType: Kind(lambda pa: pa.decimal128(*_DECIMAL)),
    look.UUIDType: Kind(lambda pa: pa.string(), str),
}


def _kind(hint: look.Type) -> Kind | None:
    """None if there is no column for it."""
    if isinstance(hint, look.Metadata):
        return _kind(hint.type)
    if isinstance(hint, look.UnionType):
        others = [member for member in hint.types if not isinstance(member, look.NoneType)]
        return _kind(others[0]) if len(others) == 1 else None
    if isinstance(hint, look.EnumType):
        return _of_values([member.value for member in hint.cls], attrgetter("value"))
    if isinstance(hint, look.LiteralType):
        return _of_values(hint.values, None)
    if isinstance(hint, look.ListType | look.SetType | look.FrozenSetType | look.VarTupleType):
        return _list_of(_kind(hint.item_type))
    if isinstance(hint, look.DictType):
        return _map_of(_kind(hint.value_type)) if isinstance(hint.key_type, look.StrType) else None
    if type(hint) in _PLAIN:
        return _PLAIN[type(hint)]
    return _struct_of(hint)


def _of_values(values: Iterable[object], convert: Convert | None) -> Kind | None:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {str}:
        return Kind(lambda pa: pa.string(), convert)
    return Kind(lambda pa: pa.int64(), convert) if kinds == {int} else None


def _list_of(item: Kind | None) -> Kind | None:
    if item is None:
        return None
    return Kind(lambda pa: pa.list_(item.arrow(pa)), lambda values: _cells(item, values))


def _map_of(item: Kind | None) -> Kind | None:
    if item is None:
        return None
    return Kind(
        lambda pa: pa.map_(pa.string(), item.arrow(pa)),
        lambda values: list(zip(values.keys(), _cells(item, values.values()), strict=True)),
    )


def _struct_of(model: look.Type) -> Kind | None:
    members = _model_fields(model)
    if not members:
        return None
    kinds = {name: _kind(hint) for name, hint in members}
    known = {name: kind for name, kind in kinds.items() if kind is not None}
    if len(known) < len(kinds):
        return None

    def convert(value: object) -> dict[str, object]:
        return {name: _cells(kind, _gotten(name, [value]))[0] for name, kind in known.items()}

    return Kind(lambda pa: pa.struct({name: kind.arrow(pa) for name, kind in known.items()}), convert)
