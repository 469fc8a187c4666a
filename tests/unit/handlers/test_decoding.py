"""A value becomes what the annotation says, or what `decode=` makes of it; what cannot work is refused with the fix."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import json
import os
import subprocess
import sys
import types
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Optional, TypedDict, TypeVar, Union
from uuid import UUID

import msgspec
import pydantic
import pydantic.dataclasses
import pydantic.v1
import pytest
from confluent_kafka.serialization import (
    Deserializer,
    DeserializerBuilder,
    DoubleDeserializer,
    IntegerDeserializer,
    MessageField,
    SerializationContext,
    StringDeserializer,
)

from kconsume import DecodeError, Record
from kconsume._handlers.annotations import bare, is_union, text_of, without_none
from kconsume._handlers.decoding import Decoding, decoding_of
from kconsume._handlers.json_decoder import explain_decode
from kconsume.errors import InvalidHandler
from tests.ids import short
from tests.unit.fakes import FakeMessage

_ROOT = str(Path(__file__).parents[3])
T = TypeVar("T")


class Placed(msgspec.Struct, tag=True):
    id: int
    sku: str = "tea"


class Cancelled(msgspec.Struct, tag=True):
    id: int


class Untagged(msgspec.Struct):
    id: int


class AlsoUntagged(msgspec.Struct):
    id: int


class Box(msgspec.Struct, Generic[T]):
    content: T


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Line(TypedDict):
    sku: str
    quantity: int


class Kind(enum.StrEnum):
    PAID = "paid"


class PlainKind(enum.Enum):
    LOST = "lost"


class Item(pydantic.BaseModel):
    sku: str
    quantity: int


class Order(pydantic.BaseModel):
    id: int
    items: list[Item] = []


class OrderPlaced(pydantic.BaseModel):
    version: Literal[1] = 1
    kind: Literal["placed", "created"]
    id: int


class OrderCancelled(pydantic.BaseModel):
    version: Literal[1] = 1
    kind: Literal["cancelled"]
    id: int


class OrderPaid(pydantic.BaseModel):
    kind: Literal[Kind.PAID]
    id: int


class OrderLost(pydantic.BaseModel):
    kind: Literal[PlainKind.LOST]


@pydantic.dataclasses.dataclass
class OrderShipped:
    kind: Literal["shipped"]
    id: int


class AlsoPlaced(pydantic.BaseModel):
    kind: Literal["placed"]


class AnyKind(pydantic.BaseModel):
    kind: str


class Envelope(pydantic.BaseModel, Generic[T]):
    body: T


class Quantities(pydantic.RootModel[dict[str, int]]):
    pass


class Deferred(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(defer_build=True)
    id: int


class DeferredUnreadable(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(defer_build=True)
    id: NoSuchName  # type: ignore[name-defined]  # noqa: F821


class Unreadable(pydantic.BaseModel):
    id: NoSuchName  # type: ignore[name-defined]  # noqa: F821


class OldOrder(pydantic.v1.BaseModel):
    id: int


@pydantic.v1.dataclasses.dataclass
class OldPoint:
    x: int


class HoldsModels(msgspec.Struct):
    orders: list[Order | None]
    parent: HoldsModels | None = None


By = pydantic.Field


def decoded(hint: object, value: bytes, decode: Callable[..., object] | None = None) -> object:
    """What a handler with this annotation is given for this value."""
    decoding = decoding_of("handle", "order", hint, decode)
    if decoding.call is None:
        return value
    return decoding.call(FakeMessage(value) if decoding.of_message else value)


def refused(hint: object, decode: Any = None) -> str:
    with pytest.raises(InvalidHandler) as caught:
        decoding_of("handle", "order", hint, decode)
    return str(caught.value)


PAYLOADS = [
    (bytes, b"\xff\x00", b"\xff\x00"),
    (bytes | None, b"", b""),
    (Annotated[bytes, "raw"], b"\xff", b"\xff"),
    (str, "tea ☕".encode(), "tea ☕"),
    (str | None, b"", ""),
    (Annotated[str | None, "said"], b"a", "a"),
    (dict, b'{"a": [1, null]}', {"a": [1, None]}),
    (dict[str, int], b'{"a": 1}', {"a": 1}),
    (dict[str, int] | None, b'{"a": 1}', {"a": 1}),
    (Annotated[dict[str, int], msgspec.Meta(max_length=1)] | None, b'{"a": 1}', {"a": 1}),
    (Untagged, b'{"id": 7, "unknown": 1}', Untagged(7)),
    (Optional[Untagged], b'{"id": 7}', Untagged(7)),  # noqa: UP045  (people write it)
    (Placed | Cancelled, b'{"type": "Cancelled", "id": 7}', Cancelled(7)),
    (Union[Placed, Cancelled, None], b'{"type": "Placed", "id": 7}', Placed(7)),  # noqa: UP007  (people write it)
    (Annotated[Placed, "new"] | Cancelled, b'{"type": "Placed", "id": 7}', Placed(7)),
    (Box[int], b'{"content": 7}', Box(7)),
    (Point, b'{"x": 1, "y": 2}', Point(1, 2)),
    (Line, b'{"sku": "tea", "quantity": 2}', {"sku": "tea", "quantity": 2}),
    (Order, b'{"id": "7", "items": [{"sku": "tea", "quantity": 2}]}',
     Order(id=7, items=[Item(sku="tea", quantity=2)])),
    (Order | None, b'{"id": 7}', Order(id=7)),
    (Annotated[Order, "the order"], b'{"id": 7}', Order(id=7)),
    (Envelope[Item], b'{"body": {"sku": "tea", "quantity": 2}}', Envelope[Item](body=Item(sku="tea", quantity=2))),
    (Quantities, b'{"tea": 2}', Quantities({"tea": 2})),
    (pydantic.RootModel[list[int]], b"[1, 2]", pydantic.RootModel[list[int]]([1, 2])),
    (OrderShipped, b'{"kind": "shipped", "id": "7"}', OrderShipped(kind="shipped", id=7)),
    (Deferred, b'{"id": 7}', Deferred(id=7)),
]  # fmt: skip

KINDS = [
    (b'{"kind": "placed", "id": 7}', OrderPlaced(kind="placed", id=7)),
    (b'{"kind": "created", "id": 7}', OrderPlaced(kind="created", id=7)),
    (b'{"kind": "cancelled", "id": 7}', OrderCancelled(kind="cancelled", id=7)),
    (b'{"kind": "shipped", "id": 7}', OrderShipped(kind="shipped", id=7)),
    (b'{"kind": "paid", "id": 7}', OrderPaid(kind=Kind.PAID, id=7)),
]


class TestPayload:
    @pytest.mark.parametrize(("hint", "value", "expected"), PAYLOADS, ids=short)
    def test_the_annotation_says_what_the_value_becomes(self, hint: object, value: bytes, expected: object) -> None:
        given = decoded(hint, value)
        assert given == expected
        assert type(given) is type(expected)

    @pytest.mark.parametrize("hint", [hint for hint, _, _ in PAYLOADS], ids=short)
    def test_a_null_value_is_wanted_by_those_who_say_none(self, hint: object) -> None:
        assert decoding_of("handle", "order", hint).optional is ("None" in text_of(hint))

    def test_no_frame_of_ours_stands_between_the_value_and_a_library_s_decoder(self) -> None:
        for hint in (str, dict, Placed, Placed | Cancelled, Point, Order, OrderPlaced | OrderCancelled):
            decoding = decoding_of("handle", "order", hint)
            assert isinstance(decoding.call, types.BuiltinFunctionType | types.MethodDescriptorType), hint
            assert not decoding.of_message
        assert decoding_of("handle", "order", bytes) == Decoding("bytes", None, of_message=False, optional=False)

    @pytest.mark.parametrize(("value", "expected"), KINDS)
    @pytest.mark.parametrize(
        "hint",
        [
            OrderPlaced | OrderCancelled | OrderShipped | OrderPaid,
            OrderPlaced | OrderCancelled | OrderShipped | OrderPaid | None,
            Annotated[OrderPlaced | OrderCancelled | OrderShipped | OrderPaid, By(discriminator="kind")],
            Annotated[OrderPlaced | OrderCancelled | OrderShipped | OrderPaid | None, By(discriminator="kind")],
            Annotated[OrderPlaced | OrderCancelled | OrderShipped | OrderPaid, pydantic.Discriminator("kind")] | None,
            Annotated[OrderPlaced | OrderCancelled, By(discriminator="kind")] | OrderShipped | OrderPaid,
        ],
    )
    def test_pydantic_models_are_told_apart_by_their_literal(
        self, hint: object, value: bytes, expected: object
    ) -> None:
        assert decoded(hint, value) == expected

    def test_pydantic_models_are_told_apart_by_a_function(self) -> None:
        hint = Annotated[
            Annotated[Order, pydantic.Tag("order")] | Annotated[Item, pydantic.Tag("item")],
            pydantic.Discriminator(lambda raw: "item" if "sku" in raw else "order"),
        ]
        assert decoded(hint, b'{"sku": "tea", "quantity": 2}') == Item(sku="tea", quantity=2)
        assert decoded(hint, b'{"id": 7}') == Order(id=7)
        assert text_of(hint) == "Order | Item"

    def test_a_record_without_the_field_that_tells_models_apart_is_not_guessed(self) -> None:
        decoding = decoding_of("handle", "order", OrderPlaced | OrderCancelled)
        assert decoding.call is not None
        with pytest.raises(pydantic.ValidationError, match="Unable to extract tag using discriminator 'kind'"):
            decoding.call(b'{"id": 7}')


REFUSED = [
    (list[Placed], r"handle asks for list\[.*Placed\]: .*annotate order with the type of one record"),
    (list, r"handle asks for list: .*the type of one record"),
    (Sequence[Placed], r"handle asks for .*Sequence\[.*Placed\].*the type of one record"),
    (int, r"handle cannot get order: int: .*annotate it as bytes, str, dict.* a pydantic model.* or pass decode="),
    (Any, r"handle cannot get order: Any: .*annotate it as bytes"),
    (object, r"handle cannot get order: object: .*annotate it as bytes"),
    (Literal["a", "b"], r"handle cannot get order: Literal\['a', 'b'\]: .*annotate it as bytes"),
    (Decoding | FakeMessage, r"handle cannot get order: FakeMessage: .*annotate it as bytes"),
    (type(None), r"handle cannot get order: .*annotate it as bytes"),
    ([Placed], r"handle cannot get order: .*annotate it as bytes"),
    (bytes | Placed, r"mixes bytes with other types in order: .*use bytes alone and decode in the handler"),
    (str | Placed | None, r"mixes str with other types in order: .*use str alone"),
    (Record | Placed, r"mixes Record with other types in order: .*use Record alone"),
    (bytes | Order, r"mixes bytes with other types in order: .*use bytes alone"),
    (Untagged | AlsoUntagged, r"cannot get order: Untagged \| AlsoUntagged: .*give each msgspec.Struct a tag"),
    (Placed | Order, r"mixes pydantic models with other types in order: Placed \| Order: .*make all of them pydantic"),
    (Order | dict[str, int], r"mixes pydantic models with other types in order: Order \| dict\[str, int\]"),
    (Order | Item, r"cannot get order: Order \| Item: nothing tells them apart; give each a field .*kind: Literal"),
    (OrderPlaced | Order, r"nothing tells them apart; .*Annotated\[OrderPlaced \| Order, .*discriminator="),
    (OrderPlaced | AlsoPlaced, r"OrderPlaced \| AlsoPlaced: nothing tells them apart"),
    (OrderPlaced | OrderLost, r"OrderPlaced \| OrderLost: nothing tells them apart"),
    (OrderPlaced | AnyKind, r"OrderPlaced \| AnyKind: nothing tells them apart"),
    (pydantic.RootModel[Literal["a"]] | pydantic.RootModel[Literal["b"]], r"nothing tells them apart"),
    (Annotated[OrderPlaced | Order, By(discriminator="kind")],
     r"cannot get order: OrderPlaced \| Order: pydantic cannot read it \(Model 'Order' needs a discriminator field"),
    (Unreadable, r"cannot get order: Unreadable: pydantic cannot read it \(.*NoSuchName.*\): correct the model"),
    (DeferredUnreadable, r"cannot get order: DeferredUnreadable: pydantic cannot read it \(.*NoSuchName"),
    (OldOrder, r"cannot get order: OldOrder: it is a model of pydantic 1, .* or pass decode=OldOrder\.parse_raw"),
    (OldPoint | None, r"cannot get order: OldPoint: it is a model of pydantic 1, .* or pass decode= a function"),
    (OldOrder | Order, r"cannot get order: OldOrder: it is a model of pydantic 1"),
    (dict[str, Order], r"it holds Order, a pydantic model, .*RootModel\[dict\[str, .*Order\]\] for a dict"),
    (HoldsModels, r"cannot get order: HoldsModels: it holds Order, a pydantic model, which only pydantic can fill"),
]  # fmt: skip


class TestRefused:
    @pytest.mark.parametrize(("hint", "sentence"), REFUSED, ids=short)
    def test_what_cannot_work_is_refused_with_the_fix(self, hint: object, sentence: str) -> None:
        with pytest.raises(InvalidHandler, match=sentence) as caught:
            decoding_of("handle", "order", hint)
        assert "\n" not in str(caught.value)

    def test_control_a_pydantic_model_within_a_struct_cannot_be_filled_by_msgspec(self) -> None:
        with pytest.raises(msgspec.ValidationError, match="Expected `Order`, got `dict`"):
            msgspec.json.Decoder(dict[str, Order]).decode(b'{"a": {"id": 1}}')

    def test_control_models_that_nothing_tells_apart_are_guessed_by_pydantic(self) -> None:
        either = pydantic.TypeAdapter[object](OrderPlaced | AnyKind).validate_json(b'{"kind": "placed"}')
        assert either == AnyKind(kind="placed"), "a placed order without its id is taken for something else"

    def test_control_a_plain_enum_is_never_found_in_json(self) -> None:
        with pytest.raises(pydantic.ValidationError, match="Input should be <PlainKind"):
            OrderLost.model_validate_json(b'{"kind": "lost"}')

    def test_the_fix_for_a_model_of_pydantic_1_works(self) -> None:
        assert decoded(OldOrder, b'{"id": 7}', OldOrder.parse_raw) == OldOrder(id=7)

    def test_fields_of_a_local_type_that_cannot_be_resolved_are_refused_in_words(self) -> None:
        """msgspec looks for the names of fields in the module only."""

        class Part(msgspec.Struct):
            sku: str

        class Whole(msgspec.Struct):
            parts: list[Part]

        assert "'Part' is not defined" in refused(Whole)

    def test_a_model_where_pydantic_is_not_installed_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert decoding_of("handle", "order", Order).call is not None
        monkeypatch.setitem(sys.modules, "pydantic", None)
        assert "cannot get order: Order: it is a pydantic model" in refused(Order)
        assert refused(Order | None).endswith("pip install pydantic")

    def test_a_model_of_an_old_pydantic_is_refused(self) -> None:
        old = type("BaseModel", (), {"__module__": "pydantic.main"})
        assert "it is a model of pydantic 1" in refused(type("Order", (old,), {}))


class Doubling:
    def __call__(self, value: bytes) -> int:
        return 2 * int(value)


class AsyncDoubling:
    async def __call__(self, value: bytes) -> int:
        return 2 * int(value)


class Contextual(Deserializer):
    """Keeps what it was called with."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes | None, SerializationContext | None]] = []

    def __call__(self, value: bytes | None, ctx: SerializationContext | None = None) -> object:
        self.seen.append((value, ctx))
        return None


class WithoutContext(Deserializer):
    def __call__(self, value: bytes | None) -> object:  # type: ignore[override]
        return value


async def awaited(value: bytes) -> int:
    return len(value)


async def many(value: bytes) -> collections.abc.AsyncIterator[int]:
    yield len(value)


def hands_over_a_coroutine(value: bytes) -> Coroutine[Any, Any, int]:
    return awaited(value)


def hands_over_an_awaitable(value: bytes) -> Awaitable[int]:
    return awaited(value)


@functools.wraps(awaited)
def hides_a_coroutine(*args: Any) -> object:
    return awaited(*args)


def two(value: bytes, topic: str) -> object:
    return value, topic


def by_name(*, value: bytes) -> object:
    return value


def with_defaults(value: bytes, base: int = 16, *, strict: bool = True) -> int:
    return int(value, base)


def annotated_with_a_name_that_is_not_there(value: bytes) -> NoSuchName:  # type: ignore[name-defined]  # noqa: F821
    return 7


class Proto:
    """What a class that protoc makes has, as far as it matters here."""

    FromString = staticmethod(len)


CALLABLES = [
    (json.loads, b"[1, 2]", [1, 2]),
    (int, b"42", 42),
    (Doubling(), b"21", 42),
    (Doubling().__call__, b"21", 42),
    (lambda value: value[1:], b"abc", b"bc"),
    (lambda *values: values, b"a", (b"a",)),
    (lambda _: None, b"a", None),
    (with_defaults, b"ff", 255),
    (functools.partial(with_defaults, base=2), b"101", 5),
    (bytes.hex, b"\xff", "ff"),
    (functools.partial(UUID, None), bytes(16), UUID(int=0)),
    (msgspec.msgpack.Decoder(Untagged).decode, msgspec.msgpack.encode(Untagged(7)), Untagged(7)),
    (Order.model_validate_json, b'{"id": 7}', Order(id=7)),
    (annotated_with_a_name_that_is_not_there, b"", 7),
    (StringDeserializer("utf_8"), "☕".encode(), "☕"),
    (IntegerDeserializer(), b"\0\0\0\x07", 7),
    (DoubleDeserializer(), bytes(8), 0.0),
]

NOT_DECODE = [
    (awaited, r"handle has decode=awaited, which is async: pass a plain function"),
    (many, r"handle has decode=many, which is async"),
    (AsyncDoubling(), r"handle has decode=AsyncDoubling, which is async"),
    (functools.partial(awaited), r"handle has decode=partial, which is async"),
    (functools.partial(AsyncDoubling()), r"handle has decode=partial, which is async"),
    (hands_over_a_coroutine, r"decode=hands_over_a_coroutine, which is async: .*deserializer without Async in its"),
    (hands_over_an_awaitable, r"decode=hands_over_an_awaitable, which is async"),
    (hides_a_coroutine, r"decode=awaited, which is async"),
    (Doubling, r"handle has decode=Doubling, a class where an object is meant: write decode=Doubling\(\.\.\.\)"),
    (IntegerDeserializer, r"decode=IntegerDeserializer, a class where an object is meant: write"),
    (Deserializer, r"decode=Deserializer, a class where an object is meant"),
    (str, r"decode=str, a type, which cannot decode bytes: remove decode= and annotate order: str"),
    (Untagged, r"decode=Untagged, a type, .*remove decode= and annotate order: Untagged"),
    (Order, r"decode=Order, a type, .*remove decode= and annotate order: Order"),
    (Point, r"decode=Point, a type, .*annotate order: Point"),
    (dict, r"decode=dict, a type, .*annotate order: dict"),
    (Proto, r"decode=Proto, a Protobuf message, .*write decode=Proto\.FromString, or pass a ProtobufDeserializer"),
    (7, r"handle has decode= of type int, which cannot be called: .*for example decode=json\.loads"),
    ("json", r"handle has decode= of type str, which cannot be called"),
    (DeserializerBuilder(), r"handle has decode= of type DeserializerBuilder, which cannot be called"),
    (two, r"decode=two, which cannot be called with one argument: it gets the value \(bytes\) alone, .*lambda value"),
    (by_name, r"decode=by_name, which cannot be called with one argument"),
    (lambda: None, r"decode=<lambda>, which cannot be called with one argument"),
    (WithoutContext(), r"decode=WithoutContext, a Deserializer that cannot be called with a value and its Serial.*ctx"),
]


class TestDecode:
    @pytest.mark.parametrize(("decode", "value", "expected"), CALLABLES, ids=short)
    @pytest.mark.parametrize("hint", [object, Untagged, list[int], int | None], ids=str)
    def test_any_callable_makes_of_the_value_what_it_likes(
        self, hint: object, decode: Callable[..., object], value: bytes, expected: object
    ) -> None:
        assert decoded(hint, value, decode) == expected
        assert decoding_of("handle", "order", hint, decode).optional is (hint == int | None)

    @pytest.mark.parametrize(("decode", "sentence"), NOT_DECODE, ids=short)
    def test_what_cannot_decode_is_refused_with_the_fix(self, decode: Any, sentence: str) -> None:
        with pytest.raises(InvalidHandler, match=sentence):
            decoding_of("handle", "order", Order, decode)

    def test_a_coroutine_is_refused_with_the_fix(self) -> None:
        """What a person has in hand who calls an Async deserializer's class and does not await it."""
        coroutine = awaited(b"")
        assert "handle has a coroutine (awaited) as decode=, which cannot be called" in refused(bytes, coroutine)
        coroutine.close()

    def test_a_refusal_does_not_show_what_the_object_holds(self) -> None:
        assert "secret" not in refused(bytes, {"basic.auth.user.info": "shop:secret"})

    def test_control_a_type_as_decode_makes_nonsense_of_bytes(self) -> None:
        make: Callable[..., Untagged] = Untagged
        assert isinstance(make(b'{"id": 7}').id, bytes)

    def test_a_plain_callable_gets_the_value_alone(self) -> None:
        given: list[object] = []
        decoding = decoding_of("handle", "order", object, given.append)
        assert not decoding.of_message
        assert decoding.call is not None
        assert decoding.call(b"v") is None, "a None that the callable makes of a value is handed over"
        assert given == [b"v"]

    @pytest.mark.parametrize("headers", [None, [("trace", b"1"), ("trace", None)]])
    def test_a_deserializer_gets_the_place_of_the_value(self, headers: list[tuple[str, bytes | None]] | None) -> None:
        deserializer = Contextual()
        decoding = decoding_of("handle", "order", dict | None, deserializer)
        assert (decoding.text, decoding.of_message, decoding.optional) == ("dict | None", True, True)
        assert decoding.call is not None
        for topic in ("orders", "returns"):
            assert decoding.call(FakeMessage(b"v", topic=topic, headers=headers)) is None
        assert [value for value, _ in deserializer.seen] == [b"v", b"v"]
        contexts = [context for _, context in deserializer.seen if context is not None]
        assert [(context.topic, context.field, context.headers) for context in contexts] == [
            ("orders", MessageField.VALUE, headers),
            ("returns", MessageField.VALUE, headers),
        ]

    @pytest.mark.parametrize(
        ("decode", "value", "sentence"),
        [
            (json.loads, b"{", "the value is not Order | None: Expecting property name"),
            (Order.model_validate_json, b"{}", "the value is not Order | None: id: Field required"),
            (IntegerDeserializer(), b"", "the value is not Order | None: unpack requires a buffer of 4 bytes"),
            (lambda value: {}[value], b"a", "the value is not Order | None: b'a'"),
            (lambda _: next(iter(())), b"a", "the value is not Order | None: StopIteration"),
        ],
    )
    def test_what_a_callable_raises_is_a_decode_error(
        self, decode: Callable[..., object], value: bytes, sentence: str
    ) -> None:
        with pytest.raises(DecodeError) as caught:
            decoded(Order | None, value, decode)
        assert str(caught.value).startswith(sentence)
        assert isinstance(caught.value.__cause__, Exception)
        assert not isinstance(caught.value.__cause__, DecodeError)

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
    def test_what_ends_a_process_is_no_decode_error(self, kind: type[BaseException]) -> None:
        def interrupted(value: bytes) -> object:
            raise kind

        with pytest.raises(kind):
            decoded(bytes, b"", interrupted)


class TestWords:
    @pytest.mark.parametrize(
        ("hint", "text"),
        [
            (bytes, "bytes"),
            (dict[str, int], "dict[str, int]"),
            (Placed | Cancelled | None, "Placed | Cancelled | None"),
            (Optional[Placed], "Placed | None"),  # noqa: UP045  (people write it)
            (Annotated[Placed | None, "x"], "Placed | None"),
            (Annotated[OrderPlaced | OrderCancelled, By(discriminator="kind")] | None,
             "OrderPlaced | OrderCancelled | None"),
            (Envelope[Item], "Envelope[Item]"),
            (Any, "Any"),
            (Literal["a"], "Literal['a']"),
        ],
    )  # fmt: skip
    def test_a_type_is_written_as_a_person_reads_it(self, hint: object, text: str) -> None:
        assert text_of(hint) == text
        assert decoding_of("handle", "order", hint, json.loads).text == text

    def test_a_local_class_is_written_without_the_place_where_it_was_defined(self) -> None:
        class Local: ...

        assert text_of(Local) == "Local"

    @pytest.mark.parametrize(
        ("hint", "rest", "optional"),
        [
            (bytes, bytes, False),
            (bytes | None, bytes, True),
            (Placed | Cancelled, Placed | Cancelled, False),
            (Placed | Cancelled | None, Union[Placed, Cancelled], True),  # noqa: UP007  (what it is made of)
            (type(None), type(None), False),
            (Annotated[bytes | None, "x", "y"], Annotated[bytes, "x", "y"], True),
            (Annotated[bytes, "x"] | None, Annotated[bytes, "x"], True),
            (Annotated[bytes, "x"], Annotated[bytes, "x"], False),
        ],
    )
    def test_none_is_taken_out_and_nothing_else(self, hint: object, rest: object, optional: bool) -> None:
        assert without_none(hint) == (rest, optional)

    def test_what_annotated_adds_can_be_left_out(self) -> None:
        assert bare(Annotated[bytes, "x"]) is bytes
        assert bare(bytes) is bytes
        assert is_union(bytes | str)
        assert not is_union(Annotated[bytes | str, "x"])

    @pytest.mark.parametrize(
        ("hint", "value", "words"),
        [
            (Order, b'{"id": 1, "items": [{"sku": "tea", "quantity": "two"}]}',
             "items.0.quantity: Input should be a valid integer, unable to parse string as an integer"),
            (Order, b'{"id": "x", "items": [{}]}',
             "id: Input should be a valid integer, unable to parse string as an integer (and 2 more)"),
            (Order, b"{", "Invalid JSON: EOF while parsing an object at line 1 column 1"),
            (Order | None, b"null", "Input should be an object"),
            (OrderPlaced | OrderCancelled, b'{"kind": "cancelled"}', "cancelled.id: Field required"),
            (OrderPlaced | OrderCancelled, b'{"kind": "lost"}',
             "Input tag 'lost' found using 'kind' does not match any of the expected tags: "
             "'placed', 'created', 'cancelled'"),
        ],
    )  # fmt: skip
    def test_pydantic_s_complaint_is_one_sentence(self, hint: object, value: bytes, words: str) -> None:
        with pytest.raises(pydantic.ValidationError) as caught:
            decoded(hint, value)
        assert explain_decode(caught.value) == words

    def test_a_validator_s_words_are_put_on_one_line(self) -> None:
        def picky(value: int) -> int:
            raise ValueError("no\n  such number")

        class Picky(pydantic.BaseModel):
            id: Annotated[int, pydantic.AfterValidator(picky)]

        with pytest.raises(pydantic.ValidationError) as caught:
            decoded(Picky, b'{"id": 1}')
        assert explain_decode(caught.value) == "id: Value error, no such number"

    def test_any_other_cause_has_its_own_words_or_its_name(self) -> None:
        assert explain_decode(ValueError("too long")) == "too long"
        assert explain_decode(ValueError()) == "ValueError"
        assert explain_decode(msgspec.ValidationError("Expected `int`")) == "Expected `int`"


def loaded_after(code: str) -> list[str]:
    """Which of the optional modules a process holds after it ran `code`."""
    names = ["pydantic", "pydantic_core", "confluent_kafka.schema_registry", "fastavro"]
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*(name for name in {names} if name in sys.modules))"],
        env={**os.environ, "PYTHONPATH": _ROOT},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.split()


_DECODE = """
import json, msgspec
from kconsume._handlers.decoding import decoding_of
from kconsume._handlers.json_decoder import explain_decode
from confluent_kafka.serialization import StringDeserializer
class Placed(msgspec.Struct):
    id: int
for hint in (bytes, str, dict, Placed, Placed | None):
    decoding_of("handle", "order", hint)
decoding_of("handle", "order", Placed, json.loads)
decoding_of("handle", "order", Placed, StringDeserializer())
explain_decode(ValueError())
"""


def test_nothing_that_the_person_did_not_import_is_imported_to_decode() -> None:
    assert loaded_after(_DECODE) == []


def test_control_what_the_person_imports_is_noticed() -> None:
    assert loaded_after(f"import pydantic\npydantic.BaseModel\n{_DECODE}") == ["pydantic", "pydantic_core"]
