"""The decorators `consume`, `resource` and `wrap`, of an app or of a router.

A `Router` collects declarations in a module of its own until an app includes it. A router knows no broker and no
store.
"""

from __future__ import annotations

import dataclasses
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from kconsume._config.client_settings import check_group
from kconsume._config.options import Executor, HandlerOptions, Order, Repeats, StartPolicy
from kconsume._handlers.batches import Batching
from kconsume._handlers.rate import Rate
from kconsume._handlers.registration import DeclaredHandler
from kconsume._handlers.resources import Resource, read_resource
from kconsume._handlers.signature import read
from kconsume._handlers.wraps import Wrap, read_wrap
from kconsume.backends.base import OffsetStore
from kconsume.errors import ConfigurationError
from kconsume.failures.policy import OnError, Retries

Handler = TypeVar("Handler", bound=Callable[..., object])
Function = TypeVar("Function", bound=Callable[..., object])


class Decorators(ABC):
    """The decorators. A subclass decides what happens with the declarations."""

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
        order: Order = "partition",
        concurrency: int | None = None,
        executor: Executor | None = None,
        retry: Retries | None = None,
        repeats: Repeats = "handle",
        on_error: OnError = "stop",
        timeout: float | None = None,
        rate: Rate | None = None,
        start: StartPolicy = "earliest",
        partitions: Sequence[int] | None = None,
        decode: Callable[..., object] | None = None,
        to: str | None = None,
        chunk: int | None = None,
    ) -> Callable[[Handler], Handler]:
        """Make the decorated function the handler of these topics. The function itself is not changed.

        Args:
            topics: the names of the topics.
            pattern: a regular expression that matches whole topic names, instead of names. Matching topics that are
                created later are consumed too.
            group: a consumer group of its own for this handler.
            offsets: an offset store of its own for this handler: an address or a store.
            batch: the size of batches, for handlers of `list[...]`, `Batch` or a table.
            order: `"partition"` handles the records of a partition in order.
            concurrency: the number of workers; by default one for each assigned partition, up to 8.
            executor: `"inline"` runs a plain function on the polling thread, for handlers that never wait. The default
                is `"thread"` for a plain function. An `async def` runs on an event loop.
            retry: try a failed record again in its place (`Retry`), later (`RetryTopics`), or both in a tuple.
            repeats: `"drop"` handles records with the same `kconsume-origin` header only once.
            on_error: what happens after the last failed attempt on a record: `"stop"` ends the app, `"hold"` stops the
                partition, `"skip"` skips the record, and a `DeadLetter` writes it to a topic or a table and goes on.
            timeout: seconds that one call may take. A longer call counts as failed.
            rate: the highest rate of records in this process.
            start: where a partition with no stored offset begins: `"earliest"`, `"latest"`, or `"error"`, which holds
                the partition.
            partitions: consume exactly these partitions of the topic, without the coordination of a group.
            decode: a function that turns the bytes into the payload.
            to: the topic to which the return value is sent.
            chunk: the highest number of records that share a transaction.
        """
        options = HandlerOptions(
            topics=topics, pattern=pattern, group=group, offsets=offsets, batch=batch, order=order,
            concurrency=concurrency, executor=executor, retry=retry, repeats=repeats, on_error=on_error,
            timeout=timeout, rate=rate, start=start, partitions=partitions, decode=decode, to=to, chunk=chunk,
        )  # fmt: skip
        self._check(options)

        def decorate(function: Handler) -> Handler:
            signature = read(function, sys._getframe(1).f_locals, decode)
            options.check_with(signature)
            self._add_handler(DeclaredHandler(options, signature, (self._wraps,)))
            return function

        return decorate

    def resource(self, function: Function) -> Function:
        """Make the decorated function the provider of a resource, which handlers request by its type.

        The resource is built once in each process before the first record, and closed after the drain.

        Args:
            function: a generator function, plain or async, that yields the resource. The code after the yield closes
                the resource. The parameters of the function may be other resources.
        """
        self._add_resource(read_resource(function, sys._getframe(1).f_locals))
        return function

    def wrap(self, function: Function) -> Function:
        """Run the decorated generator function around each call of a handler. The handler runs at the yield.

        Args:
            function: a generator function, plain or async.
        """
        wrap = read_wrap(function)
        self._wraps.append(wrap)
        try:
            self._check_wraps()
        except ConfigurationError:
            self._wraps.remove(wrap)
            raise
        return function

    def include(self, router: Router, *, group: str | None = None, offsets: str | OffsetStore | None = None) -> None:
        """Include the declarations of a router, including those that are added to the router later.

        Args:
            router: the router. An app can include it only once.
            group: the consumer group of the router's handlers, unless the handler or the router sets one.
            offsets: the offset store of the router's handlers, unless the handler or the router sets one.
        """
        if not isinstance(router, Router):
            raise ConfigurationError(
                f"include takes a Router, and got a {type(router).__name__}: write app.include(router)"
            )
        if group is not None:
            check_group(group)
        router._include_in(_Inclusion(self, group, offsets))

    def _check(self, options: HandlerOptions) -> None:
        """Raise for options that cannot work with any function."""
        options.check()

    @abstractmethod
    def _add_handler(self, declared: DeclaredHandler) -> None: ...

    @abstractmethod
    def _add_resource(self, resource: Resource) -> None: ...

    def _check_wraps(self) -> None:  # noqa: B027
        """Raise ConfigurationError if the last wrap does not fit the handlers that are known already."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Inclusion:
    """Where a router was included, and the options of `include`."""

    by: Decorators
    group: str | None
    offsets: str | OffsetStore | None


class Router(Decorators):
    """Handlers, resources and wraps of one module, for an app to include.

    The wraps of a router run only around the handlers of that router, and of routers that it includes.

    Args:
        group: the consumer group of handlers without their own `group=`.
        offsets: the offset store of handlers without their own `offsets=`.
    """

    def __init__(self, *, group: str | None = None, offsets: str | OffsetStore | None = None) -> None:
        super().__init__()
        if group is not None:
            check_group(group)
        self._group = group
        self._offsets = offsets
        self._handlers: list[DeclaredHandler] = []
        self._resources: list[Resource] = []
        self._inclusions: list[_Inclusion] = []

    def _add_handler(self, declared: DeclaredHandler) -> None:
        self._handlers.append(declared)
        for inclusion in self._inclusions:
            self._pass_on(declared, inclusion)

    def _add_resource(self, resource: Resource) -> None:
        self._resources.append(resource)
        for inclusion in self._inclusions:
            inclusion.by._add_resource(resource)

    def _include_in(self, inclusion: _Inclusion) -> None:
        if inclusion.by is self or (isinstance(inclusion.by, Router) and inclusion.by._is_within(self)):
            raise ConfigurationError(
                "a router would include itself, directly or through other routers: include it in an app"
            )
        if any(known.by is inclusion.by for known in self._inclusions):
            raise ConfigurationError("this router was included already: include it once in an app")
        for resource in self._resources:
            inclusion.by._add_resource(resource)
        for declared in self._handlers:
            self._pass_on(declared, inclusion)
        self._inclusions.append(inclusion)

    def _is_within(self, other: Router) -> bool:
        """Whether the other router has included this one, directly or through other routers."""
        outer = [inclusion.by for inclusion in self._inclusions if isinstance(inclusion.by, Router)]
        return other in outer or any(router._is_within(other) for router in outer)

    def _pass_on(self, declared: DeclaredHandler, inclusion: _Inclusion) -> None:
        options = declared.options
        options = dataclasses.replace(
            options,
            group=options.group or self._group or inclusion.group,
            offsets=next((o for o in (options.offsets, self._offsets, inclusion.offsets) if o is not None), None),
        )
        inclusion.by._add_handler(DeclaredHandler(options, declared.signature, (inclusion.by._wraps, *declared.wraps)))
