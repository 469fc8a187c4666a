"""The records of a failure, as Kafka has them, and as dead letters.

A failure is a range of offsets: one record, or those of a batch or of a script that broke off. The range may have gaps
(compaction, marks of transactions), also where it begins. Decides nothing about them; that is `failed.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from confluent_kafka import Consumer, KafkaError

from kconsume.cli.rehearse import Place, _reading, _scope
from kconsume.errors import BrokerUnavailable, ConfigurationError, Undecided
from kconsume.failures.letters import Letter
from kconsume.outlet import Outlet, producer_settings
from kconsume.output import Outgoing, encoded
from kconsume.records import Message, Partition, Record, record_of
from kconsume.runtime.budget import Deadline
from kconsume.runtime.mail import outgoing_of
from kconsume.runtime.plans import ConsumerPlan
from kconsume.settings import ClientValue

if TYPE_CHECKING:
    from kconsume.backends.redis_rows import FailedRecord

_PATIENCE = 10.0


def records_of(plan: ConsumerPlan, failed: FailedRecord) -> list[Record]:
    """All that Kafka holds of the range, in order."""
    deadline, scope = Deadline(_PATIENCE), _scope(plan, failed.partition.topic)
    with _reading(plan, Place(failed.partition, failed.offset), deadline) as consumer:
        return [record_of(message, scope) for message in _up_to_its_end(consumer, failed, deadline)]


def _up_to_its_end(consumer: Consumer, failed: FailedRecord, deadline: Deadline) -> Iterator[Message]:
    trouble = "no answer"
    while not deadline.passed:
        message = consumer.poll(min(0.2, deadline.left))
        if message is None:
            continue
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                return  # what is left of the range is a gap
            trouble = error.str()
            continue
        offset = cast(int, message.offset())
        if offset < failed.end:
            yield cast(Message, message)  # the client's stubs allow for messages that are errors
        if offset + 1 >= failed.end:
            return
    raise BrokerUnavailable(
        f"the records of {failed.partition} from {failed.offset} up to {failed.end} did not come within "
        f"{_PATIENCE:g} s ({trouble}): is the broker well?"
    )


def dead_letter(plan: ConsumerPlan, kafka: Mapping[str, ClientValue], failed: FailedRecord, topic: str) -> list[str]:
    """Write the records to that topic, and say where they are once the broker has confirmed each."""
    plan.cluster.topics([topic])  # a misspelt name is an error, not a new topic
    records = records_of(plan, failed)
    if not records:
        raise ConfigurationError(
            f"Kafka has no record of {failed.partition} from {failed.offset} up to {failed.end} any more, so there is "
            f"nothing to write: kconsume failed skip {failed.partition} --yes"
        )
    brokers = str(plan.settings["bootstrap.servers"])
    outlet = Outlet(producer_settings(brokers, {**kafka, "message.timeout.ms": _PATIENCE * 1000}), "failed")
    try:
        return [str(Place(*outlet.write(_letter(plan, failed, record, topic, outlet)).result())) for record in records]
    finally:
        outlet.close(_PATIENCE)


def _letter(plan: ConsumerPlan, failed: FailedRecord, record: Record, topic: str, outlet: Outlet) -> Outgoing:
    exception = f"{Undecided.__module__}.{Undecided.__qualname__}"
    letter = Letter(
        Partition(record.topic, record.partition), record.offset, plan.group, record.id, 1,
        exception, failed.error or "", str(failed),
        record.key, record.value, record.timestamp, record.headers,
    )  # fmt: skip
    return encoded(outgoing_of(letter), topic, outlet.most)
