"""The bare loops on confluent-kafka that kconsume is measured against.

They commit nothing, use one thread and handle no rebalance, which saves them time. They must not be slower than what a
careful user would write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException, Message

from kconsume._config.client_settings import ClientValue, client_settings

# `Any`: a narrower type of `value()` would need a call or a check for each record in the loop.
Handler = Callable[..., None]
AsyncHandler = Callable[..., Awaitable[None]]
Decode = Callable[..., object]


def same_settings(bootstrap: str, group: str) -> dict[str, ClientValue]:
    """The client settings of `App.catch_up`. The loop also sets where it starts; kconsume reads that from the store."""
    return {**client_settings(bootstrap, group, {}), "auto.offset.reset": "earliest"}


def own_defaults(bootstrap: str, group: str) -> dict[str, ClientValue]:
    return {"bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest"}


def consume(settings: Mapping[str, ClientValue], topic: str, handler: Handler, total: int) -> int:
    """Call the handler with each value until `total` records were seen. Returns how many there were."""
    consumer = _subscribed(settings, topic)
    seen = 0
    while seen < total:
        messages = consumer.consume(1000, 0.1)
        seen += len(messages)
        for message in messages:
            if error := message.error():
                seen -= _not_a_record(error)
                continue
            handler(message.value())
    consumer.close()
    return seen


def consume_decoded(
    settings: Mapping[str, ClientValue],
    topic: str,
    decode: Decode,
    handler: Handler,
    total: int,
) -> int:
    """The same as `consume`, with a decoder. A shared loop would need one more call for each record."""
    consumer = _subscribed(settings, topic)
    seen = 0
    while seen < total:
        messages = consumer.consume(1000, 0.1)
        seen += len(messages)
        for message in messages:
            if error := message.error():
                seen -= _not_a_record(error)
                continue
            handler(decode(message.value()))
    consumer.close()
    return seen


def consume_async(settings: Mapping[str, ClientValue], topic: str, handler: AsyncHandler, total: int) -> int:
    """The same as `consume`, in an event loop. Polling blocks the loop, which has no other task."""

    async def main() -> int:
        consumer = _subscribed(settings, topic)
        seen = 0
        while seen < total:
            messages = consumer.consume(1000, 0.1)
            seen += len(messages)
            for message in messages:
                if error := message.error():
                    seen -= _not_a_record(error)
                    continue
                await handler(message.value())
        consumer.close()
        return seen

    return asyncio.run(main())


def consume_values(settings: Mapping[str, ClientValue], topic: str, handler: Handler, total: int) -> int:
    """Call the handler with the list of values that each `consume(1000, 0.1)` returned."""
    consumer = _subscribed(settings, topic)
    seen = 0
    while seen < total:
        messages = consumer.consume(1000, 0.1)
        values = [message.value() for message in messages if not message.error()]
        if len(values) < len(messages):
            _must_be_ends(messages)
        seen += len(values)
        if values:
            handler(values)
    consumer.close()
    return seen


def consume_messages(settings: Mapping[str, ClientValue], topic: str, handler: Handler, total: int) -> int:
    """Call the handler with the list of messages of each `consume(1000, 0.1)`. Only their errors are read."""
    consumer = _subscribed(settings, topic)
    seen = 0
    while seen < total:
        messages = consumer.consume(1000, 0.1)
        records = [message for message in messages if not message.error()]
        if len(records) < len(messages):
            _must_be_ends(messages)
        seen += len(records)
        if records:
            handler(records)
    consumer.close()
    return seen


def _subscribed(settings: Mapping[str, ClientValue], topic: str) -> Consumer:
    consumer = Consumer(dict(settings))
    consumer.subscribe([topic])
    return consumer


def _must_be_ends(messages: Sequence[Message]) -> None:
    for message in messages:
        if error := message.error():
            _not_a_record(error)


def _not_a_record(error: KafkaError) -> int:
    """Return 1 for the end of a partition, which is an event and not a record. Raise for any other error."""
    if error.code() != KafkaError._PARTITION_EOF:
        raise KafkaException(error)
    return 1
