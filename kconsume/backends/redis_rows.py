"""A partition's row in Redis: the names of its keys, and what its fields mean.

Values only: nothing here talks to Redis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeAlias
from urllib.parse import quote, unquote

from kconsume.backends.abc import Position
from kconsume.backends.redis_script import POSITION
from kconsume.errors import Undecided
from kconsume.records import Partition

PREFIX = "kconsume:"
"""How the names of all our keys begin."""

Fields: TypeAlias = Sequence[bytes | None]


@dataclass(frozen=True, slots=True)
class FailedRecord:
    """A record that was applied in part, and about which a person decides."""

    partition: Partition
    offset: int
    end: int
    """The offset behind it: of a batch, which fails as a whole, that behind its last record."""
    index: int | None
    """Which of its commands failed, counted from 1: those before it were applied. None if it is not known."""
    of: int | None
    """How many commands it has."""
    command: str | None
    error: str | None
    at: datetime | None

    def __str__(self) -> str:
        last = "" if self.end == self.offset + 1 else f" to {self.end - 1}"
        if self.index is None:
            return f"{self.partition}@{self.offset}{last}: Redis broke off while it was applied"
        return f"{self.partition}@{self.offset}{last}: command {self.index} of {self.of} ({self.command}): {self.error}"


class Row(NamedTuple):
    """Where a group stands in a partition, and the record that keeps it there, if one does."""

    position: Position
    failed: FailedRecord | None


class Names:
    """The names of the keys. What a name holds besides letters, digits and `_.-~` is escaped as in a web address, so
    that no two partitions have the same, and no brace of a topic is taken for a hash tag."""

    def __init__(self, tag: str | None) -> None:
        self._begin = PREFIX if tag is None else f"{PREFIX}{{{tag}}}:"
        self.meta = f"{self._begin}meta"
        self.groups = f"{self._begin}groups"
        self.nothing = f"{self._begin}nothing"
        """Of a key that is never there when a script begins."""

    def of_group(self, group: str) -> tuple[str, str, str]:
        """The keys that the scripts want before those of rows."""
        return self.meta, self.groups, f"{self._begin}partitions:{quote(group, safe='')}"

    def row(self, group: str, partition: Partition) -> str:
        return f"{self._begin}offset:{quote(group, safe='')}:{quote(partition.topic, safe='')}:{partition.number}"


def row_of(partition: Partition, fields: Fields) -> Row:
    text = [None if field is None else field.decode(errors="replace") for field in fields]
    position, failure = text[: len(POSITION)], text[len(POSITION) :]
    next_offset, epoch, topic_id, owner, leader_epoch, metadata, updated_at, generation, reset_epoch = position
    return Row(
        Position(
            int(next_offset or 0),
            int(epoch or 0),
            topic_id,
            owner,
            None if leader_epoch is None else int(leader_epoch),
            metadata or "",
            _moment(updated_at),
            generation=None if generation is None else int(generation),
            reset_epoch=int(reset_epoch or 0),
        ),
        _failed(partition, failure),
    )


def _failed(partition: Partition, fields: Sequence[str | None]) -> FailedRecord | None:
    offset, end, index, of, command, error, at = fields
    if offset is None:
        return None
    return FailedRecord(
        partition,
        int(offset),
        int(end or int(offset) + 1),
        None if index is None else int(index),
        None if of is None else int(of),
        None if command is None else command.strip(),
        error,
        _moment(at),
    )


def undecided(group: str, failures: Sequence[FailedRecord]) -> Undecided:
    first, others = failures[0].partition, [str(failed.partition) for failed in failures[1:]]
    where = f"{first} of group {group!r} stays" if not others else f"{first}, {', '.join(others)} of {group!r} stay"
    return Undecided(
        f"{'; '.join(map(str, failures))}; it is applied in part, Redis cannot undo that, and {where} "
        f"stopped until a person decides: look with `kconsume failed APP show {first}`, then "
        f"`kconsume failed APP retry {first}` or `kconsume failed APP skip {first} --yes`",
        (failed.partition for failed in failures),
    )


def member_of(partition: Partition) -> str:
    return f"{quote(partition.topic, safe='')}/{partition.number}"


def partition_of(member: bytes) -> Partition:
    topic, _, number = member.decode().rpartition("/")
    return Partition(unquote(topic), int(number))


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
