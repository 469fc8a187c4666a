"""A query's checkpoint: reads its offset log, and chooses the folder with which a stream continues.

The offsets in the store decide; the checkpoint is a log that can be deleted. `CheckpointGuard` compares the checkpoint
with the store before a query starts. If they agree, the query continues in the same folder. If not, it begins at the
stored offsets in a new generation of the folder (`gen-0002`). This module writes nothing into Spark's own folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kconsume._event_log import EventLog
from kconsume.errors import CheckpointMismatch, OffsetError
from kconsume.records import Partition
from kconsume.spark._batch.ranges import Offsets, Plan
from kconsume.spark._stream.folders import Folder
from kconsume.spark._stream.offset_log import first_offsets, kafka_offsets, read_entry

_log = EventLog("spark")
_IDENTITY_FILE = "kconsume.json"


class OffsetLog:
    """The plans of one query's batches, from its checkpoint."""

    def __init__(self, files: Folder, folder: str = "") -> None:
        self._files = files
        self._folder = f"{folder}/" if folder else ""
        self._last: tuple[int, dict[Partition, int]] | None = None

    def plan(self, batch: int) -> Plan:
        """The ranges of a batch: from the end of the batch before to the end that Spark wrote before the batch ran."""
        source, end = self._end(batch)
        if self._last is not None and self._last[0] == batch - 1:
            start = self._last[1]
        elif batch > 0:
            _, start = self._end(batch - 1)
        else:
            start = self._first(source)
        self._last = (batch, end)
        return Plan.between(start, end)

    def last(self) -> tuple[int, bool] | None:
        """The last batch that was planned, and True if Spark has committed it; None without a batch."""
        planned = _numbers(self._files.names(f"{self._folder}offsets"))
        if not planned:
            return None
        return planned[-1], planned[-1] in _numbers(self._files.names(f"{self._folder}commits"))

    @property
    def is_stateful(self) -> bool:
        """True if the query keeps rows from one batch to the next. Spark makes the state folder when it plans the first
        batch, before it calls the handler."""
        return bool(self._files.names(f"{self._folder}state"))

    def _end(self, batch: int) -> tuple[int, dict[Partition, int]]:
        text = self._files.read(f"{self._folder}offsets/{batch}")
        if text is None:
            raise OffsetError(
                f"the checkpoint has no offsets of batch {batch}, so the ranges of the batch are not known: name a new "
                f"checkpoint folder; the offsets are in the store"
            )
        return kafka_offsets(read_entry(text))

    def _first(self, source: int) -> dict[Partition, int]:
        text = self._files.read(f"{self._folder}sources/{source}/0")
        if text is None:
            raise OffsetError(
                f"the checkpoint has no sources/{source}/0, so the beginning of batch 0 is not known: name a new "
                f"checkpoint folder; the offsets are in the store"
            )
        return first_offsets(text)


def _numbers(names: list[str]) -> list[int]:
    return sorted(int(name) for name in names if name.isdecimal())


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """Where a query keeps its checkpoint."""

    folder: str
    """The generation, below the base folder."""
    is_new: bool
    """True if the folder is empty, so that the query begins at the stored offsets."""
    pending: Plan | None = None
    """The batch that Spark will run again in this folder."""


class CheckpointGuard:
    """Chooses the generation of a checkpoint folder that agrees with the store."""

    def __init__(self, files: Folder, base: str, identity: Mapping[str, str]) -> None:
        """Make the guard, without I/O.

        Args:
            files: the base folder.
            base: the path of the base folder, for messages.
            identity: the query to which the folder belongs: its group and its topics.
        """
        self._files = files
        self._base = base
        self._identity = dict(identity)

    def pending_plan(self, stored: Offsets) -> Plan | None:
        """The batch that Spark would run again; None if there is none, or the folder does not agree with the store."""
        self._check_owner()
        generations = self._generations()
        found = OffsetLog(self._files, generations[-1]).last() if generations else None
        if found is None or found[1]:
            return None
        plan = OffsetLog(self._files, generations[-1]).plan(found[0])
        return Plan(plan.filled) if agrees_with_store(plan, stored, done=False) else None

    def resolve(self, stored: Offsets) -> CheckpointLocation:
        """The generation to use, given the stored offsets.

        Raises `CheckpointMismatch` if the folder belongs to another query.
        """
        self._check_owner()
        generations = self._generations()
        if not generations:
            return self._new(1)
        last = generations[-1]
        log = OffsetLog(self._files, last)
        found = log.last()
        if found is None:
            return CheckpointLocation(last, is_new=True)
        batch, done = found
        plan = log.plan(batch)
        if agrees_with_store(plan, stored, done=done):
            return CheckpointLocation(last, is_new=False, pending=None if done else plan)
        number = int(last[4:]) + 1
        _log.warning(
            "checkpoint disagrees with store",
            checkpoint=f"{self._base}/{last}",
            batch=batch,
            ranges=plan,
            stored={str(p): stored.get(p) for p in plan.partitions},
            new_generation=f"gen-{number:04}",
            hint="the offsets in the store decide: the stream begins there, in a new generation of the folder",
        )
        return self._new(number)

    def _generations(self) -> list[str]:
        return [name for name in self._files.names("") if name.startswith("gen-") and name[4:].isdecimal()]

    def _new(self, number: int) -> CheckpointLocation:
        if self._files.read(_IDENTITY_FILE) is None:  # an existing file was checked already
            self._files.write(_IDENTITY_FILE, msgspec.json.encode(self._identity).decode())
        return CheckpointLocation(f"gen-{number:04}", is_new=True)

    def _check_owner(self) -> None:
        identity = self._files.read(_IDENTITY_FILE)
        if identity is None:
            if found := {"offsets", "metadata", "commits"}.intersection(self._files.names("")):
                raise CheckpointMismatch(
                    f"checkpoint={self._base!r} is the checkpoint of a query that is not kconsume's (it has "
                    f"{', '.join(sorted(found))}): name an empty folder; the offsets are in the store"
                )
            return
        known = msgspec.json.decode(identity, type=dict[str, str])
        for what, value in self._identity.items():
            if known.get(what) != value:
                raise CheckpointMismatch(
                    f"checkpoint={self._base!r} belongs to another query: its {what} is {known.get(what)!r}, and "
                    f"here it is {value!r}; name another folder; the offsets are in the store"
                )


def agrees_with_store(plan: Plan, stored: Offsets, *, done: bool) -> bool:
    """True if a query that continues this checkpoint reads all offsets that the store does not have yet.

    Args:
        plan: the last batch in the checkpoint.
        done: True if Spark has committed that batch and continues after it; False if Spark runs the batch again.

    The stored offset of each partition must be at the end of the batch; or, if Spark runs the batch again, at its
    beginning. Partitions that only the store has are new to Spark, and Spark begins them at 0.
    """
    for each in plan.ranges:
        at = stored.get(each.partition)
        if at != each.end and (done or at != each.first):
            return False
    known = set(plan.partitions)
    return all(offset == 0 for partition, offset in stored.items() if partition not in known)
