"""A topic that never was ends the consumer; one that is gone, or may no longer be read, holds its partitions alone."""

from __future__ import annotations

from concurrent.futures import Future
from typing import cast

import pytest

from kconsume._runtime.assignment import topic_faults
from kconsume._runtime.assignment.holds import Holds
from kconsume._runtime.assignment.owned_partitions import OwnedPartitions
from kconsume._runtime.assignment.partition import OwnedPartition
from kconsume._runtime.assignment.topic_faults import TopicFaults
from kconsume.errors import KconsumeError, NotAuthorized, TopicNotFound
from kconsume.records import Partition

A, B, OTHER = Partition("orders", 0), Partition("orders", 1), Partition("payments", 0)
GONE, FORBIDDEN = TopicNotFound("orders is gone"), NotAuthorized("orders may not be read")


class FakeHolds:
    """Three partitions, and what was held."""

    def __init__(self) -> None:
        self.partitions = {p: OwnedPartition(p) for p in (A, B, OTHER)}
        self.held: list[tuple[Partition, KconsumeError, bool]] = []

    def put_on_hold(self, owned: OwnedPartition, error: KconsumeError, *, drains: bool) -> None:
        self.held.append((owned.partition, error, drains))


def faults(assignment: FakeHolds, *seen: str) -> TopicFaults:
    return TopicFaults(cast(OwnedPartitions, assignment.partitions), cast(Holds, assignment), seen.__contains__)


def test_a_topic_that_was_there_holds_its_partitions_and_no_other() -> None:
    assignment = FakeHolds()
    faults(assignment, "orders").hold({"orders": GONE}, has_read=True)
    assert assignment.held == [(A, GONE, False), (B, GONE, False)]


def test_a_lane_works_off_what_it_has_when_a_right_is_lost_and_the_process_ends_if_it_never_had_it() -> None:
    assignment = FakeHolds()
    faults(assignment, "orders").hold({"orders": FORBIDDEN}, has_read=True)
    assert assignment.held == [(A, FORBIDDEN, True), (B, FORBIDDEN, True)]
    with pytest.raises(NotAuthorized):
        faults(assignment, "orders").hold({"orders": FORBIDDEN}, has_read=False)


def test_a_topic_that_never_was_is_raised_but_not_before_the_survey_is_answered() -> None:
    assignment = FakeHolds()
    ours, first, second = faults(assignment), Future[None](), Future[None]()
    ours.survey_sent(first)
    ours.hold({"orders": GONE}, has_read=False)
    ours.survey_sent(second)
    assert ours.survey_answered(first) == {}, "another survey was sent since"
    second.set_result(None)
    waited = ours.survey_answered(second)
    assert waited == {"orders": GONE}
    with pytest.raises(TopicNotFound):
        ours.hold(waited, has_read=False)
    assert assignment.held == []


def test_a_topic_without_partitions_here_is_logged_once_in_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = faults(FakeHolds(), "stock")
    for _ in range(2):
        ours.hold({"stock": GONE}, has_read=True)
    assert [m.partition(" cause=")[0] for m in caplog.messages] == ["topic trouble topic=stock"]
    monkeypatch.setattr(topic_faults, "SAY_EVERY", 0.0)
    again = faults(FakeHolds(), "stock")
    for _ in range(2):
        again.hold({"stock": GONE}, has_read=True)
    assert len(caplog.messages) == 3
