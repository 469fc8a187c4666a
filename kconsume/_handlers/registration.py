"""A handler of an app: its options, its store and its bound parameters, and the combinations that are refused.

A decorator makes a `DeclaredHandler`, and an app makes a `Registration` from it. This file opens no connection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kconsume._config.client_settings import masked_address
from kconsume._config.options import HandlerOptions
from kconsume._handlers.batches import Batching
from kconsume._handlers.binding import Available, Binding, bind
from kconsume._handlers.resources import Resource
from kconsume._handlers.signature import Signature
from kconsume._handlers.wraps import Wrap
from kconsume._runtime.plan import HandlerPlan
from kconsume._runtime.routing import Wanted
from kconsume.backends.base import OffsetStore
from kconsume.backends.capabilities import capabilities_of
from kconsume.errors import ConfigurationError
from kconsume.failures.policy import Policy


@dataclasses.dataclass(frozen=True, slots=True)
class DeclaredHandler:
    """A decorated function, before its app is known.

    Args:
        options: the arguments of `@app.consume`.
        signature: the signature of the function.
        wraps: the wraps of the app and of the routers around it, outermost first. Lists, because a wrap may be declared
            below the handler.
    """

    options: HandlerOptions
    signature: Signature
    wraps: tuple[list[Wrap], ...]


class Registration:
    """A handler of an app.

    Args:
        declared: what the decorator made.
        group: the consumer group, from the handler, its routers or the app.
        offsets: the offset store or its address, from the handler, its routers or the app.
        store: the store of `offsets`. Only its capabilities are read; it is not opened.
        resources: the resources of the app, by type.
    """

    def __init__(
        self, declared: DeclaredHandler, group: str, offsets: str | OffsetStore, store: OffsetStore,
        resources: Mapping[object, Resource],
    ) -> None:  # fmt: skip
        options = declared.options
        self.declared = declared
        self.options = options
        self.topics = options.topics
        self.pattern = options.pattern
        self.group = group
        self.offsets = offsets
        self.store = store
        self.policy = Policy(options.on_error, options.retry)
        self.retry_chain = self.policy.retry_chain(options.topics, group)
        self.partitions = None if options.partitions is None else tuple(sorted(set(options.partitions)))
        self.batching = (options.batch or Batching()) if declared.signature.form.batched else None
        self.binding = self._bind(declared.signature, resources)
        self.executor = "async" if self.binding.is_async else options.executor or "thread"
        self._check()

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.binding.name

    @property
    def wanted(self) -> Wanted:
        """The topics that the handler subscribes to."""
        return Wanted(self.topics, self.pattern, self.retry_topics)

    @property
    def retry_topics(self) -> tuple[str, ...]:
        """The names of the handler's retry topics."""
        return () if self.retry_chain is None else tuple(self.retry_chain.retry_topics)

    @property
    def topics_text(self) -> str:
        """The topics or the pattern, as text."""
        return ", ".join(self.topics) if self.pattern is None else f"topics like {self.pattern}"

    @property
    def all_topics(self) -> set[str]:
        """The topics that the handler reads, and the topics that it writes to."""
        dead_letter = self.policy.dead_letter
        written = (self.options.to, None if dead_letter is None else dead_letter.topic)
        return {*self.topics, *self.retry_topics, *(topic for topic in written if topic is not None)}

    @property
    def store_address(self) -> str:
        """The address of the handler's store. The address may contain a password."""
        return self.offsets if isinstance(self.offsets, str) else self.offsets.address

    @property
    def own_guarantee(self) -> str | None:
        """The guarantee of a ready-made handler such as `SparkSink`, which does not depend on the store."""
        guarantee = getattr(self.binding.function, "guarantee", None)
        return guarantee if isinstance(guarantee, str) else None

    @property
    def consumer_key(self) -> tuple[str, object, object]:
        """Handlers with the same key share one consumer."""
        return (self.group, id(self.store), self.partitions)

    @property
    def wraps(self) -> tuple[Wrap, ...]:
        """The wraps around this handler. Raises InvalidHandler if a wrap does not fit the handler."""
        return tuple(wrap for scope in self.declared.wraps for wrap in scope if wrap.applies(self.binding.signature))

    def plan(self) -> HandlerPlan:
        """Return what the runtime needs to run the handler."""
        return HandlerPlan(
            binding=self.binding,
            options=self.options,
            policy=self.policy,
            executor=self.executor,
            batching=self.batching,
            wraps=self.wraps,
            outbox=capabilities_of(self.store).outbox is not None,
            retry_chain=self.retry_chain,
        )

    def _bind(self, signature: Signature, resources: Mapping[object, Resource]) -> Binding:
        offers = capabilities_of(self.store)
        available = Available(
            transactions=offers.connection_types,
            async_transactions=offers.async_connection_types,
            store=masked_address(self.store_address),
            resources={hint: resource.name for hint, resource in resources.items()},
        )
        return bind(signature, available, to=self.options.to)

    def _check(self) -> None:
        self._check_inline()
        self._check_dead_letter()
        offers, store = capabilities_of(self.store), masked_address(self.store_address)
        if self.options.repeats == "drop" and offers.outbox is None:
            raise ConfigurationError(
                f"{self.name} has repeats='drop', and its offsets are in {store}, which cannot "
                f"record in the same transaction which records were handled: use offsets='postgresql://…' or 'sqlite:///…'"
            )
        if self.options.timeout is not None and self._holds_transaction_in_thread() and not offers.severs:
            raise ConfigurationError(
                f"{self.name} has timeout=, and takes the transaction of {store}, which kconsume cannot end while a "
                f"hanging thread uses it: make the handler an async def, or leave timeout= out"
            )
        _ = self.wraps

    def _check_inline(self) -> None:
        if self.executor != "inline" or (cause := self._waits_for()) is None:
            return
        raise ConfigurationError(
            f"{self.name} has {cause}, so it waits, and executor='inline' is for handlers that never wait: while it "
            f"waits, nothing polls, and the group may remove this member; leave executor= out"
        )

    def _waits_for(self) -> str | None:
        """Return an option that makes calls of the handler wait, or None."""
        options, policy = self.options, self.policy
        causes = {
            "to=": options.to is not None,
            "a Sender": self.binding.takes_sender,
            "rate=": options.rate is not None,
            "retry=": policy.retry is not None or self.retry_chain is not None,
            "a DeadLetter": policy.dead_letter is not None,
            "timeout=": options.timeout is not None,
        }
        return next((cause for cause, given in causes.items() if given), None)

    def _check_dead_letter(self) -> None:
        letter = self.policy.dead_letter
        if letter is None:
            return
        if letter.topic in self.retry_topics:
            raise ConfigurationError(
                f"{self.name} has on_error=DeadLetter({letter.topic!r}), which is one of its retry topics, so a record "
                f"would come back for ever: give the dead letters a topic of their own"
            )
        if letter.table is not None and not capabilities_of(self.store).keeps_letters:
            raise ConfigurationError(
                f"{self.name} has on_error=DeadLetter(table={letter.table!r}), and its offsets are in "
                f"{masked_address(self.store_address)}, which has no tables: use offsets='postgresql://…' or "
                f"'sqlite:///…', or DeadLetter('a-topic')"
            )

    def _holds_transaction_in_thread(self) -> bool:
        """Whether a call that hangs keeps the transaction open in its thread. The call of an `async def` does not,
        because it can be cancelled."""
        return self.plan().in_transactions and not self.binding.is_async
