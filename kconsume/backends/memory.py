"""`memory://`: offsets in this process, fenced. For tests, and for jobs that read from the start each time."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import ClassVar

from kconsume.backends import claim as claiming
from kconsume.backends.base import ClaimTerms, Position, Positions, Refused, Start
from kconsume.backends.capabilities import ALWAYS, Capabilities
from kconsume.errors import Fenced
from kconsume.records import Partition


class MemoryStore:
    """Offsets in memory, fenced as in a database. The offsets are lost when the process ends."""

    guarantee: ClassVar[str] = "at least once; offsets are forgotten when the process ends"

    def __init__(self) -> None:
        self.address = "memory://"
        self._rows: dict[tuple[str, Partition], Position] = {}
        self._last_epoch = 0
        """The highest epoch of all deleted rows. New rows get a higher epoch, so that no epoch is used twice."""
        self._deleted: dict[tuple[str, Partition | None], int] = {}
        """By group and partition: the epoch up to which the row was deleted. The partition None means all partitions
        of the group that had no row."""
        self._id = uuid.uuid4().hex
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self, named=self, durable=False)

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

    def claim(
        self,
        group: str,
        partitions: Sequence[Partition],
        owner: str,
        start: Start,
        terms: ClaimTerms | None = None,
    ) -> dict[Partition, Position | Refused]:
        pinned: dict[Partition, Position] = {}
        while True:
            with self._lock:
                rows = {p: self._rows.get((group, p)) for p in partitions}
                late = {p: row for p, row in rows.items() if not self._accepts(row, p, owner, terms)}
                missing = [p for p, row in rows.items() if row is None and p not in late and p not in pinned]
                if not missing:
                    return {
                        p: claiming.refused(group, p, terms, late[p])
                        if p in late
                        else self._claim(group, p, owner, pinned, terms)
                        for p in partitions
                    }
            # `start` is called outside the lock. Other rows may be deleted meanwhile, so the rows are read again.
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
                self._record_new_row(group, partition)
                row = self._rows.get((group, partition)) or Position(offset, self._last_epoch)
                self._rows[group, partition] = replace(
                    row,
                    next_offset=offset,
                    epoch=row.epoch + 1,
                    topic_id=None,
                    reset_epoch=row.epoch + 1,
                    owner=None,
                    leader_epoch=None,
                    updated_at=datetime.now(UTC),
                )

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        with self._lock:
            chosen = [p for g, p in self._rows if g == group] if partitions is None else set(partitions)
            if partitions is None:
                self._deleted[group, None] = ALWAYS
            for partition in chosen:
                row = self._rows.pop((group, partition), None)
                self._deleted[group, partition] = ALWAYS if row is None else row.epoch
                self._last_epoch = max(self._last_epoch, 0 if row is None else row.epoch)

    def identity(self) -> str:
        return self._id

    def deleted(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        with self._lock:
            known = {p: self._deleted.get((group, p), self._deleted.get((group, None))) for p in partitions}
        return {p: epoch for p, epoch in known.items() if epoch is not None}

    def groups(self) -> list[str]:
        with self._lock:
            return sorted({group for group, _ in self._rows})

    def close(self) -> None:
        """Keeps the rows, which exist as long as this object."""

    def _claim(
        self, group: str, partition: Partition, owner: str, pinned: Positions, terms: ClaimTerms | None = None
    ) -> Position:
        row = self._rows.get((group, partition))
        if row is None:
            self._record_new_row(group, partition)
            row = replace(pinned[partition], epoch=self._last_epoch, reset_epoch=self._last_epoch)
        generation = row.generation if terms is None else terms.generation
        claimed = replace(row, epoch=row.epoch + 1, owner=owner, generation=generation, updated_at=datetime.now(UTC))
        self._rows[group, partition] = claimed
        return claimed

    def _accepts(self, row: Position | None, partition: Partition, owner: str, terms: ClaimTerms | None) -> bool:
        return claiming.accepts(row, partition, owner, terms)

    def _record_new_row(self, group: str, partition: Partition) -> None:
        """Record that the row of a deleted partition is created again: its higher epochs do not count as deleted."""
        if (group, partition) in self._rows:
            return
        if (group, partition) in self._deleted or (group, None) in self._deleted:
            self._deleted[group, partition] = self._last_epoch

    def _check(self, group: str, partition: Partition, position: Position) -> None:
        row = self._rows.get((group, partition))
        at = None if row is None else row.next_offset
        seen = position.previous is None or at in (position.previous, position.next_offset)
        if row is None or row.epoch != position.epoch or row.next_offset > position.next_offset or not seen:
            raise Fenced(
                f"{partition} of group {group!r} is no longer owned by this process: its claim has epoch "
                f"{position.epoch} up to offset {position.next_offset}, the store has {row}"
            )

    def _check_epoch(self, group: str, partition: Partition, epoch: int) -> None:
        row = self._rows.get((group, partition))
        if row is None or row.epoch != epoch:
            raise Fenced(
                f"{partition} of group {group!r} is no longer owned by this process: its claim has epoch {epoch}, the "
                f"store has {row}"
            )
