"""Whether the offsets of a group are still in the store that they were mirrored from.

Pure: the functions compare what the Kafka group shows for a partition with what the store has, and return a verdict.
The offsets in the store are authoritative. Their mirror in the Kafka group names the store in the commit metadata
(`_kafka/commit_metadata.py`). So two cases can be told apart: a store that was exchanged or has lost its rows, and a
store whose rows were deleted on purpose or that was copied, restored or promoted.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from kconsume._kafka.commit_metadata import MirrorSource, StoreName
from kconsume.backends.base import Position


class StoreVerdict(enum.Enum):
    FINE = "the row is there"
    BEHIND = "the row is behind what this store has shown before: a backup, or a standby that lacked its last commits"
    NEW = "nothing is committed for it"
    UNKNOWN = "something is committed, by a tool or a version that does not say which store it has"
    DELETED = "the row was deleted (store.delete)"
    LOST = "the row is gone, and nobody has deleted it"
    ANOTHER = "the offsets are kept in another store"

    @property
    def starts(self) -> bool:
        """Whether a partition without a row begins where `start=` says."""
        return self in (StoreVerdict.NEW, StoreVerdict.UNKNOWN, StoreVerdict.DELETED)


class MirroredOffset(NamedTuple):
    """What the Kafka group shows for a partition."""

    offset: int
    source: MirrorSource | None
    """The store that the offset was mirrored from; None if the commit does not say."""


def judged(ours: StoreName, shown: MirroredOffset | None, row: Position | None, deleted: int | None) -> StoreVerdict:
    """The verdict about one partition.

    Args:
        ours: the name of our store.
        shown: what the Kafka group shows; None if nothing is committed.
        row: what our store has; None if it has no row.
        deleted: the epoch up to which the store recorded a deletion of the row; None if it recorded none.
    """
    if shown is None or shown.source is None:
        return _without_a_source(shown, row)
    if not shown.source.is_of(ours):
        is_further = row is not None and row.next_offset >= shown.offset and ours.kind != "k"
        return StoreVerdict.FINE if is_further else StoreVerdict.ANOTHER
    if row is None:
        was_deleted = deleted is not None and deleted >= (shown.source.epoch or 0)
        return StoreVerdict.DELETED if was_deleted else StoreVerdict.LOST
    # An offset mirrored before a reset says nothing about the row, because a user has set the row or made it again.
    was_reset = row.reset_epoch > 0 and row.reset_epoch >= (shown.source.epoch or 0)
    return StoreVerdict.FINE if row.next_offset >= shown.offset or was_reset else StoreVerdict.BEHIND


def _without_a_source(shown: MirroredOffset | None, row: Position | None) -> StoreVerdict:
    if row is not None:
        return StoreVerdict.FINE
    return StoreVerdict.NEW if shown is None else StoreVerdict.UNKNOWN
