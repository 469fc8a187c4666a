"""A handler as it was decorated: what was asked for in the decorator, and what is refused there.

`Options` is what the decorator was given; a `Registration` is a handler of an app, with its store found and its
arguments matched. No I/O.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from kconsume.backends.abc import OffsetStore
from kconsume.backends.registry import transactions_of
from kconsume.batches import Batching
from kconsume.errors import ConfigurationError, InvalidHandler
from kconsume.failures.policy import OnError, Policy
from kconsume.handler import Binding, Offer, bind
from kconsume.output import is_topic_name
from kconsume.rate import Rate
from kconsume.resources import Resource
from kconsume.runtime.claims import Begin
from kconsume.runtime.engine import HandlerPlan
from kconsume.settings import check_group, masked_address
from kconsume.signature import Signature
from kconsume.wrapping import Wrap

Executor = Literal["thread", "inline"]


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What `@app.consume` was given."""

    topics: tuple[str, ...]
    group: str | None = None
    offsets: str | OffsetStore | None = None
    batch: Batching | None = None
    order: str = "partition"
    concurrency: int | None = None
    executor: Executor | None = None
    on_error: OnError = "stop"
    rate: Rate | None = None
    start: Begin = "earliest"
    partitions: Sequence[int] | None = None
    decode: Callable[..., object] | None = None
    to: str | None = None
    chunk: int | None = None

    def check(self) -> None:
        """Refuse what cannot work whatever the handler is."""
        if not self.topics or not all(self.topics) or callable(self.topics[0]):
            raise InvalidHandler("@app.consume needs a topic: @app.consume('orders'), with the parentheses")
        for topic in self.topics:
            if not isinstance(topic, str):
                raise InvalidHandler(
                    f"@app.consume takes the names of topics, each by itself, and got {topic!r}: write "
                    f"@app.consume('orders', 'payments')"
                )
        if self.group is not None:
            check_group(self.group)
        if self.order != "partition":
            raise ConfigurationError(f"order={self.order!r} is unknown to this version: it keeps partition order")
        if self.executor not in (None, "thread", "inline"):
            raise ConfigurationError(f"executor={self.executor!r} is unknown: choose 'thread' or 'inline'")
        if self.start not in ("earliest", "latest", "error"):
            raise ConfigurationError(f"start={self.start!r} is unknown: choose 'earliest', 'latest' or 'error'")
        Policy(self.on_error)
        for name, value in (("concurrency", self.concurrency), ("chunk", self.chunk)):
            if value is not None and not _is_whole(value, at_least=1):
                raise ConfigurationError(f"{name}={value!r} leaves nothing to run: use 1 or more, or leave it out")
        if self.partitions is not None and (len(self.topics) != 1 or not _are_numbers(self.partitions)):
            raise ConfigurationError("partitions= names partition numbers of exactly one topic: partitions=[0, 1]")
        for keyword, given, kind in (("batch", self.batch, Batching), ("rate", self.rate, Rate)):
            if given is not None and not isinstance(given, kind):
                raise ConfigurationError(
                    f"{keyword}= takes a {kind.__name__}, and got {given!r}: write {keyword}={kind.__name__}(50)"
                )
        if self.to is not None and not _is_topic(self.to):
            raise ConfigurationError(
                f"to= takes the name of a topic, 1 to 249 of a-z A-Z 0-9 . _ -, and got {self.to!r}: write to='shipped'"
            )

    def check_with(self, signature: Signature) -> None:
        """Refuse what cannot work with this handler."""
        name = signature.name
        if signature.is_async and self.executor is not None:
            raise ConfigurationError(
                f"{name} is async and runs on an event loop, so executor={self.executor!r} means nothing: leave "
                f"it out, or write a plain def"
            )
        if self.batch is not None and not signature.form.batched:
            raise InvalidHandler(
                f"{name} gets one record at a time, so batch= means nothing: annotate its first parameter as "
                f"list[{signature.payload}], or leave batch= out"
            )
        if self.chunk is not None and signature.form.batched:
            raise InvalidHandler(
                f"{name} gets batches, each in one transaction, so chunk= means nothing: say how large they are with "
                f"batch=Batching(records={self.chunk})"
            )


def _is_whole(value: object, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _is_topic(value: object) -> bool:
    return isinstance(value, str) and is_topic_name(value)


def _are_numbers(partitions: object) -> bool:
    return isinstance(partitions, Collection) and bool(partitions) and all(_is_whole(p, 0) for p in partitions)


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """A handler in a router, before it is known which app it belongs to."""

    options: Options
    signature: Signature
    wraps: tuple[list[Wrap], ...]
    """What goes around it, outermost first; lists, because a wrap may be declared below the handler."""


class Registration:
    """A handler of an app."""

    def __init__(
        self, declared: Declared, group: str, offsets: str | OffsetStore, store: OffsetStore,
        resources: Mapping[object, Resource],
    ) -> None:  # fmt: skip
        options = declared.options
        self.options = options
        self.topics = options.topics
        self.group = group
        self.offsets = offsets
        self.store = store
        """What `offsets` names, for what can be known of it without asking it."""
        self.policy = Policy(options.on_error)
        self.order = options.order
        self.concurrency = options.concurrency
        self.start = options.start
        self.partitions = None if options.partitions is None else tuple(sorted(set(options.partitions)))
        self.chunk = options.chunk
        self.batching = (options.batch or Batching()) if declared.signature.form.batched else None
        self.rate = options.rate
        self.binding = self._bind(declared.signature, resources)
        self.executor = "async" if self.binding.is_async else options.executor or "thread"
        self._wraps = declared.wraps
        self._check()

    @property
    def name(self) -> str:
        return self.binding.name

    @property
    def all_topics(self) -> set[str]:
        """Those that it reads, and the one that it writes to."""
        return {*self.topics, *([] if self.options.to is None else [self.options.to])}

    @property
    def store_address(self) -> str:
        return self.offsets if isinstance(self.offsets, str) else self.offsets.address

    @property
    def consumer_key(self) -> tuple[str, object, object]:
        """Handlers with the same key share one consumer."""
        return (self.group, id(self.store), self.partitions)

    @property
    def wraps(self) -> tuple[Wrap, ...]:
        """Those that go around this handler; refused if one cannot."""
        return tuple(wrap for scope in self._wraps for wrap in scope if wrap.applies(self.binding.signature))

    def plan(self) -> HandlerPlan:
        return HandlerPlan(
            binding=self.binding,
            topics=self.topics,
            policy=self.policy,
            start=self.start,
            executor=self.executor,
            concurrency=self.concurrency,
            chunk=self.chunk,
            batching=self.batching,
            rate=self.rate,
            wraps=self.wraps,
        )

    def _bind(self, signature: Signature, resources: Mapping[object, Resource]) -> Binding:
        offer = Offer(
            transactions=transactions_of(self.store),
            store=masked_address(self.store_address),
            resources={hint: resource.name for hint, resource in resources.items()},
        )
        return bind(signature, offer, to=self.options.to)

    def _check(self) -> None:
        waits = "to=" if self.options.to is not None else "a Sender" if self.binding.takes_sender else None
        waits = waits or (None if self.rate is None else "rate=")
        if self.executor == "inline" and waits is not None:
            raise ConfigurationError(
                f"{self.name} has {waits}, so it waits, and executor='inline' is for handlers that never do: the group "
                f"would lose its member meanwhile; leave executor= out"
            )
        _ = self.wraps
