"""Reads the records of a failure from Kafka, and writes them as dead letters. Decides nothing.

A failure is a range of offsets: one record, or all records of a batch or of a script that stopped half-way. The range
may have gaps (compaction, transaction markers), also at its beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kconsume._config.client_settings import ClientValue
from kconsume._kafka.outgoing import Outgoing, encoded
from kconsume._kafka.producer import Producer, producer_settings
from kconsume._kafka.topic_reader import RecordPlace, TopicReader
from kconsume._runtime.output.publisher import outgoing_of
from kconsume._runtime.plan import ConsumerPlan
from kconsume.cli.app_parts import record_scope
from kconsume.errors import ConfigurationError, Undecided
from kconsume.failures.letter_headers import Letter
from kconsume.records import Partition, Record, record_of

if TYPE_CHECKING:
    from kconsume.backends.redis.rows import FailedRecord

_PATIENCE = 10.0


def records_of(plan: ConsumerPlan, failed: FailedRecord) -> list[Record]:
    """The records of the range that Kafka still has, in order."""
    scope = record_scope(plan, failed.partition.topic)
    messages = TopicReader(plan.cluster, plan.settings).between(failed.partition, failed.offset, failed.end)
    return [record_of(message, scope) for message in messages]


def dead_letter(plan: ConsumerPlan, kafka: Mapping[str, ClientValue], failed: FailedRecord, topic: str) -> list[str]:
    """Write the records to a topic. Returns their places when the broker has confirmed each.

    Args:
        topic: an existing topic; a misspelt name is an error, not a new topic.
    """
    plan.cluster.topics([topic])
    records = records_of(plan, failed)
    if not records:
        raise ConfigurationError(
            f"Kafka has no record of {failed.partition} from {failed.offset} up to {failed.end} any more, so there is "
            f"nothing to write: skip it with kconsume failed skip {failed.partition} --yes"
        )
    brokers = str(plan.settings["bootstrap.servers"])
    producer = Producer(producer_settings(brokers, {**kafka, "message.timeout.ms": _PATIENCE * 1000}), "failed")
    try:
        return [
            str(RecordPlace(*producer.write(_letter(plan, failed, record, topic, producer)).result()))
            for record in records
        ]
    finally:
        producer.close(_PATIENCE)


def _letter(plan: ConsumerPlan, failed: FailedRecord, record: Record, topic: str, producer: Producer) -> Outgoing:
    exception = f"{Undecided.__module__}.{Undecided.__qualname__}"
    letter = Letter(
        Partition(record.topic, record.partition), record.offset, plan.group, record.id, 1,
        exception, failed.error or "", str(failed),
        record.key, record.value, record.timestamp, record.headers,
    )  # fmt: skip
    return encoded(outgoing_of(letter), topic, producer.max_message_bytes)
