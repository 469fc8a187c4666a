"""Why a partition is held: what is wrong with it and with no other.

A held partition keeps its owner. It is not read, its offset does not pass, and every other partition goes on. What is
known of it is in memory alone, so each new owner tries once. Values only: `Tenancy` holds and releases.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from kconsume.backends.abc import Position, Refused
from kconsume.backends.claiming import granted
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
"""The errors that hold one partition, and the code under which each is known outside. The first that fits counts."""

NOT_SKIPPED = "Nothing was skipped."
"""Stands between what is wrong and what to do."""

_READS_AGAIN = (UnreadableBatch, NotAuthorized)
"""What may be gone when the partition is read again at the same offset."""


def positions_in(answers: Mapping[Partition, Position | Refused | Trouble]) -> dict[Partition, Position]:
    """Of a claim that is taken as a whole: where its partitions stand. Raises what is wrong with one of them."""
    for found in answers.values():
        if isinstance(found, Trouble):
            raise found.error
    return granted({p: found for p, found in answers.items() if not isinstance(found, Trouble)})


def code_of(error: KconsumeError) -> str:
    return next(code for kind, code in CODES.items() if isinstance(error, kind))


def recreated(group: str, partition: Partition, position: Position, topic_id: str) -> TopicRecreated:
    """`position` is the row, `topic_id` that of the topic as it is now."""
    return TopicRecreated(
        f"{partition} stands at offset {position.next_offset} of topic id {position.topic_id}, but the topic "
        f"now has id {topic_id}: it was deleted and made again, and the offset means nothing in it. {NOT_SKIPPED} "
        f"{choices(group)}"
    )


def choices(group: str) -> str:
    """What a user can do with a topic that was made again."""
    return (
        f"Choose: store.delete({group!r}) to begin where start= says, store.reset(group, {{partition: "
        f"offset}}) for an offset of the new topic, or consume under a new group"
    )


def out_of_range(partition: Partition, cause: str) -> OffsetOutOfRange:
    return OffsetOutOfRange(
        f"the stored offset of {partition} is not in its log ({cause}): records were deleted by retention, "
        f"or the topic was cut or made again. {NOT_SKIPPED} Choose where to go on with "
        f"store.reset(group, {{partition: offset}}), or app.seek(partition, offset)"
    )


class Trouble:
    """What is wrong with one partition, since when, and which row its offset had then."""

    def __init__(self, error: KconsumeError, row: Position | None, *, open_lane: bool) -> None:
        """`row`: what the store had; None if it had nothing. `open_lane`: whether the partition was being read."""
        self.error = error
        self.row = row
        self.since = time.monotonic()
        self.tries = False
        """Whether the partition is read again, to find out whether the trouble is over."""
        self.reads_again = open_lane and isinstance(error, _READS_AGAIN)
        """Whether reading it again is a way to find that out."""

    @property
    def code(self) -> str:
        return code_of(self.error)

    def outranks(self, other: Trouble) -> bool:
        """Whether this one is named where both are there: the causes have one order, that of `CODES`."""
        order = list(CODES.values())
        return order.index(self.code) < order.index(other.code)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def row_changed(self, row: Position | None) -> bool:
        """Whether somebody has changed the row since: reset it, deleted it, or made it. Each gives it another epoch; a
        store without epochs lets nobody change offsets while the group has members."""
        return (0 if row is None else row.epoch) != (0 if self.row is None else self.row.epoch)
