"""Why records of a partition are not delivered, as the codes of `why`, health, metrics and alerts.

Pure. A partition without delivery and without a cause would stand still for ever, so an empty result is a bug.
"""

from __future__ import annotations

from kconsume._runtime.assignment.partition import OwnedPartition, State

_CODES = {"user": "paused", "pressure": "backpressure", "start": "claim_waiting"}
"""The code of each reason of a pause. The reason "trouble" has the code of the trouble."""


def flows(owned: OwnedPartition) -> bool:
    """Whether the client may deliver records of the partition."""
    return owned.state is State.OPEN and not owned.pause_reasons


def waits_for(owned: OwnedPartition, *, is_claimed: bool, can_be_confirmed: bool) -> tuple[str, ...]:
    """The codes of what the partition waits for.

    Args:
        is_claimed: whether a claim of the partition is pending.
        can_be_confirmed: whether the row of the partition is being read, or a commit that confirms our membership is
            due or under way.
    """
    match owned.state:
        case State.CLAIMING:
            return ("claim_waiting",) if is_claimed else ()
        case State.FENCED:
            return ("fenced",) if can_be_confirmed else ()
        case State.HELD:
            return () if owned.trouble is None else (owned.trouble.code,)
        case State.OPEN:
            codes = [_CODES[reason] for reason in sorted(owned.pause_reasons) if reason in _CODES]
            if "trouble" in owned.pause_reasons and owned.trouble is not None:
                codes.append(owned.trouble.code)
            return tuple(codes)
