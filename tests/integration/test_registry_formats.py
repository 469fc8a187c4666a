"""confluent-kafka's own Avro, Protobuf and JSON-Schema deserializers as `decode=`, against its registry in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest
from confluent_kafka.schema_registry import (
    AsyncSchemaRegistryClient,
    SchemaRegistryClient,
    header_schema_id_serializer,
)
from confluent_kafka.schema_registry.avro import AsyncAvroDeserializer, AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import AsyncJSONDeserializer, JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import (
    AsyncProtobufDeserializer,
    ProtobufDeserializer,
    ProtobufSerializer,
)
from confluent_kafka.serialization import Deserializer, MessageField, SerializationContext, Serializer
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]

from kconsume import DecodeError
from kconsume._handlers.decoding import Decoding, decoding_of
from kconsume.errors import InvalidHandler
from tests.unit.fakes import FakeMessage

ORDER = {"id": 7, "sku": "tea ☕"}

AVRO = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "id", "type": "long"}, {"name": "sku", "type": "string"}],
    }
)

JSON_SCHEMA = json.dumps(
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Order",
        "type": "object",
        "properties": {"id": {"type": "integer"}, "sku": {"type": "string"}},
        "required": ["id", "sku"],
    }
)

_CURRENT: dict[str, object] = {"use.deprecated.format": False}


def protobuf_order() -> Any:
    """The class that protoc makes of `message Order { int64 id = 1; string sku = 2; }`."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="shop/order.proto", package="shop", syntax="proto3")
    message = file.message_type.add(name="Order")
    message.field.add(name="id", number=1, type=field.TYPE_INT64, label=field.LABEL_OPTIONAL)
    message.field.add(name="sku", number=2, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


Order = protobuf_order()


class Format(NamedTuple):
    """One of the registry's formats: what is written, how, and how it is read again."""

    order: object
    serializer: Callable[[SchemaRegistryClient, dict[str, object]], Serializer]
    deserializer: Callable[[SchemaRegistryClient], Deserializer]


FORMATS = {
    "avro": Format(
        ORDER,
        lambda registry, conf: AvroSerializer(registry, AVRO, conf=conf),
        lambda registry: AvroDeserializer(registry),
    ),
    "json": Format(
        ORDER,
        lambda registry, conf: JSONSerializer(JSON_SCHEMA, registry, conf=conf),
        lambda registry: JSONDeserializer(JSON_SCHEMA, schema_registry_client=registry),
    ),
    "protobuf": Format(
        Order(**ORDER),
        lambda registry, conf: ProtobufSerializer(Order, registry, conf=conf | _CURRENT),
        lambda registry: ProtobufDeserializer(Order, _CURRENT, registry),
    ),
}


@pytest.fixture
def registry() -> SchemaRegistryClient:
    return SchemaRegistryClient.new_client({"url": "mock://shop"})


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


def produced(form: Format, registry: SchemaRegistryClient, **conf: object) -> FakeMessage:
    """The message that a producer with this format's serializer leaves in the topic."""
    headers: list[tuple[str, bytes | None]] = [("trace", b"1")]
    context = SerializationContext("orders", MessageField.VALUE, headers)  # type: ignore[arg-type]
    options = {name.replace("_", "."): value for name, value in conf.items()}
    return FakeMessage(form.serializer(registry, options)(form.order, context), headers=headers)


def decoding(form: Format, registry: SchemaRegistryClient) -> Decoding:
    return decoding_of("handle", "order", dict | None, form.deserializer(registry))


def decoded(by: Decoding, message: FakeMessage) -> object:
    assert by.of_message
    assert by.call is not None
    return by.call(message)


class TestRegistryFormats:
    def test_what_the_serializer_wrote_is_what_the_handler_gets(
        self, form: Format, registry: SchemaRegistryClient
    ) -> None:
        message = produced(form, registry)
        value = message.value()
        assert value is not None
        assert value[0] == 0, "the registry's frame comes first"
        by = decoding(form, registry)
        assert decoded(by, message) == form.order
        assert (by.text, by.optional) == ("dict | None", True)

    def test_a_schema_that_is_named_in_the_headers_is_found(self, form: Format, registry: SchemaRegistryClient) -> None:
        message = produced(form, registry, schema_id_serializer=header_schema_id_serializer)
        assert [name for name, _ in message.headers() or ()] == ["trace", "__value_schema_id"]
        assert decoded(decoding(form, registry), message) == form.order

    def test_control_without_its_headers_the_schema_is_not_found(
        self, form: Format, registry: SchemaRegistryClient
    ) -> None:
        message = produced(form, registry, schema_id_serializer=header_schema_id_serializer)
        with pytest.raises(DecodeError):
            decoded(decoding(form, registry), FakeMessage(message.value()))

    def test_the_deserializer_is_told_the_topic_the_field_and_the_headers(self, registry: SchemaRegistryClient) -> None:
        seen: list[SerializationContext] = []

        def keep(order: dict[str, object], context: SerializationContext) -> object:
            seen.append(context)
            return order["id"]

        message = produced(FORMATS["avro"], registry)
        by = decoding_of("handle", "order", int, AvroDeserializer(registry, AVRO, from_dict=keep))
        assert decoded(by, message) == 7
        assert [(context.topic, context.field, context.headers) for context in seen] == [
            ("orders", MessageField.VALUE, [("trace", b"1")])
        ]

    @pytest.mark.parametrize("value", [b"", b'{"id": 7, "sku": "tea"}'], ids=["empty", "without the frame"])
    def test_what_no_serializer_wrote_is_a_decode_error(
        self, form: Format, registry: SchemaRegistryClient, value: bytes
    ) -> None:
        with pytest.raises(DecodeError, match=r"the value is not dict \| None: \w+") as caught:
            decoded(decoding(form, registry), FakeMessage(value))
        assert isinstance(caught.value.__cause__, Exception)

    def test_what_was_cut_off_is_a_decode_error(self, form: Format, registry: SchemaRegistryClient) -> None:
        value = produced(form, registry).value()
        assert value is not None
        with pytest.raises(DecodeError, match=r"the value is not dict \| None: \w+"):
            decoded(decoding(form, registry), FakeMessage(value[:-2]))

    @pytest.mark.parametrize("asynchronous", ["avro", "json", "protobuf"])
    def test_the_async_twins_are_refused_with_the_fix(self, asynchronous: str) -> None:
        made: dict[str, Callable[[AsyncSchemaRegistryClient], Awaitable[object]]] = {
            "avro": lambda registry: AsyncAvroDeserializer(registry),
            "json": lambda registry: AsyncJSONDeserializer(JSON_SCHEMA, schema_registry_client=registry),
            "protobuf": lambda registry: AsyncProtobufDeserializer(Order, _CURRENT, registry),
        }

        async def make() -> Any:
            return await made[asynchronous](AsyncSchemaRegistryClient.new_client({"url": "mock://shop"}))

        deserializer = asyncio.run(make())
        with pytest.raises(InvalidHandler, match=r"which is async: .*a deserializer without Async in its name"):
            decoding_of("handle", "order", dict, deserializer)

    @pytest.mark.parametrize("kind", [AvroDeserializer, JSONDeserializer, ProtobufDeserializer, AsyncAvroDeserializer])
    def test_a_class_is_refused_with_the_fix(self, kind: type) -> None:
        name = kind.__name__
        with pytest.raises(InvalidHandler, match=rf"decode={name}, a class where an object is meant: write decode="):
            decoding_of("handle", "order", dict, kind)


class TestPlainProtobuf:
    def test_a_message_without_a_registry_is_read_by_its_own_function(self) -> None:
        by = decoding_of("handle", "order", Order, Order.FromString)
        assert (by.text, by.of_message) == ("Order", False)
        assert by.call is not None
        order = Order(**ORDER)
        assert by.call(order.SerializeToString()) == order
        with pytest.raises(DecodeError, match="the value is not Order: Error parsing message"):
            by.call(b"\xff")

    def test_the_class_alone_is_refused_with_the_fix(self) -> None:
        with pytest.raises(InvalidHandler, match=r"decode=Order, a Protobuf message, .* write decode=Order.FromString"):
            decoding_of("handle", "order", Order, Order)
