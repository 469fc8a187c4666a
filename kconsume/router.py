"""What functions are decorated with: `consume`, `resource` and `wrap`, of an app or of a router.

A `Router` collects them in a module of its own, until an app includes it. It knows no broker and no store.
"""

from __future__ import annotations

import dataclasses
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

from kconsume.backends.abc import OffsetStore
from kconsume.batches import Batching
from kconsume.errors import ConfigurationError
from kconsume.failures.policy import OnError, Retries
from kconsume.rate import Rate
from kconsume.registration import Declared, Executor, Options
from kconsume.resources import Resource, read_resource
from kconsume.runtime.claims import Begin
from kconsume.settings import check_group
from kconsume.signature import read
from kconsume.wrapping import Wrap, read_wrap

Handler = TypeVar("Handler", bound=Callable[..., object])
Function = TypeVar("Function", bound=Callable[..., object])


class Decorators(ABC):
    """The decorators, and where what they decorate goes."""

    def __init__(self) -> None:
        super().__init__()
        self._wraps: list[Wrap] = []

    def consume(
        self,
        *topics: str,
        pattern: str | None = None,
        group: str | None = None,
        offsets: str | OffsetStore | None = None,
        batch: Batching | None = None,
        order: Literal["partition"] = "partition",
        concurrency: int | None = None,
        executor: Executor | None = None,
        retry: Retries | None = None,
        repeats: Literal["handle", "drop"] = "handle",
        on_error: OnError = "stop",
        timeout: float | None = None,
        rate: Rate | None = None,
        start: Begin = "earliest",
        partitions: Sequence[int] | None = None,
        decode: Callable[..., object] | None = None,
        to: str | None = None,
        chunk: int | None = None,
    ) -> Callable[[Handler], Handler]:
        """Make the decorated function the handler of these topics. It stays an ordinary function.

        `pattern`: instead of names, a regular expression that whole names match, also of topics that come later.
        `group`, `offsets`: a consumer of its own. `batch`: how large batches are, for handlers of `list[...]`, `Batch`
        or a table. `concurrency`: workers, by default one for each assigned partition, up to 8. `executor`: `"inline"`
        runs a plain function on the polling thread, for handlers that never wait. `retry`: try a record that fails
        again, in its place (`Retry`), later (`RetryTopics`), or both in a tuple. `on_error`: what becomes of it then:
        `"stop"`, `"skip"` or a `DeadLetter`. `repeats`: `"drop"` takes a record with a `kconsume-origin` in once.
        `timeout`: seconds that one call may take; longer is a failure like others. `rate`: at most so many records, in
        this process. `start`: where a partition with no stored offset begins.
        `partitions`: take exactly these, without a group's coordination. `decode`: makes the payload from the bytes.
        `to`: the topic for what the handler returns. `chunk`: at most so many records share a transaction.
        """
        options = Options(
            topics, group, offsets, batch, order, concurrency, executor, on_error, rate, start, partitions, decode, to,
            chunk, pattern, retry, repeats, timeout,
        )  # fmt: skip
        self._check(options)

        def decorate(function: Handler) -> Handler:
            signature = read(function, sys._getframe(1).f_locals, decode)
            options.check_with(signature)
            self._add_handler(Declared(options, signature, (self._wraps,)))
            return function

        return decorate

    def resource(self, function: Function) -> Function:
        """Let the decorated function provide what handlers ask for by its type.

        A generator function, plain or async: what it yields is the resource, what follows the yield closes it. Built
        once a process before the first record, closed after the drain. It may ask for other resources.
        """
        self._add_resource(read_resource(function, sys._getframe(1).f_locals))
        return function

    def wrap(self, function: Function) -> Function:
        """Let the decorated generator function go around each call of a handler: before and after its yield."""
        self._add_wrap(read_wrap(function))
        return function

    def include(self, router: Router, *, group: str | None = None, offsets: str | OffsetStore | None = None) -> None:
        """Take over what a router has, also what is added to it later.

        `group` and `offsets` hold for those of its handlers that name none.
        """
        if not isinstance(router, Router):
            raise ConfigurationError(f"include takes a Router, and got a {type(router).__name__}: include(Router())")
        if group is not None:
            check_group(group)
        router._included(_Place(self, group, offsets))

    def _check(self, options: Options) -> None:
        """Refuse what cannot work whatever is decorated with it."""
        options.check()

    @abstractmethod
    def _add_handler(self, declared: Declared) -> None: ...

    @abstractmethod
    def _add_resource(self, resource: Resource) -> None: ...

    def _add_wrap(self, wrap: Wrap) -> None:
        self._wraps.append(wrap)


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a router was included, and with what."""

    by: Decorators
    group: str | None
    offsets: str | OffsetStore | None


class Router(Decorators):
    """Handlers, resources and wraps of one module, for an app to include.

    `group` and `offsets` hold for those of its handlers that name none; its wraps go around its own handlers only.
    """

    def __init__(self, *, group: str | None = None, offsets: str | OffsetStore | None = None) -> None:
        super().__init__()
        if group is not None:
            check_group(group)
        self._group = group
        self._offsets = offsets
        self._handlers: list[Declared] = []
        self._resources: list[Resource] = []
        self._places: list[_Place] = []

    def _add_handler(self, declared: Declared) -> None:
        self._handlers.append(declared)
        for place in self._places:
            self._hand_on(declared, place)

    def _add_resource(self, resource: Resource) -> None:
        self._resources.append(resource)
        for place in self._places:
            place.by._add_resource(resource)

    def _included(self, place: _Place) -> None:
        if place.by is self or (isinstance(place.by, Router) and place.by._is_within(self)):
            raise ConfigurationError("a router would include itself, at once or by way of others: include it in an app")
        if any(known.by is place.by for known in self._places):
            raise ConfigurationError("this router was included already: include it once in an app")
        for resource in self._resources:
            place.by._add_resource(resource)
        for declared in self._handlers:
            self._hand_on(declared, place)
        self._places.append(place)

    def _is_within(self, other: Router) -> bool:
        """Whether the other has included it, directly or by way of others."""
        outer = [place.by for place in self._places if isinstance(place.by, Router)]
        return other in outer or any(router._is_within(other) for router in outer)

    def _hand_on(self, declared: Declared, place: _Place) -> None:
        options = declared.options
        filled: Mapping[str, object] = {
            "group": options.group or self._group or place.group,
            "offsets": next((o for o in (options.offsets, self._offsets, place.offsets) if o is not None), None),
        }
        options = dataclasses.replace(options, **filled)  # type: ignore[arg-type]
        place.by._add_handler(Declared(options, declared.signature, (place.by._wraps, *declared.wraps)))
