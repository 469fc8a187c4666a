"""A handler as it was decorated: what was asked for in the decorator, and what is refused there.

`Options` is what the decorator was given; a `Registration` is a handler of an app, with its store found and its
arguments matched. No I/O.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from kconsume.backends.abc import OffsetStore, OutboxStore
from kconsume.backends.registry import keeps_letters, severs, transactions_of
from kconsume.batches import Batching
from kconsume.errors import ConfigurationError, InvalidHandler
from kconsume.failures.dead_letter import DeadLetter
from kconsume.failures.policy import OnError, Policy, Retries
from kconsume.handler import Binding, Offer, bind
from kconsume.output import is_topic_name
from kconsume.rate import Rate
from kconsume.resources import Resource
from kconsume.runtime.claims import Begin
from kconsume.runtime.plans import HandlerPlan
from kconsume.runtime.routes import Wanted
from kconsume.settings import check_group, masked_address
from kconsume.signature import Form, Signature
from kconsume.wrapping import Wrap

Executor = Literal["thread", "inline"]

_NOT_COMMON = re.compile(r"\\[A-Za-z0-9]|\(\?")
"""By POSIX, which the client goes by in classic groups, \\d matches nothing, and (? is an error without a reason."""


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
    pattern: str | None = None
    retry: Retries | None = None
    repeats: Literal["handle", "drop"] = "handle"
    timeout: float | None = None

    def check(self) -> None:
        """Refuse what cannot work whatever the handler is."""
        if (not self.topics and self.pattern is None) or not all(self.topics) or callable(next(iter(self.topics), "")):
            raise InvalidHandler("@app.consume needs a topic: @app.consume('orders'), with the parentheses")
        for topic in self.topics:
            if not isinstance(topic, str):
                raise InvalidHandler(
                    f"@app.consume takes the names of topics, each by itself, and got {topic!r}: write "
                    f"@app.consume('orders', 'payments')"
                )
            if topic.startswith("^"):
                raise InvalidHandler(
                    f"{topic!r} is no name of a topic; if it is a pattern over names, say so: pattern={topic[1:]!r}"
                )
        if self.pattern is not None:
            self._check_pattern(self.pattern)
        if self.group is not None:
            check_group(self.group)
        if self.order != "partition":
            raise ConfigurationError(f"order={self.order!r} is unknown to this version: it keeps partition order")
        if self.executor not in (None, "thread", "inline"):
            raise ConfigurationError(f"executor={self.executor!r} is unknown: choose 'thread' or 'inline'")
        if self.start not in ("earliest", "latest", "error"):
            raise ConfigurationError(f"start={self.start!r} is unknown: choose 'earliest', 'latest' or 'error'")
        policy = Policy(self.on_error, self.retry)
        self._check_dead_letter()
        if self.repeats not in ("handle", "drop"):
            raise ConfigurationError(f"repeats={self.repeats!r} is unknown: choose 'handle' or 'drop'")
        if policy.retry_topics is not None and (self.pattern is not None or self.partitions is not None):
            what = "pattern=" if self.pattern is not None else "partitions="
            raise ConfigurationError(
                f"RetryTopics have the names of the topics that a handler reads, and their partitions are a group's, "
                f"so they do not go with {what}: name the topics, or use Retry(...)"
            )
        for name, value in (("concurrency", self.concurrency), ("chunk", self.chunk)):
            if value is not None and not _is_whole(value, at_least=1):
                raise ConfigurationError(f"{name}={value!r} leaves nothing to run: use 1 or more, or leave it out")
        if self.timeout is not None and not _is_time(self.timeout):
            raise ConfigurationError(
                f"timeout={self.timeout!r} is no time that a call may take: give seconds above zero, as in timeout=30.0"
            )
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

    def _check_dead_letter(self) -> None:
        topic = self.on_error.topic if isinstance(self.on_error, DeadLetter) else None
        if topic is not None and Wanted(self.topics, self.pattern).takes(topic):
            raise ConfigurationError(
                f"on_error=DeadLetter({topic!r}) is a topic that the handler reads itself, so a record that fails "
                f"would come back for ever: give the dead letters a topic of their own"
            )

    def _check_pattern(self, pattern: object) -> None:
        if self.topics:
            raise ConfigurationError(
                f"@app.consume takes topics or pattern=, and got both {self.topics[0]!r} and {pattern!r}: add the name "
                f"to the pattern, as in 'orders-.*|{self.topics[0]}'"
            )
        try:
            re.compile(pattern if isinstance(pattern, str) and pattern else "(")
        except re.error:
            raise ConfigurationError(
                f"pattern={pattern!r} is no regular expression over names of topics: write pattern='orders-.*'"
            ) from None
        if found := _NOT_COMMON.search(str(pattern)):
            raise ConfigurationError(
                f"pattern={pattern!r} has {found.group()!r}, which Python, the Kafka client and the broker do not read "
                f"alike: write what it stands for, such as [0-9] or [a-z], and plain groups"
            )

    def check_with(self, signature: Signature) -> None:
        """Refuse what cannot work with this handler."""
        name = signature.name
        if signature.is_async and self.executor is not None:
            raise ConfigurationError(
                f"{name} is async and runs on an event loop, so executor={self.executor!r} means nothing: leave "
                f"it out, or write a plain def"
            )
        if signature.form is Form.FRAME and self.executor == "inline":
            raise ConfigurationError(
                f"{name} gets a DataFrame, so it waits for Spark, and executor='inline' is for handlers that never "
                f"wait: leave executor= out"
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


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


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
        self.pattern = options.pattern
        self.group = group
        self.offsets = offsets
        self.store = store
        """What `offsets` names, for what can be known of it without asking it."""
        self.policy = Policy(options.on_error, options.retry)
        self.ladder = self.policy.ladder(options.topics, group)
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
    def wanted(self) -> Wanted:
        return Wanted(self.topics, self.pattern, self.retry_topics)

    @property
    def retry_topics(self) -> tuple[str, ...]:
        return () if self.ladder is None else tuple(self.ladder.rungs)

    @property
    def topics_text(self) -> str:
        """What it reads, for people."""
        return ", ".join(self.topics) if self.pattern is None else f"topics like {self.pattern}"

    @property
    def all_topics(self) -> set[str]:
        """Those that it reads, and those that it writes to."""
        dead_letter = self.policy.dead_letter
        written = (self.options.to, None if dead_letter is None else dead_letter.topic)
        return {*self.topics, *self.retry_topics, *(topic for topic in written if topic is not None)}

    @property
    def store_address(self) -> str:
        return self.offsets if isinstance(self.offsets, str) else self.offsets.address

    @property
    def own_guarantee(self) -> str | None:
        """What a ready-made handler promises by itself, whatever the store."""
        said = getattr(self.binding.function, "guarantee", None)
        return said if isinstance(said, str) else None

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
            pattern=self.pattern,
            outbox=isinstance(self.store, OutboxStore),
            ladder=self.ladder,
            drops_repeats=self.options.repeats == "drop",
            timeout=self.options.timeout,
        )

    def _bind(self, signature: Signature, resources: Mapping[object, Resource]) -> Binding:
        transactions, awaited = transactions_of(self.store)
        offer = Offer(
            transactions=transactions,
            async_transactions=awaited,
            store=masked_address(self.store_address),
            resources={hint: resource.name for hint, resource in resources.items()},
        )
        return bind(signature, offer, to=self.options.to)

    def _check(self) -> None:
        waits = "to=" if self.options.to is not None else "a Sender" if self.binding.takes_sender else None
        waits = waits or (None if self.rate is None else "rate=")
        waits = waits or ("retry=" if self.policy.retry is not None or self.ladder is not None else None)
        waits = waits or (None if self.policy.dead_letter is None else "a DeadLetter")
        waits = waits or (None if self.options.timeout is None else "timeout=")
        if self.executor == "inline" and waits is not None:
            raise ConfigurationError(
                f"{self.name} has {waits}, so it waits, and executor='inline' is for handlers that never do: the group "
                f"would lose its member meanwhile; leave executor= out"
            )
        if self.options.repeats == "drop" and not isinstance(self.store, OutboxStore):
            raise ConfigurationError(
                f"{self.name} has repeats='drop', and its offsets are in {masked_address(self.store_address)}, which "
                f"cannot note in one transaction what was taken in: use offsets='postgresql://…' or 'sqlite:///…'"
            )
        if self.options.timeout is not None and self._keeps_the_transaction() and not severs(self.store):
            raise ConfigurationError(
                f"{self.name} has timeout=, and takes the transaction of {masked_address(self.store_address)}, which "
                f"cannot be taken away from a thread that hangs: make it an async def, or leave timeout= out"
            )
        dead_topic = None if self.policy.dead_letter is None else self.policy.dead_letter.topic
        if dead_topic in self.retry_topics:
            raise ConfigurationError(
                f"{self.name} has on_error=DeadLetter({dead_topic!r}), which is one of its retry topics, so a record "
                f"would go round for ever: give the dead letters a topic of their own"
            )
        table = None if self.policy.dead_letter is None else self.policy.dead_letter.table
        if table is not None and not keeps_letters(self.store):
            raise ConfigurationError(
                f"{self.name} has on_error=DeadLetter(table={table!r}), and its offsets are in "
                f"{masked_address(self.store_address)}, which has no tables: use offsets='postgresql://…' or "
                f"'sqlite:///…', or DeadLetter('a-topic')"
            )
        _ = self.wraps

    def _keeps_the_transaction(self) -> bool:
        """Whether a call that does not end has it in hand. An `async def` is cancelled."""
        return self.plan().in_transactions and not self.binding.is_async
