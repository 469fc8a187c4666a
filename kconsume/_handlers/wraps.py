"""Context managers around each call of a handler: `@app.wrap`.

A wrap sees the record and how the handler ended. A wrap cannot change the outcome: an error that it swallows is raised
again, because an offset passes only after its handler returned.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)

from kconsume._handlers.annotations import hints_of
from kconsume._handlers.batches import Batch
from kconsume._handlers.signature import Signature
from kconsume.errors import InvalidHandler
from kconsume.records import Record

Around = AbstractContextManager[object] | AbstractAsyncContextManager[object]


@dataclasses.dataclass(frozen=True, slots=True)
class Wrap:
    """A context manager around calls. Each call gets a new one."""

    name: str
    enter: Callable[..., Around]
    is_async: bool
    takes_subject: bool
    """True if the wrap takes the record or the batch of the call."""
    around_records: bool
    """True if the wrap goes around handlers of one record."""
    around_batches: bool
    """True if the wrap goes around handlers of batches."""

    def around(self, subject: Record | Batch) -> Around:
        """Return the context manager for one call.

        Args:
            subject: the record or the batch of the call.
        """
        return self.enter(subject) if self.takes_subject else self.enter()

    def applies(self, signature: Signature) -> bool:
        """Return whether the wrap goes around this handler. Raises InvalidHandler if it should but cannot."""
        if not (self.around_batches if signature.form.batched else self.around_records):
            return False
        if self.is_async and not signature.is_async:
            raise InvalidHandler(
                f"the wrap {self.name} is async and cannot go around {signature.name}, a plain def: write the wrap as "
                f"a plain def with a yield, which can go around both"
            )
        return True


def read_wrap(function: Callable[..., object]) -> Wrap:
    """Return the wrap of a decorated function. Raises InvalidHandler if the function cannot be one."""
    name = getattr(function, "__name__", repr(function))
    is_async = inspect.isasyncgenfunction(function)
    if not (is_async or inspect.isgeneratorfunction(function)):
        raise InvalidHandler(
            f"@app.wrap needs a generator function, as for contextlib.contextmanager: let {name} do what comes before "
            f"the handler, then yield once, then do what comes after"
        )
    parameters = list(inspect.signature(function).parameters.values())
    if any(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters):
        raise InvalidHandler(f"the wrap {name} takes the record by name only: remove the * before it")
    if len(parameters) > 1:
        raise InvalidHandler(
            f"the wrap {name} takes {len(parameters)} parameters: it can get the record, as in {name}(record: Record)"
        )
    kinds: set[object] = {Record, Batch}
    if parameters:
        kinds = _kinds(function, name, parameters[0].name)
    manager: object = asynccontextmanager(function) if is_async else contextmanager(function)  # type: ignore[arg-type]
    return Wrap(
        name, typing.cast(Callable[..., Around], manager), is_async, bool(parameters), Record in kinds, Batch in kinds
    )


def _kinds(function: Callable[..., object], name: str, parameter: str) -> set[object]:
    because = f"{parameter} is a Record, a Batch, or Record | Batch"
    hint = hints_of(function, f"the wrap {name}", because).get(parameter)
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if not set(members) <= {Record, Batch}:
        raise InvalidHandler(
            f"the wrap {name} must say what {parameter!r} is: annotate it as Record (it goes around handlers of one "
            f"record), Batch (of batches), or Record | Batch (of both)"
        )
    return set(members)


def wrapped(signature: Signature, wraps: typing.Sequence[Wrap]) -> Callable[..., object]:
    """Return the handler's function with wraps around it. The first argument of the result is the record or the batch.

    Args:
        signature: the signature of the handler.
        wraps: the wraps, the outermost first.
    """
    function = signature.function

    @functools.wraps(function)
    def call(subject: Record | Batch, /, *args: object, **named: object) -> object:
        failures = _WrapFailures()
        with ExitStack() as stack:
            for wrap in wraps:
                stack.enter_context(typing.cast(AbstractContextManager[object], wrap.around(subject)))
                stack.push(failures)
            result = function(*args, **named)
        failures.raise_swallowed()
        return result

    @functools.wraps(function)
    async def call_async(subject: Record | Batch, /, *args: object, **named: object) -> object:
        failures = _WrapFailures()
        async with AsyncExitStack() as stack:
            for wrap in wraps:
                around = wrap.around(subject)
                if isinstance(around, AbstractAsyncContextManager):
                    await stack.enter_async_context(around)
                else:
                    stack.enter_context(around)
                stack.push(failures)
            result = await typing.cast(typing.Awaitable[object], function(*args, **named))
        failures.raise_swallowed()
        return result

    return call_async if signature.is_async else call


class _WrapFailures:
    """Keeps the last error that reached a wrap, and raises it again if the wrap swallows it.

    The error comes from the handler or from an inner wrap, for example from a COMMIT in that wrap.
    """

    def __init__(self) -> None:
        self._last: BaseException | None = None

    def __call__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: types.TracebackType | None
    ) -> bool:
        self._last = error or self._last
        return False

    def raise_swallowed(self) -> None:
        if self._last is not None:
            raise self._last
