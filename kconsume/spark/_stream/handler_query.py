"""A handler of an app as a streaming query: where it begins, how it starts, and how it ends.

Before the query starts, its partitions are claimed, a plan that an earlier run left unfinished is run with the same
ranges, and the checkpoint folder is compared with the store.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from kconsume._event_log import EventLog
from kconsume._handlers.registration import Registration
from kconsume._kafka.cluster import Cluster
from kconsume.errors import ClientFailed, ConfigurationError
from kconsume.records import Partition
from kconsume.spark._batch.handler_call import call_of_signature
from kconsume.spark._batch.ranges import Decision, Plan, offsets_json
from kconsume.spark._stream.checkpoint import CheckpointGuard, CheckpointLocation
from kconsume.spark._stream.folders import open_folder, qualified_path
from kconsume.spark._stream.foreach_batch import ForeachBatch
from kconsume.spark._stream.kafka_options import source_options
from kconsume.spark._stream.query_checks import check_options
from kconsume.spark.jvm import last_progress
from kconsume.spark.session import check_executor_python, check_source_once, connector_mismatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from kconsume.app import App

_log = EventLog("spark")
_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")
_MEMBERS_LEAVE = 60.0
"""Seconds to wait for members of the group to leave. A killed member stays until its session times out."""


class HandlerQuery:
    """The streaming query of one handler of an app."""

    def __init__(
        self, app: App, registration: Registration, spark: SparkSession, options: Mapping[str, str], mirror: bool
    ) -> None:
        self._app = app
        self._registration = registration
        self._spark = spark
        self._brokers = app.declared.bootstrap_servers()
        self.batches = ForeachBatch(
            partial(call_of_signature, registration.binding.signature),
            registration.store,
            registration.group,
            registration.policy,
            self._brokers,
            app.kafka,
            registration.name,
            mirror,
            key=_subscription_text(registration),
        )
        self.batches.owns_store = True  # `App.run` closes the store too; a closed store opens again when it is used
        self.batches.in_stream = True
        _check_registration(registration)
        check_options(options, self.batches.call)
        self._options = source_options(self._brokers, app.kafka, options)
        self._cluster = Cluster(self._brokers, app.kafka)
        self._location: tuple[str, CheckpointLocation] | None = None
        self._query: StreamingQuery | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    @property
    def name(self) -> str:
        return self._registration.name

    @property
    def query(self) -> StreamingQuery:
        assert self._query is not None
        return self._query

    # Starting

    def prepare(self, folder: str | None) -> None:
        """Claim the partitions, finish an earlier plan, and choose the checkpoint folder.

        Args:
            folder: the base folder of the checkpoint; None for a temporary one.
        """
        batches, registration = self.batches, self._registration
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="kconsume-stream-", ignore_cleanup_errors=True)
            folder = f"file:{self._temporary.name}"
        folder = qualified_path(self._spark, folder)
        if batches.call.in_executors:
            check_executor_python(self._spark)
        topics = self._topics()
        is_new = self._await_no_members()
        batches.open(self._cluster, topics, registration.options.start)
        batches.partitions.check_topics(topics, is_new=is_new)
        check_source_once(self._spark, {**self._options, **self._subscription()})
        batches.partitions.claim(self._partitions(topics))
        guard = CheckpointGuard(open_folder(self._spark, folder), folder, self._identity())
        self._finish_pending_plan(guard)
        self._location = (folder, guard.resolve(self._stored()))

    def start(self, trigger: Mapping[str, Any]) -> None:
        assert self._location is not None
        folder, location = self._location
        source = self._spark.readStream.format("kafka").options(**self._options)
        source = source.option("startingOffsets", offsets_json(self._stored()))
        for option, value in self._subscription().items():
            source = source.option(option, value)
        try:
            frame = source.load().select(*_COLUMNS)
            writer = frame.writeStream.foreachBatch(self.batches)
            writer = writer.option("checkpointLocation", f"{folder}/{location.folder}")
            writer = writer.queryName(f"{self._registration.group} {self.name} {self.batches.owner}")
            self._query = (writer.trigger(**trigger) if trigger else writer).start()
        except Exception as error:
            raise connector_mismatch(error) or error from error
        self.batches.started = _StartedQuery(self._query)
        if self.batches.gate.closed:  # a stop was requested during the start
            self.drain(_MEMBERS_LEAVE)
        self.batches.partitions.mirror()
        _log.info(
            "stream started",
            group=self._registration.group,
            handler=self.name,
            topics=self._registration.topics_text,
            store=self._registration.store.address,
            checkpoint=f"{folder}/{location.folder}",
            new_folder=location.is_new,
        )

    def _finish_pending_plan(self, guard: CheckpointGuard) -> None:
        """Run a plan that was begun and not finished, with the same ranges, before Spark plans a new batch.

        With the same ranges `Batch.id` is the same, so a handler recognises its effects outside of the transaction. If
        the checkpoint has the plan, Spark runs it. If not, this method runs it, with a batch read of exactly these
        ranges.
        """
        batches = self.batches
        assert batches.runner is not None
        pending = batches.ledger.pending_plan()
        if pending is None:
            return
        stored = self._stored()
        decisions = {each.decide(stored.get(each.partition, -1)) for each in pending.filled}
        if decisions - {Decision.APPLY, Decision.SKIP}:
            _log.warning(
                "plan dropped",
                group=batches.group,
                plan=pending,
                reason="another consumer of the group has moved the offsets",
            )
            batches.ledger.drop_plan()
        elif Decision.APPLY in decisions and guard.pending_plan(stored) != pending:
            _log.info("plan resumed", group=batches.group, plan=pending)
            batches.runner.run(self._read(pending), pending, None, _NoQueryControl(self.batches))
            batches.runner.nothing_applied = True

    def _read(self, plan: Plan) -> DataFrame:
        """The records of the plan, by a batch read."""
        topics: dict[str, list[int]] = {}
        for each in plan.filled:
            topics.setdefault(each.partition.topic, []).append(each.partition.number)
        source = self._spark.read.format("kafka").options(
            **{name: value for name, value in self._options.items() if not name.startswith("maxOffsets")}
        )
        filled = Plan(plan.filled)
        return (
            source.option("assign", msgspec.json.encode(topics).decode())
            .option("startingOffsets", offsets_json(filled.starts))
            .option("endingOffsets", offsets_json(filled.ends))
            .load()
            .select(*_COLUMNS)
        )

    def _topics(self) -> list[str]:
        registration = self._registration
        if registration.pattern is None:
            return list(registration.topics)
        pattern = re.compile(registration.pattern)
        return sorted(name for name in self._cluster.all_topics() if pattern.fullmatch(name))

    def _partitions(self, topics: Sequence[str]) -> list[Partition]:
        if self._registration.partitions is not None:
            return [Partition(topics[0], number) for number in self._registration.partitions]
        return [Partition(t, n) for t, count in self._cluster.topics(topics).items() for n in range(count)]

    def _subscription(self) -> dict[str, str]:
        registration = self._registration
        if registration.pattern is not None:
            return {"subscribePattern": f"^(?:{registration.pattern})$"}
        if registration.partitions is not None:
            numbers = ",".join(map(str, registration.partitions))
            return {"assign": f'{{"{registration.topics[0]}":[{numbers}]}}'}
        return {"subscribe": ",".join(registration.topics)}

    def _stored(self) -> dict[Partition, int]:
        return {p: position.next_offset for p, position in self.batches.partitions.positions.items()}

    def _identity(self) -> dict[str, str]:
        registration = self._registration
        return {"group": registration.group, "topics": _subscription_text(registration)}

    def _await_no_members(self) -> bool:
        """Wait until the group has no members. Returns True if the cluster does not know the group.

        A group with members is consumed by an embedded app: the app and the stream would fence each other in turns.
        """
        group, deadline, logged = self._registration.group, time.monotonic() + _MEMBERS_LEAVE, False
        while True:
            try:
                known = self._cluster.group(group)
            except ClientFailed:
                return False  # not authorized, or a mock broker without this request; epochs still fence the app
            if known is None or not known.members:
                return known is None
            clients = ", ".join(sorted({member.client for member in known.members})[:3])
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"group {group!r} has members ({clients}), who consume its partitions: stop the embedded app "
                    f"first, then start the stream; or give one of them a group of its own"
                )
            if not logged:
                _log.warning(
                    "group has members",
                    group=group,
                    clients=clients,
                    hint=f"the stream waits up to {_MEMBERS_LEAVE:g} s for them to leave; stop the embedded app",
                )
            logged = True
            time.sleep(0.5)

    # Running and ending

    @property
    def active(self) -> bool:
        return self._query is not None and bool(self._query.isActive)

    @property
    def failed(self) -> bool:
        return not self.active and (self.batches.failure is not None or self.query.exception() is not None)

    def await_end(self) -> None:
        """Wait until the query has ended, with or without an error."""
        with suppress(Exception):  # `raise_failure` raises the error
            self.query.awaitTermination()

    def drain(self, timeout: float) -> bool:
        in_time = self.batches.drain(timeout)
        self.close()
        return in_time

    def raise_failure(self) -> None:
        self.batches.raise_failure(self.query)

    def abandon(self) -> None:
        if self._query is not None:
            self._query.stop()
        self.close()

    def close(self) -> None:
        self.batches.close()
        if self._temporary is not None:
            self._temporary.cleanup()


class _StartedQuery:
    """The `StoppableQuery` of a query that was started here."""

    def __init__(self, query: StreamingQuery) -> None:
        self._query = query

    @property
    def id(self) -> str:
        return str(self._query.id)

    @property
    def active(self) -> bool:
        return bool(self._query.isActive)

    @property
    def last_reported_batch(self) -> int | None:
        progress = last_progress(self._query)
        return None if progress is None else int(progress.batchId())

    def stop(self) -> None:
        self._query.stop()


class _NoQueryControl:
    """The `QueryControl` of a plan that runs before the query starts."""

    active = True

    def __init__(self, batches: ForeachBatch) -> None:
        self.pause = batches.gate.pause


def _subscription_text(registration: Registration) -> str:
    """The topics or the pattern: identifies the query in its group, also if the handler gets another name."""
    return registration.pattern if registration.pattern is not None else ",".join(sorted(registration.topics))


def _check_registration(registration: Registration) -> None:
    """Refuse a handler that asks for something that a stream does not offer."""
    binding = registration.binding
    if binding.signature.columns is not None or binding.signature.decoding is not None:
        raise ConfigurationError(
            f"{registration.name} takes {binding.payload}, and a stream does not decode records: take a plain "
            f"DataFrame or pyarrow.Table, and decode in the handler (from_json, from_avro)"
        )
    if binding.sends:
        raise ConfigurationError(
            f"{registration.name} sends records, which a stream does not do: write them with "
            f"df.write.format('kafka'), or to the outbox of the transaction"
        )
    if registration.wraps:
        raise ConfigurationError(
            f"{registration.name} has an @app.wrap around it, which a stream does not call: remove it"
        )
