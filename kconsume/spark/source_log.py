"""Whether the records of a range are still those that were planned: the topic is the same, and its log begins before.

A handler that catches everything may swallow Spark's word that records are gone, and of a topic that was deleted, made
again and has grown past the offset Spark says nothing at all. So the cluster is asked after the handler, before the
offsets pass: a log only ever loses its beginning, so one that begins early enough now had the records all the while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kconsume.backends.abc import Positions
from kconsume.cluster import Cluster
from kconsume.errors import OffsetOutOfRange, TopicRecreated
from kconsume.records import Partition
from kconsume.spark.ranges import OffsetRange


def must_be_whole(cluster: Cluster, ranges: Sequence[OffsetRange], positions: Positions, group: str) -> None:
    ask_whether_whole(cluster, ranges, positions, group)()


def ask_whether_whole(
    cluster: Cluster, ranges: Sequence[OffsetRange], positions: Positions, group: str
) -> Callable[[], None]:
    """Asked now; who calls what this returns waits for the answer, and an answer that is not yes is raised there."""
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
                f"it was read. Nothing was passed. Choose: store.delete({group!r}) to begin where start= says, or "
                f"consume under a new group"
            )
    begins = begins_of()
    for each in ranges:
        if begins[each.partition] > each.first:
            raise out_of_range([f"{each} was to be read, and the log begins at {begins[each.partition]}"], group)


def out_of_range(facts: Iterable[str], group: str) -> OffsetOutOfRange:
    return OffsetOutOfRange(
        f"records are gone that were not handled: {'; '.join(facts)}. Retention has passed them, or the topic was made "
        f"again. Nothing was passed. Choose: store.reset({group!r}, {{partition: offset}}) to skip them, or a longer "
        f"retention"
    )
