"""What stands still is named in the log within 30 s (P12), once, and what moves is not."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import cast

import pytest

from kconsume._kafka.two_member_consumer import AnyConsumer
from kconsume._runtime.assignment.assignment import Assignment
from kconsume._runtime.assignment.owned_partitions import OwnedPartitions
from kconsume._runtime.assignment.partition import OwnedPartition, State
from kconsume._runtime.dispatch import Dispatcher
from kconsume._runtime.observation.event_lines import log_events
from kconsume._runtime.observation.events import Events
from kconsume._runtime.observation.standstill import LOG_AGAIN_EVERY, StandstillWatch
from kconsume.records import Partition
from tests.unit.runtime.observation.test_causes import busy, in_state, moved, troubled

A, B = Partition("orders", 0), Partition("orders", 1)


class Bench:
    """A watch over partitions, each as the test makes it."""

    def __init__(self, partitions: dict[Partition, OwnedPartition]) -> None:
        self.partitions = OwnedPartitions()
        self.partitions.update(partitions)
        self.ends: set[Partition] = set()
        self.store_error = ""
        assignment = SimpleNamespace(
            partitions=self.partitions,
            claiming=SimpleNamespace(has_pending=lambda _: True),
            commits=SimpleNamespace(coordinator_is_lost=False),
            can_be_confirmed=lambda _: True,
            is_rebalancing=False,
            blocked_outboxes={},
            outbox_is_full=lambda _: False,
            store_error="",
        )
        self.assignment = assignment
        events = Events()
        log_events(events)
        self.watch = StandstillWatch(
            cast(Assignment, assignment),
            cast(Dispatcher, SimpleNamespace(waits_for_batch=lambda _: False)),
            cast(AnyConsumer, SimpleNamespace(ends=self.ends)),
            events,
        )

    def looks(self, begin: float, seconds: float) -> None:
        """As a loop does: once a second."""
        for second in range(int(seconds) + 1):
            self.watch.look(begin + second, "")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "stands still" in r.getMessage()]


def test_a_call_that_does_not_return_is_named_within_30_s_and_not_every_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench({A: busy(), B: in_state()})
    bench.ends.add(B)
    bench.looks(0, 15)
    assert lines(caplog) == [], "handlers may take their time"
    bench.looks(15, 14)
    (line,) = lines(caplog)
    assert line.startswith("partition stands still partition=orders/0 code=handler_running seconds=")
    bench.looks(30, LOG_AGAIN_EVERY - 15)
    assert len(lines(caplog)) == 1
    bench.looks(30 + LOG_AGAIN_EVERY - 15, 20)
    assert len(lines(caplog)) == 2


def test_another_cause_is_named_anew(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench({A: busy()})
    bench.looks(0, 25)
    bench.assignment.store_error = "no answer from the database"
    bench.looks(26, 25)
    assert [("handler_running" in line, "no answer" in line) for line in lines(caplog)] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize(
    "owned",
    [
        pytest.param(in_state(), id="at its end"),
        pytest.param(in_state(State.OPEN, "user"), id="paused by a user"),
        pytest.param(troubled("trouble"), id="held: logged by the one who holds it"),
    ],
)
def test_what_needs_nobody_is_not_logged(caplog: pytest.LogCaptureFixture, owned: OwnedPartition) -> None:
    bench = Bench({A: owned})
    bench.ends.add(A)
    with caplog.at_level(logging.INFO, "kconsume"):
        bench.looks(0, 60)
    assert lines(caplog) == []


def test_what_moves_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench({A: busy()})
    for second in range(100):
        moved(0, bench.partitions[A]).moved_at = float(second)
        bench.watch.look(float(second), "")
    assert lines(caplog) == []
