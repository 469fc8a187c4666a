"""Whether the offsets of a group are still in the store that they were copied from.

Pure: what the Kafka group shows of a partition and what the store has of it go in, a verdict comes out. The store is
the truth; the copy in Kafka says which store it was made from (`commit_note.py`). So a store that was exchanged, or has
lost its rows, is told from one whose rows were deleted on purpose, or that was copied, restored or promoted.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from kconsume.backends.abc import Position
from kconsume.backends.commit_note import Source, StoreName


class Verdict(enum.Enum):
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
        return self in (Verdict.NEW, Verdict.UNKNOWN, Verdict.DELETED)


class Shown(NamedTuple):
    """What the Kafka group shows of a partition."""

    offset: int
    source: Source | None


def judged(ours: StoreName, shown: Shown | None, row: Position | None, deleted: int | None) -> Verdict:
    """`deleted`: the epoch up to which the store knows that the row was deleted; None if it was not."""
    if shown is None or shown.source is None:
        return _without_a_note(shown, row)
    if not shown.source.is_of(ours):
        is_further = row is not None and row.next_offset >= shown.offset and ours.kind != "k"
        return Verdict.FINE if is_further else Verdict.ANOTHER
    if row is None:
        was_deleted = deleted is not None and deleted >= (shown.source.epoch or 0)
        return Verdict.DELETED if was_deleted else Verdict.LOST
    # What was shown before a reset says nothing of the row: a user has set it, or had it made anew.
    was_reset = row.reset_epoch > 0 and row.reset_epoch >= (shown.source.epoch or 0)
    return Verdict.FINE if row.next_offset >= shown.offset or was_reset else Verdict.BEHIND


def _without_a_note(shown: Shown | None, row: Position | None) -> Verdict:
    if row is not None:
        return Verdict.FINE
    return Verdict.NEW if shown is None else Verdict.UNKNOWN
