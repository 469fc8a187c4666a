"""Stores the offsets of the partitions: in the store, and as a mirror in the Kafka group.

A committer sends one set of offsets at a time (`committer`). This module decides what is sent, and what an answer means
for its partitions. All methods are called on the owner thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kconsume._event_log import EventLog
from kconsume._runtime.assignment.claiming import Claiming
from kconsume._runtime.assignment.committer import CommitEntries, CommitEntry, Committer, GroupCommitter, StoreCommitter
from kconsume._runtime.assignment.holds import Holds
from kconsume._runtime.assignment.owned_partitions import OwnedPartitions
from kconsume._runtime.assignment.partition import OwnedPartition, State
from kconsume._runtime.deadlines import MIRROR_SHARE, Deadline
from kconsume._runtime.observation.events import Events, OffsetsStored

_log = EventLog("loop")

_SEND_AGAIN_EVERY = 0.05
"""Seconds between two commits of the last offsets, while one is refused."""


class Commits:
    """The offsets of one consumer."""

    def __init__(
        self,
        partitions: OwnedPartitions,
        claiming: Claiming,
        holds: Holds,
        committer: Committer,
        mirror: GroupCommitter | None,
        events: Events,
    ) -> None:
        """
        Args:
            partitions: the partitions of the consumer.
            claiming: claims partitions again that the store has refused or the broker has confirmed.
            holds: holds a partition whose offset cannot be stored.
            committer: stores the offsets.
            mirror: also commits the offsets to the Kafka group, if they are kept in another store.
            events: gets `OffsetsStored`.
        """
        self._partitions = partitions
        self._claiming = claiming
        self._holds = holds
        self._committer = committer
        self._mirror = mirror
        self._events = events
        self._sent_at = 0.0

    @property
    def store_error(self) -> str:
        """Why the store did not answer the last save, if an offset still waits for it."""
        committer = self._committer
        return committer.store_error if isinstance(committer, StoreCommitter) and self._is_behind else ""

    @property
    def coordinator_is_lost(self) -> bool:
        """Whether the last commit to the Kafka group had no answer, and an offset still waits for it."""
        if self._mirror is not None:
            return self._mirror.coordinator_is_lost and self._mirror_is_behind
        return isinstance(self._committer, GroupCommitter) and self._committer.coordinator_is_lost and self._is_behind

    @property
    def confirms_membership(self) -> bool:
        """Whether a commit to the group can confirm our membership, apart from the offsets in the store."""
        return self._mirror is not None

    def send(self) -> None:
        """Send the offsets that are not stored yet."""
        owned_partitions = self._partitions.values()
        if not self._committer.busy and (entries := _unsaved(owned_partitions)):
            self._committer.send(entries)
            self._sent_at = time.monotonic()
        if self._mirror is not None and not self._mirror.busy:
            behind = {
                o.partition: CommitEntry(o, offset, o.token)
                for o in owned_partitions
                if (offset := o.offset_to_mirror) is not None
            }
            if behind:
                self._mirror.send(behind)

    def collect(self) -> None:
        """Take the answers that have come."""
        self._collect_saved()
        self._collect_mirrored()

    def hand_over(self, leaving: Iterable[OwnedPartition], deadline: Deadline) -> None:
        """Send the last offsets of partitions that leave, so that the next owner finds them."""
        self._committer.settle(deadline)
        self._collect_saved()
        if entries := _unsaved(leaving):
            self._committer.hand_over(entries, deadline)

    def send_last(self, deadline: Deadline, poll: Callable[[], None]) -> None:
        """Commit until nothing is unsaved, or until the deadline.

        Args:
            poll: brings the answers to commits.
        """
        pause, mirror_deadline = Deadline(0.0), deadline.part(MIRROR_SHARE)
        while True:
            self.collect()
            unsaved = [o for o in self._partitions.values() if o.unsaved]
            # Lag tools should see the last offset, but the shutdown does not wait for a mirror that is refused.
            behind = not mirror_deadline.passed and self._mirror is not None and self._mirror_is_behind
            busy = self._committer.busy or (self._mirror is not None and self._mirror.busy)
            if not unsaved and not behind and not busy:
                break
            if deadline.passed:
                _log.error("offsets not committed", partitions=sorted(o.partition for o in unsaved))
                break
            if (unsaved or behind) and not self._committer.busy and pause.passed:
                pause = Deadline(_SEND_AGAIN_EVERY)
                self.send()
            poll()
            time.sleep(0.002)

    @property
    def _is_behind(self) -> bool:
        return any(owned.unsaved for owned in self._partitions.values())

    @property
    def _mirror_is_behind(self) -> bool:
        return any(o.state is State.OPEN and o.offset_to_mirror is not None for o in self._partitions.values())

    def _collect_saved(self) -> None:
        receipt = self._committer.collect()
        if receipt is None:
            return
        for partition, entry in receipt.kept.items():
            if (owned := self._partitions.current(partition, entry.token)) is not None:
                self._claiming.offset_stored(owned, entry.offset)
        if receipt.kept:
            stored = {p: entry.offset for p, entry in receipt.kept.items()}
            self._events.publish(OffsetsStored(stored, time.monotonic() - self._sent_at))
        for partition, (entry, error) in receipt.fenced.items():
            if (owned := self._partitions.current(partition, entry.token)) is not None:
                self._claiming.store_refused(owned, error)
        for partition, (entry, fault) in receipt.faults.items():
            if (owned := self._partitions.current(partition, entry.token)) is not None:
                self._holds.put_on_hold(owned, fault)

    def _collect_mirrored(self) -> None:
        if self._mirror is None or (receipt := self._mirror.collect()) is None:
            return
        generation, confirmed = receipt.generation or 0, list[OwnedPartition]()
        for partition, entry in receipt.kept.items():
            if (owned := self._partitions.current(partition, entry.token)) is None:
                continue
            if owned.state is not State.FENCED:
                owned.mirrored = entry.offset
            elif generation > 0:
                confirmed.append(owned)
        if confirmed:
            self._claiming.confirmed(confirmed, generation)


def _unsaved(owned_partitions: Iterable[OwnedPartition]) -> CommitEntries:
    return {o.partition: CommitEntry(o, o.progress.watermark, o.token) for o in owned_partitions if o.unsaved}
