"""What the commits of a consumer say of the store and the coordinator: only while an offset waits for them."""

from __future__ import annotations

from queue import SimpleQueue
from typing import cast

import pytest

from kconsume._kafka.two_member_consumer import AnyConsumer
from kconsume._runtime.assignment.claiming import Claiming
from kconsume._runtime.assignment.commits import Commits
from kconsume._runtime.assignment.committer import GroupCommitter, StoreCommitter
from kconsume._runtime.assignment.holds import Holds
from kconsume._runtime.assignment.owned_partitions import OwnedPartitions
from kconsume._runtime.assignment.partition import OwnedPartition, State
from kconsume._runtime.assignment.watermark import Watermark
from kconsume._runtime.background import BackgroundThread
from kconsume._runtime.lanes.inline import InlineLanes
from kconsume._runtime.lanes.lane import Lane, Work
from kconsume._runtime.lanes.pacing import Pace
from kconsume._runtime.observation.events import Events
from kconsume.backends import MemoryStore
from kconsume.records import Partition

A = Partition("orders", 0)


def with_one_finished() -> OwnedPartitions:
    """A partition whose watermark is 1, and whose stored and mirrored offsets are 0."""
    owned = OwnedPartition(A)
    owned.state, owned.stored, owned.mirrored = State.OPEN, 0, 0
    owned.lane = Lane(A, InlineLanes(SimpleQueue()), cast(Work, None), epoch=1, start=0, scope="shop:A", pace=Pace(1))
    owned.progress = Watermark(1)
    partitions = OwnedPartitions()
    partitions[A] = owned
    return partitions


def of(partitions: OwnedPartitions, committer: object, mirror: object = None) -> Commits:
    claiming, holds = cast(Claiming, None), cast(Holds, None)
    return Commits(partitions, claiming, holds, cast(StoreCommitter, committer), cast(GroupCommitter, mirror), Events())


def test_a_store_that_did_not_answer_is_named_until_nothing_waits_for_it() -> None:
    committer = StoreCommitter(MemoryStore(), "shop", cast(BackgroundThread, None))
    partitions = with_one_finished()
    commits, said = of(partitions, committer), list[str]()
    said.append(commits.store_error)
    committer.store_error = "no answer"
    said.append(commits.store_error)
    partitions[A].stored = 1
    said.append(commits.store_error)
    partitions[A].stored = 0
    del partitions[A]
    said.append(commits.store_error)
    assert said == ["", "no answer", "", ""], "only while an offset of ours waits"


@pytest.mark.parametrize("is_mirror", [True, False])
def test_a_lost_coordinator_is_named_until_nothing_waits_for_it(is_mirror: bool) -> None:
    committer, partitions = GroupCommitter(cast(AnyConsumer, None)), with_one_finished()
    commits = of(partitions, None, committer) if is_mirror else of(partitions, committer)
    if is_mirror:
        partitions[A].stored = 1
    is_lost = [commits.coordinator_is_lost]
    committer.coordinator_is_lost = True
    is_lost.append(commits.coordinator_is_lost)
    del partitions[A]
    is_lost.append(commits.coordinator_is_lost)
    assert is_lost == [False, True, False]
