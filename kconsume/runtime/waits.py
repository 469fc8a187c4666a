"""What a partition that does not flow waits for, by the codes under which causes are known outside.

Pure. A partition that does not flow and waits for nothing stands still for ever, so an empty answer is a fault.
"""

from __future__ import annotations

from kconsume.runtime.holding import Holding, State

_REASONS = {"person": "paused", "pressure": "backpressure", "start": "claim_waiting"}


def flows(holding: Holding) -> bool:
    """Whether the client may deliver its records."""
    return holding.state is State.OPEN and not holding.held


def waits_for(holding: Holding, *, is_claimed: bool, can_be_confirmed: bool) -> tuple[str, ...]:
    """`is_claimed`: a claim of it is pending. `can_be_confirmed`: its row is being read, or a commit that confirms our
    membership is due or under way."""
    match holding.state:
        case State.CLAIMING:
            return ("claim_waiting",) if is_claimed else ()
        case State.EJECTED:
            return ("fenced",) if can_be_confirmed else ()
        case State.HELD:
            return () if holding.trouble is None else (holding.trouble.code,)
        case State.OPEN:
            causes = [_REASONS[reason] for reason in sorted(holding.held) if reason in _REASONS]
            if "trouble" in holding.held and holding.trouble is not None:
                causes.append(holding.trouble.code)
            return tuple(causes)
