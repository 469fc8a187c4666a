"""Held partitions: what is wrong with one partition stops that partition and no other.

`HeldWatch` decides when a held partition is tried again; this module carries that out. All methods are called on the
owner thread.
"""

from __future__ import annotations

from kconsume._kafka.consumer import StartAt
from kconsume._runtime.assignment.claiming import Claiming
from kconsume._runtime.assignment.held_watch import HeldWatch
from kconsume._runtime.assignment.owned_partitions import OwnedPartitions
from kconsume._runtime.assignment.partition import OwnedPartition, State
from kconsume._runtime.assignment.partition_trouble import PartitionTrouble
from kconsume._runtime.observation.events import Events, PartitionReleased, PartitionTriedAgain
from kconsume.backends.base import Position
from kconsume.errors import KconsumeError


class Holds:
    """Holds partitions of one consumer, and releases them."""

    def __init__(self, partitions: OwnedPartitions, claiming: Claiming, watch: HeldWatch, events: Events) -> None:
        self._partitions = partitions
        self._claiming = claiming
        self._watch = watch
        self._events = events

    def put_on_hold(self, owned: OwnedPartition, error: KconsumeError, *, drains: bool = True) -> None:
        """Hold an open partition because of an error that concerns no other partition.

        Args:
            drains: whether the lane still handles the records that it already has.
        """
        if owned.state is not State.OPEN:
            return  # the claim of the partition will find the same trouble
        if owned.lane is not None and not drains:
            owned.lane.request_stop("held")
        self._partitions.add_pause(owned, "trouble")
        row = Position(owned.stored or 0, owned.epoch, owned.topic_id)
        trouble, earlier = PartitionTrouble(error, row, open_lane=True), owned.trouble
        if earlier is not None:
            is_same = earlier.code == trouble.code
            if is_same or not (earlier.is_read_again or trouble.outranks(earlier)):
                earlier.is_read_again = False  # the partition was read again and has the same trouble
                return
        self._watch.begin(owned, trouble)

    def note_progress(self, owned: OwnedPartition) -> None:
        """Note that records of a partition were finished, or that its end was reached. If the partition was being read
        again after a trouble, the trouble is over."""
        if owned.trouble is not None and owned.trouble.is_read_again:
            self._events.publish(PartitionReleased(owned.partition, owned.trouble.code))
            owned.trouble = None

    def try_again(self, owned: OwnedPartition, reason: str) -> None:
        """Claim a held partition again.

        Args:
            reason: why its trouble may be over.
        """
        assert owned.trouble is not None
        self._events.publish(PartitionTriedAgain(owned.partition, owned.trouble.code, reason))
        self._claiming.claim_again(owned, "held")

    def step(self) -> None:
        """Look at the held partitions. Cheap when there are none."""
        if not self._watch.active:
            return
        decisions = self._watch.step([o for o in self._partitions.values() if o.trouble is not None])
        for owned, reason in decisions.claim_again:
            self.try_again(owned, reason)
        for owned, error in decisions.fenced:
            self._claiming.fenced_while_held(owned, error)
        for owned in decisions.read_again:
            self._read_again(owned)

    def _read_again(self, owned: OwnedPartition) -> None:
        """Read the partition again from its watermark. Then records arrive, or the client reports the same trouble."""
        trouble, lane = owned.trouble, owned.lane
        if trouble is None or not trouble.reads_again or lane is None or lane.unfinished or not owned.progress.idle:
            return
        if lane.batch_buffer:  # the buffered records would arrive a second time, in the same batch
            return
        trouble.is_read_again = True
        owned.pause_reasons.discard("trouble")
        place = StartAt(owned.progress.watermark, owned.leader_epoch, paused=bool(owned.pause_reasons))
        self._partitions.consumer.start_at({owned.partition: place})
