"""Resources: objects that handlers request by type, declared with `@app.resource`.

A resource is declared by a function that makes it, usually a generator, as for a pytest fixture: the generator yields
the resource, and the code after the yield closes it. Each resource is built once in a process, before the first record,
and closed after the drain, in the opposite order. This module must not know handlers or Kafka.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from typing import Any

from kconsume._event_log import EventLog
from kconsume._handlers.annotations import hints_of, text_of, without_none
from kconsume._handlers.batches import Batch
from kconsume._kafka.outgoing import Sender
from kconsume.errors import InvalidHandler, ResourceFailed
from kconsume.records import Record

_log = EventLog("resources")

_ITERATED = (Iterator, Generator, Iterable, AsyncIterator, AsyncGenerator, AsyncIterable)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """How a resource is made."""

    name: str
    provides: object
    """The type that handlers and other resources ask for."""
    make: Callable[..., object]
    needs: Mapping[str, object]
    """The types of the resources that `make` takes, by parameter."""
    is_default: bool = False
    """True for a resource of kconsume's own. A resource that the user declares for the same type replaces it."""


def read_resource(function: Callable[..., object], names: Mapping[str, object] | None = None) -> Resource:
    """Return the resource of a decorated function. Raises InvalidHandler if the function cannot be one.

    Args:
        function: the function that makes the resource.
        names: the local names of the place where the function is decorated.
    """
    name = getattr(function, "__name__", repr(function))
    if inspect.isclass(function) or not hasattr(function, "__name__"):
        raise InvalidHandler(f"@app.resource needs a function that makes the resource: write def ...() above {name}")
    hints = hints_of(function, f"the resource {name}", "handlers ask for it by that type", names)
    provides = _provided(function, name, hints.get("return"))
    needs: dict[str, object] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InvalidHandler(
                f"the resource {name} takes {parameter}, which cannot be given by name: name each resource that it "
                f"needs as a plain parameter, with its type"
            )
        if parameter.name in hints and parameter.default is parameter.empty:
            needs[parameter.name] = without_none(hints[parameter.name])[0]
        elif parameter.default is parameter.empty:
            raise InvalidHandler(
                f"the resource {name} does not say what {parameter.name!r} is: annotate it with the type of another "
                f"resource, or give it a default"
            )
    return Resource(name, provides, function, needs)


def _provided(function: Callable[..., object], name: str, returned: object) -> object:
    generates = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    example = "AsyncIterator" if inspect.isasyncgenfunction(function) else "Iterator"
    if generates:
        if typing.get_origin(returned) not in _ITERATED or not typing.get_args(returned):
            raise InvalidHandler(
                f"the resource {name} does not say what it yields: annotate it, for example "
                f"def {name}() -> {example}[Client], because handlers ask for it by that type"
            )
        provided: object = typing.get_args(returned)[0]
    else:
        provided = returned
    if provided in (None, type(None), object, Any):
        raise InvalidHandler(
            f"the resource {name} must say the type that it provides: annotate it, for example "
            f"def {name}() -> {example}[Client] with a yield"
        )
    if any(provided is ours for ours in (Record, Batch, Sender)):
        raise InvalidHandler(
            f"the resource {name} provides {text_of(provided)}, which handlers get from kconsume: let it provide a "
            f"type of its own"
        )
    # A handler that asks for `Client | None` asks for `Client`.
    return without_none(provided)[0]


class ResourceStack:
    """Resources that have been built. Each is built once, and all are closed together.

    Args:
        declared: how to make each resource, by type.
        given: ready objects, by type, that replace declared resources and are not closed here.
    """

    def __init__(self, declared: Mapping[object, Resource], given: Mapping[object, object] | None = None) -> None:
        self._declared = declared
        self._built: dict[object, object] = dict(given or {})
        self._closers: list[tuple[str, Callable[[], object]]] = []
        self.at = "nothing"
        """The name of the resource that is being built or closed."""

    def needed(self, wanted: Iterable[object]) -> list[Resource]:
        """Return the resources to build for these types, each after those that it needs.

        Raises InvalidHandler if one is not declared, or if resources need each other in a circle.
        """
        found: dict[object, Resource] = {}
        for hint in wanted:
            self._find(hint, (), found)
        return list(found.values())

    async def build(self, wanted: Iterable[object]) -> dict[object, object]:
        """Build the resources of these types and return them by type.

        Plain functions are called on the event loop that runs this coroutine.
        """
        wanted = list(wanted)
        for resource in self.needed(wanted):
            arguments = {parameter: self._built[needed] for parameter, needed in resource.needs.items()}
            self.at = resource.name
            try:
                self._built[resource.provides] = await self._make(resource, arguments)
            except (Exception, asyncio.CancelledError, SystemExit) as error:
                raise ResourceFailed(
                    f"the resource {resource.name} could not be built: {type(error).__name__}: {error}"
                ) from error
        return {hint: self._built[hint] for hint in wanted}

    @property
    def empty(self) -> bool:
        """True if nothing has to be closed."""
        return not self._closers

    async def close(self) -> BaseException | None:
        """Close all resources in the opposite order, even after errors. Return the first error, or None."""
        first: ResourceFailed | None = None
        while self._closers:
            name, close = self._closers.pop()
            self.at = name
            try:
                ended = close()
                if inspect.isawaitable(ended):
                    await ended
            except BaseException as error:  # noqa: BLE001  (the others are closed too)
                failed = ResourceFailed(f"the resource {name} could not be closed: {type(error).__name__}: {error}")
                failed.__cause__ = error
                _log.error("resource not closed", resource=name, cause=error)
                first = first or failed
        return first

    def _find(self, hint: object, above: tuple[Resource, ...], found: dict[object, Resource]) -> None:
        if hint in self._built or hint in found:
            return
        resource = self._declared.get(hint)
        if resource is None:
            asking = f"the resource {above[-1].name} asks for" if above else "a handler asks for"
            raise InvalidHandler(f"{asking} {text_of(hint)}, which no @app.resource provides: declare one that does")
        if resource in above:
            circle = " → ".join(each.name for each in (*above, resource))
            raise InvalidHandler(f"resources need one another in a circle ({circle}): let one of them make the other")
        for needed in resource.needs.values():
            self._find(needed, (*above, resource), found)
        found[hint] = resource

    async def _make(self, resource: Resource, arguments: Mapping[str, object]) -> object:
        made = resource.make(**arguments)
        if isinstance(made, AsyncGenerator):
            value = await _first_async(made)
            self._closers.append((resource.name, lambda: _end_async(made)))
            return value
        if isinstance(made, Generator):
            value = _first(made)
            self._closers.append((resource.name, lambda: _end(made)))
            return value
        return await made if asyncio.iscoroutine(made) else made


def _first(made: Generator[object, Any, Any]) -> object:
    try:
        return next(made)
    except StopIteration:
        raise ResourceFailed("it yields nothing: let it yield the resource once") from None


async def _first_async(made: AsyncGenerator[object, Any]) -> object:
    try:
        return await anext(made)
    except StopAsyncIteration:
        raise ResourceFailed("it yields nothing: let it yield the resource once") from None


def _end(made: Generator[object, Any, Any]) -> None:
    for _ in made:
        raise ResourceFailed("it yields more than once: let it yield the resource once")


async def _end_async(made: AsyncGenerator[object, Any]) -> None:
    async for _ in made:
        raise ResourceFailed("it yields more than once: let it yield the resource once")
