"""A router is as good as the app: its handlers, resources and wraps arrive there, once, and under its own names."""

from __future__ import annotations

import dataclasses
import inspect
import sqlite3
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kconsume import App, Record
from kconsume._config.options import HandlerOptions
from kconsume._handlers.registration import Registration
from kconsume._runtime.plan import ConsumerPlan
from kconsume.backends import MemoryStore
from kconsume.errors import ConfigurationError, InvalidHandler, UnknownStore
from kconsume.router import Decorators, Router

ADDRESS = "127.0.0.1:1"


def app(**settings: Any) -> App:
    return App(ADDRESS, **{"group": "shop", **settings})


def one(value: bytes) -> None: ...
def two(value: bytes) -> None: ...
def three(value: bytes) -> None: ...
def writes(value: bytes, tx: sqlite3.Connection) -> None: ...


def named(made: App, name: str) -> Registration:
    (found,) = [registration for registration in made.registrations if registration.name == name]
    return found


def topics_of(plan: ConsumerPlan) -> list[str]:
    return sorted(topic for handler in plan.handlers for topic in handler.options.topics)


def test_every_option_is_a_parameter_of_the_decorator_with_the_same_default() -> None:
    _, topics, *parameters = inspect.signature(Decorators.consume).parameters.values()
    taken = {each.name: each.default for each in parameters}
    declared = {each.name: each.default for each in dataclasses.fields(HandlerOptions)}
    assert topics.kind is inspect.Parameter.VAR_POSITIONAL
    assert taken == {name: default for name, default in declared.items() if name != "topics"}


class Client:
    pass


class TestIncluding:
    def test_its_handlers_are_those_of_the_app(self) -> None:
        router, made = Router(), app()
        router.consume("orders")(one)
        made.consume("payments")(two)
        made.include(router)
        assert [(r.name, r.topics, r.group) for r in made.registrations] == [
            ("two", ("payments",), "shop"),
            ("one", ("orders",), "shop"),
        ]

    def test_also_those_that_are_added_later(self) -> None:
        router, made = Router(), app()
        made.include(router)
        router.consume("orders")(one)
        assert named(made, "one").topics == ("orders",)

    def test_the_decorated_function_stays_an_ordinary_function(self) -> None:
        assert Router().consume("orders")(one) is one

    def test_a_router_in_a_router(self) -> None:
        inner, middle, outer, made = Router(), Router(), Router(), app()
        inner.consume("a")(one)
        middle.include(inner)
        outer.include(middle)
        made.include(outer)
        inner.consume("b")(two)
        assert [r.name for r in made.registrations] == ["one", "two"]

    def test_a_router_in_two_apps_and_each_has_its_own_settings(self) -> None:
        router, first, second = Router(), app(), app(group="audit", offsets="memory://")
        router.consume("orders")(one)
        first.include(router)
        second.include(router)
        router.consume("payments")(two)
        assert [(r.name, r.group, r.store_address) for made in (first, second) for r in made.registrations] == [
            ("one", "shop", "kafka://"),
            ("two", "shop", "kafka://"),
            ("one", "audit", "memory://"),
            ("two", "audit", "memory://"),
        ]

    def test_twice_in_one_app_is_refused_and_changes_nothing(self) -> None:
        router, made = Router(), app()
        router.consume("orders")(one)
        made.include(router)
        with pytest.raises(ConfigurationError, match="this router was included already: include it once"):
            made.include(router, group="audit")
        assert len(made.registrations) == 1

    @pytest.mark.timeout(10)
    def test_in_itself_is_refused_and_does_not_go_on_for_ever(self) -> None:
        router = Router()
        router.consume("orders")(one)
        with pytest.raises(ConfigurationError, match="would include itself"):
            router.include(router)

    @pytest.mark.timeout(10)
    def test_in_a_circle_is_refused_and_does_not_go_on_for_ever(self) -> None:
        first, second, third = Router(), Router(), Router()
        third.consume("orders")(one)
        first.include(second)
        second.include(third)
        with pytest.raises(ConfigurationError, match="would include itself"):
            third.include(first)

    @pytest.mark.parametrize("other", [app, None, "router", Router])
    def test_what_is_no_router_is_refused(self, other: Any) -> None:
        other = other() if other is app else other
        with pytest.raises(ConfigurationError, match="include takes a Router"):
            app().include(other)

    def test_a_handler_that_cannot_work_in_the_app_is_refused_when_it_is_included(self) -> None:
        router = Router()
        router.consume("orders")(writes)
        with pytest.raises(InvalidHandler, match=r"writes asks for tx.*its offsets are in kafka://"):
            app().include(router)
        made = app(offsets="sqlite:///shop.db")
        made.include(router)
        assert named(made, "writes").binding.transaction is sqlite3.Connection

    def test_a_signature_that_is_wrong_is_refused_where_it_is_decorated(self) -> None:
        def untold(value) -> None: ...  # type: ignore[no-untyped-def]

        with pytest.raises(InvalidHandler, match="does not say what 'value' is"):
            Router().consume("orders")(untold)

    @pytest.mark.parametrize("option", [{"start": "now"}, {"to": ""}, {"concurrency": 0}, {"group": " x"}])
    def test_an_option_that_is_wrong_is_refused_where_it_is_written(self, option: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError):
            Router().consume("orders", **option)


class TestGroupsAndStores:
    @pytest.mark.parametrize(
        ("handler", "router", "include", "effective"),
        [
            (None, None, None, "shop"),
            (None, None, "c", "c"),
            (None, "b", "c", "b"),
            ("a", "b", "c", "a"),
            ("a", None, None, "a"),
        ],
    )
    def test_the_nearest_group_counts(
        self, handler: str | None, router: str | None, include: str | None, effective: str
    ) -> None:
        made, within = app(), Router(group=router)
        within.consume("orders", group=handler)(one)
        made.include(within, group=include)
        assert named(made, "one").group == effective

    @pytest.mark.parametrize(
        ("handler", "router", "include", "effective"),
        [
            (None, None, None, "kafka://"),
            (None, None, "memory://", "memory://"),
            (None, "sqlite:///b.db", "memory://", "sqlite:///b.db"),
            ("sqlite:///a.db", "sqlite:///b.db", "memory://", "sqlite:///a.db"),
        ],
    )
    def test_the_nearest_store_counts(
        self, handler: str | None, router: str | None, include: str | None, effective: str
    ) -> None:
        made, within = app(), Router(offsets=router)
        within.consume("orders", offsets=handler)(one)
        made.include(within, offsets=include)
        assert named(made, "one").store_address == effective

    def test_of_nested_routers_the_inner_one_s_counts(self) -> None:
        inner, outer, made = Router(group="inner"), Router(group="outer"), app()
        inner.consume("a")(one)
        outer.consume("b")(two)
        outer.include(inner)
        made.include(outer, group="include")
        assert (named(made, "one").group, named(made, "two").group) == ("inner", "outer")

    def test_two_routers_with_two_groups_and_stores_on_one_topic_are_two_consumers(self) -> None:
        made = app()
        billing, audit = Router(group="billing", offsets="sqlite:///billing.db"), Router(group="audit")
        billing.consume("orders")(writes)
        audit.consume("orders", offsets="memory://")(one)
        made.include(billing)
        made.include(audit)
        assert [(plan.group, plan.store.address, topics_of(plan)) for plan in made.plans()] == [
            ("billing", "sqlite:///billing.db", ["orders"]),
            ("audit", "memory://", ["orders"]),
        ]

    def test_handlers_of_two_routers_in_one_group_and_store_are_one_consumer(self) -> None:
        made, first, second = app(offsets="memory://"), Router(), Router()
        first.consume("orders")(one)
        second.consume("payments")(two)
        made.include(first)
        made.include(second)
        (plan,) = made.plans()
        assert topics_of(plan) == ["orders", "payments"]

    def test_a_conflict_names_both_handlers_across_routers(self) -> None:
        made, first, second = app(), Router(), Router()
        first.consume("orders")(one)
        second.consume("orders")(two)
        made.include(first)
        with pytest.raises(ConfigurationError, match="one and two both handle 'orders' in group 'shop'"):
            made.include(second)

    def test_one_group_in_two_stores_is_refused_across_routers(self) -> None:
        made, first, second = app(), Router(group="g", offsets="memory://"), Router(group="g")
        first.consume("orders")(one)
        second.consume("payments")(two)
        made.include(first)
        with pytest.raises(ConfigurationError, match="share group 'g' but keep the group's offsets in"):
            made.include(second)

    def test_a_store_object_is_shared_by_those_that_were_given_it(self) -> None:
        store, made = MemoryStore(), app()
        router = Router(group="g", offsets=store)
        router.consume("a")(one)
        router.consume("b")(two)
        made.include(router)
        (plan,) = made.plans()
        assert plan.store is store

    @pytest.mark.parametrize("group", ["", "  ", " x", 3])
    def test_a_group_that_the_client_would_not_take_is_refused(self, group: Any) -> None:
        """With only white space in it the client would abort the process."""
        with pytest.raises(ConfigurationError, match="group"):
            Router(group=group)
        with pytest.raises(ConfigurationError, match="group"):
            app().include(Router(), group=group)

    def test_a_store_that_is_none_is_refused_when_the_app_meets_it(self) -> None:
        router = Router(offsets="mongodb://db")
        router.consume("orders")(one)
        with pytest.raises(UnknownStore):
            app().include(router)


class TestResources:
    def test_what_a_router_provides_the_app_s_handlers_may_ask_for(self) -> None:
        router, made = Router(), app()

        @router.resource
        def client() -> Iterator[Client]:
            yield Client()

        def asks(value: bytes, client: Client) -> None: ...

        made.include(router)
        made.consume("orders")(asks)
        assert named(made, "asks").binding.resources == {"client": Client}

    def test_what_the_app_provides_the_router_s_handlers_may_ask_for(self) -> None:
        router, made = Router(), app()

        @made.resource
        def client() -> Iterator[Client]:
            yield Client()

        def asks(value: bytes, client: Client) -> None: ...

        router.consume("orders")(asks)
        made.include(router)
        assert named(made, "asks").binding.resources == {"client": Client}

    def test_two_that_provide_one_type_are_refused_across_routers(self) -> None:
        first, second, made = Router(), Router(), app()

        @first.resource
        def client() -> Iterator[Client]:
            yield Client()

        @second.resource
        def other() -> Iterator[Client]:
            yield Client()

        made.include(first)
        with pytest.raises(ConfigurationError, match="client and other both provide Client"):
            made.include(second)

    def test_the_same_one_by_two_ways_is_one(self) -> None:
        """A router of shared resources that two others include."""
        shared, first, second, made = Router(), Router(), Router(), app()

        @shared.resource
        def client() -> Iterator[Client]:
            yield Client()

        first.include(shared)
        second.include(shared)
        made.include(first)
        made.include(second)
        assert list(made.declared.resources) == [Client]

    def test_a_type_that_is_local_to_the_place_of_decoration_is_found(self) -> None:
        class Local:
            pass

        class Order(msgspec.Struct):
            id: int

        router, made = Router(), app()

        @router.resource
        def local() -> Iterator[Local]:
            yield Local()

        @router.consume("orders")
        def asks(orders: list[Order | None], local: Local) -> None: ...

        made.include(router)
        assert named(made, "asks").binding.resources == {"local": Local}
        assert named(made, "asks").binding.batched


class TestWraps:
    def around(self, name: str) -> Any:
        def wrap() -> Iterator[None]:
            yield

        wrap.__name__ = name
        return wrap

    def test_those_of_a_router_go_around_its_own_handlers_only(self) -> None:
        router, other, made = Router(), Router(), app()
        router.wrap(self.around("mine"))
        other.wrap(self.around("others"))
        router.consume("a")(one)
        other.consume("b")(two)
        made.include(router)
        made.include(other)
        made.consume("c")(three)
        wraps = {r.name: [wrap.name for wrap in r.wraps] for r in made.registrations}
        assert wraps == {"one": ["mine"], "two": ["others"], "three": []}

    def test_those_of_the_app_go_around_all_and_outermost(self) -> None:
        inner, outer, made = Router(), Router(), app()
        inner.wrap(self.around("inner"))
        outer.wrap(self.around("outer"))
        made.wrap(self.around("app"))
        inner.consume("a")(one)
        outer.consume("b")(two)
        outer.include(inner)
        made.include(outer)
        assert [wrap.name for wrap in named(made, "one").wraps] == ["app", "outer", "inner"]
        assert [wrap.name for wrap in named(made, "two").wraps] == ["app", "outer"]

    def test_those_that_are_declared_below_the_handler_or_after_the_include_count_too(self) -> None:
        router, made = Router(), app()
        router.consume("a")(one)
        router.wrap(self.around("below"))
        made.include(router)
        router.wrap(self.around("later"))
        made.wrap(self.around("app"))
        assert [wrap.name for wrap in named(made, "one").wraps] == ["app", "below", "later"]

    def test_in_two_apps_each_has_its_own_around_the_shared_ones(self) -> None:
        router, first, second = Router(), app(), app(group="audit")
        router.wrap(self.around("router"))
        router.consume("a")(one)
        first.wrap(self.around("first"))
        first.include(router)
        second.include(router)
        assert [wrap.name for wrap in named(first, "one").wraps] == ["first", "router"]
        assert [wrap.name for wrap in named(second, "one").wraps] == ["router"]

    def test_one_for_records_is_not_put_around_batches(self) -> None:
        router, made = Router(), app()

        @router.wrap
        def of_records(record: Record) -> Iterator[None]:
            yield

        def many(values: list[bytes]) -> None: ...

        router.consume("a")(one)
        router.consume("b")(many)
        made.include(router)
        assert [wrap.name for wrap in named(made, "one").wraps] == ["of_records"]
        assert named(made, "many").wraps == ()
