"""The state of one consumer, as one value for other threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kconsume._runtime.assignment.partition_trouble import PartitionTrouble
from kconsume._runtime.observation.causes import Cause
from kconsume.records import Partition


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Written by the owner thread about once a second, and replaced as a whole."""

    state: str = "starting"
    assigned: tuple[Partition, ...] = ()
    stored: Mapping[Partition, int] = field(default_factory=dict)
    handled: int = 0
    skipped: int = 0
    abandoned: tuple[Partition, ...] = ()
    held: Mapping[Partition, PartitionTrouble] = field(default_factory=dict)
    """Partitions that are held, and why."""
    causes: Mapping[Partition, Cause] = field(default_factory=dict)
    """Why each partition moves, waits or stands still."""
