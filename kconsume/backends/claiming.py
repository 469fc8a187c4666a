"""What stores that claim have in common: which claims a row accepts, how missing rows are pinned, and what is said of
claims and epochs that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from kconsume.backends.abc import ClaimTerms, Position, Positions, Refused, Start
from kconsume.errors import Fenced
from kconsume.records import Partition

Answers: TypeAlias = dict[Partition, Position | Refused]


def accepts(row: Position | None, partition: Partition, owner: str, terms: ClaimTerms | None) -> bool:
    """Whether a claim on these terms may take the row. Pure; the caller has the row locked.

    A partition has one owner in a generation, so a row of the same generation is taken by its owner, or by anybody
    after a reset, which takes the owner away. A row without a generation was claimed by nobody who named one.
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
    claim: Callable[[Sequence[Partition], Positions], Answers | Sequence[Partition]],
    terms: ClaimTerms | None = None,
) -> Answers:
    """Claim all, with rows made for those that are not `known`. `claim` is given the partitions, sorted, and the rows
    to pin; it answers with the positions, or, having changed nothing, with partitions that turned out to have no row.

    `start` is asked before and outside `claim`: it talks to Kafka, and nobody should wait for that with rows locked.
    Where the terms name epochs, no row is made.
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
        missing = answer  # deleted meanwhile; pinned now, and there are only so many


def granted(answers: Mapping[Partition, Position | Refused]) -> dict[Partition, Position]:
    """The positions, where all must have been claimed; else the first cause is raised."""
    positions: dict[Partition, Position] = {}
    for partition, answer in answers.items():
        if isinstance(answer, Refused):
            raise answer.cause
        positions[partition] = answer
    return positions


def refused(group: str, partition: Partition, terms: ClaimTerms | None, stored: Position | None) -> Refused:
    """A claim on these terms came too late for what the store has."""
    assert terms is not None, "without terms nothing is refused"
    has = "no row"
    if stored is not None:
        has = f"epoch {stored.epoch}, generation {stored.generation}, owner {stored.owner}"
    ours = f"generation {terms.generation}" if terms.epochs is None else f"epoch {terms.epochs[partition]}"
    return Refused(Fenced(f"{partition} of group {group!r} was not claimed: we came with {ours}, the store has {has}"))


def fenced(group: str, partition: Partition, epoch: int, stored: Position | None, offset: int | None = None) -> Fenced:
    """We hold `epoch`, at `offset` if that matters, and the store has something else."""
    has = "no row"
    if stored is not None:
        has = f"epoch {stored.epoch} at offset {stored.next_offset}, owner {stored.owner}"
    ours = f"epoch {epoch}" if offset is None else f"epoch {epoch} at offset {offset}"
    return Fenced(f"{partition} of group {group!r} is not ours any more: we hold {ours}, the store has {has}")
