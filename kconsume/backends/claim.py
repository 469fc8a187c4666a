"""Code that all fenced stores share: the rule that accepts or refuses a claim, the creation of missing rows, and the
errors for refused claims and stale epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from kconsume.backends.base import ClaimTerms, Position, Positions, Refused, Start
from kconsume.errors import Fenced
from kconsume.records import Partition

ClaimResults: TypeAlias = dict[Partition, Position | Refused]


def accepts(row: Position | None, partition: Partition, owner: str, terms: ClaimTerms | None) -> bool:
    """True if a claim with these terms may take the row. The caller has locked the row.

    In one generation of a Kafka group, a partition has one owner. So a row of the same generation may be taken by its
    owner, and after a reset, which removes the owner, by any member. Any member may take a row of an earlier generation
    and a row without a generation.

    Args:
        row: None if the partition has no row.
        owner: the name of the consumer that claims.
        terms: None to accept every claim.
    """
    if terms is None:
        return True
    if terms.epochs is not None:
        return row is not None and row.epoch == terms.epochs[partition]
    if row is None or row.generation is None or row.generation < terms.generation:
        return True
    return row.generation == terms.generation and row.owner in (None, owner)


def claim_pinned(
    partitions: Iterable[Partition],
    start: Start,
    known: Iterable[Partition],
    claim: Callable[[Sequence[Partition], Positions], ClaimResults | Sequence[Partition]],
    terms: ClaimTerms | None = None,
) -> ClaimResults:
    """Claim all partitions. Creates rows for partitions that have none.

    Args:
        start: returns the positions to store for partitions that have no row. Called before and outside `claim`,
            because `start` asks Kafka, and no row must be locked meanwhile. Not called if the terms have epochs,
            because such a claim creates no rows.
        known: the partitions that have a row.
        claim: called with the sorted partitions and the positions to store. Returns the results. If some partitions
            have neither a row nor a position to store, `claim` changes nothing and returns these partitions.
    """
    wanted = sorted(partitions)
    have = set(known if terms is None or terms.epochs is None else wanted)
    missing: Sequence[Partition] = [p for p in wanted if p not in have]
    pinned: dict[Partition, Position] = {}
    while True:
        starts = start(missing) if missing else {}
        pinned.update({p: starts[p] for p in missing})
        answer = claim(wanted, pinned)
        if isinstance(answer, dict):
            return answer
        missing = answer  # the rows of these partitions were deleted meanwhile; the next round creates the rows


def granted(answers: Mapping[Partition, Position | Refused]) -> dict[Partition, Position]:
    """Return the positions if all partitions were claimed. Otherwise raise the cause of the first refusal."""
    positions: dict[Partition, Position] = {}
    for partition, answer in answers.items():
        if isinstance(answer, Refused):
            raise answer.cause
        positions[partition] = answer
    return positions


def refused(group: str, partition: Partition, terms: ClaimTerms | None, stored: Position | None) -> Refused:
    """The result for a claim that is older than the row in the store."""
    assert terms is not None, "without terms nothing is refused"
    has = "no row"
    if stored is not None:
        has = f"epoch {stored.epoch}, generation {stored.generation}, owner {stored.owner}"
    ours = f"generation {terms.generation}" if terms.epochs is None else f"epoch {terms.epochs[partition]}"
    return Refused(Fenced(f"{partition} of group {group!r} was not claimed: the claim has {ours}, the store has {has}"))


def fenced(group: str, partition: Partition, epoch: int, stored: Position | None, offset: int | None = None) -> Fenced:
    """Return the error for a row that has another epoch or offset than this process expects.

    Args:
        epoch: the epoch under which this process owns the partition.
        stored: the row; None if there is none.
        offset: the offset that the row should have; None if only the epoch was compared.
    """
    has = "no row"
    if stored is not None:
        has = f"epoch {stored.epoch} at offset {stored.next_offset}, owner {stored.owner}"
    ours = f"epoch {epoch}" if offset is None else f"epoch {epoch} at offset {offset}"
    return Fenced(
        f"{partition} of group {group!r} is no longer owned by this process: its claim has {ours}, the store has {has}"
    )
