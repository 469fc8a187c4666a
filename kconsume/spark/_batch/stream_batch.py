"""The `Batch` that a handler gets under Spark: `StreamBatch` in the driver, `RangeBatch` in executors.

A batch is a value with one list that grows: the records that the handler rejected. Nothing here calls Spark or a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from kconsume._handlers.batches import Batch
from kconsume.errors import ConfigurationError, Rejected
from kconsume.records import Message
from kconsume.spark._batch.ranges import OffsetRange

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


class StreamBatch(Batch):
    """A micro-batch of Spark: its offset ranges and its identifiers. Its records are in the DataFrame.

    `id` is the same for the same ranges, at every attempt and after every restart. Use it as the idempotency key for
    work outside of the transaction. `batch_id` is Spark's own number, which begins at 0 again in a new checkpoint.

    `number` is a version for a table that skips a version that it has seen, such as Delta's `txnVersion`. Give each
    query a `txnAppId` of its own, for example the group and the name of the handler.

    - A batch that is tried again, or run again after a restart, keeps its number. Any later batch has a higher number.
    - To find bad records, kconsume calls the handler with parts of a batch. Each part has a number of its own. A search
      that was interrupted begins again with higher numbers.
    - So the table takes each row at least once. It takes each row exactly once if there is no such search, if the
      handler writes to the table last, and if the checkpoint folder is kept. There is no search with
      `on_error="stop"`, or if the handler names the bad records by `reject`.

    `number` is None in executors, and with a store other than PostgreSQL.
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
        super().__init__(_RecordsInFrame(), group, attempt)
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
        """Make these records dead letters. They are written after the handler returned, in the batch's transaction.

        Args:
            records: rows with the columns topic, partition and offset. They should also have key, value, headers and
                timestamp, which become the dead letter's.
            reason: why they are rejected, as a text or as an error; it becomes the error of the dead letters.

        Raises `ConfigurationError` if the handler has no `on_error=DeadLetter(...)`.
        """
        if not self.rejects:
            raise ConfigurationError(
                "batch.reject() needs a place for dead letters: give the handler on_error=DeadLetter('orders.dlq') or "
                "DeadLetter(table='failed_orders')"
            )
        error = Rejected(reason) if isinstance(reason, str) else reason
        self.rejected.append((records, error))

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id})"


class RangeBatch(StreamBatch):
    """The range of one partition, in an executor.

    If the handler takes a table, the batch has its records, as in an embedded app. If the handler takes an iterator,
    the batch has no records, and `first` and `last` are the bounds of the range.
    """

    __slots__ = ("_has_records",)

    def __init__(
        self, *arguments: Any, messages: Sequence[Message] | None = None, scope: str = "", **named: Any
    ) -> None:
        """messages, scope: as for `Batch`."""
        super().__init__(*arguments, **named)
        self._has_records = messages is not None
        if messages is not None:
            self._messages, self._scope = messages, scope

    @property
    def topic(self) -> str:
        return self.ranges[0].partition.topic

    @property
    def partition(self) -> int:
        return self.ranges[0].partition.number

    @property
    def first(self) -> int:
        return super().first if self._has_records else self.ranges[0].first

    @property
    def last(self) -> int:
        return super().last if self._has_records else self.ranges[0].end - 1

    @property
    def id(self) -> str:
        return Batch.id.__get__(self) if self._has_records else super().id


class _RecordsInFrame(Sequence[Message]):
    """Takes the place of the records, which are only in the DataFrame. Each access raises `ConfigurationError`."""

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse()

    def __len__(self) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigurationError(
            "the Batch of a DataFrame has no records: a micro-batch of Spark can have several partitions, and its "
            "records are in the DataFrame. Use batch.ranges (topic, partition and offsets of each), batch.id and the "
            "columns of the DataFrame; or take a pyarrow.Table, which has one partition and a Batch with records"
        )
