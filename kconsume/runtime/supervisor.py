"""From start to stop: engines, signals, one deadline for all phases, and the report at the end.

Runs on the caller's thread and never touches a consumer. A signal handler here only leaves a note: an exception
or a lock in it could destroy records or deadlock.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import FrameType

from kconsume.errors import KconsumeError, ResourceFailed, ShutdownTimeout
from kconsume.outlet import Outlet, RelayOutlet
from kconsume.records import Partition
from kconsume.runtime.budget import Deadline
from kconsume.runtime.ending import Guard, exit_code
from kconsume.runtime.engine import Engine
from kconsume.runtime.errands import Errands
from kconsume.runtime.furnishing import Furnishing
from kconsume.runtime.home import Home
from kconsume.runtime.plans import ConsumerPlan, Equipment, HandlerPlan

_log = logging.getLogger("kconsume")

_LOOK_EVERY = 0.05
_LEAST = 0.5
"""Seconds that closing something gets, also after the deadline."""


@dataclass(frozen=True, slots=True)
class Report:
    """How a run ended: what was drained, committed and left."""

    handled: int
    skipped: int
    committed: Mapping[Partition, int]
    abandoned: Sequence[Partition]
    """Partitions whose handler had not ended at the deadline."""
    hung: Sequence[str]
    """Groups whose client did not close in time."""
    seconds: float
    """From the request to stop until the end."""
    failure: BaseException | None = field(default=None)
    signal: int | None = None
    """The second signal, if one cut the drain short."""
    resources_hang: bool = False
    """Whether resources were still not closed at the deadline."""
    held: Mapping[Partition, KconsumeError] = field(default_factory=dict)
    """Partitions that were held, and what was wrong with each."""
    unsent: int = 0
    """Records that are still in the outbox, at most so many: whoever has their partitions next sends them."""

    @property
    def exit_code(self) -> int:
        if self.signal is not None:
            return 128 + self.signal
        if self.failure is not None:
            return exit_code(self.failure)
        return ShutdownTimeout.exit_code if self.abandoned or self.hung else 0

    @property
    def unclean(self) -> bool:
        """Whether threads are left behind, which only the end of the process removes."""
        return bool(self.abandoned or self.hung or self.signal or self.resources_hang)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the consumers of an app share."""

    home: Home
    furnishing: Furnishing
    outlet: Outlet
    letter_outlet: Outlet
    """The way out of letters that are handed over, and not waited for."""
    relay_outlet: RelayOutlet
    """The way out of what an outbox keeps."""
    most_bytes: int
    """Of a message that is sent."""

    def way_out(self, handler: HandlerPlan) -> Outlet:
        """Of what a handler produces."""
        if handler.outbox:
            return self.relay_outlet
        return self.letter_outlet if handler.hands_letters_over else self.outlet


class Supervisor:
    """Runs the consumers of an app."""

    def __init__(
        self,
        plans: Sequence[ConsumerPlan],
        shutdown: float,
        shared: Shared,
        guard: Guard | None = None,
    ) -> None:
        """`guard`: of the user's `with` block; told when the app has failed."""
        self._plans = plans
        self._shutdown = shutdown
        self._shared = shared
        self._news: SimpleQueue[int | None] = SimpleQueue()
        self._signals = 0
        self._deadline: Deadline | None = None
        self._asked_at = time.monotonic()
        self._hard_signal: int | None = None
        self._guard = guard
        self._trouble: BaseException | None = None
        self.engines: list[Engine] = []

    def start(self) -> None:
        """Build the resources, then consume. Nothing is consumed if one of them cannot be built."""
        # In the order in which they are asked for, the same at every start.
        wanted = dict.fromkeys(
            hint for plan in self._plans for h in plan.handlers for hint in h.binding.resources.values()
        )
        try:
            shared = self._shared
            resources = self._built(wanted)
            producing = [handler for plan in self._plans for handler in plan.handlers if handler.produces]
            for outlet in set(map(shared.way_out, producing)):
                outlet.open()  # settings that a producer cannot have are known before the first record
            equipment = Equipment(
                shared.home,
                shared.outlet,
                resources,
                shared.most_bytes,
                letter_outlet=shared.letter_outlet,
                relay_outlet=shared.relay_outlet,
            )
            for plan in self._plans:
                self.engines.append(Engine(plan, equipment, self._engine_ended))
        except BaseException:
            closing = self._deadline or Deadline(self._shutdown)
            for engine in self.engines:
                engine.close(closing)
            self._close_shared(closing)
            raise
        for engine in self.engines:
            engine.start()
            if self._deadline is not None:  # asked to stop while the resources were built
                engine.loop.stop(self._deadline)

    def _built(self, wanted: Iterable[object]) -> Mapping[object, object]:
        """The resources. Building may take its time, unless it is asked to stop meanwhile."""
        furnishing = self._shared.furnishing
        building = furnishing.begin(wanted)
        building.add_done_callback(lambda _: self._news.put(None))
        while not building.done():
            self._await_news(0.1)
            if self._deadline is not None and self._deadline.passed:
                furnishing.hangs = True
                raise ResourceFailed(
                    f"the resource {furnishing.at} was still not built {self._shutdown:.1f} s after the request to stop"
                )
        return building.result()

    def await_start(self, seconds: float) -> None:
        """Return once every consumer has joined its group and has had its first claim answered, or when the app has
        failed or is asked to stop; raise `StartTimeout` when it takes longer. With 0, return at once."""
        if not seconds:
            return
        deadline = Deadline(seconds)
        for engine in self.engines:
            while not engine.loop.started.wait(_LOOK_EVERY):
                if self.failure is not None or self._deadline is not None:
                    return
                if deadline.passed:
                    raise engine.start_timeout(seconds)

    def serves(self, guard: Guard) -> bool:
        """Whether it is the block of this guard that it runs for."""
        return self._guard is guard

    def stop(self) -> None:
        """Ask all engines to drain and leave. From any thread; the first call counts."""
        if self._deadline is None:
            self._asked_at = time.monotonic()
            self._deadline = Deadline(self._shutdown)
            for engine in self.engines:
                engine.loop.stop(self._deadline)
        self._news.put(None)

    def stop_when_idle(self, seconds: float) -> None:
        for engine in self.engines:
            engine.loop.stop_when_idle(seconds)

    @property
    def failure(self) -> BaseException | None:
        return next((e.loop.failure for e in self.engines if e.loop.failure is not None), self._trouble)

    def finish(self) -> Report:
        """Wait for the end, by itself or by `stop`; then the deadline holds. The report says how it went."""
        running = list(self.engines)
        while running:
            if self._hard_signal is not None or (self._deadline is not None and self._deadline.passed):
                break
            self._await_news(0.5 if self._deadline is None else min(0.1, self._deadline.left))
            running = [engine for engine in running if not engine.join(0)]
            if self.failure is not None and self._deadline is None:
                self.stop()
        if self._hard_signal is not None and running:
            running = [engine for engine in running if not engine.join(1.0 / len(running))]
        self._close(running)
        return self._report(running)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT ask to stop; a second one leaves at once."""
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _close(self, running: Sequence[Engine]) -> None:
        """Let go of everything, on another thread: a second signal is heard meanwhile, and leaves at once."""
        closing = Deadline(max(_LEAST, self._shutdown if self._deadline is None else self._deadline.left))
        closer = Errands("kconsume-closing")
        closed = closer.send(lambda: self._let_go(running, closing))
        closed.add_done_callback(lambda _: self._news.put(None))
        while not closed.done() and self._hard_signal is None:
            self._await_news(0.5)
        closer.close(_LEAST)
        if self._hard_signal is None:
            closed.result()

    def _let_go(self, running: Sequence[Engine], deadline: Deadline) -> None:
        for engine in self.engines:
            engine.give_up()
        self._shared.home.rest(min(1.0, max(_LEAST, deadline.left)))
        for engine in self.engines:
            if engine in running:
                engine.close_late()
            else:
                engine.close(deadline)
        self._close_shared(deadline)

    def _close_shared(self, deadline: Deadline) -> None:
        """After the drain: nothing uses them any more, or what does was given up."""
        self._trouble = self._shared.furnishing.close(max(_LEAST, deadline.left))
        self._shared.relay_outlet.close(_LEAST)  # what it still carries is in the outbox
        self._shared.letter_outlet.close(max(_LEAST, deadline.left))
        self._shared.outlet.close(max(_LEAST, deadline.left))
        self._shared.home.close(deadline.left)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._signals += 1
        self._news.put(number)

    def _engine_ended(self) -> None:
        self._news.put(None)
        if self.failure is not None and self._guard is not None:
            self._guard.failed(self.failure)

    def _await_news(self, seconds: float) -> None:
        try:
            number = self._news.get(timeout=seconds)
        except Empty:
            return
        if number is not None and self._signals > 1:
            self._hard_signal = number
        elif number is not None:
            _log.info("signal=%s, draining within %.0fs", signal.Signals(number).name, self._shutdown)
            self.stop()

    def _report(self, running: Sequence[Engine]) -> Report:
        snapshots = [engine.loop.snapshot for engine in self.engines]
        return Report(
            handled=sum(s.handled for s in snapshots),
            skipped=sum(s.skipped for s in snapshots),
            committed={p: offset for s in snapshots for p, offset in s.stored.items()},
            abandoned=[p for s in snapshots for p in s.abandoned],
            hung=[engine.plan.group for engine in running],
            seconds=time.monotonic() - self._asked_at,
            failure=self.failure,
            signal=self._hard_signal,
            resources_hang=self._shared.furnishing.hangs,
            held={p: trouble.error for s in snapshots for p, trouble in s.held.items()},
            unsent=sum(engine.unsent for engine in self.engines),
        )
