"""What users need for rebalances: listeners, assignors, state for each partition, and the history of rebalances.

The protocol with the broker is in `kconsume/_kafka/consumer.py`, which describes a rebalance from start to end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kconsume._lazy import lazily

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
    from kconsume.rebalance.events import History, Rebalance, Statistics
    from kconsume.rebalance.listeners import RebalanceListener
    from kconsume.rebalance.partition_state import AsyncPartitionState, PartitionState

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

_MODULES = dict.fromkeys(__all__, "kconsume.rebalance.assignors") | {
    "AsyncPartitionState": "kconsume.rebalance.partition_state",
    "History": "kconsume.rebalance.events",
    "PartitionState": "kconsume.rebalance.partition_state",
    "Rebalance": "kconsume.rebalance.events",
    "RebalanceListener": "kconsume.rebalance.listeners",
    "Statistics": "kconsume.rebalance.events",
}

__getattr__, __dir__ = lazily(__name__, _MODULES, globals())
