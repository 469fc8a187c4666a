"""Error messages for records that could not be sent: the client's cause, and the fix. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from confluent_kafka import KafkaError

_NO_TOPIC = "topic {topic!r} does not exist on {brokers}: create it, or correct the name"
_LATE = (
    "a record to topic {topic!r} was not confirmed within {seconds}{reason}, and may have been written: check that the "
    "brokers at {brokers} run, and that as many replicas are in sync as the topic's min.insync.replicas requires"
)
_TOO_LARGE = (
    "a record to topic {topic!r} is too large for it ({cause}): send a reference to the data, or raise "
    "message.max.bytes in kafka={{...}} and max.message.bytes of the topic"
)
_FORBIDDEN = "a record to topic {topic!r} was refused ({cause}): give the principal Write on the topic"
NOT_IN_TIME = "was not confirmed before the app had to stop: its handler is called again and sends it again"
_SENTENCES: Mapping[int, str] = {
    KafkaError.UNKNOWN_TOPIC_OR_PART: _NO_TOPIC,
    KafkaError._UNKNOWN_TOPIC: _NO_TOPIC,
    KafkaError._UNKNOWN_PARTITION: "topic {topic!r} on {brokers} has no partition {partition}: correct the number",
    KafkaError._MSG_TIMED_OUT: _LATE,
    KafkaError._TIMED_OUT: _LATE,
    KafkaError.TOPIC_AUTHORIZATION_FAILED: _FORBIDDEN,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: _FORBIDDEN,
    KafkaError.MSG_SIZE_TOO_LARGE: _TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE: _TOO_LARGE,
    KafkaError.INVALID_RECORD: "a record to topic {topic!r} was refused ({cause}): a compacted topic needs a key",
    KafkaError._PURGE_QUEUE: f"a record to topic {{topic!r}} {NOT_IN_TIME}",
    KafkaError._PURGE_INFLIGHT: f"a record to topic {{topic!r}} {NOT_IN_TIME}",
    KafkaError._QUEUE_FULL: (
        "a record to topic {topic!r} was not sent, because the queue to {brokers} has been full for "
        "{seconds}{reason}: check that the brokers run, and that the record fits in queue.buffering.max.kbytes"
    ),
}


class SendError(NamedTuple):
    """Why a record was not written, as the client reported it."""

    error: KafkaError
    topic: str
    partition: int


def sentence(refusal: SendError, brokers: str, patience: float, reason: str) -> str:
    """Return the message for a record that was not written.

    Args:
        refusal: what the client reported.
        brokers: the address of the brokers.
        patience: seconds after which the client gives up a record.
        reason: the last connection error, in parentheses, or nothing.
    """
    error, topic, partition = refusal
    text = _SENTENCES.get(error.code(), "a record to topic {topic!r} was refused ({cause}): correct the record")
    return text.format(
        topic=topic,
        partition=partition,
        brokers=brokers,
        seconds=f"{patience:g} s",
        cause=f"{error.str()}, {error.name()}",
        reason=reason,
    )


def broken(error: KafkaError) -> str:
    """Return the message for a fatal error of the producer."""
    return (
        f"the producer failed ({error.str()}) and does not know which records were written: their handlers are "
        f"called again and send them again; if this error returns, check that the principal may write"
    )
