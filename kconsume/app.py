"""The app: settings, registration, start and stop.

`App()` and `@app.consume` open no connection: they read signatures, and raise if a configuration cannot work. `App`
starts a `Supervisor` with the plans of its declarations and waits for its report. `App` must not consume anything
itself.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Generic, TypeVar, cast

from kconsume import _console, _log_context
from kconsume._config import environment
from kconsume._config.app_settings import AppSettings
from kconsume._config.client_settings import ClientValue
from kconsume._config.options import HandlerOptions
from kconsume._declared import Declarations
from kconsume._event_log import EventLog
from kconsume._handlers.registration import DeclaredHandler
from kconsume._handlers.resources import Resource
from kconsume._kafka.outgoing import Outgoing, OutgoingHeaders, encoded
from kconsume._kafka.producer import Producer, RelayProducer, letter_settings, producer_settings, relay_settings
from kconsume._runtime.exit_guard import Guard, OnFailure, raised
from kconsume._runtime.gc_tuning import seldom_collected
from kconsume._runtime.handler_loop import CallersLoop, EventLoopThread, HandlerLoop
from kconsume._runtime.interrupt import InterruptibleBlock
from kconsume._runtime.plan import ConsumerPlan
from kconsume._runtime.resource_scope import ResourceScope
from kconsume._runtime.running_block import AsyncBlock, Running, in_thread
from kconsume._runtime.supervisor import AppParts, Report, Supervisor
from kconsume.backends.base import OffsetStore
from kconsume.control import RunningControl
from kconsume.errors import ConfigurationError
from kconsume.router import Decorators

_log = EventLog()

Value = TypeVar("Value")

_CLOSE_TIMEOUT = 5.0
"""Seconds for closing the producer of an override."""


class _Setting(Generic[Value]):
    """An attribute of an app that is one of its settings. A new value is checked like an argument of `App`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, app: App, owner: type) -> Value:
        return cast(Value, getattr(app.declared.settings, self._name))

    def __set__(self, app: App, value: Value) -> None:
        app.declared.settings = app.declared.settings.replaced({self._name: value})


class App(Decorators, RunningControl):
    """A consumer application.

    Each parameter can be overridden by a `KCONSUME_*` environment variable.

    Args:
        brokers: the address of the brokers, `"host:port,..."`; `"embedded://"` runs a broker in this process.
        group: the consumer group. Required, so that two services never share one by accident.
        offsets: where the group's offsets are kept: a store, or an address such as `"postgresql://host/db"`.
        kafka: librdkafka properties, passed to the client. Properties that would break a guarantee are refused
            by name.
        instance: the name of a static member, which keeps its partitions over a restart.
        startup: seconds that `running()` waits until the first partitions are assigned and claimed in the offset
            store; 0 enters the block at once. The default is the session timeout and 15 s more.
        shutdown: seconds from the request to stop until the process has ended.
        memory: bytes of records that may be in flight.
    """

    brokers = _Setting[str]()
    """The address of the brokers."""
    group = _Setting[str]()
    """The group of handlers without their own `group=`."""
    offsets = _Setting[str | OffsetStore]()
    """The offset store of handlers without their own `offsets=`."""
    kafka = _Setting[dict[str, ClientValue]]()
    """The librdkafka properties of the user."""
    instance = _Setting[str | None]()
    """The name of a static member."""
    startup = _Setting[float | None]()
    """Seconds that `running()` waits for the first partitions; None for the default."""
    shutdown = _Setting[float]()
    """Seconds from the request to stop until the process has ended."""
    memory = _Setting[int]()
    """Bytes of records that may be in flight."""

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
        variables = environment.read(os.environ)
        settings = AppSettings(
            brokers=cast(str, variables.brokers or brokers),  # AppSettings raises if it is None
            group=cast(str, variables.group or group),
            offsets=variables.offsets or offsets,
            kafka={**(kafka or {}), **variables.kafka},
            instance=variables.instance or instance,
            startup=startup if variables.startup is None else variables.startup,
            shutdown=variables.shutdown or shutdown,
            memory=variables.memory or memory,
        )
        self.declared = Declarations(settings, variables)
        self._producer: Producer | None = None
        self._producer_lock = threading.Lock()
        self._start_lock = threading.Lock()

    def send(self, topic: str, value: object, key: bytes | str | None = None, headers: OutgoingHeaders = ()) -> None:
        """Send a record, and return when the broker has confirmed it. Inside a handler, use a `Sender` instead.

        Args:
            topic: the topic.
            value: bytes, str, None for a tombstone, or anything that msgspec or pydantic encodes as JSON.
            key: the key, which also chooses the partition.
            headers: a dict, or pairs of a name and a value.
        """
        outgoing = encoded(Outgoing(value, key, headers, topic), None, self.declared.max_message_bytes)
        self._producer_to({topic}).deliver([outgoing]).result()

    # Running

    def run(self) -> None:
        """Consume until SIGTERM, SIGINT, `stop()` or a failure; then drain and leave the group.

        Returns if everything was drained and nothing failed. Otherwise the process ends with an exit code
        (`docs/running.md`). A configuration that cannot work ends the process with a message and exit code 2; the cause
        of that `SystemExit` is the `ConfigurationError`. A second signal ends the process at once.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "app.run() handles signals, which only the main thread can: call it there, or consume in this thread "
                "with `with app.running():`"
            )
        _console.set_up_logging()
        try:
            supervisor = self._start()
        except ConfigurationError as error:
            _console.tell_failure(error)
            raise SystemExit(error.exit_code) from error
        with supervisor.signals(), seldom_collected():
            _console.banner(self)
            report = self._finish(supervisor)
        _console.farewell(report)
        if report.unclean:
            # Only the end of the process ends abandoned handlers and a client that hangs in close().
            _console.flush()
            os._exit(report.exit_code)
        if report.exit_code:
            raise SystemExit(report.exit_code)

    def running(self, *, on_failure: OnFailure | None = None) -> Running[App]:
        """Consume while the block runs: `with` or, on the caller's event loop, `async with`.

        The block is entered when the first partitions are assigned and claimed; an error before that is raised instead
        (`App(startup=...)`). A handler that fails later ends the block with its exception. Where that exception
        may remain unnoticed, as under `async with` in a web server, the process ends too (`docs/running.md`).

        Args:
            on_failure: called with the exception of a failed run instead of ending the process. A plain function.
        """
        if inspect.iscoroutinefunction(on_failure):
            raise ConfigurationError(
                "on_failure= takes a plain function of one argument, the exception, and got an async one: write a "
                "plain def, and start what it must await with asyncio.create_task"
            )
        return Running(lambda: self._running_here(on_failure), lambda: self._running_on_loop(on_failure))

    def catch_up(self, idle: float = 1.0) -> Report:
        """Consume until every partition is read to its end, then stop and return the report.

        Args:
            idle: seconds without a new record after which a partition counts as read to its end.
        """
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
        """Ask a running app to drain and to leave its groups. May be called on any thread, also in a handler."""
        if self._supervisor is not None:
            self._supervisor.stop()

    # Putting it together

    def unknown_variables(self) -> list[str]:
        """Return a sentence for each `KCONSUME_*` variable that is set and not read."""
        return [str(variable) for variable in self.declared.unread_variables()]

    def plans(self) -> list[ConsumerPlan]:
        """Return the plans of a run: one consumer for each group and store.

        Opens no connection, but starts an embedded broker.
        """
        return self.declared.plans(self.listeners)

    @contextmanager
    def using(self, declared: Declarations) -> Iterator[None]:
        """Use other declarations inside the block. For `kconsume.testing.override`.

        A handler that is declared inside the block is added to the former declarations at the end, because
        its module is imported only once. A producer and stores that were opened inside the block are closed.

        Args:
            declared: made by `Declarations.overridden` from this app's own.
        """
        if self._supervisor is not None:
            raise ConfigurationError(
                "this app is running, so its settings cannot be replaced: override it before it runs"
            )
        known = len(declared.registrations)
        before, producer = self._exchange(declared, None)  # a producer keeps the brokers it was created with
        try:
            yield
        finally:
            _, used = self._exchange(before, producer)
            for registration in declared.registrations[known:]:
                before.add_handler(registration.declared)
            if used is not None:
                used.close(_CLOSE_TIMEOUT)
            declared.close_stores_since(before)

    def _exchange(self, declared: Declarations, producer: Producer | None) -> tuple[Declarations, Producer | None]:
        former = self.declared, self._producer
        self.declared, self._producer = declared, producer
        return former

    @contextmanager
    def _running_here(self, on_failure: OnFailure | None) -> Iterator[App]:
        body = InterruptibleBlock()
        guard = Guard(body, self.shutdown, self.stop, on_failure)
        supervisor = self._start(guard=guard)
        try:
            supervisor.await_start(self.declared.settings.startup_seconds)
            if supervisor.failure is None:
                with body:
                    guard.enter()
                    yield self
        except BaseException:
            guard.leave()
            supervisor.stop()
            _log_failure(self._finish(supervisor))
            raise
        guard.leave()
        supervisor.stop()
        _raise(self._finish(supervisor))

    @asynccontextmanager
    async def _running_on_loop(self, on_failure: OnFailure | None) -> AsyncIterator[App]:
        body, handler_loop = AsyncBlock(), CallersLoop(asyncio.get_running_loop())
        guard = Guard(body, self.shutdown, self.stop, on_failure)
        supervisor, cancelled = await in_thread(
            lambda: self._start(guard=guard, handler_loop=handler_loop), hurry=lambda: self._stop_for(guard)
        )
        try:
            if cancelled is None:
                _, cancelled = await in_thread(
                    lambda: supervisor.await_start(self.declared.settings.startup_seconds), hurry=supervisor.stop
                )
            if cancelled is not None:
                raise cancelled
            if supervisor.failure is None:
                with body:
                    guard.enter()
                    yield self
        except BaseException:
            guard.leave()
            _log_failure((await self._finish_off_loop(supervisor))[0])
            raise
        guard.leave()
        report, cancelled = await self._finish_off_loop(supervisor)
        if cancelled is not None:
            _log_failure(report)
            raise cancelled
        _raise(report)

    def _start(self, *, guard: Guard | None = None, handler_loop: HandlerLoop | None = None) -> Supervisor:
        with self._start_lock:
            if self._supervisor is not None:
                raise ConfigurationError("this app is running already: stop it first, or make a second App")
            _log_context.install()
            for variable in self.declared.unread_variables():
                _log.warning("environment variable not read", variable=variable.name, hint=variable.hint)
            plans = self.plans()
            handler_loop = handler_loop or EventLoopThread(f"kconsume-loop-{self.group}")
            resources = ResourceScope(self.declared.resources, self.declared.ready_resources, handler_loop)
            brokers = self.declared.bootstrap_servers()
            shared = AppParts(
                handler_loop,
                resources,
                self._producer_to(set()),
                Producer(letter_settings(brokers, self.kafka), f"kconsume-letters-{self.group}", awaited=False),
                RelayProducer(relay_settings(brokers, self.kafka), f"kconsume-relay-{self.group}"),
                self.declared.max_message_bytes,
            )
            supervisor = self._supervisor = Supervisor(plans, self.shutdown, shared, guard)
        try:
            supervisor.start()
        except BaseException:
            self._supervisor = self._producer = None
            raise
        return supervisor

    def _finish(self, supervisor: Supervisor) -> Report:
        try:
            return supervisor.finish()
        finally:
            self._supervisor = self._producer = None

    def _stop_for(self, guard: Guard) -> None:
        """Stop the run if this block started it. The app may be running because of another block."""
        if self._supervisor is not None and self._supervisor.serves(guard):
            self._supervisor.stop()

    async def _finish_off_loop(self, supervisor: Supervisor) -> tuple[Report, asyncio.CancelledError | None]:
        """Stop, and wait for the report on another thread, because the handlers end on this event loop.

        If the task is cancelled, it still waits for the report, and the cancellation is returned.
        """
        supervisor.stop()
        return await in_thread(lambda: self._finish(supervisor))

    def _producer_to(self, topics: set[str]) -> Producer:
        """Return the producer of the run; outside a run, the producer of `send`."""
        brokers = self.declared.bootstrap_servers(topics)
        with self._producer_lock:
            if self._producer is None:
                self._producer = Producer(producer_settings(brokers, self.kafka), f"kconsume-{self.group}")
            return self._producer

    def _check(self, options: HandlerOptions) -> None:
        super()._check(options)
        if options.offsets is not None:
            self.declared.store(options.offsets)

    def _add_handler(self, handler: DeclaredHandler) -> None:
        self.declared.add_handler(handler)

    def _add_resource(self, resource: Resource) -> None:
        self.declared.add_resource(resource)

    def _check_wraps(self) -> None:
        for registration in self.registrations:
            _ = registration.wraps


def _log_failure(report: Report) -> None:
    """Log a failure that cannot be raised, because another exception is being raised."""
    _log_abandoned(report)
    if report.failure is not None:
        _log.error("consumer failed", error=report.failure, exc_info=report.failure)


def _log_abandoned(report: Report) -> None:
    for partition in report.abandoned:
        hint = "the handler or the dead letter was not finished at the deadline; the record is handled again"
        _log.error("handler abandoned", partition=partition, hint=hint)


def _raise(report: Report) -> None:
    _log_abandoned(report)
    if report.failure is not None:
        failure = raised(report.failure)
        if failure is not report.failure:
            failure.add_note(f"kconsume: {report.failure}")
        # `from` hides the context, which is only the exception that interrupted the block.
        raise failure from failure.__cause__
