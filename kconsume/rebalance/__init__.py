"""Rebalances as people meet them: listeners, assignors, the coordinator on a store.

The protocol with the broker is not here: it is told, from start to end, in `kconsume/runtime/source.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kconsume.lazy import lazily

if TYPE_CHECKING:
    from kconsume.rebalance.assignors import (
        ASSIGNORS,
        Assignment,
        Assignor,
        Member,
        assign_in_turn,
        assign_ranges,
        assign_stickily,
        assignor_named,
        moved,
        skew,
        step_towards,
    )
    from kconsume.rebalance.listeners import RebalanceListener
    from kconsume.rebalance.record import History, Rebalance, Statistics
    from kconsume.rebalance.state import AsyncPartitionState, PartitionState

__all__ = [
    "ASSIGNORS",
    "Assignment",
    "Assignor",
    "AsyncPartitionState",
    "History",
    "Member",
    "PartitionState",
    "Rebalance",
    "RebalanceListener",
    "Statistics",
    "assign_in_turn",
    "assign_ranges",
    "assign_stickily",
    "assignor_named",
    "moved",
    "skew",
    "step_towards",
]

_HOMES = dict.fromkeys(__all__, "assignors") | {
    "AsyncPartitionState": "state",
    "History": "record",
    "PartitionState": "state",
    "Rebalance": "record",
    "RebalanceListener": "listeners",
    "Statistics": "record",
}

__getattr__, __dir__ = lazily(__name__, _HOMES, globals())
