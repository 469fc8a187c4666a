"""Converts rows of the offset table and the outbox into values, and partitions into parameters of statements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeAlias

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends.base import Position, Positions
from kconsume.backends.outbox.tables import Posted, Targets, headers_of
from kconsume.records import Partition

Parameters: TypeAlias = dict[str, Any]
Row: TypeAlias = tuple[Any, ...]


def partition_key(group: str, partition: Partition) -> Parameters:
    """The parameters of a statement about one row."""
    return {"group": group, "topic": partition.topic, "partition": partition.number}


def partition_arrays(group: str, partitions: Iterable[Partition]) -> Parameters:
    """The parameters of a statement about many rows."""
    chosen = list(partitions)
    return {"group": group, "topics": [p.topic for p in chosen], "partitions": [p.number for p in chosen]}


def position_arrays(group: str, positions: Positions) -> Parameters:
    """The parameters of a statement that writes positions."""
    return {
        **partition_arrays(group, positions),
        "offsets": [p.next_offset for p in positions.values()],
        "topic_ids": [p.topic_id for p in positions.values()],
        "leader_epochs": [p.leader_epoch for p in positions.values()],
    }


def target_arrays(chosen: Sequence[Targets]) -> Parameters:
    """The parameters of a statement that reads chosen outbox rows of many partitions."""
    return {
        "names": [",".join(each.topics) for each in chosen],
        "others": [each.others for each in chosen],
        "above": [each.above for each in chosen],
    }


def positions_of(rows: Iterable[Row]) -> dict[Partition, Position]:
    return {Partition(topic, number): _position(*row) for topic, number, *row in rows}


def _position(offset: int, epoch: int, *rest: Any) -> Position:
    *others, generation, reset_epoch = rest
    return replace(Position(offset, epoch, *others), generation=generation, reset_epoch=reset_epoch)


def posted_of(row: Row) -> Posted:
    _, number, target, key, value, headers, timestamp = row
    return Posted(number, Outgoing(value, key, headers_of(headers), target, timestamp))


def posted_by_partition(partitions: Sequence[Partition], rows: Iterable[Row]) -> dict[Partition, list[Posted]]:
    """Group outbox rows by partition. rows: sorted by the first column, the index of the partition, counted from 1."""
    return {partitions[index - 1]: list(map(posted_of, group)) for index, group in groupby(rows, itemgetter(0))}
