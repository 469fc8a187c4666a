"""What `app.subscribe` refuses, and what it asks of the engines that run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kconsume import App
from kconsume._runtime.plan import HandlerPlan
from kconsume._runtime.routing import Routes, Wanted
from kconsume._runtime.supervisor import Supervisor
from kconsume.errors import ConfigurationError, InvalidHandler


def orders(value: bytes) -> None: ...
def payments(value: bytes) -> None: ...
def chosen(value: bytes) -> None: ...


class RunningEngine:
    """What steering knows of an engine."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.wanted: dict[HandlerPlan, Wanted] = {h: h.wanted for h in plan.handlers}

    def subscribe(self, handler: HandlerPlan, wanted: Wanted) -> None:
        self.wanted[handler] = wanted


def running(app: App) -> dict[str, tuple[str, ...]]:
    """Let it look as if it ran; answers with what each handler has."""
    consumers = [RunningEngine(plan) for plan in app.plans()]
    app._supervisor = cast(Supervisor, SimpleNamespace(consumers=consumers))
    return Topics(consumers)


class Topics(dict[str, tuple[str, ...]]):
    def __init__(self, consumers: list[RunningEngine]) -> None:
        super().__init__()
        self.consumers = consumers

    def __missing__(self, name: str) -> tuple[str, ...]:
        return next(w.topics for e in self.consumers for h, w in e.wanted.items() if h.binding.name == name)


@pytest.fixture
def app() -> App:
    app = App("127.0.0.1:1", group="shop")
    app.consume("orders")(orders)
    app.consume("payments")(payments)
    return app


def test_a_handler_by_its_name_or_itself_gets_other_topics(app: App) -> None:
    has = running(app)
    app.subscribe("orders", "returns", handler=orders)
    app.subscribe("refunds", handler="payments")
    assert (has["orders"], has["payments"]) == (("orders", "returns"), ("refunds",))


def test_an_only_handler_need_not_be_named() -> None:
    app = App("127.0.0.1:1", group="shop")
    app.consume("orders")(orders)
    has = running(app)
    app.subscribe("returns")
    assert has["orders"] == ("returns",)


def test_an_app_that_does_not_run_has_no_subscription_to_change(app: App) -> None:
    with pytest.raises(ConfigurationError, match=r"not running, and subscribe needs a running app"):
        app.subscribe("returns", handler=orders)


@pytest.mark.parametrize("handler", [None, "reserve", chosen])
def test_which_handler_is_meant_must_be_clear(app: App, handler: Any) -> None:
    running(app)
    with pytest.raises(ConfigurationError, match=r"subscribe needs one handler.*one of orders, payments"):
        app.subscribe("returns", handler=handler)


def test_one_function_for_two_groups_cannot_be_told_apart(app: App) -> None:
    app.consume("orders", group="audit")(orders)
    running(app)
    with pytest.raises(ConfigurationError, match="matches 2: give each a name of its own"):
        app.subscribe("returns", handler=orders)


@pytest.mark.parametrize("topics", [(), ("",), (["a", "b"],), ("^returns-.*",)])
def test_what_is_no_topic_is_refused(app: App, topics: Any) -> None:
    has = running(app)
    with pytest.raises((ConfigurationError, InvalidHandler)):
        app.subscribe(*topics, handler=orders)
    assert has["orders"] == ("orders",)


def test_what_another_handler_of_the_group_has_is_refused(app: App) -> None:
    has = running(app)
    with pytest.raises(ConfigurationError, match="payments and orders both handle 'payments' in group 'shop'"):
        app.subscribe("orders", "payments", handler=orders)
    assert has["orders"] == ("orders",)


def test_what_it_has_is_what_it_was_given_last(app: App) -> None:
    has = running(app)
    app.subscribe("refunds", handler=payments)
    app.subscribe("payments", handler=orders)
    with pytest.raises(ConfigurationError, match="both handle 'refunds'"):
        app.subscribe("refunds", handler=orders)
    assert has["orders"] == ("payments",)


def test_partitions_that_a_person_chose_are_not_a_subscription(app: App) -> None:
    app.consume("prices", group="prices", partitions=[0])(chosen)
    running(app)
    with pytest.raises(ConfigurationError, match="chosen has partitions=, which no group assigns"):
        app.subscribe("returns", handler=chosen)


class TestRoutes:
    def test_a_pattern_is_written_so_that_all_protocols_read_it_alike(self) -> None:
        routes = Routes([("a", Wanted(("orders",))), ("b", Wanted((), "x|y-.*"))])
        assert (routes.topics, routes.subscription) == (["orders"], ["orders", "^(x|y-.*)$"])

    def test_records_of_what_was_wanted_before_still_find_their_handler(self) -> None:
        routes = Routes([("a", Wanted(("orders",)))])
        routes.change("a", Wanted(("returns",)))
        assert (routes.handler_of("orders"), routes.handler_of("returns"), routes.topics) == ("a", "a", ["returns"])
        assert routes.handler_of("payments") is None

    def test_two_patterns_that_match_one_name_are_seen(self) -> None:
        routes = Routes([("a", Wanted((), "orders-.*")), ("b", Wanted((), ".*-eu"))])
        assert routes.takers("orders-eu") == ["a", "b"]
        assert routes.takers("orders-us") == ["a"]
