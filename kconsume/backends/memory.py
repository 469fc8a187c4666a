"""`memory://`: offsets in this process, fenced; for tests and for jobs that read from the start each time."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import ClassVar

from kconsume.backends.abc import Position, Positions, Start
from kconsume.errors import Fenced
from kconsume.records import Partition


class MemoryStore:
    """Fenced like a database, gone with the process."""

    guarantee: ClassVar[str] = "at least once; offsets are forgotten when the process ends"

    def __init__(self) -> None:
        self.address = "memory://"
        self.place: str | None = None
        self._rows: dict[tuple[str, Partition], Position] = {}
        self._last_epoch = 0
        """The highest epoch of all deleted rows: those made later begin above it, so that none is given out twice."""
        self._lock = threading.Lock()

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        with self._lock:
            return {p: self._rows[group, p] for p in partitions if (group, p) in self._rows}

    def save(self, group: str, positions: Positions) -> None:
        with self._lock:
            for partition, position in positions.items():
                self._check(group, partition, position)
            for partition, position in positions.items():
                row = self._rows[group, partition]
                self._rows[group, partition] = replace(
                    row,
                    next_offset=position.next_offset,
                    topic_id=position.topic_id or row.topic_id,
                    leader_epoch=position.leader_epoch,
                    updated_at=datetime.now(UTC),
                )

    def claim(self, group: str, partitions: Sequence[Partition], owner: str, start: Start) -> dict[Partition, Position]:
        pinned: dict[Partition, Position] = {}
        while True:
            with self._lock:
                missing = [p for p in partitions if (group, p) not in self._rows and p not in pinned]
                if not missing:
                    return {p: self._claim(group, p, owner, pinned) for p in partitions}
            # Asked for outside the lock, so rows may go meanwhile; those are asked for too.
            starts = start(missing)
            pinned.update({p: starts[p] for p in missing})

    def reclaim(self, group: str, epochs: Mapping[Partition, int], owner: str) -> dict[Partition, Position]:
        with self._lock:
            for partition, epoch in epochs.items():
                self._check_epoch(group, partition, epoch)
            return {p: self._claim(group, p, owner, {}) for p in epochs}

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        with self._lock:
            for partition, offset in offsets.items():
                row = self._rows.get((group, partition)) or Position(offset, self._last_epoch)
                self._rows[group, partition] = replace(
                    row,
                    next_offset=offset,
                    epoch=row.epoch + 1,
                    owner=None,
                    leader_epoch=None,
                    updated_at=datetime.now(UTC),
                )

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        with self._lock:
            chosen = None if partitions is None else set(partitions)
            for key in [k for k in self._rows if k[0] == group and (chosen is None or k[1] in chosen)]:
                self._last_epoch = max(self._last_epoch, self._rows.pop(key).epoch)

    def groups(self) -> list[str]:
        with self._lock:
            return sorted({group for group, _ in self._rows})

    def close(self) -> None:
        """Nothing to let go of: the rows stay with the object."""

    def _claim(self, group: str, partition: Partition, owner: str, pinned: Positions) -> Position:
        row = self._rows.get((group, partition)) or replace(pinned[partition], epoch=self._last_epoch)
        claimed = replace(row, epoch=row.epoch + 1, owner=owner, updated_at=datetime.now(UTC))
        self._rows[group, partition] = claimed
        return claimed

    def _check(self, group: str, partition: Partition, position: Position) -> None:
        row = self._rows.get((group, partition))
        at = None if row is None else row.next_offset
        seen = position.previous is None or at in (position.previous, position.next_offset)
        if row is None or row.epoch != position.epoch or row.next_offset > position.next_offset or not seen:
            raise Fenced(
                f"{partition} of group {group!r} is not ours any more: we hold epoch {position.epoch} up to "
                f"offset {position.next_offset}, the store has {row}"
            )

    def _check_epoch(self, group: str, partition: Partition, epoch: int) -> None:
        row = self._rows.get((group, partition))
        if row is None or row.epoch != epoch:
            raise Fenced(
                f"{partition} of group {group!r} is not ours any more: we hold epoch {epoch}, the store has {row}"
            )
