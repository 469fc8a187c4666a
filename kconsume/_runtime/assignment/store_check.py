"""Refuses a store whose offsets do not fit what the Kafka group shows. Otherwise records would be skipped or handled
again.

Blocking; runs on the background thread. `store_identity` makes the verdicts. This module asks the store and the group,
and raises.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from kconsume._event_log import EventLog
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.commit_metadata import MirrorSource, StoreName, name_of, source_in
from kconsume._runtime.assignment.store_identity import MirroredOffset, StoreVerdict, judged
from kconsume.backends.base import OffsetStore, Position, Positions
from kconsume.backends.capabilities import NamedStore
from kconsume.backends.kafka import KafkaStore
from kconsume.errors import ConfigurationError, RowLost
from kconsume.records import Partition

_log = EventLog("rebalance")

MissingRow = tuple[StoreVerdict, MirroredOffset | None]
"""Why a partition has no row, and what the Kafka group shows for the partition."""


class StoreCheck:
    """Compares the rows of one group in a store with what the Kafka group shows.

    Fields: written on the background thread. `name` is also read on the owner thread, when offsets are committed.
    """

    def __init__(self, store: OffsetStore, named: NamedStore | None, cluster: Cluster, group: str) -> None:
        """store: where the offsets are kept.

        Args:
            named: the same store, if it records deletions.
            cluster: is asked for the offsets of the group.
            group: the consumer group.
        """
        self.name: StoreName | None = None
        """The name that distinguishes the store from others, once the store was asked. None for a store in memory."""
        self.is_new = False
        """Whether the cluster was asked and does not know the group. Then it has no offsets of the group either."""
        self._store = store
        self._named = named
        self._cluster = cluster
        self._group = group
        self._is_named = False
        self._shown: dict[Partition, MirroredOffset] = {}
        """What the Kafka group showed when it was last asked."""
        self._owned: dict[Partition, Position] = {}
        """Rows that this process had. They prove that a missing row existed, even if the group does not show its offset
        yet, or never will because it refuses our commits."""

    def note_owned(self, rows: Positions) -> None:
        """Remember rows that were ours until now."""
        self._owned.update(rows)

    def must_be_same(self, partitions: Sequence[Partition], stored: Positions) -> None:
        """Raise if the offsets of the group are kept in another store and are further there. Otherwise records would be
        handled again. A consumer with an external store names its store in the Kafka group (`GroupCommitter`).

        Args:
            stored: the rows of our store, for the partitions that have a row.
        """
        self._shown.update(self._ask_group(partitions, stored))
        behind: list[Partition] = []
        for partition in sorted(stored.keys() | self._shown.keys() & set(partitions)):
            match self._verdict(partition, stored.get(partition)):
                case StoreVerdict.ANOTHER:
                    raise self._another_store(partition, self._shown[partition], stored.get(partition))
                case StoreVerdict.BEHIND:
                    behind.append(partition)
        if behind:
            _log.warning(
                "store is behind",
                store=self._store.address,
                stored={p: stored[p].next_offset for p in behind},
                committed={p: self._shown[p].offset for p in behind},
                reason=StoreVerdict.BEHIND.value,
                effect="records are handled again",
            )

    def explain_missing(self, missing: Sequence[Partition]) -> dict[Partition, MissingRow]:
        """Why these partitions have no row. Raises if a row was lost: a start at `start=` would skip the records up to
        the lost offset or handle them again. The group is asked again, because another member may have had the
        partition since the survey."""
        for partition in missing:
            self._shown.pop(partition, None)
        self._shown.update(self._ask_group(missing, {}))
        self._shown.update(self._owned_further(missing))
        found = {p: (self._verdict(p, None), self._shown.get(p)) for p in sorted(missing)}
        for partition, (verdict, shown) in found.items():
            if verdict is StoreVerdict.ANOTHER and shown is not None:
                raise self._another_store(partition, shown, None)
        if lost := {
            p: shown for p, (verdict, shown) in found.items() if verdict is StoreVerdict.LOST and shown is not None
        }:
            raise self._lost(lost)
        return found

    def may_start(self, missing: Sequence[Partition]) -> list[Partition]:
        """The partitions without a row that may begin where `start=` says."""
        self._shown.update(self._ask_group(missing, {}))
        return [p for p in missing if self._verdict(p, None).starts]

    def log_starts(self, offsets: Mapping[Partition, int], reasons: Mapping[Partition, MissingRow]) -> None:
        """Log where partitions without a row begin, and why they have none."""
        for verdict in sorted({verdict for verdict, _ in reasons.values()}, key=str):
            found = {p: shown for p, (reason, shown) in sorted(reasons.items()) if reason is verdict}
            committed = {p: shown.offset for p, shown in found.items() if shown is not None}
            _log.at(
                logging.WARNING if verdict is StoreVerdict.UNKNOWN else logging.INFO,
                "no stored offset",
                starts_at={p: offsets[p] for p in found},
                committed=committed,
                reason=verdict.value if self.name is not None else f"{self._store.address} is lost with the process",
            )

    def _owned_further(self, missing: Sequence[Partition]) -> dict[Partition, MirroredOffset]:
        """The offsets of rows that were ours, where the group shows a lower offset. An offset that the group shows for
        another store is not replaced."""
        if self.name is None:
            return {}
        known = {
            p: MirroredOffset(row.next_offset, MirrorSource(self.name.kind, self.name.id, row.epoch))
            for p, row in self._owned.items()
        }
        return {p: ours for p in missing if (ours := known.get(p)) and not self._shows_more(p, ours)}

    def _shows_more(self, partition: Partition, ours: MirroredOffset) -> bool:
        shown = self._shown.get(partition)
        if shown is None or shown.source is None or self.name is None:
            return False
        return not shown.source.is_of(self.name) or shown.offset >= ours.offset

    def _ask_group(self, partitions: Sequence[Partition], stored: Positions) -> dict[Partition, MirroredOffset]:
        """What the Kafka group shows for these partitions."""
        if not self._is_named:
            self.name, self._is_named = name_of(self._store), True
        if self.name is None or self.is_new:
            return {}
        if isinstance(self._store, KafkaStore):
            return {p: MirroredOffset(row.next_offset, source_in(row.metadata)) for p, row in stored.items()}
        committed = self._cluster.committed(self._group, partitions)
        return {p: MirroredOffset(each.offset, source_in(each.metadata)) for p, each in committed.items()}

    def _verdict(self, partition: Partition, row: Position | None) -> StoreVerdict:
        if self.name is None:
            return StoreVerdict.NEW if row is None else StoreVerdict.FINE
        verdict = judged(self.name, self._shown.get(partition), row, None)
        if verdict is not StoreVerdict.LOST:
            return verdict
        if self._named is None:
            return StoreVerdict.UNKNOWN  # the store does not record deletions
        deleted = self._named.deleted(self._group, [partition]).get(partition)
        return judged(self.name, self._shown.get(partition), row, deleted)

    def _another_store(self, partition: Partition, there: MirroredOffset, row: Position | None) -> ConfigurationError:
        here = "has no row here" if row is None else f"at {row.next_offset} here"
        return ConfigurationError(
            f"group {self._group!r} keeps its offsets in another store than {self._store.address}: {partition} "
            f"stands at {there.offset} there and {here}, so its records would be handled again or skipped. Give both "
            f"deployments the same offsets=, or this one a group= of its own. To move the group here, or if the other "
            f"store is gone, stop the other deployment and set the offsets with "
            f"store.reset(group, {{Partition({partition.topic!r}, {partition.number}): {there.offset}, ...}})"
        )

    def _lost(self, lost: Mapping[Partition, MirroredOffset]) -> RowLost:
        stood = ", ".join(f"{p} at {shown.offset}" for p, shown in lost.items())
        (partition, shown), *_ = lost.items()
        named = f"Partition({partition.topic!r}, {partition.number})"
        return RowLost(
            f"{self._store.address} has lost rows of group {self._group!r}: it had {stood}, has no row now, and nobody "
            f"has deleted it with store.delete. Nothing was skipped. Restore the rows, or choose: "
            f"store.reset(group, {{{named}: {shown.offset}}}) to continue from there, or "
            f"store.delete(group, [{named}]) to begin where start= says",
            lost,
        )
