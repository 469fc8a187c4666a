"""Events: whoever watches is told, and can harm nobody."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import pytest

from kconsume._runtime.observation.event_lines import log_events
from kconsume._runtime.observation.events import BrokerTrouble, Events, PartitionHeld, PartitionsLost, RebalanceEnded
from kconsume.errors import HandlerFailed, OffsetOutOfRange
from kconsume.rebalance.events import Rebalance
from kconsume.records import Partition

A = Partition("orders", 0)


def test_a_subscriber_gets_its_kind_in_order_and_no_other() -> None:
    events, seen = Events(), list[object]()
    events.subscribe(PartitionsLost, lambda event: seen.append(("first", event.partitions)))
    events.subscribe(PartitionsLost, lambda event: seen.append(("second", event.partitions)))
    events.publish(BrokerTrouble(1, "down"))
    events.publish(PartitionsLost([A]))
    assert seen == [("first", [A]), ("second", [A])]


def test_a_subscriber_that_raises_is_logged_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    events, seen = Events(), list[object]()

    def broken(event: PartitionsLost) -> None:
        raise ZeroDivisionError

    events.subscribe(PartitionsLost, broken)
    events.subscribe(PartitionsLost, seen.append)
    events.publish(PartitionsLost([A]))
    assert seen == [PartitionsLost([A])]
    assert "subscriber failed watched=PartitionsLost" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_without_a_subscriber_nothing_is_formatted_or_called() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise AssertionError("nobody asked for it")

    Events().publish(PartitionHeld(A, "held", Unprintable()))


def test_a_failed_record_is_logged_with_its_traceback_and_its_command(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    log_events(events)
    error = HandlerFailed("reserve", "orders/0@7", ValueError("no such sku"))
    events.publish(PartitionHeld(A, "held", error, f"see it again: {error.try_command}"))
    events.publish(PartitionHeld(A, "offset_out_of_range", OffsetOutOfRange("42 is gone"), "", 61.2))
    first, second = caplog.records
    assert first.getMessage().startswith("partition held partition=orders/0 code=held")
    assert first.exc_info is not None
    assert "ValueError: no such sku" in caplog.text
    assert (
        second.getMessage()
        == "partition still held partition=orders/0 code=offset_out_of_range seconds=61 cause=" + ('"42 is gone"')
    )


def test_a_rebalance_in_which_nothing_moved_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    log_events(events)
    values = {"protocol": "cooperative", "began": datetime.now(UTC), "duration": 0.1, "drained": 0, "dropped": 0}
    still = Rebalance(reason="members", gained=(), gone=(), kept=(A,), abandoned=(), success=True, **values)  # type: ignore[arg-type]
    moved = Rebalance(reason="members", gained=(A,), gone=(), kept=(), abandoned=(), success=True, **values)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "kconsume"):
        events.publish(RebalanceEnded(still))
        assert caplog.records == []
        events.publish(RebalanceEnded(moved))
    assert [record.getMessage().partition(" reason=")[0] for record in caplog.records] == ["rebalance ended"]
