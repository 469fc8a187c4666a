"""Whether an app is healthy, and the one cause of each of its partitions.

Pure: it reads the snapshots that running consumers publish. The codes are those of `_runtime/observation/causes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kconsume._runtime.observation.snapshot import Snapshot

UNHEALTHY = frozenset((
    "store_mismatch", "topic_missing", "topic_recreated", "authorization_lost", "start_required",
    "offset_out_of_range", "unreadable_batch", "held", "store_unreachable", "dead_letter_unwritten", "outbox_blocked",
    "broker_unreachable", "coordinator_lost",
))  # fmt: skip
"""The codes with which a partition makes its app unhealthy: records do not flow, and a human or a server has to do
something. With every other code the app does what it was asked to do."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one partition, or the whole app, is as it is.

    Args:
        code: a stable code, such as `handler_running`.
        detail: the partition and the evidence, in one sentence.
    """

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class Health:
    """The health of an app.

    Args:
        ok: False if the app does not run, a consumer has failed, or a partition has one of the codes in `UNHEALTHY`.
        reasons: one for each partition; one for a consumer without partitions, or that has failed.
    """

    ok: bool
    reasons: Sequence[Reason]


NOT_RUNNING = Health(False, (Reason("not_assigned", "the app is not running"),))


def health_of(consumers: Iterable[tuple[str, Snapshot, BaseException | None]]) -> Health:
    """The health of a running app.

    Args:
        consumers: the group of each consumer, its snapshot, and its failure if it has failed.
    """
    ok, reasons = True, list[Reason]()
    for group, snapshot, failure in consumers:
        if failure is not None:
            ok = False
            reasons.append(Reason("not_assigned", f"the consumer of group {group} has failed: {failure}"))
        elif not snapshot.causes:
            reasons.append(Reason("not_assigned", f"the consumer of group {group} has no partition"))
        for partition, cause in sorted(snapshot.causes.items()):
            ok = ok and cause.code not in UNHEALTHY
            reasons.append(Reason(cause.code, f"{partition}: {cause.detail}" if cause.detail else str(partition)))
    return Health(ok, tuple(reasons))
