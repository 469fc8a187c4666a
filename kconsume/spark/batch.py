"""What a handler can know of its micro-batch, and say about records that it does not want: `StreamBatch`, and in
executors `RangeBatch`.

A value, with a list for what was rejected. Nothing here asks Spark or a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from kconsume.batches import Batch
from kconsume.errors import ConfigurationError, Rejected
from kconsume.records import Message
from kconsume.spark.ranges import OffsetRange

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


class StreamBatch(Batch):
    """A micro-batch: a `Batch` that knows its ranges, and not its records, which are in the frame.

    `id` is the same for the same ranges, at every attempt and after every restart: the idempotency key for what is done
    outside of the transaction. `batch_id` is Spark's own, and begins at 0 again in a new checkpoint.

    `number` is a version for a table that skips a write whose version it has seen, such as Delta's `txnVersion`. Each
    query needs a `txnAppId` of its own, for example the group and the name of the handler. A later call has a higher
    number; only the same batch, tried again or run again after a restart, has the same number. When kconsume calls the
    handler with parts of a batch to find bad records, each part has a number of its own. A search that was interrupted
    begins again with higher numbers. So the table takes each row at least once. It takes each row exactly once if the
    handler writes to it last, if the checkpoint folder is kept, and if there is no search: with `on_error="stop"`, or
    with bad records that the handler names by `reject`. `number` is None in executors, and with a store other than
    PostgreSQL.
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
        super().__init__(_InTheFrame(), group, attempt)
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

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id})"


class RangeBatch(StreamBatch):
    """In an executor, where a batch is one partition's range. Beside a table it knows the records too, as it does in an
    embedded app; beside an iterator it does not, and its first and last offsets are the bounds of the range."""

    __slots__ = ("_knows",)

    def __init__(
        self, *arguments: Any, messages: Sequence[Message] | None = None, scope: str = "", **named: Any
    ) -> None:
        """`messages` and `scope`: as for `Batch`."""
        super().__init__(*arguments, **named)
        self._knows = messages is not None
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
        return super().first if self._knows else self.ranges[0].first

    @property
    def last(self) -> int:
        return super().last if self._knows else self.ranges[0].end - 1

    @property
    def id(self) -> str:
        return Batch.id.__get__(self) if self._knows else super().id


class _InTheFrame(Sequence[Message]):
    """Stands for records that the batch does not know."""

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse()

    def __len__(self) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigurationError(
            "a micro-batch of a Spark stream can be of several partitions, and has its records in the frame: use "
            "batch.ranges (topic, partition and offsets of each) and batch.id, and the DataFrame's columns; or take a "
            "pyarrow.Table, which is of one partition and whose batch knows its records"
        )
