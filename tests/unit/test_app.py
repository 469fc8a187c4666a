"""What an app refuses, and when: as early as it can be known, by name, with the fix, and without a secret."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from kconsume import App, Partition
from kconsume.backends import MemoryStore, SqliteStore
from kconsume.errors import ConfigurationError, InvalidHandler, KconsumeError, UnknownStore

ADDRESS = "127.0.0.1:1"


def handle(value: bytes) -> None: ...
def other(value: bytes) -> None: ...
def writes(value: bytes, tx: sqlite3.Connection) -> None: ...


def app(**settings: Any) -> App:
    return App(ADDRESS, **{"group": "shop", **settings})


class TestConstruction:
    def test_a_group_must_be_named(self) -> None:
        with pytest.raises(ConfigurationError, match="App needs a group"):
            App(ADDRESS)

    @pytest.mark.parametrize("group", ["", None, 3])
    def test_a_group_that_is_none_is_refused(self, group: object) -> None:
        with pytest.raises(ConfigurationError, match=r"App needs a group: App\(..., group='inventory'\)"):
            app(group=group)

    @pytest.mark.parametrize("brokers", ["", None, ["a:9092"]])
    def test_an_address_must_be_given_as_text(self, brokers: object) -> None:
        with pytest.raises(ConfigurationError, match="App needs an address"):
            App(brokers, group="shop")  # type: ignore[arg-type]

    @pytest.mark.parametrize("settings", [{"shutdown": 0}, {"shutdown": -1}, {"memory": 0}])
    def test_no_time_or_no_memory_is_refused(self, settings: dict[str, int]) -> None:
        with pytest.raises(ConfigurationError, match="must be above zero"):
            app(**settings)

    @pytest.mark.parametrize(
        "name", ["enable.auto.commit", "enable.auto.offset.store", "auto.offset.reset", "group.id", "bootstrap.servers"]
    )
    def test_a_client_property_that_breaks_a_promise_is_refused_by_name(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match=f"'{name}'.* is refused"):
            app(kafka={name: "x"})

    @pytest.mark.parametrize(
        "setting", [{"group.protocol": "streams"}, {"partition.assignment.strategy": "geographic"}]
    )
    def test_a_rebalance_protocol_that_there_is_not_is_refused(self, setting: dict[str, str]) -> None:
        with pytest.raises(ConfigurationError, match=r"choose '"):
            app(kafka=setting)

    @pytest.mark.parametrize("name", ["", " ", 7, " pod-1"])
    def test_an_instance_without_a_name_is_refused(self, name: object) -> None:
        with pytest.raises(ConfigurationError, match=r"App\(instance='shop-0'\)"):
            app(instance=name)

    def test_the_caller_s_settings_are_copied(self) -> None:
        wishes: dict[str, int] = {}
        made = app(kafka=wishes)
        wishes["fetch.wait.max.ms"] = 1
        assert made.kafka == {}

    @pytest.mark.parametrize("offsets", ["mongodb://db", "shop.db"])
    def test_an_unknown_store_is_refused_at_once(self, offsets: str) -> None:
        with pytest.raises(UnknownStore):
            app(offsets=offsets)
        with pytest.raises(UnknownStore):
            app().consume("orders", offsets=offsets)

    @pytest.mark.parametrize("offsets", [object(), 3, SqliteStore])
    def test_an_object_that_is_no_store_is_refused(self, offsets: object) -> None:
        with pytest.raises(ConfigurationError, match=r"is not a store: give an address such as 'sqlite:///shop\.db'"):
            app(offsets=offsets)

    def test_a_store_object_is_taken(self) -> None:
        store = MemoryStore()
        assert app(offsets=store).offsets is store


class TestSecrets:
    @pytest.mark.parametrize(
        "offsets",
        [
            "mongodb://shop:hunter2@db/shop",
            "mongodb://:hunter2@db/shop",
            "sqlite://shop:hunter2@db/shop.db",
            "postgresql:/shop:hunter2@db/shop",
            {"url": "postgresql://shop:hunter2@db/shop"},
        ],
    )
    def test_no_error_shows_the_password_of_a_store(self, offsets: object) -> None:
        with pytest.raises(KconsumeError) as refused:
            app(offsets=offsets)
        assert "hunter2" not in str(refused.value)

    def test_no_refusal_shows_the_value_of_a_property(self) -> None:
        with pytest.raises(ConfigurationError) as refused:
            app(kafka={"sasl.password": "hunter2", "group.id": "hunter2"})
        assert "hunter2" not in str(refused.value)

    def test_a_handler_that_is_refused_does_not_show_the_password_of_its_store(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Remote(MemoryStore):
            def __init__(self, address: str) -> None:
                super().__init__()
                self.address = address

        monkeypatch.setattr("kconsume.backends.registry._third_party", lambda _, address: Remote(address))
        made = app(offsets="remote://shop:hunter2@db/shop")
        with pytest.raises(InvalidHandler) as refused:
            made.consume("orders")(writes)
        assert "hunter2" not in str(refused.value)


class TestTopics:
    def test_a_topic_must_be_named(self) -> None:
        with pytest.raises(InvalidHandler, match=r"needs a topic: @app.consume\('orders'\), with the parentheses"):
            app().consume()

    def test_the_parentheses_are_not_to_be_forgotten(self) -> None:
        with pytest.raises(InvalidHandler, match="with the parentheses"):
            app().consume(handle)  # type: ignore[arg-type]

    @pytest.mark.parametrize("topics", [("",), ("orders", ""), (None,)])
    def test_a_topic_without_a_name_is_refused(self, topics: tuple[Any, ...]) -> None:
        with pytest.raises(InvalidHandler, match="needs a topic"):
            app().consume(*topics)

    @pytest.mark.parametrize("topics", [(["orders", "payments"],), (3,), ({"orders"},), ("orders", ["payments"])])
    def test_a_list_of_topics_is_refused_with_how_to_write_it(self, topics: tuple[Any, ...]) -> None:
        with pytest.raises(ConfigurationError, match=r"@app.consume\('orders'"):
            app().consume(*topics)

    def test_a_pattern_in_the_place_of_a_name_is_refused(self) -> None:
        with pytest.raises(InvalidHandler, match=r"'\^orders-\.\*' is no topic name.*pattern='orders-\.\*'"):
            app().consume("^orders-.*")(handle)

    def test_an_app_without_handlers_cannot_run(self) -> None:
        for start in (app().plans, app().catch_up, app().running().__enter__):
            with pytest.raises(ConfigurationError, match=r"has no handler: decorate a function with @app.consume"):
                start()


class TestPatterns:
    def test_a_pattern_takes_the_place_of_names(self) -> None:
        made = app()
        made.consume(pattern="orders-[a-z]+")(handle)
        (registration,) = made.registrations
        assert (registration.topics, registration.pattern) == ((), "orders-[a-z]+")
        assert registration.wanted.takes("orders-eu")
        assert not any(registration.wanted.takes(name) for name in ("orders-", "xorders-eu", "orders-eu2"))

    def test_a_pattern_beside_names_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"topics or pattern=, and got both 'orders' and 'payments-\.\*'"):
            app().consume("orders", pattern="payments-.*")(handle)

    @pytest.mark.parametrize("pattern", ["orders-(", "*", "", 3, b"orders-.*"])
    def test_what_does_not_compile_is_refused(self, pattern: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"is no regular expression.*write pattern='orders-\.\*'"):
            app().consume(pattern=pattern)(handle)

    @pytest.mark.parametrize(
        ("pattern", "part"), [(r"orders-\d+", r"\d"), (r"orders-\w+", r"\w"), ("orders-(?:eu|us)", "(?")]
    )
    def test_what_the_client_or_the_broker_would_read_in_another_way_is_refused(self, pattern: str, part: str) -> None:
        with pytest.raises(ConfigurationError, match=r"read differently: write the characters instead") as refused:
            app().consume(pattern=pattern)(handle)
        assert repr(part) in str(refused.value)

    def test_a_dot_may_be_escaped(self) -> None:
        app().consume(pattern=r"orders\.(eu|us)\.[0-9]{2}")(handle)

    def test_partitions_are_not_of_a_pattern(self) -> None:
        with pytest.raises(ConfigurationError, match="partition numbers of exactly one topic"):
            app().consume(pattern="orders-.*", partitions=[0])(handle)


class TestOptions:
    @pytest.mark.parametrize(
        ("option", "sentence"),
        [
            ({"order": "key"}, "order='key' is unknown to this version: leave order= out"),
            ({"executor": "process"}, "executor='process' is unknown: choose 'thread' or 'inline'"),
            ({"start": "beginning"}, "start='beginning' is unknown: choose 'earliest', 'latest' or 'error'"),
            ({"on_error": "ignore"}, "on_error='ignore' is unknown: choose 'stop', 'hold', 'skip' or DeadLetter"),
            ({"concurrency": 0}, "concurrency=0 must be a whole number, 1 or more"),
            ({"chunk": 0}, "chunk=0 must be a whole number, 1 or more"),
            ({"chunk": -5}, "chunk=-5 must be a whole number, 1 or more"),
        ],
    )
    def test_an_unknown_choice_is_refused_with_those_there_are(self, option: dict[str, Any], sentence: str) -> None:
        with pytest.raises(ConfigurationError, match=sentence):
            app().consume("orders", **option)

    @pytest.mark.parametrize("partitions", [[], [-1], [3, -1]])
    def test_partitions_are_numbers_from_zero(self, partitions: list[int]) -> None:
        with pytest.raises(ConfigurationError, match="must be partition numbers of exactly one topic"):
            app().consume("orders", partitions=partitions)

    def test_partitions_are_of_one_topic(self) -> None:
        with pytest.raises(ConfigurationError, match="of exactly one topic"):
            app().consume("orders", "payments", partitions=[0])

    def test_partitions_are_taken_once_each_and_in_order(self) -> None:
        made = app(offsets="memory://")
        made.consume("orders", partitions=[2, 0, 2])(handle)
        (plan,) = made.plans()
        assert plan.partitions == (Partition("orders", 0), Partition("orders", 2))


def ask(made: App, wanted: str | dict[str, str]) -> Any:
    return made.consume(wanted) if isinstance(wanted, str) else made.consume(**wanted)  # type: ignore[arg-type]


class TestConflicts:
    def test_two_handlers_for_one_topic_in_one_group(self) -> None:
        made = app()
        made.consume("orders", "payments")(handle)
        with pytest.raises(ConfigurationError) as refused:
            made.consume("refunds", "payments")(other)
        assert "handle and other both handle 'payments' in group 'shop'" in str(refused.value)
        assert "give one of them its own group=" in str(refused.value)
        assert len(made.registrations) == 1

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ({"pattern": "orders-.*"}, {"pattern": "orders-.*"}),
            ({"pattern": "orders-.*"}, "orders-eu"),
            ("orders-eu", {"pattern": "orders-.*"}),
        ],
    )
    def test_a_pattern_and_another_handler_for_what_it_matches(self, first: Any, second: Any) -> None:
        made = app()
        ask(made, first)(handle)
        with pytest.raises(ConfigurationError, match=r"handle and other both handle 'orders-.*' in group 'shop'"):
            ask(made, second)(other)

    def test_a_pattern_and_another_handler_for_what_it_does_not_match(self) -> None:
        made = app()
        made.consume(pattern="orders-.*")(handle)
        made.consume("orders")(other)
        assert len(made.plans()) == 1

    def test_two_handlers_for_one_topic_in_two_groups(self) -> None:
        made = app()
        made.consume("orders")(handle)
        made.consume("orders", group="audit")(other)
        assert [plan.group for plan in made.plans()] == ["shop", "audit"]

    def test_one_group_in_two_stores(self) -> None:
        made = app()
        made.consume("orders")(handle)
        with pytest.raises(ConfigurationError, match="share group 'shop' but keep its offsets in different stores"):
            made.consume("payments", offsets="memory://")(other)

    def test_one_group_in_one_store_is_one_consumer_of_both_topics(self) -> None:
        made = app()
        made.consume("orders")(handle)
        made.consume("payments")(other)
        (plan,) = made.plans()
        assert sorted(topic for handler in plan.handlers for topic in handler.options.topics) == ["orders", "payments"]

    def test_partitions_without_coordination_need_a_group_of_their_own(self) -> None:
        for first, second in [({"partitions": [0]}, {}), ({}, {"partitions": [0]})]:
            made = app()
            made.consume("orders", **first)(handle)  # type: ignore[arg-type]
            with pytest.raises(ConfigurationError, match="partitions= a group of its own"):
                made.consume("payments", **second)(other)  # type: ignore[arg-type]

    def test_a_handler_with_its_own_store_and_group_is_its_own_consumer(self) -> None:
        made = app(offsets="memory://")
        made.consume("orders")(handle)
        made.consume("payments", group="audit", offsets="sqlite:///audit.db")(writes)
        assert [(plan.group, plan.store.address) for plan in made.plans()] == [
            ("shop", "memory://"),
            ("audit", "sqlite:///audit.db"),
        ]

    def test_a_store_by_its_address_is_opened_once_so_that_memory_outlives_a_run(self) -> None:
        made = app(offsets="memory://")
        made.consume("orders")(handle)
        assert made.plans()[0].store is made.plans()[0].store


class TestSteering:
    def test_an_app_that_does_not_run_cannot_be_steered(self) -> None:
        for steer in (app().pause, app().resume, lambda p: app().seek(p, 3)):
            with pytest.raises(ConfigurationError, match="the app is not running"):
                steer("orders/3")

    def test_an_offset_below_zero_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="offset -1 is below zero"):
            app().seek("orders/3", -1)

    def test_stopping_what_does_not_run_is_no_error(self) -> None:
        app().stop()
