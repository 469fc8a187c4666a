"""What stands in a topic, read from the broker: where records have transaction markers between them, no test can say
beforehand which offsets they will have."""

from __future__ import annotations

from typing import TypeAlias

from confluent_kafka import Consumer, TopicPartition

from tests.contract.test_output import everything
from tests.fix_kafka import unique

Place: TypeAlias = tuple[int, int]
"""A partition and an offset."""


def read_log(brokers: str, topic: str, partitions: int, each: int) -> dict[Place, bytes]:
    """The value of each record by its place, in the order of the log. Each partition has so many records, and at least
    one offset that is no record's."""
    log = {(m.partition() or 0, m.offset() or 0): m.value() or b"" for m in everything(brokers, topic)}
    for partition in range(partitions):
        offsets = offsets_in(log, partition)
        assert len(offsets) == each, f"partition {partition} has {len(offsets)} records, and {each} were written"
        assert offsets[-1] >= each, f"partition {partition} has no gaps: {each} records end at offset {offsets[-1]}"
    return log


def offsets_in(log: dict[Place, bytes], partition: int) -> list[int]:
    """Of the records of one partition, in the order of the log."""
    return [offset for number, offset in log if number == partition]


def ends_of(brokers: str, topic: str, partitions: int) -> list[int]:
    """Where the log of each partition ends, behind its last transaction marker."""
    reader = Consumer({"bootstrap.servers": brokers, "group.id": unique("reader"), "log_level": 0})
    try:
        places = [TopicPartition(topic, number) for number in range(partitions)]
        return [reader.get_watermark_offsets(place, timeout=20)[1] for place in places]
    finally:
        reader.close()
