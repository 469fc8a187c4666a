"""What people decorate and run: registration, settings, run and stop.

`App()` and `@app.consume` do no I/O: they read signatures and refuse what cannot work. Everything that runs is
put together from plans in `runtime/engine.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import math
import os
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

from kconsume import console, environment, logs
from kconsume.backends.abc import OffsetStore
from kconsume.backends.kafka import KafkaStore
from kconsume.backends.registry import open_store
from kconsume.cluster import Cluster
from kconsume.decoding import text_of
from kconsume.errors import ConfigurationError
from kconsume.outlet import Outlet, RelayOutlet, letter_settings, most_bytes, producer_settings, relay_settings
from kconsume.output import Outgoing, OutgoingHeaders, encoded
from kconsume.protocols import check_protocol
from kconsume.records import Partition
from kconsume.registration import Declared, Options, Registration
from kconsume.resources import Resource
from kconsume.router import Decorators
from kconsume.runtime.ending import Guard, OnFailure, raised
from kconsume.runtime.furnishing import Furnishing
from kconsume.runtime.garbage import seldom_collected
from kconsume.runtime.home import CallersLoop, Home, OwnLoop
from kconsume.runtime.interrupt import Body
from kconsume.runtime.plans import ConsumerPlan
from kconsume.runtime.running import AsyncBody, Running, in_thread
from kconsume.runtime.supervisor import Report, Shared, Supervisor
from kconsume.settings import (
    DEFAULTS,
    EMBEDDED,
    ClientValue,
    check_group,
    check_instance,
    check_overrides,
    client_settings,
)
from kconsume.spark.sink import spare_session
from kconsume.steering import Steering, must_not_go_round, must_not_share
from kconsume.wrapping import Wrap

_log = logging.getLogger("kconsume")

_AFTER_THE_SESSION = 15.0
"""Seconds that joining and claiming get, where `startup=` is not said, once nothing in the group waits any more."""


class App(Decorators, Steering):
    """A consumer application.

    `brokers`: `"host:port,..."`, or `"embedded://"` for a broker in this process. `group`: required, so that two
    services never share one by accident. `offsets`: where the group's position is kept. `kafka`: any librdkafka
    property. `instance`: the name of a static member, which keeps its partitions over a restart. `startup`: seconds
    that `running()` waits for the first claim; the session timeout and 15 more by default, 0 to enter the block at
    once. `shutdown`: seconds from the request to stop until the process is gone. `memory`: bytes of records that may be
    in flight. Each can come from a `KCONSUME_*` variable, which wins.
    """

    def __init__(
        self,
        brokers: str | None = None,
        *,
        group: str | None = None,
        offsets: str | OffsetStore = "kafka://",
        kafka: Mapping[str, ClientValue] | None = None,
        instance: str | None = None,
        startup: float | None = None,
        shutdown: float = 25.0,
        memory: int = 64 * 1024 * 1024,
    ) -> None:
        super().__init__()
        said = self._environment = environment.read(os.environ)
        brokers, group = said.brokers or brokers, said.group or group
        offsets = said.offsets or offsets
        instance = said.instance or instance
        startup = startup if said.startup is None else said.startup
        shutdown, memory = said.shutdown or shutdown, said.memory or memory
        if not brokers or not isinstance(brokers, str):
            raise ConfigurationError("App needs an address: App('localhost:9092', ...) or App('embedded://', ...)")
        if shutdown <= 0 or memory <= 0:
            raise ConfigurationError("shutdown= (seconds) and memory= (bytes) must be above zero")
        if startup is not None and not 0 <= startup < math.inf:
            raise ConfigurationError(
                f"startup={startup!r} is no number of seconds: say how long running() may wait for the first claim, "
                f"or 0 to enter the block at once"
            )
        self.brokers = brokers
        self.group = check_group(group)
        self.offsets = offsets
        self.kafka = {**(kafka or {}), **said.kafka}
        self.startup = startup
        self.shutdown = shutdown
        self.memory = memory
        self.instance = None if instance is None else check_instance(instance)
        check_overrides(self.kafka)
        check_protocol(self.kafka)
        self._stores: dict[str, OffsetStore] = {}
        self._resources: dict[object, Resource] = {}
        self._given: dict[object, object] = {}
        """Resources that tests put in the place of those declared."""
        self._outlet: Outlet | None = None
        self._sending = threading.Lock()
        self._starting = threading.Lock()
        self._store(offsets)

    def send(self, topic: str, value: object, key: bytes | str | None = None, headers: OutgoingHeaders = ()) -> None:
        """Send a record, and return when the broker has confirmed it. Inside a handler, ask for a `Sender` instead."""
        outgoing = encoded(Outgoing(value, key, headers, topic), None, self._most_bytes)
        self._outlet_to({topic}).deliver([outgoing]).result()

    # Running

    def run(self) -> None:
        """Consume until SIGTERM, SIGINT, `stop()` or a failure; then drain and leave.

        Returns when everything was drained; otherwise ends the process with an exit code (`docs/running.md`).
        A configuration that cannot work ends it too, with a sentence and 2; the cause of that `SystemExit` is the
        `ConfigurationError`. A second signal leaves at once.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "app.run() handles signals, which only the main thread can: call it there, or consume in this thread "
                "with `with app.running():`"
            )
        console.set_up_logging()
        try:
            supervisor = self._start()
        except ConfigurationError as error:
            console.tell_failure(error)
            raise SystemExit(error.exit_code) from error
        with supervisor.signals(), seldom_collected():
            console.banner(self)
            report = self._finish(supervisor)
        console.farewell(report)
        if report.unclean:
            # Abandoned handlers and a client that hangs in close() end with the process, and only so.
            console.flush()
            os._exit(report.exit_code)
        if report.exit_code:
            raise SystemExit(report.exit_code)

    def running(self, *, on_failure: OnFailure | None = None) -> Running[App]:
        """Consume while the block runs: `with` or, on the caller's event loop, `async with`.

        The block is entered when the first claim has succeeded; what is wrong until then is raised instead
        (`App(startup=...)`). A handler that fails later ends the block with its exception. Where that could go
        unnoticed, as under `async with` in a web server, the process is ended too; with `on_failure`, that is called
        with the exception instead (`docs/running.md`).
        """
        if inspect.iscoroutinefunction(on_failure):
            raise ConfigurationError(
                "on_failure= takes a plain function of one argument, the exception: in it, start what is to be awaited "
                "with asyncio.create_task"
            )
        return Running(lambda: self._running_here(on_failure), lambda: self._running_on_loop(on_failure))

    def catch_up(self, idle: float = 1.0) -> Report:
        """Consume until every partition is read to its end and nothing came for `idle` seconds."""
        supervisor = self._start()
        supervisor.stop_when_idle(idle)
        try:
            with seldom_collected():
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

    # Putting it together

    def unknown_variables(self) -> list[str]:
        """A sentence for each `KCONSUME_*` variable that nobody reads."""
        return self._environment.unknown([r.name for r in self.registrations])

    def plans(self) -> list[ConsumerPlan]:
        """What would run: one consumer for each group and store. Opens no connection, but starts an embedded broker."""
        if not self.registrations:
            raise ConfigurationError("the app has no handler: decorate a function with @app.consume('topic')")
        brokers = self._address()
        cluster = Cluster(brokers, self.kafka)
        consumers: dict[tuple[str, object, object], list[Registration]] = {}
        for registration in self.registrations:
            consumers.setdefault(registration.consumer_key, []).append(registration)
        return [self._plan(handlers, brokers, cluster) for handlers in consumers.values()]

    def _plan(self, registrations: list[Registration], brokers: str, cluster: Cluster) -> ConsumerPlan:
        one = registrations[0]
        settings = client_settings(
            brokers,
            one.group,
            self.kafka,
            instance=self.instance if one.partitions is None else None,
            embedded=self._embedded,
        )
        return ConsumerPlan(
            group=one.group,
            store=self._store_of_a_run(one, brokers, cluster),
            handlers=tuple(r.plan() for r in registrations),
            partitions=None if one.partitions is None else tuple(Partition(one.topics[0], n) for n in one.partitions),
            settings=settings,
            cluster=cluster,
            shutdown=self.shutdown,
            memory=self.memory,
            listeners=tuple(self.listeners),
        )

    @property
    def _startup(self) -> float:
        """Until the session of a member that was killed has ended, no other of its group is given partitions."""
        if self.startup is not None:
            return self.startup
        default = EMBEDDED if self._embedded else {each.name: each.value for each in DEFAULTS}
        session = self.kafka.get("session.timeout.ms", default["session.timeout.ms"])
        return float(session) / 1000 + _AFTER_THE_SESSION

    @property
    def _embedded(self) -> bool:
        return self.brokers.startswith("embedded://")

    def _address(self, more: Iterable[str] = ()) -> str:
        if not self._embedded:
            return self.brokers
        from kconsume.testing.addresses import resolve

        return resolve(self.brokers, {*more, *(topic for r in self.registrations for topic in r.all_topics)})

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

    @contextmanager
    def _running_here(self, on_failure: OnFailure | None) -> Iterator[App]:
        body = Body()
        guard = Guard(body, self.shutdown, self.stop, on_failure)
        supervisor = self._start(guard=guard)
        try:
            supervisor.await_start(self._startup)
            if supervisor.failure is None:
                with body:
                    guard.enter()
                    yield self
        except BaseException:
            guard.leave()
            supervisor.stop()
            _tell(self._finish(supervisor))
            raise
        guard.leave()
        supervisor.stop()
        _raise(self._finish(supervisor))

    @asynccontextmanager
    async def _running_on_loop(self, on_failure: OnFailure | None) -> AsyncIterator[App]:
        body, home = AsyncBody(), CallersLoop(asyncio.get_running_loop())
        guard = Guard(body, self.shutdown, self.stop, on_failure)
        supervisor, cancelled = await in_thread(
            lambda: self._start(guard=guard, home=home), hurry=lambda: self._stop_for(guard)
        )
        try:
            if cancelled is None:
                _, cancelled = await in_thread(lambda: supervisor.await_start(self._startup), hurry=supervisor.stop)
            if cancelled is not None:
                raise cancelled
            if supervisor.failure is None:
                with body:
                    guard.enter()
                    yield self
        except BaseException:
            guard.leave()
            _tell((await self._finish_off_loop(supervisor))[0])
            raise
        guard.leave()
        report, cancelled = await self._finish_off_loop(supervisor)
        if cancelled is not None:
            _tell(report)
            raise cancelled
        _raise(report)

    def _start(self, *, guard: Guard | None = None, home: Home | None = None) -> Supervisor:
        with self._starting:
            if self._supervisor is not None:
                raise ConfigurationError("this app is running already: stop it first, or make a second App")
            logs.install()
            for sentence in self.unknown_variables():
                _log.warning("%s", sentence)
            plans = self.plans()
            home = home or OwnLoop(f"kconsume-loop-{self.group}")
            furnishing = Furnishing(self._resources, self._given, home)
            outlet = self._outlet_to(set())
            relay, letters = f"kconsume-relay-{self.group}", f"kconsume-letters-{self.group}"
            relay_outlet = RelayOutlet(relay_settings(self._address(), self.kafka), relay)
            letter_outlet = Outlet(letter_settings(self._address(), self.kafka), letters, awaited=False)
            shared = Shared(home, furnishing, outlet, letter_outlet, relay_outlet, self._most_bytes)
            supervisor = self._supervisor = Supervisor(plans, self.shutdown, shared, guard)
        try:
            supervisor.start()
        except BaseException:
            self._supervisor = self._outlet = None
            raise
        return supervisor

    def _finish(self, supervisor: Supervisor) -> Report:
        try:
            return supervisor.finish()
        finally:
            self._supervisor = self._outlet = None

    def _stop_for(self, guard: Guard) -> None:
        """Stop what runs for this block; there may be another that got in first."""
        if self._supervisor is not None and self._supervisor.serves(guard):
            self._supervisor.stop()

    async def _finish_off_loop(self, supervisor: Supervisor) -> tuple[Report, asyncio.CancelledError | None]:
        """Handlers end on this loop meanwhile; it is left when they have, also by a task that was cancelled."""
        supervisor.stop()
        return await in_thread(lambda: self._finish(supervisor))

    def _outlet_to(self, topics: set[str]) -> Outlet:
        """The way out: one a run, or one for what is sent outside runs."""
        brokers = self._address(topics)
        with self._sending:
            if self._outlet is None:
                self._outlet = Outlet(producer_settings(brokers, self.kafka), f"kconsume-{self.group}")
            return self._outlet

    @property
    def _most_bytes(self) -> int:
        return most_bytes(self.kafka)

    def _check(self, options: Options) -> None:
        super()._check(options)
        if options.offsets is not None:
            self._store(options.offsets)

    def _add_handler(self, declared: Declared) -> None:
        said = self._environment.handler(declared.signature.name)
        if said:
            options = dataclasses.replace(declared.options, **said)
            options.check()
            options.check_with(declared.signature)
            declared = dataclasses.replace(declared, options=options)
        offsets = self.offsets if declared.options.offsets is None else declared.options.offsets
        registration = Registration(
            declared, declared.options.group or self.group, offsets, self._store(offsets), self._resources
        )
        self._check_conflicts(registration)
        self.registrations.append(registration)
        for hint in registration.binding.resources.values():
            if hint not in self._resources:  # only a session of Spark is there without being declared
                self._resources[hint] = spare_session()

    def _add_resource(self, resource: Resource) -> None:
        known = self._resources.get(resource.provides)
        if known is not None and known is not resource and not known.spare:  # the same one may come by two routers
            raise ConfigurationError(
                f"{known.name} and {resource.name} both provide {text_of(resource.provides)}, and handlers ask by "
                f"type: let one of them provide a type of its own, such as a subclass"
            )
        self._resources[resource.provides] = resource

    def _add_wrap(self, wrap: Wrap) -> None:
        super()._add_wrap(wrap)
        try:
            for registration in self.registrations:
                _ = registration.wraps
        except ConfigurationError:
            self._wraps.remove(wrap)
            raise

    def _check_conflicts(self, new: Registration) -> None:
        must_not_go_round([*self.registrations, new])
        for old in self.registrations:
            must_not_share(old, new, (*new.topics, *new.retry_topics))
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


def _checked(store: OffsetStore) -> OffsetStore:
    if isinstance(store, OffsetStore):
        return store
    # By its type only: a person's settings may hold a password.
    raise ConfigurationError(
        f"offsets= got a value of type {type(store).__name__}, which is not a store: give an address such as "
        f"'sqlite:///shop.db', or an object with the methods of kconsume.backends.OffsetStore"
    )


def _tell(report: Report) -> None:
    """A failure that cannot be raised, because another error is on its way: said all the same."""
    _tell_abandoned(report)
    if report.failure is not None:
        _log.error("%s", report.failure, exc_info=report.failure)


def _tell_abandoned(report: Report) -> None:
    for partition in report.abandoned:
        _log.error("abandoned partition=%s: a handler or letter not ended by the deadline; it comes again", partition)


def _raise(report: Report) -> None:
    _tell_abandoned(report)
    if report.failure is not None:
        failure = raised(report.failure)
        if failure is not report.failure:
            failure.add_note(f"kconsume: {report.failure}")
        # Without the context: it would tell of the interrupted block, which explains nothing.
        raise failure from failure.__cause__
