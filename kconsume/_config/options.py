"""The options of a handler, and which of them are refused.

`HandlerOptions` is the one declaration of an option: the decorator makes it, the environment replaces single values of
it, and the runtime's `HandlerPlan` carries it. A new option needs a field here, a parameter of
`Decorators.consume`, and code that uses it. This file opens no connection.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from kconsume._config.client_settings import check_group
from kconsume._handlers.batches import Batching
from kconsume._handlers.rate import Rate
from kconsume._handlers.signature import Form, Signature
from kconsume._kafka.outgoing import is_topic_name
from kconsume._runtime.routing import Wanted
from kconsume.backends.base import OffsetStore
from kconsume.errors import ConfigurationError, InvalidHandler
from kconsume.failures.dead_letter import DeadLetter
from kconsume.failures.policy import OnError, Policy, Retries

Executor = Literal["thread", "inline"]
Order = Literal["partition"]
Repeats = Literal["handle", "drop"]
StartPolicy = Literal["earliest", "latest", "error"]
"""Where a partition with no stored offset begins."""

_NOT_COMMON = re.compile(r"\\[A-Za-z0-9]|\(\?")
"""Regular expressions that Python, the client and the broker read differently.

In classic groups the client follows POSIX, where \\d matches nothing, and (? is an error that names no cause.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandlerOptions:
    """The arguments of `@app.consume`. `Decorators.consume` says what each option means."""

    topics: tuple[str, ...]
    pattern: str | None = None
    group: str | None = None
    offsets: str | OffsetStore | None = None
    batch: Batching | None = None
    order: Order = "partition"
    concurrency: int | None = None
    executor: Executor | None = None
    retry: Retries | None = None
    repeats: Repeats = "handle"
    on_error: OnError = "stop"
    timeout: float | None = None
    rate: Rate | None = None
    start: StartPolicy = "earliest"
    partitions: Sequence[int] | None = None
    decode: Callable[..., object] | None = None
    to: str | None = None
    chunk: int | None = None

    def check(self) -> None:
        """Raise for options that cannot work with any handler."""
        if (not self.topics and self.pattern is None) or not all(self.topics) or callable(next(iter(self.topics), "")):
            raise InvalidHandler("@app.consume needs a topic: @app.consume('orders'), with the parentheses")
        for topic in self.topics:
            if not isinstance(topic, str):
                raise InvalidHandler(
                    f"@app.consume takes topic names as separate arguments, and got {topic!r}: write "
                    f"@app.consume('orders', 'payments')"
                )
            if topic.startswith("^"):
                raise InvalidHandler(f"{topic!r} is no topic name; if it is a pattern, write pattern={topic[1:]!r}")
        if self.pattern is not None:
            self._check_pattern(self.pattern)
        if self.group is not None:
            check_group(self.group)
        if self.order != "partition":
            raise ConfigurationError(
                f"order={self.order!r} is unknown to this version: leave order= out to keep the order of each partition"
            )
        if self.executor not in (None, "thread", "inline"):
            raise ConfigurationError(f"executor={self.executor!r} is unknown: choose 'thread' or 'inline'")
        if self.start not in ("earliest", "latest", "error"):
            raise ConfigurationError(f"start={self.start!r} is unknown: choose 'earliest', 'latest' or 'error'")
        policy = Policy(self.on_error, self.retry)
        self._check_dead_letter()
        if self.repeats not in ("handle", "drop"):
            raise ConfigurationError(f"repeats={self.repeats!r} is unknown: choose 'handle' or 'drop'")
        if policy.retry_topics is not None and self.pattern is not None:
            raise ConfigurationError(
                "RetryTopics are named after the topics of the handler, and pattern= names none: name the topics, or "
                "use Retry(...)"
            )
        if policy.retry_topics is not None and self.partitions is not None:
            raise ConfigurationError(
                "the group assigns the partitions of RetryTopics, so they do not work with partitions=: leave "
                "partitions= out, or use Retry(...)"
            )
        for name, value in (("concurrency", self.concurrency), ("chunk", self.chunk)):
            if value is not None and not _is_whole(value, at_least=1):
                raise ConfigurationError(
                    f"{name}={value!r} must be a whole number, 1 or more: change it, or leave it out"
                )
        if self.timeout is not None and not _is_time(self.timeout):
            raise ConfigurationError(
                f"timeout={self.timeout!r} must be the seconds that a call may take, above zero: timeout=30.0"
            )
        if self.partitions is not None and (len(self.topics) != 1 or not _are_numbers(self.partitions)):
            raise ConfigurationError(
                f"partitions={self.partitions!r} must be partition numbers of exactly one topic: partitions=[0, 1]"
            )
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
                f"pattern={pattern!r} is no regular expression for topic names: write pattern='orders-.*'"
            ) from None
        if found := _NOT_COMMON.search(str(pattern)):
            raise ConfigurationError(
                f"pattern={pattern!r} has {found.group()!r}, which Python, the Kafka client and the broker read "
                f"differently: write the characters instead, such as [0-9] or [a-z], and plain groups"
            )

    def check_with(self, signature: Signature) -> None:
        """Raise for options that cannot work with this handler.

        Args:
            signature: the signature of the handler.
        """
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
                f"{name} gets batches, each in one transaction, so chunk= means nothing: set their size with "
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
