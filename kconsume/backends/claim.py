"""Shared by all fenced stores: the rule for which claims a row accepts, the pinning of missing rows, and the errors for
refused claims and epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from kconsume.backends.base import ClaimTerms, Position, Positions, Refused, Start
from kconsume.errors import Fenced
from kconsume.records import Partition

ClaimResults: TypeAlias = dict[Partition, Position | Refused]


def accepts(row: Position | None, partition: Partition, owner: str, terms: ClaimTerms | None) -> bool:
    """Whether a claim on these terms may take the row. Pure: the caller has locked the row.

    A partition has one owner in each generation. So only its owner may take a row of the same generation. After a
    reset, which removes the owner, any member may take the row. Any member may take a row without a generation.

    Args:
        row: None if the partition has no row.
        owner: the name of the claimant.
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
    """Claim all partitions. Makes rows for partitions that have none.

    Args:
        start: returns the rows to pin. Called before and outside `claim`, because `start` asks Kafka, and no row must
            be locked meanwhile. Not called if the terms name epochs: then no row is made.
        known: the partitions that have a row.
        claim: called with the sorted partitions and the rows to pin. Returns the positions. If some partitions have no
            row, it changes nothing and returns those partitions.
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
        missing = answer  # the rows of these partitions were deleted meanwhile; they are pinned now, so the loop ends


def granted(answers: Mapping[Partition, Position | Refused]) -> dict[Partition, Position]:
    """The positions, if all were claimed. Raises the first cause otherwise."""
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
    """The error for a row that is not under our epoch.

    Args:
        epoch: the epoch that we hold.
        stored: the row; None if there is none.
        offset: the offset that the row should have, if that was compared too.
    """
    has = "no row"
    if stored is not None:
        has = f"epoch {stored.epoch} at offset {stored.next_offset}, owner {stored.owner}"
    ours = f"epoch {epoch}" if offset is None else f"epoch {epoch} at offset {offset}"
    return Fenced(
        f"{partition} of group {group!r} is no longer owned by this process: it holds {ours}, the store has {has}"
    )
