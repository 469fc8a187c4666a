"""What the work on batches is given: the job that every batch of a query is, and a word from its query.

Values and protocols, and the one question that both ways of running a handler ask of an error: whose is it?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kconsume.backends.abc import Position, Positions
from kconsume.cluster import Cluster
from kconsume.errors import StoreError, StoreUnavailable
from kconsume.failures.policy import Policy
from kconsume.records import Partition
from kconsume.spark.calls import Call
from kconsume.spark.interrupts import data_loss_in, interrupted, is_interrupt, texts_of
from kconsume.spark.ledger import Ledger
from kconsume.spark.ranges import OffsetRange, Plan
from kconsume.spark.source_log import out_of_range

if TYPE_CHECKING:
    from kconsume.spark.tasks import Task

_STORE_AWAY = "kconsume.errors.StoreUnavailable"


class Control(Protocol):
    """What the work is told of the query that it is done for."""

    @property
    def active(self) -> bool:
        """Whether the query is still to run."""
        ...

    def pause(self, seconds: float) -> bool:
        """Wait; False if the query is to end meanwhile."""
        ...


@dataclass
class Job:
    """What is done with every batch of a query."""

    call: Call
    policy: Policy
    group: str
    ledger: Ledger
    cluster: Cluster
    reclaim: Callable[[Mapping[Partition, int]], Mapping[Partition, Position]]
    most_bytes: int
    task: Callable[[Mapping[Partition, OffsetRange], int | None], Task] | None = None
    """For a handler that is called in executors."""
    posted: Callable[[Mapping[Partition, int]], None] = lambda _: None
    """Told of rows that were left in the outbox."""


def raise_if_not_the_handlers(error: Exception, control: Control, ranges: Sequence[OffsetRange], group: str) -> None:
    """An interrupt, or records that are gone, are no failure of the handler."""
    texts = texts_of(error)
    if is_interrupt(texts, active=control.active):
        raise interrupted("its job was interrupted") from None
    if (line := data_loss_in(texts)) is not None:
        raise out_of_range([f"{Plan(tuple(ranges))} was to be read, and Spark says: {line[:300]}"], group) from error
    if isinstance(error, StoreError):
        raise error
    if away := [line for text in texts for line in text.splitlines() if _STORE_AWAY in line]:
        raise StoreUnavailable(away[0].strip()) from error


def scopes_of(group: str, positions: Positions) -> dict[str, str]:
    """The beginning of `Record.id`, by topic."""
    return {p.topic: f"{group}:{position.topic_id or p.topic}" for p, position in positions.items()}
