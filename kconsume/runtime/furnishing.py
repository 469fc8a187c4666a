"""Where and when resources are built and closed: by one thread, or on the event loop if one of them needs it.

The same place for both ends of a resource. Closing has a deadline; what is not closed by then is said.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from kconsume.errors import ResourceFailed
from kconsume.resources import Resource, Shelf
from kconsume.runtime.errands import Errands
from kconsume.runtime.home import Home, on_loop

T = TypeVar("T")

_log = logging.getLogger("kconsume.resources")


class Furnishing:
    """The resources of an app while it runs."""

    def __init__(self, declared: Mapping[object, Resource], given: Mapping[object, object], home: Home) -> None:
        """`given` replaces what is declared, by type."""
        self.hangs = False
        """Whether something was not closed in time, and may still be at it."""
        self._shelf = Shelf(declared, given)
        self._on_loop = False
        self._home = home
        self._thread: Errands | None = None

    def build(self, wanted: Iterable[object]) -> Mapping[object, object]:
        """What is asked for, each built once; one that cannot be raises its error. `close` closes those before it."""
        wanted = list(wanted)
        if not wanted:
            return {}
        self._on_loop = self._on_loop or any(_is_async(resource.make) for resource in self._shelf.needed(wanted))
        return self._run(self._shelf.build(wanted)).result()

    def close(self, seconds: float) -> BaseException | None:
        """What went wrong, if something did."""
        closing = None if self._shelf.empty else self._run(self._shelf.close())
        if self._thread is not None:
            self._thread.close(seconds)
        try:
            return None if closing is None else closing.result(0.0 if self._thread is not None else seconds)
        except FutureTimeout:
            self.hangs = True
            return ResourceFailed(
                f"the resources were not closed within {seconds:.1f} s: {self._shelf.closing} hangs, or the event loop "
                f"is blocked; let what follows its yield end sooner, or raise App(shutdown=...)"
            )

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._on_loop:
            return on_loop(self._home, work)
        if self._thread is None:
            self._thread = Errands("kconsume-resources")
        return self._thread.send(lambda: _drive(work))


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
