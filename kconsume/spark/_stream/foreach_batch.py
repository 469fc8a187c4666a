"""`foreach_batch`: a handler with kconsume's promises, for `writeStream.foreachBatch` of a user's own query.

The query, its checkpoint, the brokers of its source and the stored offsets are known only when the first batch comes.
The first batch looks them up and checks them before a record is read, and claims the partitions, which fences an
embedded app or another query of the group. From then on a heartbeat thread records that the query is alive and receives
requests to stop.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from kconsume._config.client_settings import ClientValue, check_group
from kconsume._config.options import StartPolicy
from kconsume._event_log import EventLog
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.producer import most_bytes
from kconsume.backends.base import OffsetStore
from kconsume.backends.kafka import KafkaStore
from kconsume.backends.registry import open_store
from kconsume.errors import ConfigurationError, Fenced, KconsumeError
from kconsume.failures.policy import OnError, Policy, Retries
from kconsume.records import Partition
from kconsume.spark._batch.context import BatchContext, record_id_scopes
from kconsume.spark._batch.handler_call import Handler, HandlerCall, read_call
from kconsume.spark._batch.interrupts import QueryInterrupted, data_loss_line, error_texts, interrupted, is_interrupt
from kconsume.spark._batch.ledger.base import connection_types, open_ledger
from kconsume.spark._batch.log_check import records_gone
from kconsume.spark._batch.micro_batch import MicroBatchRunner
from kconsume.spark._batch.ranges import OffsetRange
from kconsume.spark._stream.checkpoint import OffsetLog
from kconsume.spark._stream.drain import Gate, StoppableQuery, drain_query, on_jvm_shutdown, on_signals
from kconsume.spark._stream.folders import open_folder
from kconsume.spark._stream.progress import ProgressLog
from kconsume.spark._stream.query_checks import check_handler, check_query, source_brokers
from kconsume.spark._stream.query_partitions import QueryPartitions
from kconsume.spark._stream.running_query import RunningQuery
from kconsume.spark.session import check_executor_python, connector_mismatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from kconsume.spark._batch.task import Task

_log = EventLog("spark")
_HEARTBEAT_EVERY = 1.0
_JVM_SHUTDOWN_DRAIN = 60.0
"""Seconds for the running batch when the JVM is asked to end."""


def foreach_batch(
    handler: Handler,
    *,
    store: str | OffsetStore,
    group: str,
    brokers: str | None = None,
    kafka: Mapping[str, ClientValue] | None = None,
    name: str | None = None,
    retry: Retries | None = None,
    on_error: OnError = "stop",
    mirror: bool = True,
) -> ForeachBatch:
    """The function for `writeStream.foreachBatch`: calls the handler for the offsets that the store does not have yet.

    Args:
        handler: `handler(df, …)` is called in the driver, or in executors if it is marked `for_each_partition`. Further
            parameters by type: the transaction of the store (`psycopg.Connection`), `Batch`, Spark's batch id (`int`).
        store: where the group's offsets are kept, an address or a store. With PostgreSQL, what the handler writes
            through the transaction and the offsets commit together.
        group: the consumer group to which the offsets belong.
        brokers: the brokers of the query's source. Needed if the source requires authentication, or with
            `store="kafka://"`.
        kafka: properties of librdkafka. Needed if the source requires authentication.
        name: identifies the query in its group; by default the handler's name.
        retry: how often, and after which pauses, a failed batch is tried again.
        on_error: what happens to records that still fail: `"stop"`, `"skip"` or `DeadLetter(...)`.
        mirror: True to write the offsets to the Kafka group as well, so that lag tools see them.
    """
    check_group(group)
    if store == "kafka://" and brokers is None:
        raise ConfigurationError(
            "store='kafka://' keeps the offsets in the cluster that is consumed, which only the query knows: write "
            "foreach_batch(…, brokers='host:port')"
        )
    opened = open_store(store, brokers=brokers or "localhost:9092", kafka=kafka) if isinstance(store, str) else store
    local_names = dict(sys._getframe(1).f_locals)  # the handler's annotations may use them

    def read(transactions: Sequence[type], address: str) -> HandlerCall:
        return read_call(handler, transactions, address, local_names)

    batches = ForeachBatch(read, opened, group, Policy(on_error, retry), brokers, kafka or {}, name, mirror)
    batches.owns_store = isinstance(store, str)
    return batches


CallReader: TypeAlias = Callable[[Sequence[type], str], HandlerCall]
"""Returns the call of a handler. Takes the types of the store's transaction, and the address of the store."""

_instances: weakref.WeakSet[ForeachBatch] = weakref.WeakSet()


class ForeachBatch:
    """What `foreach_batch` returns: Spark calls this object with each batch, and the object calls the handler.

    Spark calls it on a thread of the query. `drain`, `close` and `lag` may be called on any thread.
    """

    def __init__(
        self,
        call_reader: CallReader,
        store: OffsetStore,
        group: str,
        policy: Policy,
        brokers: str | None,
        kafka: Mapping[str, ClientValue],
        name: str | None = None,
        mirror: bool = True,
        key: str | None = None,
    ) -> None:
        """The parameters are those of `foreach_batch`, and:

        Args:
            call_reader: makes the call of the handler.
            policy: made of `retry` and `on_error`.
            key: identifies the query in its group, instead of its name.
        """
        self.group = group
        self.store = store
        self.owns_store = False
        """True if the store is closed with the query."""
        self.in_stream = False
        """True if `stream` made the query: `stream` checks it, and drains it with the other queries of its app."""
        self._kafka = kafka
        self._brokers = brokers
        self._policy = policy
        self.call = call_reader(connection_types(store), store.address)
        self.name = name or self.call.name
        self._key = key
        self._has_mirror = mirror and not isinstance(store, KafkaStore)
        self._closing = threading.Lock()
        self._reset()
        check_handler(self.call, policy, self.ledger, store.address)
        _instances.add(self)

    def _reset(self) -> None:
        """Set the fields of one run of one query. After a query has ended, another query may start with this object."""
        self.gate = Gate()
        self.failure: BaseException | None = None
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        name = self._key or self.name
        self.ledger = open_ledger(self.store, self.group, name, self.owner, by_handler=self._key is None)
        self.partitions = QueryPartitions(self.store, self.group, self.owner, self.ledger, self._policy, self._kafka)
        self.started: StoppableQuery | None = None
        """The query, if it is known before its first batch; for `drain`."""
        self.runner: MicroBatchRunner | None = None
        """None before `open`."""
        self._progress: ProgressLog | None = None
        self._offset_log: OffsetLog | None = None
        self._query: RunningQuery | None = None
        self._remove_hook: Callable[[], None] = lambda: None
        self.closed = threading.Event()

    def __reduce__(self) -> NoReturn:
        """Refuse Spark Connect, which would send the handler to a server without the query and this process."""
        raise ConfigurationError(
            "foreach_batch reads the query's checkpoint and stops the query through the driver's own JVM, but with "
            "Spark Connect the handler runs elsewhere: run the driver in classic mode (spark-submit, or "
            "SparkSession.builder.master(…)), or let an embedded app hand its batches to Spark"
        )

    # As Spark calls it

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        self._check_single_query(df)
        try:
            query = self._query_of(df)
            with self.gate.batch(batch_id, query):
                self._handle(df, batch_id, query)
        except QueryInterrupted:
            raise
        except BaseException as error:
            if isinstance(error, Exception) and self._was_interrupted(error):
                raise interrupted("the query was interrupted between two calls of the handler") from None
            self.failure = error
            self.close()  # Spark ends the query with this error
            raise

    def _check_single_query(self, df: DataFrame) -> None:
        """Reset for a query that was started after the last one ended. Refuse a query while another query runs."""
        known = self._query
        if self.in_stream or (known is not None and known.is_handled_here()):
            return
        if known is None and not self.closed.is_set():
            return  # the first batch
        try:
            query = RunningQuery(df)
        except ConfigurationError:
            raise interrupted("the query was stopped before its batch began") from None
        if known is not None:
            if query.run == known.run:
                return  # this run is being stopped
            if known.active:
                raise ConfigurationError(
                    f"{self.name} was given to two queries that run at the same time: call foreach_batch for each query"
                )
        self.close()
        self._reset()

    def _was_interrupted(self, error: Exception) -> bool:
        return self._query is not None and is_interrupt(error_texts(error), active=self._query.active)

    def _handle(self, df: DataFrame, batch_id: int, query: RunningQuery) -> None:
        assert self._offset_log is not None
        began = time.monotonic()
        plan = self._offset_log.plan(batch_id)
        if self.runner is None:
            brokers = self._brokers or source_brokers(query, self._kafka)
            self.open(Cluster(brokers, self._kafka), sorted({p.topic for p in plan.partitions}))
        self.partitions.claim_new(plan)
        assert self.runner is not None
        with query.job_description(f"{self.group} {self.name} {plan}"[:500]):
            applied = self.runner.run(df, plan, batch_id, _BatchControl(query, self.gate))
        assert self._progress is not None
        self._progress.batch_done(plan, applied, batch_id, time.monotonic() - began)
        self.partitions.mirror()

    def _query_of(self, df: DataFrame) -> RunningQuery:
        if self._query is None:
            query = RunningQuery(df)
            self._offset_log = OffsetLog(open_folder(df.sparkSession, query.checkpoint))
            if not self.in_stream:
                check_query(query, self.call, stateful=self._offset_log.is_stateful)
                if self.call.in_executors:
                    check_executor_python(df.sparkSession)
                self._remove_hook = on_jvm_shutdown(df.sparkSession, self._drain_for_jvm, _JVM_SHUTDOWN_DRAIN)
            self._query = query
        return self._query

    # Opening and closing

    def open(self, cluster: Cluster, topics: Sequence[str], begin: StartPolicy | None = None) -> None:
        """Register as the one query of the group on these topics, and start the heartbeat.

        Args:
            begin: where partitions without a stored offset begin; None to begin where the query begins.
        """
        for other in list(_instances):
            other._close_if_ended()
        self.partitions.open(cluster, topics, begin, mirror=self._has_mirror)
        context = BatchContext(
            call=self.call,
            policy=self._policy,
            group=self.group,
            ledger=self.ledger,
            cluster=cluster,
            reclaim=self.partitions.reclaim,
            most_bytes=most_bytes(self._kafka),
            task=self._task if self.call.in_executors else None,
            outbox_rows_committed=self.partitions.outbox_rows_committed,
        )
        self.runner = MicroBatchRunner(context, self.partitions.positions)
        self._progress = ProgressLog(self.group, self.name)
        threading.Thread(target=self._heartbeats, name=f"kconsume-stream-{self.group}", daemon=True).start()

    def _task(self, ranges: Mapping[Partition, OffsetRange], batch_id: int | None) -> Task:
        from kconsume.backends.postgres.store import PostgresStore
        from kconsume.spark._batch.task import Task

        assert isinstance(self.store, PostgresStore)
        positions = self.partitions.positions
        return Task(
            address=self.store.database.address,
            group=self.group,
            call=self.call,
            policy=self._policy,
            ranges=dict(ranges),
            epochs={p: positions[p].epoch for p in ranges},
            scopes=record_id_scopes(self.group, positions),
            most_bytes=most_bytes(self._kafka),
            batch_id=batch_id,
            in_stream=self.in_stream,
        )

    def close(self) -> None:
        """Release the group's topics and close what the query used. The query must have ended."""
        with self._closing:
            if self.closed.is_set():
                return
            self.closed.set()
        self._remove_hook()
        self.partitions.close()
        if self.owns_store:
            self.store.close()

    def _close_if_ended(self) -> None:
        if self._query is not None and not self.closed.is_set() and not self._query.active:
            self.close()

    # Stopping

    def drain(self, timeout: float = 60.0) -> bool:
        """Stop the query after its running batch, so that no batch is handled without a commit.

        Args:
            timeout: seconds for the running batch.

        Returns False if the batch took longer: the batch was interrupted, and is run again later.
        """
        self.gate.close()
        query = self.started or self._query
        in_time = True if query is None else drain_query(query, self.gate, timeout)
        self.close()
        return in_time

    def _drain_for_jvm(self) -> None:
        self._remove_hook = lambda: None  # Java cannot remove a hook while hooks run
        _log.info("stop requested", by="jvm", group=self.group, handler=self.name, drain_seconds=_JVM_SHUTDOWN_DRAIN)
        self.drain(_JVM_SHUTDOWN_DRAIN)

    def wait(self, query: StreamingQuery, timeout: float = 60.0) -> None:
        """Wait until the query ends. SIGTERM and SIGINT drain the query. Raises the error that ended the query.

        Args:
            query: what `writeStream.start()` returned.
            timeout: seconds for the running batch after a signal.
        """
        asked = threading.Event()
        with on_signals(asked.set):
            while query.isActive and not asked.is_set():
                asked.wait(0.2)
            if asked.is_set():
                self.drain(timeout)
        self.raise_failure(query)

    def raise_failure(self, query: StreamingQuery) -> None:
        """Raise the error that ended the query, if there is one."""
        if self._query is None or self.in_stream or self._query.run == str(query.runId):
            self.close()
            if self.failure is not None:
                raise self.failure
        if (error := query.exception()) is not None:
            raise self._meaning(error) or error from error

    def _meaning(self, error: Exception) -> KconsumeError | None:
        """What to raise for an error that Spark found outside of the handler; None to raise the error itself."""
        line = data_loss_line(error_texts(error))
        return connector_mismatch(error) if line is None else records_gone([f"Spark says: {line[:300]}"], self.group)

    # Observing

    def lag(self) -> dict[Partition, int]:
        """How many offsets each partition is behind the end of its log."""
        return self.partitions.lag()

    def _heartbeats(self) -> None:
        closed, ledger, progress = self.closed, self.ledger, self._progress
        assert progress is not None
        while not closed.wait(_HEARTBEAT_EVERY):
            try:
                if ledger.heartbeat():
                    _log.info("stop requested", by="request_stop", group=self.group, handler=self.name)
                    self.drain()
                    return
                progress.log_if_due(self.lag)
            except Fenced as error:
                if self.failure is None:
                    self.failure = error
                _log.error("query fenced", group=self.group, handler=self.name, cause=error)
                if (query := self.started or self._query) is not None:
                    query.stop()
                return
            except KconsumeError as error:
                _log.warning("heartbeat failed", group=self.group, handler=self.name, cause=error)


class _BatchControl:
    """The `QueryControl` of a running query."""

    def __init__(self, query: RunningQuery, gate: Gate) -> None:
        self._query = query
        self.pause: Callable[[float], bool] = gate.pause

    @property
    def active(self) -> bool:
        return self._query.active
