"""Why a partition is as it is: exactly one code for each partition, the same in the log, health, metrics and alerts.

Pure. `cause_of` names the first code of `CODES` that applies. A partition whose records are not delivered and that
waits for nothing would stand still for ever: for it, `waits_for` returns nothing, and that is a bug.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kconsume._runtime.assignment.partition import OwnedPartition, State

MOVING = "moving"
MOVED_RECENTLY = 10.0
"""Seconds after which a stored offset no longer counts as moving."""

CODES = (
    "not_assigned", "paused", "store_mismatch", "topic_missing", "topic_recreated", "authorization_lost",
    "start_required", "offset_out_of_range", "unreadable_batch", "held", "store_unreachable", "fenced",
    "claim_waiting", "rebalancing", "dead_letter_unwritten", "outbox_blocked", "outbox_full", "parked", "retrying",
    "handler_running", "throttled", "backpressure", "broker_unreachable", "coordinator_lost", "open_transaction",
    "caught_up",
)  # fmt: skip
"""All codes except `moving`. The first one that applies is the cause."""

_PAUSES = {"user": "paused", "pressure": "backpressure", "start": "claim_waiting"}
"""The code of each reason of a pause. The reason "trouble" has the code of the trouble."""


class Cause(NamedTuple):
    """The one cause of a partition."""

    code: str
    detail: str = ""
    """The evidence, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What `cause_of` must know of one partition, beside the partition itself."""

    is_claimed: bool = False
    """Whether a claim of the partition is pending."""
    can_be_confirmed: bool = False
    """Whether the row of the partition is being read, or a commit that confirms our membership is due or under way."""
    store_error: str = ""
    """The error of the store, if it did not answer the last claim or save."""
    is_rebalancing: bool = False
    outbox_error: str = ""
    """Why a row of the outbox is refused."""
    outbox_is_full: bool = False
    waits_for_batch: bool = False
    """Whether records wait until their batch is full or due."""
    broker_error: str = ""
    """The last error of the connections to the brokers, if nothing was fetched since."""
    coordinator_is_lost: bool = False
    """Whether the last commit to the Kafka group had no answer."""
    is_at_end: bool = False
    """Whether the end of the log was read."""


def flows(owned: OwnedPartition) -> bool:
    """Whether the client may deliver records of the partition."""
    return owned.state is State.OPEN and not owned.pause_reasons


def waits_for(owned: OwnedPartition, facts: Facts) -> Mapping[str, str]:
    """What the partition waits for if its records are not delivered: codes, each with its evidence."""
    match owned.state:
        case State.CLAIMING if facts.is_claimed and facts.store_error:
            return {"store_unreachable": facts.store_error}
        case State.CLAIMING if facts.is_claimed:
            return {"claim_waiting": "the store has not answered the claim"}
        case State.FENCED if facts.can_be_confirmed:
            return {"fenced": "another owner has claimed the row; the broker must confirm our membership"}
        case State.HELD if owned.trouble is not None:
            return {owned.trouble.code: str(owned.trouble.error)}
        case State.OPEN:
            found = {_PAUSES[reason]: "" for reason in sorted(owned.pause_reasons) if reason in _PAUSES}
            if "trouble" in owned.pause_reasons and owned.trouble is not None:
                found[owned.trouble.code] = str(owned.trouble.error)
            return found
    return {}


def cause_of(owned: OwnedPartition, facts: Facts, now: float) -> Cause:
    """The one cause of a partition that is assigned to this process.

    Args:
        now: the time on the clock of `OwnedPartition.moved_at`.
    """
    if owned.moved_at is not None and now - owned.moved_at < MOVED_RECENTLY:
        return Cause(MOVING, f"the stored offset is {owned.stored}")
    found = {**_conditions(owned, facts), **waits_for(owned, facts)}
    if not found and owned.opened_at is not None and now - owned.opened_at < MOVED_RECENTLY:
        return Cause("rebalancing", "its claim has just succeeded, and its first records are fetched")
    return next((Cause(code, found[code]) for code in CODES if code in found), _WITHOUT_ANSWER)


_WITHOUT_ANSWER = Cause("broker_unreachable", "the broker has sent neither records nor the end of the log")
"""The cause of a partition that is fetched and gets nothing."""


def _conditions(owned: OwnedPartition, facts: Facts) -> dict[str, str]:
    """The codes that apply to a partition, whether its records are delivered or not."""
    lane = owned.lane
    suspended = None if lane is None else lane.suspended
    found = {
        "store_unreachable": facts.store_error,
        "rebalancing": "a rebalance has not ended" if facts.is_rebalancing else "",
        "outbox_blocked": facts.outbox_error,
        "outbox_full": "too many rows wait in the outbox" if facts.outbox_is_full else "",
        "handler_running": "a call of the handler has not returned" if lane is not None and lane.busy else "",
        "throttled": "records wait until their batch is full or due" if facts.waits_for_batch else "",
        "broker_unreachable": facts.broker_error,
        "coordinator_lost": "the group coordinator did not answer the last commit" if facts.coordinator_is_lost else "",
        "caught_up": "the end of the log is read" if facts.is_at_end and owned.is_done else "",
    }
    if suspended is not None:
        found |= {"handler_running": "", suspended.code: _SUSPENDED[suspended.code]}
    return {code: detail for code, detail in found.items() if detail}


_SUSPENDED = {
    "retrying": "a record failed and waits for its next attempt",
    "throttled": "the rate of the handler is used up",
    "outbox_full": "too many rows wait in the outbox",
    "dead_letter_unwritten": "a dead letter is not confirmed",
}
"""Why a lane is suspended. The codes are those of the step `Wait`."""
