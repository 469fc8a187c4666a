"""What a handler sends becomes bytes while it runs; what can never be sent is its error, and nothing has left."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconsume._kafka.outgoing import Outgoing, OutgoingHeaders, Sender, encode, encoded, returned
from kconsume.errors import SendFailed

MOST = 1000


class Placed(msgspec.Struct, tag=True):
    id: int


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Model(pydantic.BaseModel):
    order_id: int = pydantic.Field(alias="orderId")
    price: Decimal = Decimal("1.50")


class Untellable(pydantic.BaseModel):
    id: int = 1

    @pydantic.field_serializer("id")
    def tell(self, value: int) -> int:
        raise ValueError("it is a secret")


class Color(enum.StrEnum):
    RED = "red"


class TestEncoding:
    @pytest.mark.parametrize(
        ("value", "sent"),
        [
            (None, None),
            (b"", b""),
            (b"\x00\xff", b"\x00\xff"),
            (bytearray(b"ab"), b"ab"),
            (memoryview(b"ab"), b"ab"),
            ("", b""),
            ("tea ☕", "tea ☕".encode()),
            (Color.RED, b"red"),
            ({"id": 1}, b'{"id":1}'),
            ([1, "a", None], b'[1,"a",null]'),
            ((1, 2), b"[1,2]"),
            (7, b"7"),
            (True, b"true"),
            (Placed(1), b'{"type":"Placed","id":1}'),
            (Point(1, 2), b'{"x":1,"y":2}'),
            ({"at": datetime(2026, 1, 2, tzinfo=UTC)}, b'{"at":"2026-01-02T00:00:00Z"}'),
            (Model(orderId=1), b'{"orderId":1,"price":"1.50"}'),
            ({"order": Model(orderId=1)}, b'{"order":{"orderId":1,"price":"1.50"}}'),
        ],
    )
    def test_a_value_is_sent_as_its_bytes_its_text_or_json(self, value: object, sent: bytes | None) -> None:
        assert encode(value) == sent

    @given(st.recursive(st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(), st.lists, max_leaves=20))
    def test_json_can_be_read_again(self, value: object) -> None:
        assert msgspec.json.decode(encode({"value": value}) or b"") == {"value": value}

    def test_a_pydantic_model_is_sent_as_it_would_be_read(self) -> None:
        assert Model.model_validate_json(encode(Model(orderId=7)) or b"") == Model(orderId=7)

    @pytest.mark.parametrize("value", [object(), {"a": object()}, (n for n in range(3)), SimpleNamespace(a=1)])
    def test_a_value_that_nobody_can_encode_is_refused_with_its_type_and_the_fix(self, value: object) -> None:
        with pytest.raises(SendFailed, match=f"of type {type(value).__name__} cannot be encoded .*send bytes, str, or"):
            encode(value)

    def test_text_that_is_no_text_is_refused(self) -> None:
        with pytest.raises(SendFailed, match="surrogates not allowed"):
            encode("\ud800")

    def test_a_value_that_holds_itself_is_refused(self) -> None:
        circle: list[object] = []
        circle.append(circle)
        with pytest.raises(SendFailed, match="of type list cannot be encoded"):
            encode(circle)

    def test_what_a_models_own_serializer_raises_is_the_cause(self) -> None:
        with pytest.raises(SendFailed, match=r"of type Untellable cannot be encoded .*it is a secret") as refused:
            encode(Untellable())
        assert refused.value.__cause__ is not None

    def test_an_outgoing_in_an_outgoing_is_refused_and_not_sent_as_json(self) -> None:
        with pytest.raises(SendFailed, match="is an Outgoing"):
            encode(Outgoing(b"a"))


class TestARecord:
    def test_it_leaves_as_bytes_with_its_topic_set(self) -> None:
        ready = encoded(Outgoing({"id": 1}, key="k", headers={"a": "b"}), "orders", MOST)
        assert ready == Outgoing(b'{"id":1}', b"k", (("a", b"b"),), "orders")

    def test_its_own_topic_is_stronger_than_the_handlers(self) -> None:
        assert encoded(Outgoing(b"", topic="mine"), "orders", MOST).topic == "mine"

    def test_encoding_it_again_changes_nothing(self) -> None:
        once = encoded(Outgoing("v", "k", [("a", "1"), ("a", b"2")]), "orders", MOST)
        assert encoded(once, None, MOST) == once

    def test_a_tombstone_stays_one(self) -> None:
        assert encoded(Outgoing(None, key=b"k"), "orders", MOST) == Outgoing(None, b"k", (), "orders")

    def test_an_empty_key_is_a_key(self) -> None:
        assert encoded(Outgoing(b"", key=""), "orders", MOST).key == b""

    @pytest.mark.parametrize("headers", [{"a": b"1", "b": "2"}, [("a", b"1"), ("b", "2")], (("a", "1"), ["b", b"2"])])
    def test_headers_are_pairs_in_their_order(self, headers: OutgoingHeaders) -> None:
        assert encoded(Outgoing(b"", headers=headers), "orders", MOST).headers == (("a", b"1"), ("b", b"2"))

    def test_a_timestamp_is_kept_and_one_that_is_no_moment_is_refused(self) -> None:
        moment = datetime(2026, 1, 2, tzinfo=UTC)
        assert encoded(Outgoing(b"", timestamp=moment), "orders", MOST).timestamp == moment
        for wrong in (datetime(2026, 1, 2), 1_700_000_000_000):
            with pytest.raises(SendFailed, match=r"give a datetime with a time zone, as in datetime\.now\(UTC\)"):
                encoded(Outgoing(b"", timestamp=wrong), "orders", MOST)  # type: ignore[arg-type]

    def test_one_header_may_come_twice(self) -> None:
        sent = encoded(Outgoing(b"", headers=[("a", "1"), ("a", "2")]), "orders", MOST)
        assert sent.headers == (("a", b"1"), ("a", b"2"))

    def test_without_a_topic_it_is_refused(self) -> None:
        with pytest.raises(SendFailed, match="has no topic: give it one"):
            encoded(Outgoing(b""), None, MOST)

    @pytest.mark.parametrize("topic", ["", ".", "..", "a b", "a/b", "a\n", "é", "a" * 250, b"orders", 7, ["orders"]])
    def test_a_topic_name_that_kafka_refuses_is_refused(self, topic: str) -> None:
        with pytest.raises(SendFailed, match="is no topic name: use 1 to 249 of"):
            encoded(Outgoing(b"", topic=topic), None, MOST)

    @pytest.mark.parametrize("topic", ["a", "a" * 249, "a.b_c-D0", "..."])
    def test_a_topic_name_that_kafka_takes_is_taken(self, topic: str) -> None:
        assert encoded(Outgoing(b"", topic=topic), None, MOST).topic == topic

    @pytest.mark.parametrize("key", [7, ["k"], object()])
    def test_a_key_that_is_no_text_is_refused_with_the_fix(self, key: str) -> None:
        with pytest.raises(SendFailed, match=r"to topic 'orders' cannot be sent: its key is a \w+: .*key=str"):
            encoded(Outgoing(b"", key=key), "orders", MOST)

    @pytest.mark.parametrize(
        ("headers", "told"),
        [
            ("trace", "hold a str"),
            (7, "hold a int"),
            ([("a",)], "hold a tuple"),
            (["ab"], "hold a str"),
            ({1: b""}, "hold a tuple"),
            ({"a": 1}, "header 'a' is a int"),
            ({"a": None}, "header 'a' is a NoneType"),
            ({"a": "\ud800"}, "header 'a' is no text"),
            ({"\ud800": "a"}, "a header's name is no text"),
        ],
    )
    def test_headers_that_are_none_are_refused(self, headers: OutgoingHeaders, told: str) -> None:
        with pytest.raises(SendFailed, match=f"to topic 'orders' cannot be sent: .*{told}"):
            encoded(Outgoing(b"", headers=headers), "orders", MOST)

    @pytest.mark.parametrize(
        "outgoing",
        [
            Outgoing(b"x" * (MOST + 1)),
            Outgoing(b"", key=b"x" * (MOST + 1)),
            Outgoing(b"", headers={"a": b"x" * MOST}),
            Outgoing(b"x" * (MOST // 2), key=b"x" * (MOST // 2), headers={"a": b""}),
            Outgoing("é" * MOST),
        ],
    )
    def test_more_bytes_than_are_allowed_are_refused_with_both_numbers(self, outgoing: Outgoing) -> None:
        with pytest.raises(SendFailed, match=r"to topic 'orders' has [\d,]+ bytes, and 1,000 are allowed: .*max.mess"):
            encoded(outgoing, "orders", MOST)

    def test_as_many_bytes_as_are_allowed_are_taken(self) -> None:
        outgoing = Outgoing(b"x" * (MOST - 4), key=b"k", headers={"a": b"bc"})
        assert encoded(outgoing, "orders", MOST).value == outgoing.value


class TestWhatAHandlerReturns:
    @pytest.mark.parametrize(
        ("result", "values"),
        [
            (None, []),
            ([], []),
            (b"a", [b"a"]),
            ({"a": 1}, [b'{"a":1}']),
            ([b"a", "b", {"c": 1}], [b"a", b"b", b'{"c":1}']),
            ([b"a", None, b"b"], [b"a", b"b"]),
            (Outgoing(None, key=b"k"), [None]),
            (Outgoing([1, 2]), [b"[1,2]"]),
            ((1, 2), [b"[1,2]"]),
            ("", [b""]),
            (0, [b"0"]),
        ],
    )
    def test_none_is_nothing_a_list_is_each_and_all_else_is_one(
        self, result: object, values: Sequence[bytes | None]
    ) -> None:
        sent = returned(result, "orders", MOST)
        assert [each.value for each in sent] == values
        assert {each.topic for each in sent} <= {"orders"}

    def test_each_may_have_its_own_topic_and_key(self) -> None:
        sent = returned([Outgoing("a", key="k", topic="mine"), "b"], "orders", MOST)
        assert sent == [Outgoing(b"a", b"k", (), "mine"), Outgoing(b"b", None, (), "orders")]

    def test_one_that_cannot_be_sent_refuses_them_all(self) -> None:
        with pytest.raises(SendFailed, match="to topic 'orders' cannot be sent"):
            returned([b"a", object()], "orders", MOST)


class TestSender:
    def test_it_keeps_what_is_sent_in_order_and_sends_nothing(self) -> None:
        buffer: list[Outgoing] = []
        sender = Sender(buffer, MOST)
        sender.send("orders", {"id": 1}, key="k", headers={"a": "b"})
        sender.send("orders", None, "k")
        assert buffer == [
            Outgoing(b'{"id":1}', b"k", (("a", b"b"),), "orders"),
            Outgoing(None, b"k", (), "orders"),
        ]

    def test_what_is_sent_is_what_the_value_was_then(self) -> None:
        buffer: list[Outgoing] = []
        order = {"id": 1}
        Sender(buffer, MOST).send("orders", order)
        order["id"] = 2
        assert buffer[0].value == b'{"id":1}'

    @pytest.mark.parametrize(("topic", "value"), [("no topic", b""), ("orders", object()), ("orders", b"x" * 1001)])
    def test_what_can_never_be_sent_raises_at_once_and_is_not_kept(self, topic: str, value: object) -> None:
        buffer: list[Outgoing] = []
        with pytest.raises(SendFailed):
            Sender(buffer, MOST).send(topic, value)
        assert buffer == []

    def test_after_the_handler_has_returned_it_refuses_instead_of_losing(self) -> None:
        buffer: list[Outgoing] = []
        sender = Sender(buffer, MOST)
        sender.close()
        with pytest.raises(SendFailed, match="'orders' was sent after the handler had returned"):
            sender.send("orders", b"late")
        assert buffer == []
