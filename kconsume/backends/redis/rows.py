"""The row of a partition in Redis: the names of its keys, and the meaning of its fields.

Values only: nothing here talks to Redis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeAlias
from urllib.parse import quote, unquote

from kconsume.backends.base import Position
from kconsume.backends.redis.scripts import POSITION
from kconsume.errors import Undecided
from kconsume.records import Partition

PREFIX = "kconsume:"
"""The beginning of the names of all keys of kconsume."""

Fields: TypeAlias = Sequence[bytes | None]


@dataclass(frozen=True, slots=True)
class FailedRecord:
    """A record of which Redis applied only a part. The user decides whether to retry or to skip the record.

    Args:
        partition: the partition of the record.
        offset: the offset of the record; for a batch, which fails as a whole, the offset of its first record.
        end: the offset after the record; for a batch, the offset after its last record.
        index: the number of the failed command, counted from 1. The commands before the failed command were applied.
            None if the number is unknown.
        of: how many commands the record has.
        command: the failed command, cut to 200 characters of its first argument.
        error: the reply of Redis to the failed command.
        at: when it failed.
    """

    partition: Partition
    offset: int
    end: int
    index: int | None
    of: int | None
    command: str | None
    error: str | None
    at: datetime | None

    def __str__(self) -> str:
        last = "" if self.end == self.offset + 1 else f" to {self.end - 1}"
        if self.index is None:
            return f"{self.partition}@{self.offset}{last}: Redis broke off while it applied the commands"
        return f"{self.partition}@{self.offset}{last}: command {self.index} of {self.of} ({self.command}): {self.error}"


class RedisRow(NamedTuple):
    """The position of a group in a partition, and its failed record if it has one."""

    position: Position
    failed: FailedRecord | None


class Names:
    """The names of kconsume's keys. Characters other than letters, digits and `_.-~` are escaped as in a URL. So no two
    partitions share a name, and Redis reads no brace in a group name as a hash tag.

    Attributes:
        nothing: the name of a key that never exists when a script starts.
    """

    def __init__(self, tag: str | None) -> None:
        self._prefix = PREFIX if tag is None else f"{PREFIX}{{{tag}}}:"
        self.meta = f"{self._prefix}meta"
        self.groups = f"{self._prefix}groups"
        self.nothing = f"{self._prefix}nothing"

    def of_group(self, group: str) -> tuple[str, str, str]:
        """The keys that scripts take before the rows: meta, groups, and the partitions of this group."""
        return self.meta, self.groups, f"{self._prefix}partitions:{quote(group, safe='')}"

    def row(self, group: str, partition: Partition) -> str:
        return f"{self._prefix}offset:{quote(group, safe='')}:{quote(partition.topic, safe='')}:{partition.number}"


def row_of(partition: Partition, fields: Fields) -> RedisRow:
    text = [None if field is None else field.decode(errors="replace") for field in fields]
    position, failure = text[: len(POSITION)], text[len(POSITION) :]
    next_offset, epoch, topic_id, owner, leader_epoch, metadata, updated_at, generation, reset_epoch = position
    return RedisRow(
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
        f"{'; '.join(map(str, failures))}; Redis may have applied a part and cannot undo it, so {where} "
        f"stopped until a user decides: look with `kconsume failed show APP {first}`, then "
        f"`kconsume failed retry APP {first}` or `kconsume failed skip APP {first} --yes`",
        (failed.partition for failed in failures),
    )


def member_of(partition: Partition) -> str:
    return f"{quote(partition.topic, safe='')}/{partition.number}"


def partition_of(member: bytes) -> Partition:
    topic, _, number = member.decode().rpartition("/")
    return Partition(unquote(topic), int(number))


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
