"""A handler of an app as a streaming query: where it begins, how it is started, and how it ends.

Before it starts its partitions are claimed, a plan that an earlier run left unfinished is carried out as it was, and
the checkpoint folder is compared with the store.
"""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from kconsume.cluster import Cluster
from kconsume.errors import ClientFailed, ConfigurationError
from kconsume.records import Partition
from kconsume.registration import Registration
from kconsume.spark.calls import call_of
from kconsume.spark.checkpoint import CheckpointGuard, Location, files_at, qualified
from kconsume.spark.foreach import ForeachBatch
from kconsume.spark.kafka_options import source_options
from kconsume.spark.ranges import Plan, offsets_json
from kconsume.spark.refusals import check_options
from kconsume.spark.session import must_open_streams, must_run_handlers, unfit_connector

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from kconsume.app import App

_log = logging.getLogger("kconsume.spark")
_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")
_MEMBERS_LEAVE = 60.0
"""Seconds that members of the group may take to leave: one that was killed is a member until its session is over."""


class HandlerQuery:
    """A handler of the app, and its query."""

    def __init__(
        self, app: App, registration: Registration, spark: SparkSession, options: Mapping[str, str], mirror: bool
    ) -> None:
        self._app = app
        self._registration = registration
        self._spark = spark
        self._brokers = app._address()
        self.batches = ForeachBatch(
            partial(call_of, registration.binding.signature), registration.store, registration.group,
            registration.policy, self._brokers,
            app.kafka, registration.name, mirror, key=_reads(registration),
        )  # fmt: skip
        self.batches.owns_store = True  # as of a run: it opens again when it is used again
        self.batches.in_stream = True
        _must_fit(registration)
        check_options(options, self.batches.call)
        self._options = source_options(self._brokers, app.kafka, options)
        self._cluster = Cluster(self._brokers, app.kafka)
        self._location: tuple[str, Location] | None = None
        self._query: StreamingQuery | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    @property
    def name(self) -> str:
        return self._registration.name

    @property
    def query(self) -> StreamingQuery:
        assert self._query is not None
        return self._query

    # Beginning

    def prepare(self, folder: str | None) -> None:
        """Claim what is to be read, and find out where to begin."""
        batches, registration = self.batches, self._registration
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="kconsume-stream-", ignore_cleanup_errors=True)
            folder = f"file:{self._temporary.name}"
        folder = qualified(self._spark, folder)
        if batches.call.in_executors:
            must_run_handlers(self._spark)
        topics = self._topics()
        is_new = self._must_be_alone()
        batches.open(self._cluster, topics, registration.start)
        batches.survey(topics, is_new=is_new)
        must_open_streams(self._spark, {**self._options, **self._subscription()})
        batches.claim(self._partitions(topics))
        guard = CheckpointGuard(files_at(self._spark, folder), folder, self._identity())
        self._finish_pending(guard)
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
            raise unfit_connector(error) or error from error
        self.batches.started = _Started(self._query)
        if self.batches.gate.closed:  # somebody has asked to stop while it started
            self.drain(_MEMBERS_LEAVE)
        self.batches.mirror()
        _log.info("stream started group=%s handler=%s topics=%s store=%s checkpoint=%s/%s fresh=%s",
                  self._registration.group, self.name, self._registration.topics_text,
                  self._registration.store.address, folder, location.folder, location.fresh)  # fmt: skip

    def _finish_pending(self, guard: CheckpointGuard) -> None:
        """A plan that was begun and not finished is carried out as it was, so that what has its id outside of the
        transaction is the same: by Spark if the checkpoint has it, else by a read of exactly these ranges."""
        batches = self.batches
        assert batches.work is not None
        pending = batches.ledger.pending()
        if pending is None:
            return
        stored = self._stored()
        decided = [each.decide(stored.get(each.partition, -1)).value for each in pending.filled]
        if set(decided) - {"apply", "skip"}:
            _log.warning("plan dropped group=%s plan=%s: another has gone on from there", batches.group, pending)
            batches.ledger.drop()
        elif "apply" in decided and guard.peek(stored) != pending:
            _log.info("plan of an earlier run is finished first group=%s plan=%s", batches.group, pending)
            batches.work.run(self._read(pending), pending, None, _Alone(self.batches))
            batches.work.fresh = True

    def _read(self, plan: Plan) -> DataFrame:
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
        assert self.batches.work is not None
        return {p: position.next_offset for p, position in self.batches.work.positions.items()}

    def _identity(self) -> dict[str, str]:
        registration = self._registration
        return {"group": registration.group, "topics": _reads(registration)}

    def _must_be_alone(self) -> bool:
        """A group with members is consumed by an embedded app: the two would only fence each other, by turns. Answers
        whether the cluster knows no such group."""
        group, deadline, said = self._registration.group, time.monotonic() + _MEMBERS_LEAVE, False
        while True:
            try:
                known = self._cluster.group(group)
            except ClientFailed:
                return False  # who may not ask, or a mock that cannot say; the epochs keep them apart
            if known is None or not known.members:
                return known is None
            clients = ", ".join(sorted({member.client for member in known.members})[:3])
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"group {group!r} has members ({clients}), who consume its partitions: stop the embedded app "
                    f"first, then start the stream; or give one of them a group of its own"
                )
            if not said:
                _log.warning("group=%s has members (%s): waiting for them to leave", group, clients)
            said = True
            time.sleep(0.5)

    # Running and ending

    @property
    def active(self) -> bool:
        return self._query is not None and bool(self._query.isActive)

    @property
    def failed(self) -> bool:
        return not self.active and (self.batches.failure is not None or self.query.exception() is not None)

    def await_end(self) -> None:
        """Until the query has ended, however it did."""
        with suppress(Exception):  # what ended it is raised by `raise_failure`
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


class _Started:
    """A query for who stops it."""

    def __init__(self, query: StreamingQuery) -> None:
        self._query = query

    @property
    def id(self) -> str:
        return str(self._query.id)

    @property
    def active(self) -> bool:
        return bool(self._query.isActive)

    @property
    def reported(self) -> int | None:
        progress = self._query._jsq.lastProgress()
        return None if progress is None else int(progress.batchId())

    def stop(self) -> None:
        self._query.stop()


class _Alone:
    """The word of a query that is not there yet."""

    active = True

    def __init__(self, batches: ForeachBatch) -> None:
        self.pause = batches.gate.pause


def _reads(registration: Registration) -> str:
    """What a query is known by in its group: a handler may get another name."""
    return registration.pattern if registration.pattern is not None else ",".join(sorted(registration.topics))


def _must_fit(registration: Registration) -> None:
    binding = registration.binding
    if getattr(binding.signature, "columns", None) is not None or binding.signature.decoding is not None:
        raise ConfigurationError(
            f"{registration.name} takes {binding.payload}, and a stream hands records over as they came: take a plain "
            f"DataFrame or pyarrow.Table, and decode in it (from_json, from_avro)"
        )
    if binding.sends:
        raise ConfigurationError(
            f"{registration.name} sends records, which Spark does by itself: write them with df.write.format('kafka'), "
            f"or to the outbox of the transaction"
        )
    if registration.wraps:
        raise ConfigurationError(
            f"{registration.name} has an @app.wrap around it, which a stream does not call: remove it"
        )
