"""Why one partition is held while all others continue.

A held partition keeps its owner. The partition is not read, and its offset does not move. The hold is in memory only,
so each new owner tries once. `Assignment` holds and releases partitions; this module has the values and error texts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from kconsume.backends.base import Position, Refused
from kconsume.backends.claim import granted
from kconsume.errors import (
    HandlerFailed,
    KconsumeError,
    NotAuthorized,
    OffsetOutOfRange,
    RowLost,
    StartRequired,
    TopicNotFound,
    TopicRecreated,
    Undecided,
    UnreadableBatch,
)
from kconsume.records import Partition

CODES: dict[type[KconsumeError], str] = {
    TopicNotFound: "topic_missing",
    TopicRecreated: "topic_recreated",
    NotAuthorized: "authorization_lost",
    RowLost: "store_mismatch",
    StartRequired: "start_required",
    OffsetOutOfRange: "offset_out_of_range",
    UnreadableBatch: "unreadable_batch",
    HandlerFailed: "held",
    Undecided: "held",
}
"""The errors that hold one partition, and the public code of each. The first matching class counts. Earlier classes
outrank later ones."""

NOT_SKIPPED = "Nothing was skipped."
"""The sentence of an error between what is wrong and what to do."""

_READS_AGAIN = (UnreadableBatch, NotAuthorized)
"""Errors that may be gone when the partition is read again at the same offset."""


def positions_in(answers: Mapping[Partition, Position | Refused | PartitionTrouble]) -> dict[Partition, Position]:
    """The positions of all partitions of a claim. Raises if one partition has trouble or was refused."""
    for found in answers.values():
        if isinstance(found, PartitionTrouble):
            raise found.error
    return granted({p: found for p, found in answers.items() if not isinstance(found, PartitionTrouble)})


def code_of(error: KconsumeError) -> str:
    """The public code of an error that holds a partition."""
    return next(code for kind, code in CODES.items() if isinstance(error, kind))


def recreated(group: str, partition: Partition, position: Position, topic_id: str) -> TopicRecreated:
    """The error for an offset of a topic that was deleted and made again.

    Args:
        position: the row, with the old topic id.
        topic_id: the id of the topic now.
    """
    return TopicRecreated(
        f"{partition} has stored offset {position.next_offset} of topic id {position.topic_id}, but the topic now has "
        f"id {topic_id}: it was deleted and made again, and the offset means nothing in the new topic. {NOT_SKIPPED} "
        f"{choices(group)}"
    )


def choices(group: str) -> str:
    """What a user can do with a topic that was made again."""
    return (
        f"Choose: store.delete({group!r}) to begin where start= says, store.reset(group, {{partition: "
        f"offset}}) for an offset of the new topic, or consume under a new group"
    )


def out_of_range(partition: Partition, cause: str) -> OffsetOutOfRange:
    """The error for a stored offset that the log does not have."""
    return OffsetOutOfRange(
        f"the stored offset of {partition} is not in its log ({cause}): records were deleted by retention, "
        f"or the topic was truncated or made again. {NOT_SKIPPED} Choose where to continue with "
        f"store.reset(group, {{partition: offset}}), or app.seek(partition, offset)"
    )


class PartitionTrouble:
    """What is wrong with one partition, since when, and the row of its offset at that time.

    The owner thread writes it; other threads read it through `Snapshot.held`.
    """

    def __init__(self, error: KconsumeError, row: Position | None, *, open_lane: bool) -> None:
        """
        Args:
            error: what is wrong.
            row: the row in the store; None if there was none.
            open_lane: whether the partition was being read when the trouble appeared.
        """
        self.error = error
        self.row = row
        self.since = time.monotonic()
        self.is_read_again = False
        """Whether the partition is being read again, to find out whether the trouble is over."""
        self.reads_again = open_lane and isinstance(error, _READS_AGAIN)
        """Whether reading the partition again can show that the trouble is over."""

    @property
    def code(self) -> str:
        return code_of(self.error)

    def outranks(self, other: PartitionTrouble) -> bool:
        """Whether this trouble is named if a partition has both."""
        order = list(CODES.values())
        return order.index(self.code) < order.index(other.code)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def row_changed(self, row: Position | None) -> bool:
        """Whether the row was reset, deleted or created after the trouble appeared. Each of these changes the epoch of
        the row. A store without epochs refuses changes of offsets while the group has members."""
        return (0 if row is None else row.epoch) != (0 if self.row is None else self.row.epoch)
