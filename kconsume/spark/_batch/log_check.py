"""Checks that the records of a range still exist: the topic has the same id, and its log begins before the range.

Spark alone does not guarantee this. A handler that catches every exception may swallow Spark's error about lost
records. If a topic was deleted, recreated and has grown past the offset, Spark raises no error at all. The cluster is
asked after the handler returned and before the offsets move. A log loses records only at its beginning, so if the log
still begins before the range, all records of the range existed while the handler ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kconsume._kafka.cluster import Cluster
from kconsume.backends.base import Positions
from kconsume.errors import OffsetOutOfRange, TopicRecreated
from kconsume.records import Partition
from kconsume.spark._batch.ranges import OffsetRange


def check_records_exist(cluster: Cluster, ranges: Sequence[OffsetRange], positions: Positions, group: str) -> None:
    """Raises `TopicRecreated` or `OffsetOutOfRange` if records of these ranges are gone."""
    start_records_check(cluster, ranges, positions, group)()


def start_records_check(
    cluster: Cluster, ranges: Sequence[OffsetRange], positions: Positions, group: str
) -> Callable[[], None]:
    """Send the requests of `check_records_exist`. The returned function waits for the answers, and raises if needed."""
    begins_of = cluster.ask_edges([each.partition for each in ranges], "earliest")
    ids_of = cluster.ask_topic_ids({each.partition.topic for each in ranges})
    return lambda: _compare(ranges, positions, group, begins_of, ids_of)


def _compare(
    ranges: Sequence[OffsetRange],
    positions: Positions,
    group: str,
    begins_of: Callable[[], Mapping[Partition, int]],
    ids_of: Callable[[], Mapping[str, str | None]],
) -> None:
    ids = ids_of()
    for each in ranges:
        known, now = positions[each.partition].topic_id, ids[each.partition.topic]
        if known is not None and now is not None and known != now:
            raise TopicRecreated(
                f"topic {each.partition.topic!r} had id {known} and now has {now}: it was deleted and made again while "
                f"it was read. Nothing was skipped. Choose: store.delete({group!r}) to begin where start= says, or "
                f"consume under a new group"
            )
    begins = begins_of()
    for each in ranges:
        if begins[each.partition] > each.first:
            raise records_gone([f"{each} was to be read, and the log begins at {begins[each.partition]}"], group)


def records_gone(facts: Iterable[str], group: str) -> OffsetOutOfRange:
    return OffsetOutOfRange(
        f"records were deleted before they were handled: {'; '.join(facts)}. Retention deleted them, or the topic was "
        f"made again. Nothing was skipped. To skip these records, call store.reset({group!r}, {{partition: offset}}); "
        f"to keep records longer, set a longer retention"
    )
