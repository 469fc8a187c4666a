"""Exactly one cause for each partition (P12): which code it is, and which of several."""

from __future__ import annotations

from dataclasses import fields
from queue import SimpleQueue
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconsume._runtime.assignment.partition import Confirmation, OwnedPartition, PendingClaim, State
from kconsume._runtime.assignment.partition_trouble import CODES as TROUBLES
from kconsume._runtime.assignment.partition_trouble import PartitionTrouble
from kconsume._runtime.lanes.inline import InlineLanes
from kconsume._runtime.lanes.lane import Lane, Work
from kconsume._runtime.lanes.pacing import Pace
from kconsume._runtime.lanes.reports import Suspended
from kconsume._runtime.observation.causes import CODES, Cause, Facts, cause_of, flows, waits_for
from kconsume.errors import OffsetOutOfRange
from kconsume.records import Partition

PARTITION = Partition("orders", 3)
NOW = 1000.0


def in_state(state: State = State.OPEN, *pauses: str) -> OwnedPartition:
    owned = OwnedPartition(PARTITION)
    owned.state, owned.pause_reasons = state, set(pauses)
    owned.lane = Lane(
        PARTITION, InlineLanes(SimpleQueue()), cast(Work, None), epoch=1, start=0, scope="shop:A", pace=Pace(1)
    )
    return owned


def troubled(*pauses: str, state: State = State.OPEN) -> OwnedPartition:
    owned = in_state(state, *pauses)
    owned.trouble = PartitionTrouble(OffsetOutOfRange("42 is not in the log"), None, open_lane=True)
    return owned


def busy(code: str | None = None) -> OwnedPartition:
    owned = in_state()
    assert owned.lane is not None
    owned.lane.busy = True
    if code is not None:
        owned.lane.suspended = Suspended(1.0, lambda: None, code)
    return owned


def moved(seconds_ago: float, owned: OwnedPartition) -> OwnedPartition:
    owned.moved_at, owned.stored = NOW - seconds_ago, 7
    return owned


def opened(seconds_ago: float, owned: OwnedPartition) -> OwnedPartition:
    owned.opened_at = NOW - seconds_ago
    return owned


@pytest.mark.parametrize(
    ("owned", "facts", "code"),
    [
        (in_state(State.OPEN, "user"), {}, "paused"),
        (troubled("trouble"), {}, "offset_out_of_range"),
        (troubled(state=State.HELD), {}, "offset_out_of_range"),
        (in_state(State.CLAIMING), {"is_claimed": True}, "claim_waiting"),
        (in_state(State.CLAIMING), {"is_claimed": True, "store_error": "refused"}, "store_unreachable"),
        (in_state(State.OPEN, "start"), {}, "claim_waiting"),
        (in_state(State.FENCED), {"can_be_confirmed": True}, "fenced"),
        (in_state(), {"store_error": "no answer"}, "store_unreachable"),
        (in_state(), {"is_rebalancing": True}, "rebalancing"),
        (busy("dead_letter_unwritten"), {}, "dead_letter_unwritten"),
        (in_state(), {"outbox_error": "too large"}, "outbox_blocked"),
        (in_state(), {"outbox_is_full": True}, "outbox_full"),
        (busy("outbox_full"), {}, "outbox_full"),
        (busy("retrying"), {}, "retrying"),
        (busy(), {}, "handler_running"),
        (busy("throttled"), {}, "throttled"),
        (in_state(), {"waits_for_batch": True}, "throttled"),
        (in_state(State.OPEN, "pressure"), {}, "backpressure"),
        (in_state(), {"broker_error": "down"}, "broker_unreachable"),
        (in_state(), {"coordinator_is_lost": True, "is_at_end": True}, "coordinator_lost"),
        (in_state(), {"is_at_end": True}, "caught_up"),
        (in_state(), {}, "broker_unreachable"),
        (opened(3, in_state()), {}, "rebalancing"),
        (opened(3, in_state()), {"is_at_end": True}, "caught_up"),
        (opened(30, in_state()), {}, "broker_unreachable"),
        (moved(3, busy()), {}, "moving"),
        (moved(30, busy()), {}, "handler_running"),
    ],
)
def test_each_situation_has_its_code(owned: OwnedPartition, facts: dict[str, Any], code: str) -> None:
    assert cause_of(owned, Facts(**facts), NOW).code == code


def test_the_evidence_is_the_error_itself() -> None:
    assert cause_of(troubled("trouble"), Facts(), NOW) == Cause("offset_out_of_range", "42 is not in the log")
    assert cause_of(in_state(), Facts(store_error="no answer from db"), NOW).detail == "no answer from db"


def test_every_trouble_has_a_place_in_the_order() -> None:
    assert set(TROUBLES.values()) <= set(CODES)
    in_order = [code for code in CODES if code in set(TROUBLES.values())]
    assert list(dict.fromkeys(TROUBLES.values())) != [], "there are troubles to order"
    assert in_order.index("store_mismatch") < in_order.index("offset_out_of_range") < in_order.index("held")


FACTS = st.builds(
    Facts,
    **{
        field.name: st.sampled_from(["", "an error"]) if field.type == "str" else st.booleans()
        for field in fields(Facts)
    },
)
LANES = st.sampled_from([None, "idle", "busy", "retrying", "throttled", "outbox_full", "dead_letter_unwritten"])


@given(
    state=st.sampled_from(State),
    pauses=st.sets(st.sampled_from(["user", "pressure", "start", "trouble", "claim"])),
    is_troubled=st.booleans(),
    lane=LANES,
    facts=FACTS,
    seconds=st.sampled_from([None, 0.0, 9.9, 10.1]),
)
def test_exactly_one_known_code_whatever_comes_together(
    state: State, pauses: set[str], is_troubled: bool, lane: str | None, facts: Facts, seconds: float | None
) -> None:
    owned = OwnedPartition(PARTITION) if lane is None else busy(None if lane in ("busy", "idle") else lane)
    if owned.lane is not None:
        owned.lane.busy = lane != "idle"
    owned.state, owned.pause_reasons = state, pauses
    if is_troubled:
        owned.trouble = troubled().trouble
    if seconds is not None:
        moved(seconds, owned)
    cause = cause_of(owned, facts, NOW)
    assert (cause.code == "moving") == (seconds is not None and seconds < 10)
    if cause.code != "moving":
        assert cause.code in CODES
        earlier = CODES[: CODES.index(cause.code)]
        assert not set(waits_for(owned, facts)) & set(earlier), "the first that applies"


def test_a_partition_that_nothing_will_wake_waits_for_nothing() -> None:
    """The state machine looks for these: each is a bug."""
    for state in (State.CLAIMING, State.FENCED, State.HELD):
        lost = in_state(state)
        lost.claim, lost.confirmation = PendingClaim({}, lambda *_: {}), Confirmation()
        assert not flows(lost)
        assert waits_for(lost, Facts()) == {}
    assert waits_for(in_state(State.OPEN, "claim"), Facts()) == {}
