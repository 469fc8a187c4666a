"""Where and when resources are built and closed: on a thread, or on the event loop if one of them is async.

A resource is closed on the same thread, or in the same task, in which it was built. Closing has a deadline. The error
names a resource that is not closed at the deadline.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from kconsume._handlers.resources import Resource, ResourceStack
from kconsume._runtime.background import BackgroundThread
from kconsume._runtime.handler_loop import HandlerLoop
from kconsume.errors import ResourceFailed

T = TypeVar("T")


class ResourceScope:
    """The resources of an app while it runs. The supervisor calls all methods, on one thread at a time."""

    def __init__(
        self, declared: Mapping[object, Resource], given: Mapping[object, object], handler_loop: HandlerLoop
    ) -> None:
        """
        Args:
            declared: the resources of the app, by type.
            given: ready objects that replace declared resources of the same type.
            handler_loop: where async resources are built and closed.
        """
        self.hangs = False
        """Whether a resource was not built or closed in time, and may still be busy."""
        self._stack = ResourceStack(declared, given)
        self._on_loop = False
        self._handler_loop = handler_loop
        self._thread: BackgroundThread | None = None
        self._task: _OneTask | None = None

    @property
    def at(self) -> str:
        """The name of the resource that is being built or closed."""
        return self._stack.at

    def build(self, wanted: Iterable[object]) -> Mapping[object, object]:
        """Build the wanted resources, each once, and return them. If one cannot be built, its error is raised. `close`
        then closes the resources that were built before."""
        return self.begin(wanted).result()

    def begin(self, wanted: Iterable[object]) -> Future[Mapping[object, object]]:
        """Like `build`, without waiting. Raises at once if a wanted resource is not declared."""
        wanted = list(wanted)
        self._on_loop = self._on_loop or any(_is_async(resource.make) for resource in self._stack.needed(wanted))
        if wanted:
            return self._run(self._stack.build(wanted))
        nothing: Future[Mapping[object, object]] = Future()
        nothing.set_result({})
        return nothing

    def close(self, seconds: float) -> BaseException | None:
        """Close the resources that were built, within this many seconds. Returns the error, if there was one."""
        closing = None if self._stack.empty else self._run(self._stack.close())
        if self._task is not None:
            if self.hangs:
                self._task.cancel()
            self._task.close()
        if self._thread is not None:
            self._thread.close(seconds)
        try:
            return None if closing is None else closing.result(0.0 if self._thread is not None else seconds)
        except FutureTimeout:
            self.hangs, hanging = True, self.at  # read first: after the cancellation, `at` names the next one
            if self._task is not None:
                self._task.cancel()
            return ResourceFailed(
                f"the resources were not closed within {seconds:.1f} s: {hanging} hangs, or the event loop is blocked; "
                f"let what follows its yield end sooner, or raise App(shutdown=...)"
            )

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._on_loop:
            self._task = self._task or _OneTask(self._handler_loop)
            return self._task.send(work)
        if self._thread is None:
            self._thread = BackgroundThread("kconsume-resources")
        return self._thread.send(lambda: _drive(work))


class _OneTask:
    """Runs coroutines one after the other, in one task of the event loop. Task groups and tokens of context variables
    must be left in the task that entered them.

    `send`, `close` and `cancel` are called on threads other than the loop's thread. Fields: `_waiting` and `_task` are
    used on the loop only.
    """

    def __init__(self, handler_loop: HandlerLoop) -> None:
        self._loop = handler_loop.loop
        self._waiting: asyncio.Queue[Callable[[], Coroutine[Any, Any, None]] | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._loop.call_soon_threadsafe(self._start)

    def send(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        future: Future[T] = Future()

        async def run() -> None:
            try:
                future.set_result(await work)
            except BaseException as error:  # noqa: BLE001  (raised where the future is read)
                future.set_exception(error)

        self._loop.call_soon_threadsafe(self._waiting.put_nowait, run)
        return future

    def close(self) -> None:
        """End the task after the coroutines that were sent."""
        self._loop.call_soon_threadsafe(self._waiting.put_nowait, None)

    def cancel(self) -> None:
        """Cancel the coroutine that runs, and continue with the next."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run(), name="kconsume-resources")

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while (run := await self._waiting.get()) is not None:
            await run()


def _is_async(make: Callable[..., object]) -> bool:
    return inspect.isasyncgenfunction(make) or inspect.iscoroutinefunction(make)


def _drive(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, because nothing in it is async."""
    try:
        work.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    raise ResourceFailed("a resource waits for an event loop: declare it with async def")
