"""What people decorate and run: registration, settings, run and stop.

`App()` and `@app.consume` do no I/O: they read signatures and refuse what cannot work. Everything that runs is
put together from a plan in `runtime/engine.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

from kconsume import console
from kconsume.backends.abc import OffsetStore
from kconsume.backends.kafka import KafkaStore
from kconsume.backends.registry import open_store, transactions_of
from kconsume.cluster import Cluster
from kconsume.errors import ConfigurationError, HandlerFailed, InvalidHandler
from kconsume.failures.policy import OnError, Policy
from kconsume.handler import bind
from kconsume.records import Partition
from kconsume.runtime.claims import Begin
from kconsume.runtime.engine import ConsumerPlan, Engine, HandlerPlan
from kconsume.runtime.supervisor import Report, Supervisor
from kconsume.settings import ClientValue, check_group, check_overrides, client_settings, masked_address

Handler = TypeVar("Handler", bound=Callable[..., object])
Executor = Literal["thread", "inline"]


class App:
    """A consumer application.

    `brokers`: `"host:port,..."`, or `"embedded://"` for a broker in this process. `group`: required, so that two
    services never share one by accident. `offsets`: where the group's position is kept. `kafka`: any librdkafka
    property. `shutdown`: seconds from the request to stop until the process is gone. `memory`: bytes of records
    that may be in flight.
    """

    def __init__(
        self,
        brokers: str,
        *,
        group: str,
        offsets: str | OffsetStore = "kafka://",
        kafka: Mapping[str, ClientValue] | None = None,
        shutdown: float = 25.0,
        memory: int = 64 * 1024 * 1024,
    ) -> None:
        if not brokers or not isinstance(brokers, str):
            raise ConfigurationError("App needs an address: App('localhost:9092', ...) or App('embedded://', ...)")
        check_group(group)
        if shutdown <= 0 or memory <= 0:
            raise ConfigurationError("shutdown= (seconds) and memory= (bytes) must be above zero")
        self.brokers = brokers
        self.group = group
        self.offsets = offsets
        self.kafka = dict(kafka or {})
        self.shutdown = shutdown
        self.memory = memory
        check_overrides(self.kafka)
        self.registrations: list[Registration] = []
        self._stores: dict[str, OffsetStore] = {}
        self._supervisor: Supervisor | None = None
        self._store(offsets)

    def consume(
        self,
        *topics: str,
        group: str | None = None,
        offsets: str | OffsetStore | None = None,
        order: Literal["partition"] = "partition",
        concurrency: int | None = None,
        executor: Executor = "thread",
        on_error: OnError = "stop",
        start: Begin = "earliest",
        partitions: Sequence[int] | None = None,
        chunk: int | None = None,
    ) -> Callable[[Handler], Handler]:
        """Make the decorated function the handler of these topics. It stays an ordinary function.

        `concurrency`: workers, by default one for each assigned partition, up to 8. `executor`: `"inline"` runs
        the handler on the polling thread, for handlers that never wait. `start`: where a partition with no
        stored offset begins. `partitions`: take exactly these, without a group's coordination. `chunk`: at
        most so many records share a transaction.
        """
        offsets = self.offsets if offsets is None else offsets
        registration = Registration(
            topics=topics,
            group=group or self.group,
            offsets=offsets,
            store=self._store(offsets),
            policy=Policy(on_error),
            order=order,
            concurrency=concurrency,
            executor=executor,
            start=start,
            partitions=None if partitions is None else tuple(sorted(set(partitions))),
            chunk=chunk,
        )
        registration.check()

        def decorate(function: Handler) -> Handler:
            registration.bind(function, sys._getframe(1).f_locals)
            self._check_conflicts(registration)
            self.registrations.append(registration)
            return function

        return decorate

    # Running

    def run(self) -> None:
        """Consume until SIGTERM, SIGINT, `stop()` or a failure; then drain and leave.

        Returns when everything was drained; otherwise ends the process with an exit code (`docs/running.md`).
        A second signal leaves at once.
        """
        console.set_up_logging()
        supervisor = self._start(report_ends=False)
        with supervisor.signals():
            console.banner(self)
            report = self._finish(supervisor)
        console.farewell(report)
        if report.unclean:
            # Abandoned handlers and a client that hangs in close() end with the process, and only so.
            console.flush()
            os._exit(report.exit_code)
        if report.exit_code:
            raise SystemExit(report.exit_code)

    @contextmanager
    def running(self) -> Iterator[App]:
        """Consume while the block runs. A handler that fails ends the block with its exception."""
        supervisor = self._start(report_ends=False)
        try:
            with supervisor.body:
                yield self
        finally:
            supervisor.stop()
            report = self._finish(supervisor)
        _raise(report)

    def catch_up(self, idle: float = 1.0) -> Report:
        """Consume until every partition is read to its end and nothing came for `idle` seconds."""
        supervisor = self._start(report_ends=True)
        supervisor.stop_when_idle(idle)
        try:
            report = self._finish(supervisor)
        except BaseException:
            supervisor.stop()
            self._finish(supervisor)
            raise
        _raise(report)
        return report

    def stop(self) -> None:
        """Ask a running app to drain and leave. From any thread, also from a handler."""
        if self._supervisor is not None:
            self._supervisor.stop()

    # Steering

    def pause(self, *partitions: Partition | str) -> None:
        """Stop fetching these partitions until `resume`; what is in flight is finished."""
        self._steer(partitions, lambda engine, chosen: engine.pause(chosen))

    def resume(self, *partitions: Partition | str) -> None:
        self._steer(partitions, lambda engine, chosen: engine.resume(chosen))

    def seek(self, partition: Partition | str, offset: int) -> None:
        """Go on at this offset: an explicit reset, stored under a new epoch."""
        if offset < 0:
            raise ConfigurationError(f"offset {offset} is below zero: name the offset of the next record to handle")
        self._steer([partition], lambda engine, chosen: engine.seek(dict.fromkeys(chosen, offset)))

    # Putting it together

    def plans(self, *, report_ends: bool = False) -> list[ConsumerPlan]:
        """What would run: one consumer for each group and store. Opens no connection, but starts an embedded broker."""
        if not self.registrations:
            raise ConfigurationError("the app has no handler: decorate a function with @app.consume('topic')")
        brokers = self._address()
        cluster = Cluster(brokers, self.kafka)
        consumers: dict[tuple[str, object, object], list[Registration]] = {}
        for registration in self.registrations:
            consumers.setdefault(registration.consumer_key, []).append(registration)
        return [self._plan(handlers, brokers, cluster, report_ends) for handlers in consumers.values()]

    def _plan(
        self, registrations: list[Registration], brokers: str, cluster: Cluster, report_ends: bool
    ) -> ConsumerPlan:
        one = registrations[0]
        settings = client_settings(brokers, one.group, self.kafka, embedded=self._embedded, report_ends=report_ends)
        return ConsumerPlan(
            group=one.group,
            store=self._store_of_a_run(one, brokers, cluster),
            handlers=tuple(r.plan() for r in registrations),
            partitions=None if one.partitions is None else tuple(Partition(one.topics[0], n) for n in one.partitions),
            settings=settings,
            cluster=cluster,
            shutdown=self.shutdown,
            memory=self.memory,
        )

    @property
    def _embedded(self) -> bool:
        return self.brokers.startswith("embedded://")

    def _address(self) -> str:
        if not self._embedded:
            return self.brokers
        from kconsume.testing.addresses import resolve

        return resolve(self.brokers, {topic for r in self.registrations for topic in r.topics})

    def _store(self, offsets: str | OffsetStore) -> OffsetStore:
        """The store, refused here if it is none. One object an address, so that memory:// outlives a run."""
        if not isinstance(offsets, str):
            return _checked(offsets)
        if offsets not in self._stores:
            self._stores[offsets] = open_store(offsets, brokers=self.brokers, kafka=self.kafka)
        return self._stores[offsets]

    def _store_of_a_run(self, registration: Registration, brokers: str, cluster: Cluster) -> OffsetStore:
        """By its address, kafka:// is the cluster that is consumed: known when it runs, and asked by one client."""
        if isinstance(registration.offsets, str) and isinstance(registration.store, KafkaStore):
            return KafkaStore(brokers, cluster=cluster)
        return registration.store

    def _start(self, *, report_ends: bool) -> Supervisor:
        if self._supervisor is not None:
            raise ConfigurationError("this app is running already: stop it first, or make a second App")
        supervisor = Supervisor(self.plans(report_ends=report_ends), self.shutdown)
        self._supervisor = supervisor
        supervisor.start()
        return supervisor

    def _finish(self, supervisor: Supervisor) -> Report:
        try:
            return supervisor.finish()
        finally:
            self._supervisor = None

    def _steer(self, partitions: Sequence[Partition | str], act: Callable[[Engine, list[Partition]], None]) -> None:
        supervisor = self._supervisor
        if supervisor is None:
            raise ConfigurationError("the app is not running: pause, resume and seek steer a running one")
        chosen = [p if isinstance(p, Partition) else Partition.parse(p) for p in partitions]
        for engine in supervisor.engines:
            mine = [p for p in chosen if p.topic in engine.plan.topics]
            if mine:
                act(engine, mine)

    def _check_conflicts(self, new: Registration) -> None:
        for old in self.registrations:
            shared = sorted(set(old.topics) & set(new.topics))
            if shared and old.group == new.group:
                raise ConfigurationError(
                    f"{old.name} and {new.name} both handle {shared[0]!r} in group {new.group!r}, where each record "
                    f"has one handler: give one of them its own group=, or call one from the other"
                )
            if old.group == new.group and (old.partitions is not None or new.partitions is not None):
                raise ConfigurationError(
                    f"{old.name} and {new.name} share group {new.group!r}, but partitions= takes partitions without "
                    f"coordination: give the handler with partitions= a group of its own"
                )
            if old.group == new.group and old.consumer_key != new.consumer_key:
                raise ConfigurationError(
                    f"{old.name} and {new.name} share group {new.group!r} but keep its offsets in different stores: "
                    f"use one store for a group, or give one handler its own group="
                )


class Registration:
    """A handler as it was decorated."""

    def __init__(
        self,
        *,
        topics: tuple[str, ...],
        group: str,
        offsets: str | OffsetStore,
        store: OffsetStore,
        policy: Policy,
        order: str,
        concurrency: int | None,
        executor: str,
        start: Begin,
        partitions: tuple[int, ...] | None,
        chunk: int | None,
    ) -> None:
        self.topics = topics
        self.group = group
        self.offsets = offsets
        self.store = store
        """What `offsets` names, for what can be known of it without asking it."""
        self.policy = policy
        self.order = order
        self.concurrency = concurrency
        self.executor = executor
        self.start = start
        self.partitions = partitions
        self.chunk = chunk

    @property
    def name(self) -> str:
        return self.binding.name

    @property
    def store_address(self) -> str:
        return self.offsets if isinstance(self.offsets, str) else self.offsets.address

    @property
    def consumer_key(self) -> tuple[str, object, object]:
        """Handlers with the same key share one consumer."""
        return (self.group, id(self.store), self.partitions)

    def check(self) -> None:
        if not self.topics or not all(self.topics) or callable(self.topics[0]):
            raise InvalidHandler("@app.consume needs a topic: @app.consume('orders'), with the parentheses")
        for topic in self.topics:
            if not isinstance(topic, str):
                raise InvalidHandler(
                    f"@app.consume takes the names of topics, each by itself, and got {topic!r}: write "
                    f"@app.consume('orders', 'payments')"
                )
        check_group(self.group)
        if self.order != "partition":
            raise ConfigurationError(f"order={self.order!r} is unknown to this version: it keeps partition order")
        if self.executor not in ("thread", "inline"):
            raise ConfigurationError(f"executor={self.executor!r} is unknown: choose 'thread' or 'inline'")
        if self.start not in ("earliest", "latest", "error"):
            raise ConfigurationError(f"start={self.start!r} is unknown: choose 'earliest', 'latest' or 'error'")
        for name, value in (("concurrency", self.concurrency), ("chunk", self.chunk)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{name}={value} leaves nothing to run: use 1 or more, or leave it out")
        if self.partitions is not None and (len(self.topics) != 1 or not self.partitions or self.partitions[0] < 0):
            raise ConfigurationError("partitions= names partition numbers of exactly one topic: partitions=[0, 1]")

    def bind(self, function: Callable[..., object], names: Mapping[str, object]) -> None:
        self.binding = bind(function, transactions_of(self.store), masked_address(self.store_address), names)

    def plan(self) -> HandlerPlan:
        return HandlerPlan(
            self.binding, self.topics, self.policy, self.start, self.executor, self.concurrency, self.chunk
        )


def _checked(store: OffsetStore) -> OffsetStore:
    if isinstance(store, OffsetStore):
        return store
    # By its type only: a person's settings may hold a password.
    raise ConfigurationError(
        f"offsets= got a value of type {type(store).__name__}, which is not a store: give an address such as "
        f"'sqlite:///shop.db', or an object with the methods of kconsume.backends.OffsetStore"
    )


def _raise(report: Report) -> None:
    failure = report.failure
    if isinstance(failure, HandlerFailed) and failure.__cause__ is not None:
        failure.__cause__.add_note(f"kconsume: {failure}")
        failure = failure.__cause__
    if failure is not None:
        # Without the context: it would tell of the interrupted block, which explains nothing.
        raise failure from failure.__cause__
