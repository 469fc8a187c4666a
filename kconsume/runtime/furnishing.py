"""Where and when resources are built and closed: by one thread, or on the event loop if one of them needs it.

The same place for both ends of a resource. Closing has a deadline; what is not closed by then is said.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from kconsume.errors import ResourceFailed
from kconsume.resources import Resource, Shelf
from kconsume.runtime.errands import Errands
from kconsume.runtime.home import Home

T = TypeVar("T")


class Furnishing:
    """The resources of an app while it runs."""

    def __init__(self, declared: Mapping[object, Resource], given: Mapping[object, object], home: Home) -> None:
        """`given` replaces what is declared, by type."""
        self.hangs = False
        """Whether something was not built or closed in time, and may still be at it."""
        self._shelf = Shelf(declared, given)
        self._on_loop = False
        self._home = home
        self._thread: Errands | None = None
        self._task: _OneTask | None = None

    @property
    def at(self) -> str:
        """The name of the resource that is being built or closed."""
        return self._shelf.at

    def build(self, wanted: Iterable[object]) -> Mapping[object, object]:
        """What is asked for, each built once; one that cannot be raises its error. `close` closes those before it."""
        return self.begin(wanted).result()

    def begin(self, wanted: Iterable[object]) -> Future[Mapping[object, object]]:
        """The same without waiting. What cannot be had is refused here."""
        wanted = list(wanted)
        self._on_loop = self._on_loop or any(_is_async(resource.make) for resource in self._shelf.needed(wanted))
        if wanted:
            return self._run(self._shelf.build(wanted))
        nothing: Future[Mapping[object, object]] = Future()
        nothing.set_result({})
        return nothing

    def close(self, seconds: float) -> BaseException | None:
        """What went wrong, if something did."""
        closing = None if self._shelf.empty else self._run(self._shelf.close())
        if self._task is not None:
            if self.hangs:
                self._task.cancel()
            self._task.close()
        if self._thread is not None:
            self._thread.close(seconds)
        try:
            return None if closing is None else closing.result(0.0 if self._thread is not None else seconds)
        except FutureTimeout:
            self.hangs, hanging = True, self.at  # before it is cancelled, and the next one is closed
            if self._task is not None:
                self._task.cancel()
            return ResourceFailed(
                f"the resources were not closed within {seconds:.1f} s: {hanging} hangs, or the event loop is blocked; "
                f"let what follows its yield end sooner, or raise App(shutdown=...)"
            )

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._on_loop:
            self._task = self._task or _OneTask(self._home)
            return self._task.send(work)
        if self._thread is None:
            self._thread = Errands("kconsume-resources")
        return self._thread.send(lambda: _drive(work))


class _OneTask:
    """Runs coroutines one after the other, in one task of the event loop. What was entered in a task is left in it:
    task groups ask for that, and tokens of context variables. From other threads than the loop's."""

    def __init__(self, home: Home) -> None:
        self._loop = home.loop
        self._waiting: asyncio.Queue[Callable[[], Coroutine[Any, Any, None]] | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        """Both only on the loop."""
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
        """Nothing will follow."""
        self._loop.call_soon_threadsafe(self._waiting.put_nowait, None)

    def cancel(self) -> None:
        """Leave what it is at, and go on with the next."""
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
    """A coroutine that never waits, because nothing in it is async, run to its end."""
    try:
        work.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    raise ResourceFailed("a resource waits for an event loop: declare it with async def")
