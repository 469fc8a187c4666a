"""What a handler can know of its micro-batch, and say about records that it does not want: `StreamBatch`.

A value, with a list for what was rejected. Nothing here asks Spark or a store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from kconsume.batches import Batch
from kconsume.errors import ConfigurationError, Rejected
from kconsume.spark.ranges import OffsetRange

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


class StreamBatch(Batch):
    """A micro-batch: a `Batch` that knows its ranges, and not its records, which are in the frame.

    `id` is the same for the same ranges, at every attempt and after every restart: the idempotency key for what is done
    outside of the transaction. `number` grows from batch to batch (Delta's `txnVersion`) and is the same when the same
    plan is run again; None where the store does not persist plans. `batch_id` is Spark's own, and begins at 0 again in
    a new checkpoint.
    """

    __slots__ = ("batch_id", "group", "number", "ranges", "rejected", "rejects")

    def __init__(
        self,
        group: str,
        ranges: tuple[OffsetRange, ...],
        *,
        attempt: int = 1,
        number: int | None = None,
        batch_id: int | None = None,
        rejects: bool = False,
    ) -> None:
        super().__init__((), group, attempt)
        self.group = group
        self.ranges = ranges
        self.number = number
        self.batch_id = batch_id
        self.rejects = rejects
        self.rejected: list[tuple[DataFrame | pa.Table, BaseException]] = []

    @property
    def id(self) -> str:
        return f"{self.group}:{','.join(map(str, self.ranges))}"

    def reject(self, records: DataFrame | pa.Table, reason: str | BaseException) -> None:
        """Make these records dead letters when the handler has returned, in its transaction. They must have the columns
        topic, partition and offset, and should have key, value, headers and timestamp."""
        if not self.rejects:
            raise ConfigurationError(
                "batch.reject() needs a place for dead letters: give the handler on_error=DeadLetter('orders.dlq') or "
                "DeadLetter(table='failed_orders')"
            )
        error = Rejected(reason) if isinstance(reason, str) else reason
        self.rejected.append((records, error))

    def __len__(self) -> int:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"StreamBatch({self.id})"

    def _refuse(self) -> NoReturn:
        raise ConfigurationError(
            "a batch of a Spark stream has its records in the frame, and here only its ranges: use the DataFrame"
        )
