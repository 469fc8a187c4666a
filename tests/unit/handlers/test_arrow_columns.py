"""A model's fields as columns."""

from __future__ import annotations

import enum
import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pyarrow as pa
import pydantic
import pytest

from kconsume._handlers.arrow_columns import Columns
from kconsume.errors import InvalidHandler


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Place(msgspec.Struct):
    town: str
    floor: int | None = None


class Click(msgspec.Struct):
    id: int
    at: datetime
    day: date
    price: Decimal
    share: float
    seen: bool
    raw: bytes
    by: uuid.UUID
    colour: Colour
    kind: Literal["tap", "click"]
    words: list[str]
    marks: set[int]
    counts: dict[str, int]
    place: Place
    places: list[Place]
    note: str | None = None


CLICK = Click(
    7, datetime(2026, 1, 2, 3, 4, 5, 6, UTC), date(2026, 1, 2), Decimal("1.5"), 0.25, True, b"\x00\xff",
    uuid.UUID(int=1), Colour.RED, "tap", ["a", "b"], {3}, {"x": 1}, Place("Bern", 2), [Place("Basel")],
)  # fmt: skip


def test_a_column_for_each_field_with_its_type() -> None:
    assert [f"{field.name}: {field.type}" for field in Columns("load", Click).schema] == [
        "id: int64",
        "at: timestamp[us, tz=UTC]",
        "day: date32[day]",
        "price: decimal128(38, 18)",
        "share: double",
        "seen: bool",
        "raw: binary",
        "by: string",
        "colour: string",
        "kind: string",
        "words: list<item: string>",
        "marks: list<item: int64>",
        "counts: map<string, int64>",
        "place: struct<town: string, floor: int64>",
        "places: list<item: struct<town: string, floor: int64>>",
        "note: string",
    ]


def test_a_row_for_each_value() -> None:
    table = Columns("load", Click).table([CLICK, msgspec.structs.replace(CLICK, id=8, note="hm")])
    table.validate(full=True)
    first, second = table.to_pylist()
    assert (first["id"], first["note"], second["id"], second["note"]) == (7, None, 8, "hm")
    assert first["at"] == CLICK.at
    assert first["price"] == CLICK.price
    assert first["by"] == str(CLICK.by)
    assert first["colour"] == "red"
    assert first["marks"] == [3]
    assert first["counts"] == [("x", 1)]
    assert first["place"] == {"town": "Bern", "floor": 2}
    assert first["places"] == [{"town": "Basel", "floor": None}]


@dataclass
class Plain:
    id: int
    word: str | None


class Dict(TypedDict):
    id: int
    word: str | None


class Model(pydantic.BaseModel):
    id: int
    word: str | None


@pytest.mark.parametrize("model", [Plain, Dict, Model])
def test_models_of_every_library(model: type) -> None:
    columns = Columns("load", model)
    assert columns.names == ["id", "word"]
    assert columns.table([model(id=1, word=None), model(id=2, word="b")]).to_pydict() == {
        "id": [1, 2],
        "word": [None, "b"],
    }


class Nested(pydantic.BaseModel):
    inner: Model
    all: list[Model] = []


def test_a_pydantic_model_within_another() -> None:
    table = Columns("load", Nested).table([Nested(inner=Model(id=1, word="a"), all=[Model(id=2, word=None)])])
    assert table.to_pylist() == [{"inner": {"id": 1, "word": "a"}, "all": [{"id": 2, "word": None}]}]


def test_dicts_that_a_decoder_of_ones_own_makes_have_the_columns_of_the_model() -> None:
    assert Columns("load", Plain).table([{"id": 1}, {"id": 2, "word": "b"}]).to_pydict() == {
        "id": [1, 2],
        "word": [None, "b"],
    }


def test_no_rows_is_a_table_with_its_columns() -> None:
    table = Columns("load", Plain).table([])
    assert (table.num_rows, table.column_names) == (0, ["id", "word"])


def test_a_value_that_its_column_cannot_hold_raises() -> None:
    with pytest.raises((OverflowError, pa.ArrowInvalid)):
        Columns("load", Plain).table([Plain(2**70, None)])


class Anything(msgspec.Struct):
    what: Any


class Mixed(msgspec.Struct):
    what: int | str


class Numbered(msgspec.Struct):
    what: dict[int, str]


class Tree(msgspec.Struct):
    what: list[Tree]


class Nothing(msgspec.Struct):
    pass


@pytest.mark.parametrize("model", [Anything, Mixed, Numbered, Tree])
def test_a_field_that_no_column_holds_is_refused_by_name(model: type) -> None:
    with pytest.raises(InvalidHandler, match=rf"load cannot have {model.__name__} as columns: .*'what'"):
        Columns("load", model)


@pytest.mark.parametrize("model", [Nothing, int, dict])
def test_what_has_no_fields_is_refused(model: type) -> None:
    with pytest.raises(InvalidHandler, match="as columns"):
        Columns("load", model)


def test_what_annotated_says_of_a_field_does_not_matter() -> None:
    class Bound(msgspec.Struct):
        id: Annotated[int, msgspec.Meta(ge=0)]

    assert Columns("load", Bound).schema == pa.schema({"id": pa.int64()})
