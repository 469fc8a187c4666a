"""Runs the state machine, and shows that it finds what it is for."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.machine import broken
from tests.machine.rules import Kind, Machine

SETTINGS = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
SEARCH = settings(SETTINGS, max_examples=6000, phases=[Phase.generate])
"""To find a fault that is there: as soon as it is found, the search ends."""
LONGER = settings(SEARCH, stateful_step_count=70)
"""Saves have a thread of their own, so one that is still under way when its partition goes is rare in short runs."""


def machine(kind: Kind) -> type[Machine]:
    return type(f"Machine_{kind}", (Machine,), {"kind": kind})


@pytest.mark.parametrize("kind", ["transactions", "fenced", "kafka"])
def test_every_partition_flows_in_the_end_and_none_stands_still_without_a_cause(kind: Kind) -> None:
    run_state_machine_as_test(machine(kind), settings=SETTINGS)


@pytest.mark.parametrize(
    ("fault", "kind", "found"),
    [
        (broken.a_row_has_two_writers, "transactions", "its row has two writers"),
        (broken.stale_answers_count, "fenced", "."),
        (broken.a_hung_handler_is_waited_for, "transactions", "stands still"),
        (broken.only_stored_offsets_confirm, "transactions", "does not flow, and nothing will change that"),
        (broken.claims_are_not_ordered, "fenced", "came late, and fences the member that has it"),
        (broken.the_last_save_does_not_wait, "fenced", "its row has two writers"),
        (broken.a_closed_lane_is_forgotten, "kafka", "side by side|stands still"),
        (broken.what_was_abandoned_is_awaited, "kafka", "stands still"),
        (broken.a_claim_may_be_resumed, "kafka", "paused at the client"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_it_finds_a_fault_whose_fix_is_taken_out(
    fault: broken.Fault, kind: Kind, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    search = LONGER if fault is broken.the_last_save_does_not_wait else SEARCH
    with pytest.raises(AssertionError, match=found):
        run_state_machine_as_test(machine(kind), settings=search)
