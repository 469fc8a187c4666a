"""`foreach_batch`: a handler with kconsume's promises, for `writeStream.foreachBatch` of a person's own query.

What is known only when the first batch comes is found out then, before a record is read: the query and its checkpoint,
the brokers of its source, where the store stands. From then on the partitions are claimed, so that an embedded app or
another query of the group is fenced off, and a thread says that this one is alive and hears whether it is to stop.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from kconsume.backends.abc import FencedStore, OffsetStore, OutboxStore, Position
from kconsume.backends.commit_note import name_of
from kconsume.backends.kafka import KafkaStore
from kconsume.backends.registry import open_store
from kconsume.cluster import Cluster
from kconsume.errors import ConfigurationError, Fenced, KconsumeError
from kconsume.failures.policy import OnError, Policy, Retries
from kconsume.outlet import RelayOutlet, most_bytes, relay_settings
from kconsume.records import Partition
from kconsume.runtime.budget import Deadline
from kconsume.runtime.claims import Begin, Claims
from kconsume.runtime.errands import Errands
from kconsume.runtime.limits import Limits
from kconsume.runtime.relay import Relay
from kconsume.runtime.trouble import positions_in
from kconsume.settings import ClientValue, check_group
from kconsume.spark.calls import Call, Handler, read_call
from kconsume.spark.checkpoint import OffsetLog, files_at
from kconsume.spark.drain import Gate, Stoppable, drain, on_jvm_shutdown, on_signals
from kconsume.spark.interrupts import Interrupted, data_loss_in, interrupted, is_interrupt, texts_of
from kconsume.spark.job import Job, scopes_of
from kconsume.spark.ledger import connection_types, ledger_of
from kconsume.spark.mirror import GroupMirror
from kconsume.spark.query import Query
from kconsume.spark.ranges import OffsetRange, Plan
from kconsume.spark.refusals import check_handler, check_query, source_brokers
from kconsume.spark.session import must_run_handlers, unfit_connector
from kconsume.spark.source_log import out_of_range
from kconsume.spark.work import BatchWork

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from kconsume.spark.tasks import Task

_log = logging.getLogger("kconsume.spark")
_BEAT = 1.0
_SAID_EVERY = 10.0
_SHUTDOWN = 60.0
"""Seconds that the running batch has to end when the JVM is asked to."""


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
    """What to give to `writeStream.foreachBatch`: the handler, with each offset range applied once.

    `handler(df, …)` is called in the driver, or in executors if it is `for_each_partition`. Further parameters by type:
    the transaction of the store (`psycopg.Connection`), `Batch`, Spark's batch id (`int`). `store`: where the group's
    offsets are kept; with PostgreSQL what the handler writes through the transaction and the offsets commit together.
    `brokers` and `kafka` (properties of librdkafka) are needed if the query's source asks who is there. `mirror`: write
    the offsets to the Kafka group as well, so that lag tools see them.
    """
    check_group(group)
    if store == "kafka://" and brokers is None:
        raise ConfigurationError(
            "store='kafka://' keeps the offsets in the cluster that is consumed, which only the query knows: say "
            "foreach_batch(…, brokers='host:port')"
        )
    opened = open_store(store, brokers=brokers or "localhost:9092", kafka=kafka) if isinstance(store, str) else store
    here = dict(sys._getframe(1).f_locals)  # where the handler's annotations mean what they say

    def reading(transactions: Sequence[type], address: str) -> Call:
        return read_call(handler, transactions, address, here)

    batches = ForeachBatch(reading, opened, group, Policy(on_error, retry), brokers, kafka or {}, name, mirror)
    batches.owns_store = isinstance(store, str)
    return batches


Reading: TypeAlias = Callable[[Sequence[type], str], Call]


class PlannedClaims(Claims):
    """Claims of a query that is a person's own: a partition without a stored offset begins where the query does."""

    planned: Mapping[Partition, int] = {}

    def _starts(self, missing: Sequence[Partition], added: object) -> dict[Partition, int]:  # noqa: ARG002
        return {partition: self.planned[partition] for partition in missing}


_all: weakref.WeakSet[ForeachBatch] = weakref.WeakSet()


class ForeachBatch:
    """A handler as Spark calls it; see `foreach_batch`."""

    def __init__(
        self,
        reading: Reading,
        store: OffsetStore,
        group: str,
        policy: Policy,
        brokers: str | None,
        kafka: Mapping[str, ClientValue],
        name: str | None = None,
        mirror: bool = True,
        key: str | None = None,
    ) -> None:
        """`reading`: makes the call of the handler, given the types of the store's transaction, and its address; `key`:
        what the query is known by in its group, if not by its name."""
        self.group = group
        self.store = store
        self.owns_store = False
        """Whether it is closed with the query."""
        self.in_stream = False
        """Whether `stream` has made the query: it is checked there, and drained with the others of its app."""
        self._kafka = kafka
        self._brokers = brokers
        self._policy = policy
        self.call = reading(connection_types(store), store.address)
        self.name = name or self.call.name
        self._key = key
        self._wants_mirror = mirror and not isinstance(store, KafkaStore)
        self._closing = threading.Lock()
        self._begin()
        check_handler(self.call, policy, self.ledger, store.address)
        _all.add(self)

    def _begin(self) -> None:
        """As nothing was done yet. A query that has ended may be started again with the same handler: what follows is
        of one run of one query."""
        self.gate = Gate()
        self.failure: BaseException | None = None
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        name = self._key or self.name
        self.ledger = ledger_of(self.store, self.group, name, self.owner, by_handler=self._key is None)
        self._mirror: GroupMirror | None = None
        self._relay: Relay | None = None
        self._outlet: RelayOutlet | None = None
        self._cluster: Cluster | None = None
        self._claims: Claims | None = None
        self._log: OffsetLog | None = None
        self._query: Query | None = None
        self.started: Stoppable | None = None
        """The query for who stops it, if that is known before its first batch."""
        self.work: BatchWork | None = None
        self._forget_hook: Callable[[], None] = lambda: None
        self._over = threading.Event()
        self._done = (0, 0)
        """Batches and offsets since the last word about them."""

    def __reduce__(self) -> NoReturn:
        """With Spark Connect the handler is sent to the server, where there is neither its query nor this process."""
        raise ConfigurationError(
            "foreach_batch reads the query's checkpoint and stops it through the driver's own JVM, and with Spark "
            "Connect the handler runs elsewhere: run the driver in classic mode (spark-submit, or "
            "SparkSession.builder.master(…)), or let an embedded app hand its batches to Spark"
        )

    # As Spark calls it

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        self._must_be_of_one_query(df)
        try:
            query = self._query_of(df)
            with self.gate.batch(batch_id, query):
                self._handle(df, batch_id, query)
        except Interrupted:
            raise
        except BaseException as error:
            if isinstance(error, Exception) and self._was_interrupted(error):
                raise interrupted("it was interrupted between two calls of the handler") from None
            self.failure = error
            self.close()  # the query ends with it
            raise

    def _must_be_of_one_query(self, df: DataFrame) -> None:
        """Begin anew for a query that was started after the last one ended; refuse one that runs beside it."""
        known = self._query
        if self.in_stream or (known is not None and known.is_handled_here()):
            return
        if known is None and not self._over.is_set():
            return  # the first batch of all
        try:
            query = Query(df)
        except ConfigurationError:
            raise interrupted("it was stopped before its batch began") from None
        if known is not None:
            if query.run == known.run:
                return  # it is being stopped
            if known.active:
                raise ConfigurationError(
                    f"{self.name} was given to two queries that run at the same time: call foreach_batch for each query"
                )
        self.close()
        self._begin()

    def _was_interrupted(self, error: Exception) -> bool:
        return self._query is not None and is_interrupt(texts_of(error), active=self._query.active)

    def _handle(self, df: DataFrame, batch_id: int, query: Query) -> None:
        assert self._log is not None
        began = time.monotonic()
        plan = self._log.plan(batch_id)
        if self._claims is None:
            self.open(Cluster(self._address(query), self._kafka), sorted({p.topic for p in plan.partitions}))
        self._claim_new(plan)
        assert self.work is not None
        with query.described(f"{self.group} {self.name} {plan}"[:500]):
            applied = self.work.run(df, plan, batch_id, _Control(query, self.gate))
        self._say(plan, applied, batch_id, time.monotonic() - began)
        self.mirror()

    def _query_of(self, df: DataFrame) -> Query:
        if self._query is None:
            query = Query(df)
            self._log = OffsetLog(files_at(df.sparkSession, query.checkpoint))
            if not self.in_stream:
                check_query(query, self.call, stateful=self._log.is_stateful)
                if self.call.in_executors:
                    must_run_handlers(df.sparkSession)
                self._forget_hook = on_jvm_shutdown(df.sparkSession, self._from_the_jvm, _SHUTDOWN)
            self._query = query
        return self._query

    # Setting up and putting away

    def open(self, cluster: Cluster, topics: Sequence[str], begin: Begin | None = None) -> None:
        """Be the one query of the group on these topics. `begin`: where partitions without an offset begin; None for
        where the query does."""
        for other in list(_all):
            other._close_if_ended()
        self._cluster = cluster
        is_new = None if begin is not None else self._ask_whether_new(cluster)
        self.ledger.enter(topics)
        kind = PlannedClaims if begin is None else Claims
        self._claims = kind(self.store, cluster, self.group, self.owner, lambda _: begin or "earliest")
        self._claims.is_new = is_new is not None and is_new.result()
        if self._wants_mirror:
            self._mirror = GroupMirror(cluster, self.group, name_of(self.store))
        if self._policy.dead_letter is not None and self._policy.dead_letter.topic is not None:
            assert isinstance(self.store, OutboxStore)  # checked when it was made
            self._outlet = RelayOutlet(relay_settings(cluster.brokers, self._kafka), f"kconsume-relay-{self.group}")
            limits = Limits(cluster, self._outlet.largest_batch)
            self._relay = Relay(self.store, self.group, self._outlet, self.owner, limits)
            self._relay.start()
        self.work = BatchWork(
            Job(
                call=self.call,
                policy=self._policy,
                group=self.group,
                ledger=self.ledger,
                cluster=cluster,
                reclaim=self._reclaim,
                most_bytes=most_bytes(self._kafka),
                task=self._task if self.call.in_executors else None,
                posted=self._posted,
            )
        )
        threading.Thread(target=self._live, name=f"kconsume-stream-{self.group}", daemon=True).start()

    def _ask_whether_new(self, cluster: Cluster) -> Future[bool]:
        """Whether the cluster knows no such group: then it need not be asked for its offsets, which takes a client of
        its own. One that cannot say counts as no. Asked while the store is opened, so that neither waits for the
        other."""

        def ask() -> bool:
            try:
                return cluster.group(self.group) is None
            except KconsumeError:
                return False

        asking = Errands(f"kconsume-ask-{self.group}")
        answer = asking.send(ask)
        asking.close(0.0)  # it ends by itself
        return answer

    def claim(self, partitions: Sequence[Partition]) -> None:
        assert self._claims is not None
        assert self.work is not None
        self.ledger.also(sorted({p.topic for p in partitions}))
        claimed = self._claims.claim_all(partitions)
        self.work.positions.update(claimed)
        self._open_outboxes(claimed)

    def survey(self, topics: Sequence[str], *, is_new: bool) -> None:
        """`is_new`: the cluster knows no such group."""
        assert self._claims is not None
        self._claims.is_new = is_new
        self._claims.survey(topics)

    def close(self) -> None:
        """Let go of the group, when the query has ended."""
        with self._closing:
            if self._over.is_set():
                return
            self._over.set()
        self._forget_hook()
        if self._mirror is not None:
            self._mirror.close()
        if self._relay is not None:
            self._relay.close(Deadline(10.0))
        if self._outlet is not None:
            self._outlet.close(5.0)
        self.ledger.leave()
        if self.owns_store:
            self.store.close()

    def _close_if_ended(self) -> None:
        if self._query is not None and not self._over.is_set() and not self._query.active:
            self.close()

    def _claim_new(self, plan: Plan) -> None:
        assert self.work is not None
        new = [p for p in plan.partitions if p not in self.work.positions]
        if new:
            if isinstance(self._claims, PlannedClaims):
                self._claims.planned = plan.starts
            self.claim(new)

    def _reclaim(self, epochs: Mapping[Partition, int]) -> Mapping[Partition, Position]:
        assert self._claims is not None
        if not isinstance(self.store, FencedStore):
            return self._looked_up(epochs)
        positions = positions_in(self._claims.reclaim(epochs))
        self._open_outboxes(positions)
        return positions

    def _looked_up(self, partitions: Iterable[Partition]) -> Mapping[Partition, Position]:
        """In a store without epochs nothing can be raised: what it shows is what is done."""
        assert self.work is not None
        known = {p: self.work.positions[p] for p in partitions}
        stored = self.store.load(self.group, known)
        return {p: replace(at, next_offset=stored[p].next_offset) if p in stored else at for p, at in known.items()}

    def _open_outboxes(self, positions: Mapping[Partition, Position]) -> None:
        if self._relay is not None:
            for partition, position in positions.items():
                self._relay.open(partition, position.epoch)

    def _posted(self, rows: Mapping[Partition, int]) -> None:
        if self._relay is not None:
            for partition, count in rows.items():
                self._relay.wrote(partition, count)

    def _task(self, ranges: Mapping[Partition, OffsetRange], batch_id: int | None) -> Task:
        from kconsume.backends.postgres import PostgresStore
        from kconsume.spark.tasks import Task

        assert isinstance(self.store, PostgresStore)
        assert self.work is not None
        positions = self.work.positions
        return Task(
            address=self.store._at,
            group=self.group,
            call=self.call,
            policy=self._policy,
            ranges=dict(ranges),
            epochs={p: positions[p].epoch for p in ranges},
            scopes=scopes_of(self.group, positions),
            most_bytes=most_bytes(self._kafka),
            batch_id=batch_id,
            in_stream=self.in_stream,
        )

    def _address(self, query: Query) -> str:
        return self._brokers or source_brokers(query, self._kafka)

    # Stopping

    def drain(self, timeout: float = 60.0) -> bool:
        """Stop the query behind the batch that runs, so that none is left handled and not committed; False if that
        took longer, and the batch was interrupted: it comes again."""
        self.gate.close()
        stoppable = self.started or self._query
        in_time = True if stoppable is None else drain(stoppable, self.gate, timeout)
        self.close()
        return in_time

    def _from_the_jvm(self) -> None:
        self._forget_hook = lambda: None  # it is being run, and Java lets go of none any more
        _log.info("asked to stop by the JVM: draining within=%.0fs", _SHUTDOWN)
        self.drain(_SHUTDOWN)

    def wait(self, query: StreamingQuery, timeout: float = 60.0) -> None:
        """Until the query ends; SIGTERM and SIGINT drain it. Raises what ended it."""
        asked = threading.Event()
        with on_signals(asked.set):
            while query.isActive and not asked.is_set():
                asked.wait(0.2)
            if asked.is_set():
                self.drain(timeout)
        self.raise_failure(query)

    def raise_failure(self, query: StreamingQuery) -> None:
        if self._query is None or self.in_stream or self._query.run == str(query.runId):
            self.close()
            if self.failure is not None:
                raise self.failure
        if (error := query.exception()) is not None:
            raise self._meaning(error) or error from error

    def _meaning(self, error: Exception) -> KconsumeError | None:
        """Of what ended the query outside of the handler."""
        line = data_loss_in(texts_of(error))
        return unfit_connector(error) if line is None else out_of_range([f"Spark says: {line[:300]}"], self.group)

    # What a person sees

    def lag(self) -> dict[Partition, int]:
        """How many offsets each partition is behind its end."""
        if self._cluster is None or self.work is None:
            return {}
        positions = dict(self.work.positions)
        ends = self._cluster.edges(positions, "latest")
        return {p: max(0, ends[p] - position.next_offset) for p, position in positions.items()}

    def mirror(self) -> None:
        if self._mirror is not None and self.work is not None:
            self._mirror.offer({p: position.next_offset for p, position in self.work.positions.items()})

    def _say(self, plan: Plan, applied: Sequence[OffsetRange], batch_id: int, seconds: float) -> None:
        offsets = sum(map(len, applied))
        batches, before = self._done
        self._done = (batches + 1, before + offsets)
        if not applied and plan.filled:
            _log.info("batch skipped group=%s handler=%s batch=%d ranges=%s: the store shows its end",
                      self.group, self.name, batch_id, plan)  # fmt: skip
        elif applied:
            rate = offsets / max(seconds, 1e-9)
            _log.info("batch done group=%s handler=%s batch=%d offsets=%d rate=%.0f/s ranges=%s",
                      self.group, self.name, batch_id, offsets, rate, Plan(tuple(applied)))  # fmt: skip

    def _live(self) -> None:
        """Say that we are alive, hear whether to stop, tell how far we are."""
        said_at, over, ledger = time.monotonic(), self._over, self.ledger
        while not over.wait(_BEAT):
            try:
                if ledger.beat():
                    _log.info("asked to stop group=%s handler=%s: draining", self.group, self.name)
                    self.drain()
                    return
                if time.monotonic() - said_at > _SAID_EVERY:
                    self._tell(time.monotonic() - said_at)
                    said_at = time.monotonic()
            except Fenced as error:
                if self.failure is None:
                    self.failure = error
                _log.error("%s", error)
                if (stoppable := self.started or self._query) is not None:
                    stoppable.stop()
                return
            except KconsumeError as error:
                _log.warning("group=%s handler=%s: %s", self.group, self.name, error)

    def _tell(self, seconds: float) -> None:
        (batches, offsets), self._done = self._done, (0, 0)
        if batches:
            lag = self.lag()
            _log.info("progress group=%s handler=%s batches=%d rate=%.0f/s lag=%d worst=%d", self.group, self.name,
                      batches, offsets / seconds, sum(lag.values()), max(lag.values(), default=0))  # fmt: skip


class _Control:
    """What the work is told of its query."""

    def __init__(self, query: Query, gate: Gate) -> None:
        self._query = query
        self.pause: Callable[[float], bool] = gate.pause

    @property
    def active(self) -> bool:
        return self._query.active
