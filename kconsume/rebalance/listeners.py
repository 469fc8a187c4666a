"""Rebalance listeners of users: functions, and objects with up to three methods.

A listener is read once, when it is declared. If it cannot be called, the declaration raises an error with the fix. This
module never calls a listener: `_runtime.assignment.listener_calls` does, at the times that `_kafka.consumer` describes.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kconsume._handlers.annotations import bare, hints_of, is_union, text_of
from kconsume.errors import InvalidHandler
from kconsume.rebalance.events import Rebalance
from kconsume.records import Partition

Event = Literal["assigned", "revoked", "lost"]

_EVENTS: tuple[Event, ...] = ("assigned", "revoked", "lost")
_FIX = "write def moved(partitions: Sequence[Partition]) -> None"
_FIX_OR_TWO = f"{_FIX}, or with a second parameter, rebalance: Rebalance"


class RebalanceListener:
    """A listener for `app.listen(...)`. Override the methods that you need; the others are not called.

    A method may be `def` or `async def`. A method may omit the parameter `rebalance`. A type checker then accepts only
    a class that does not inherit from this class; such a class works as well. Listeners are called one after the other,
    never on the polling thread. A listener must end within the budget of the rebalance; otherwise the rebalance
    continues without it. An exception of a listener is logged; it changes neither the assignment nor the calls of
    other listeners.
    """

    def on_assigned(self, partitions: Sequence[Partition], rebalance: Rebalance) -> Awaitable[None] | None:
        """Called when this consumer owns new partitions, before it handles their first record.

        Args:
            partitions: the new partitions.
            rebalance: the rebalance that brought them.
        """

    def on_revoked(self, partitions: Sequence[Partition], rebalance: Rebalance) -> Awaitable[None] | None:
        """Called when partitions are being given up. The handlers have ended and the offsets are committed. No other
        consumer owns the partitions yet.

        Args:
            partitions: the revoked partitions.
            rebalance: the rebalance that takes them.
        """

    def on_lost(self, partitions: Sequence[Partition], rebalance: Rebalance) -> Awaitable[None] | None:
        """Called when other consumers already own the partitions. Nothing was committed. A write now may overwrite data
        of the new owner.

        Args:
            partitions: the lost partitions.
            rebalance: the rebalance that took them.
        """


@dataclass(frozen=True, slots=True)
class Listener:
    """A listener function, and how to call it.

    Args:
        function: called with the partitions, and with the rebalance if `takes_rebalance`, both by position.
        is_async: True if it returns a coroutine.
    """

    name: str
    event: Event
    function: Callable[..., Any]
    is_async: bool
    takes_rebalance: bool


def read_listener(function: Callable[..., object], event: Event) -> Listener:
    """Return how to call this function. Raises `InvalidHandler` if it cannot be a listener."""
    name = _name_of(function)
    if inspect.isclass(function) or not callable(function):
        raise InvalidHandler(
            f"@app.on_{event} needs a function, and got {_article(function)}: {_FIX}, or give an object with "
            f"on_{event} to app.listen"
        )
    written = _written(function)
    _check_code(function, written, name)
    parameters = _parameters(function, name)
    _check_partitions(parameters[0], written, name)
    return Listener(
        name=name,
        event=event,
        function=function,
        is_async=_is_async(written),
        takes_rebalance=_takes_rebalance(parameters, written, name),
    )


def listeners_of(listener: object) -> list[Listener]:
    """The overridden methods of a `RebalanceListener`, or the `on_…` methods that another object has."""
    kind = listener.__name__ if inspect.isclass(listener) else type(listener).__name__
    if inspect.isclass(listener):
        raise InvalidHandler(f"app.listen needs an object, and got the class {kind}: write app.listen({kind}(...))")
    found = [read_listener(method, event) for event in _EVENTS if (method := _method(listener, event)) is not None]
    if not found:
        raise InvalidHandler(
            f"{kind} has none of on_assigned, on_revoked and on_lost, so it would never be called: give it one, as in "
            f"def on_assigned(self, partitions: Sequence[Partition], rebalance: Rebalance) -> None, or decorate a "
            f"function with @app.on_assigned"
        )
    return found


def _method(listener: object, event: Event) -> Callable[..., object] | None:
    method: Callable[..., object] | None = getattr(listener, f"on_{event}", None)
    inherited = getattr(method, "__func__", None) is getattr(RebalanceListener, f"on_{event}")
    return None if inherited else method


# The function


def _name_of(function: object) -> str:
    """`moved`, or `Stock.on_assigned` for a method of an object."""
    if isinstance(function, functools.partial):
        return _name_of(function.func)
    if inspect.ismethod(function) and not inspect.isclass(function.__self__):
        return f"{type(function.__self__).__name__}.{function.__name__}"
    return getattr(function, "__name__", type(function).__name__)


def _article(function: object) -> str:
    if inspect.isclass(function):
        return f"the class {function.__name__}"
    return f"{type(function).__name__} {function!r}" if function is not None else "None"


def _written(function: Callable[..., object]) -> Callable[..., object]:
    """The `def` behind a partial, a staticmethod or an object with `__call__`."""
    if isinstance(function, functools.partial):
        return _written(function.func)
    if isinstance(function, staticmethod):
        return _written(function.__func__)
    if inspect.isroutine(function):
        return function
    return typing.cast(Callable[..., object], type(function).__call__)


def _is_async(written: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(written)


def _check_code(function: Callable[..., object], written: Callable[..., object], name: str) -> None:
    innermost = inspect.unwrap(_written(inspect.unwrap(function)))
    for layer in (written, innermost):
        if inspect.isgeneratorfunction(layer) or inspect.isasyncgenfunction(layer):
            raise InvalidHandler(
                f"the listener {name} is a generator, so calling it would do nothing: remove the yield"
            )
    if _is_async(innermost) and not _is_async(written):
        # Such a function returns the coroutine, and the caller of a plain function does not await it.
        raise InvalidHandler(
            f"the listener {name} is async, and its decorator is not: write the decorator's inner function as "
            f"async def too"
        )


# Its parameters


def _parameters(function: Callable[..., object], name: str) -> list[inspect.Parameter]:
    """The parameters that can be passed by position, at least one."""
    try:
        every = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise InvalidHandler(
            f"the listener {name} has no signature to read ({error}): call it from a function, {_FIX}"
        ) from error
    by_position = [p for p in every if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    for parameter in every:
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            raise InvalidHandler(
                f"the listener {name} takes {parameter.name!r} by name only, but gets its arguments by position: {_FIX}"
            )
    required = [p for p in by_position if _is_required(p)]
    if not by_position:
        raise InvalidHandler(f"the listener {name} has no parameter for the partitions: {_FIX}")
    if by_position[0].name == "self":
        raise InvalidHandler(
            f"the listener {name} is a method with no object to call it on: give the object to app.listen, or {_FIX}"
        )
    if len(required) > 2:
        raise InvalidHandler(
            f"the listener {name} needs {len(required)} arguments, and gets at most two: {_FIX_OR_TWO}"
        )
    return by_position


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL


def _check_partitions(first: inspect.Parameter, written: Callable[..., object], name: str) -> None:
    hint = _hints_if_readable(written, name).get(first.name, Any)
    if first.kind is not first.VAR_POSITIONAL and not _may_be_partitions(hint):
        raise InvalidHandler(
            f"the listener {name} cannot get {first.name}: {text_of(hint)}, because it gets all partitions that moved "
            f"at once: {_FIX}"
        )


def _takes_rebalance(parameters: Sequence[inspect.Parameter], written: Callable[..., object], name: str) -> bool:
    """Whether the second parameter gets the rebalance. A parameter with a default may be for another purpose, so it
    gets the rebalance only if its name or its type says so."""
    if parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return True
    if len(parameters) == 1:
        return False
    second = parameters[1]
    if second.kind is second.VAR_POSITIONAL:
        return True
    if not _is_required(second):
        return second.name == "rebalance" or _asks_for_rebalance(second, written, name)
    hint = _hints_if_readable(written, name).get(second.name, Any)
    if not _may_be(hint, Rebalance):
        raise InvalidHandler(
            f"the listener {name} cannot get {second.name}: {text_of(hint)}, because a listener gets nothing but the "
            f"partitions and the rebalance: {_FIX_OR_TWO}"
        )
    return True


def _asks_for_rebalance(second: inspect.Parameter, written: Callable[..., object], name: str) -> bool:
    if second.annotation is second.empty:
        return False
    because = f"the annotation says whether {second.name} gets the rebalance or keeps its default"
    hint = bare(hints_of(written, f"the listener {name}", because).get(second.name))
    return Rebalance in (typing.get_args(hint) if is_union(hint) else (hint,))


# Its annotations


def _hints_if_readable(written: Callable[..., object], name: str) -> dict[str, object]:
    """The annotations; none if one of them exists only for the type checker. Annotations are only checked; nothing else
    depends on them."""
    try:
        return hints_of(written, f"the listener {name}", "it says what the listener gets")
    except InvalidHandler:
        return {}


def _may_be_partitions(hint: object) -> bool:
    hint = bare(hint)
    if is_union(hint):
        return any(map(_may_be_partitions, typing.get_args(hint)))
    items = typing.get_args(hint)
    return _may_be(hint, tuple, list) and (not items or _may_be(items[0], Partition))


def _may_be(hint: object, *kinds: type) -> bool:
    """Whether a value of one of these kinds fits the hint. True for a hint that is not a class."""
    hint = bare(hint)
    if is_union(hint):
        return any(_may_be(member, *kinds) for member in typing.get_args(hint))
    wanted = typing.get_origin(hint) or hint
    if wanted is Any or not isinstance(wanted, type):  # Any is a class since Python 3.11
        return True
    try:
        return any(issubclass(kind, wanted) for kind in kinds)
    except TypeError:  # a protocol with attributes
        return True
