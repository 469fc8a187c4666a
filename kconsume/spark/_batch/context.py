"""What all micro-batches of a query share, and the classification of errors around a handler.

Values and protocols. `raise_unless_handler_failed` serves both runners, in the driver and in executors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kconsume._kafka.cluster import Cluster
from kconsume.backends.base import Position, Positions
from kconsume.errors import StoreError, StoreUnavailable
from kconsume.failures.policy import Policy
from kconsume.records import Partition
from kconsume.spark._batch.handler_call import HandlerCall
from kconsume.spark._batch.interrupts import data_loss_line, error_texts, interrupted, is_interrupt
from kconsume.spark._batch.ledger.base import Ledger
from kconsume.spark._batch.log_check import records_gone
from kconsume.spark._batch.ranges import OffsetRange, Plan

if TYPE_CHECKING:
    from kconsume.spark._batch.task import Task

_STORE_UNAVAILABLE = "kconsume.errors.StoreUnavailable"


class QueryControl(Protocol):
    """The part of a query's state that its batches use."""

    @property
    def active(self) -> bool:
        """False if the query was stopped."""
        ...

    def pause(self, seconds: float) -> bool:
        """Wait this long. Returns False if the query must end before the time is over."""
        ...


@dataclass
class BatchContext:
    """What all micro-batches of a query share."""

    call: HandlerCall
    policy: Policy
    group: str
    ledger: Ledger
    cluster: Cluster
    reclaim: Callable[[Mapping[Partition, int]], Mapping[Partition, Position]]
    """Raises the epochs of these partitions, and returns their stored positions."""
    most_bytes: int
    """The size in bytes of the largest record that the outbox takes."""
    task: Callable[[Mapping[Partition, OffsetRange], int | None], Task] | None = None
    """Makes the task for the executors; None for a handler that runs in the driver."""
    outbox_rows_committed: Callable[[Mapping[Partition, int]], None] = lambda _: None
    """Called with the number of new outbox rows of each partition."""


def raise_unless_handler_failed(
    error: Exception, control: QueryControl, ranges: Sequence[OffsetRange], group: str
) -> None:
    """Raise if the handler did not cause the error: for an interrupt, deleted records, or a failure of the store."""
    texts = error_texts(error)
    if is_interrupt(texts, active=control.active):
        raise interrupted("a job of the query was interrupted") from None
    if (line := data_loss_line(texts)) is not None:
        raise records_gone([f"{Plan(tuple(ranges))} was to be read, and Spark says: {line[:300]}"], group) from error
    if isinstance(error, StoreError):
        raise error
    if lines := [line for text in texts for line in text.splitlines() if _STORE_UNAVAILABLE in line]:
        raise StoreUnavailable(lines[0].strip()) from error


def record_id_scopes(group: str, positions: Positions) -> dict[str, str]:
    """The beginning of `Record.id`, by topic."""
    return {p.topic: f"{group}:{position.topic_id or p.topic}" for p, position in positions.items()}
