"""The declarations of an app: its settings, handlers, resources and stores.

`App` adds declarations, and runs the plans that `plans` returns. The command line, Spark and `kconsume.testing` read
the declarations as `app.declared`. This file must not run, consume or send anything. A store that is opened by address
connects only when it is used. One exception: `bootstrap_servers` starts the broker of an `embedded://` address.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from kconsume._config.app_settings import AppSettings
from kconsume._config.client_settings import ClientValue, client_settings
from kconsume._config.environment import Environment, UnreadVariable
from kconsume._handlers.annotations import text_of
from kconsume._handlers.registration import DeclaredHandler, Registration
from kconsume._handlers.resources import Resource
from kconsume._handlers.type_providers import default_resource
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.producer import most_bytes
from kconsume._runtime.plan import ConsumerPlan
from kconsume.backends.base import OffsetStore
from kconsume.backends.kafka import KafkaStore
from kconsume.backends.registry import open_store
from kconsume.errors import ConfigurationError
from kconsume.rebalance.listeners import Listener
from kconsume.records import Partition


class Declarations:
    """The declarations of one app.

    Args:
        settings: what `App(...)` was given.
        environment: the `KCONSUME_*` variables, for the options of handlers.
    """

    def __init__(self, settings: AppSettings, environment: Environment) -> None:
        self.settings = settings
        self.environment = environment
        self.registrations: list[Registration] = []
        """The handlers, in the order of their declaration."""
        self.resources: dict[object, Resource] = {}
        """The resources that `@app.resource` declared, by the type that handlers ask for."""
        self.ready_resources: dict[object, object] = {}
        """Objects that replace declared resources in a test, by type. A run does not build or close them."""
        self.stores: dict[str, OffsetStore] = {}
        """The stores that were opened, by address."""
        self.store(settings.offsets)

    # Declarations

    def store(self, offsets: str | OffsetStore) -> OffsetStore:
        """Return the store. The same address returns the same object, so `memory://` keeps its offsets between runs.

        Args:
            offsets: an address, or a store. Anything else raises ConfigurationError.
        """
        if not isinstance(offsets, str):
            return _checked_store(offsets)
        if offsets not in self.stores:
            self.stores[offsets] = open_store(offsets, brokers=self.settings.brokers, kafka=self.settings.kafka)
        return self.stores[offsets]

    def add_handler(self, handler: DeclaredHandler) -> None:
        """Register a handler. Options from the environment override its own options."""
        options = self.environment.options_of(handler.signature.name, handler.options)
        if options is not handler.options:
            options.check()
            options.check_with(handler.signature)
            handler = dataclasses.replace(handler, options=options)
        offsets = self.settings.offsets if options.offsets is None else options.offsets
        registration = self._register(handler, options.group or self.settings.group, offsets)
        for hint in registration.binding.resources.values():
            if hint not in self.resources and (default := default_resource(hint)) is not None:
                self.resources[hint] = default

    def add_resource(self, resource: Resource) -> None:
        """Register a resource. Two routers may add the same resource. Two resources of one type are refused."""
        known = self.resources.get(resource.provides)
        if known is not None and known is not resource and not known.is_default:
            raise ConfigurationError(
                f"{known.name} and {resource.name} both provide {text_of(resource.provides)}, and handlers ask for "
                f"resources by type: let one of them provide a type of its own, such as a subclass"
            )
        self.resources[resource.provides] = resource

    def _register(self, handler: DeclaredHandler, group: str, offsets: str | OffsetStore) -> Registration:
        registration = Registration(handler, group, offsets, self.store(offsets), self.resources)
        self._must_not_conflict(registration)
        self.registrations.append(registration)
        return registration

    def _must_not_conflict(self, new: Registration) -> None:
        must_not_go_round([*self.registrations, new])
        for old in self.registrations:
            must_not_share(old, new, (*new.topics, *new.retry_topics))
            if old.group == new.group and (old.partitions is not None or new.partitions is not None):
                raise ConfigurationError(
                    f"{old.name} and {new.name} share group {new.group!r}, but partitions= takes partitions without "
                    f"coordination: give the handler with partitions= a group of its own"
                )
            if old.group == new.group and old.consumer_key != new.consumer_key:
                raise ConfigurationError(
                    f"{old.name} and {new.name} share group {new.group!r} but keep its offsets in different stores: "
                    f"use one store for a group, or give one handler its own group="
                )

    def unread_variables(self) -> list[UnreadVariable]:
        """Return the `KCONSUME_*` variables that are set and not read."""
        return self.environment.unread([registration.name for registration in self.registrations])

    # The plans of a run

    @property
    def max_message_bytes(self) -> int:
        """The size of the largest message that the app may send."""
        return most_bytes(self.settings.kafka)

    def bootstrap_servers(self, topics: Iterable[str] = ()) -> str:
        """Return the value for `bootstrap.servers`. For an `embedded://` address, start the broker.

        Args:
            topics: topics that an embedded broker creates in addition to the topics of the handlers.
        """
        if not self.settings.embedded:
            return self.settings.brokers
        from kconsume._embedded.address import resolve

        return resolve(self.settings.brokers, {*topics, *(t for r in self.registrations for t in r.all_topics)})

    def plans(self, listeners: Sequence[Listener]) -> list[ConsumerPlan]:
        """Return one plan for each group and store. Opens no connection, but starts an embedded broker."""
        if not self.registrations:
            raise ConfigurationError("the app has no handler: decorate a function with @app.consume('topic')")
        brokers = self.bootstrap_servers()
        cluster = Cluster(brokers, self.settings.kafka)
        consumers: dict[tuple[str, object, object], list[Registration]] = {}
        for registration in self.registrations:
            consumers.setdefault(registration.consumer_key, []).append(registration)
        return [self._plan(handlers, brokers, cluster, listeners) for handlers in consumers.values()]

    def _plan(
        self, registrations: list[Registration], brokers: str, cluster: Cluster, listeners: Sequence[Listener]
    ) -> ConsumerPlan:
        first, settings = registrations[0], self.settings
        store = first.store
        if isinstance(first.offsets, str) and isinstance(store, KafkaStore):
            # The address kafka:// means the cluster that is consumed. The run and its store share one admin client.
            store = KafkaStore(brokers, cluster=cluster)
        return ConsumerPlan(
            group=first.group,
            store=store,
            handlers=tuple(r.plan() for r in registrations),
            partitions=None
            if first.partitions is None
            else tuple(Partition(first.topics[0], n) for n in first.partitions),
            settings=client_settings(
                brokers,
                first.group,
                settings.kafka,
                instance=settings.instance if first.partitions is None else None,
                embedded=settings.embedded,
            ),
            cluster=cluster,
            shutdown=settings.shutdown,
            memory=settings.memory,
            listeners=tuple(listeners),
        )

    # Overriding

    def overridden(
        self,
        *,
        brokers: str | None,
        offsets: str | OffsetStore | None,
        group: str | None,
        kafka: Mapping[str, ClientValue] | None,
        ready_resources: Mapping[object, object],
    ) -> Declarations:
        """Return a copy with other settings, for `kconsume.testing.override`. None keeps the present value.

        The copy shares the declared resources and the opened stores with the original. A handler with its own `group=`
        or `offsets=` keeps that value.

        Args:
            brokers: the address of the brokers.
            offsets: the offset store. An address opens a new store, even if the original has a store of that address.
            group: the consumer group.
            kafka: replaces all client properties.
            ready_resources: more objects that replace declared resources, by type.
        """
        given = {
            "brokers": brokers,
            "offsets": offsets,
            "group": group,
            "kafka": None if kafka is None else dict(kafka),
        }
        copy = Declarations.__new__(Declarations)
        copy.settings = self.settings.replaced({name: value for name, value in given.items() if value is not None})
        copy.environment = self.environment
        copy.registrations = list(self.registrations)
        copy.resources = self.resources
        copy.ready_resources = {**self.ready_resources, **ready_resources}
        copy.stores = dict(self.stores)
        if isinstance(offsets, str):
            copy.stores.pop(offsets, None)
        try:
            copy.store(copy.settings.offsets)
            if offsets is not None or group is not None:
                copy._rebind(self)
        except BaseException:
            copy.close_stores_since(self)
            raise
        return copy

    def _rebind(self, before: Declarations) -> None:
        self.registrations = []
        for old in before.registrations:
            own = old.options
            group = self.settings.group if own.group in (None, before.settings.group) else old.group
            offsets = self.settings.offsets
            if own.offsets is not None and own.offsets != before.settings.offsets:
                offsets = own.offsets
            self._register(old.declared, group, offsets)

    def close_stores_since(self, before: Declarations) -> None:
        """Close the stores that were opened here and not in `before`."""
        for address, store in self.stores.items():
            if before.stores.get(address) is not store:
                store.close()


def must_not_share(old: Registration, new: Registration, topics: Sequence[str]) -> None:
    """Raise if two handlers of one group read the same topic."""
    shared = [topic for topic in topics if old.wanted.takes(topic)]
    if new.pattern is not None:
        shared += [topic for topic in old.topics if new.wanted.takes(topic)]
        shared += [new.pattern] if old.pattern == new.pattern else []
    if shared and old.group == new.group:
        raise topic_shared(old.name, new.name, shared, new.group)


def topic_shared(old: str, new: str, topics: Sequence[str], group: str) -> ConfigurationError:
    """Return the error about a topic that two handlers of one group read."""
    return ConfigurationError(
        f"{old} and {new} both handle {min(topics)!r} in group {group!r}, where each record goes to one handler: give "
        f"one of them its own group=, or call one from the other"
    )


def must_not_go_round(registrations: Sequence[Registration]) -> None:
    """Raise if dead letters return to the topic of their records.

    The dead letters of one handler may be read by another handler, whose dead letters may be read by a third one, and
    so on. The letters must not reach the first topic again.
    """
    dead = {r: letter.topic for r in registrations if (letter := r.policy.dead_letter) is not None and letter.topic}
    # A handler reads a topic by its name, by its pattern, or as one of its retry topics. `after` has
    # the topics of the dead letters that come from each topic.
    after = {topic: {dead[r] for r in dead if r.wanted.takes(topic)} for topic in set(dead.values())}
    for start in sorted(after):
        reached, ahead = set[str](), list(after[start])
        while ahead:
            topic = ahead.pop()
            if topic == start:
                raise ConfigurationError(
                    f"a record of {start!r} that keeps failing would come back to that topic through dead-letter "
                    f"topics, for ever: set on_error= of the last handler of that circle to 'stop' or 'skip', or to a "
                    f"topic that no handler of this app reads"
                )
            if topic not in reached:
                reached.add(topic)
                ahead += after.get(topic, ())


def _checked_store(store: OffsetStore) -> OffsetStore:
    if isinstance(store, OffsetStore):
        return store
    # The message shows only the type: a settings object of the user may hold a password.
    raise ConfigurationError(
        f"offsets= got a value of type {type(store).__name__}, which is not a store: give an address such as "
        f"'sqlite:///shop.db', or an object with the methods of kconsume.backends.OffsetStore"
    )
