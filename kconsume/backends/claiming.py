"""What stores that claim have in common: rows that are missing are pinned by `start`, and being fenced has words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kconsume.backends.abc import Position, Positions, Start
from kconsume.errors import Fenced
from kconsume.records import Partition


def claim_pinned(
    partitions: Iterable[Partition],
    start: Start,
    known: Iterable[Partition],
    claim: Callable[[Sequence[Partition], Positions], dict[Partition, Position] | Sequence[Partition]],
) -> dict[Partition, Position]:
    """Claim all, with rows made for those that are not `known`. `claim` is given the partitions, sorted, and the rows
    to pin; it answers with the positions, or, having changed nothing, with partitions that turned out to have no row.

    `start` is asked before and outside `claim`: it talks to Kafka, and nobody should wait for that with rows locked.
    """
    wanted = sorted(partitions)
    have = set(known)
    missing: Sequence[Partition] = [p for p in wanted if p not in have]
    pinned: dict[Partition, Position] = {}
    while True:
        starts = start(missing) if missing else {}
        pinned.update({p: starts[p] for p in missing})
        answer = claim(wanted, pinned)
        if isinstance(answer, dict):
            return answer
        missing = answer  # deleted meanwhile; pinned now, and there are only so many


def fenced(group: str, partition: Partition, epoch: int, stored: Position | None, offset: int | None = None) -> Fenced:
    """We hold `epoch`, at `offset` if that matters, and the store has something else."""
    has = "no row"
    if stored is not None:
        has = f"epoch {stored.epoch} at offset {stored.next_offset}, owner {stored.owner}"
    ours = f"epoch {epoch}" if offset is None else f"epoch {epoch} at offset {offset}"
    return Fenced(f"{partition} of group {group!r} is not ours any more: we hold {ours}, the store has {has}")
