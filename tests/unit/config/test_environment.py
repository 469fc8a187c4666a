"""Every setting can come from a variable; what cannot be read, and what nobody reads, is said by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconsume._config.client_settings import MASK
from kconsume._config.environment import Environment, read
from kconsume._config.options import HandlerOptions
from kconsume._handlers.batches import Batching
from kconsume._handlers.rate import Rate
from kconsume.errors import ConfigurationError
from kconsume.failures.retry import Retry
from kconsume.failures.retry_topics import RetryTopics

ROOT = Path(__file__).parents[3]
OPTIONS = {field.name for field in dataclasses.fields(HandlerOptions)} - {"decode"}
"""The options that a variable can give: all but a function."""


def handler(environment: Environment, name: str) -> Mapping[str, object]:
    """What the variables say about a handler. An option that they do not give stays as it was."""
    plain = HandlerOptions(topics=("from the code",))
    changed = environment.options_of(name, plain)
    given = environment.handlers.get(name.upper(), {})
    assert {name: getattr(changed, name) for name in given} == given
    return given


class TestTheAppsSettings:
    def test_without_variables_nothing_is_said(self) -> None:
        assert read({}) == read({"PATH": "/bin", "KCONSUMER_GROUP": "x"}) == Environment()

    def test_each_is_read_as_what_it_is(self) -> None:
        environment = read(
            {
                "KCONSUME_BROKERS": "one:9092,two:9092",
                "KCONSUME_GROUP": "inventory",
                "KCONSUME_OFFSETS": "postgresql://localhost/shop",
                "KCONSUME_INSTANCE": "pod-1",
                "KCONSUME_SHUTDOWN": "12.5",
                "KCONSUME_MEMORY": "64M",
            }
        )
        assert environment == Environment(
            "one:9092,two:9092", "inventory", "postgresql://localhost/shop", "pod-1", 12.5, 64 * 1024 * 1024
        )

    def test_an_empty_variable_counts_as_not_set(self) -> None:
        names = ["GROUP", "OFFSETS", "SHUTDOWN", "KAFKA_SASL_PASSWORD", "HANDLER_RESERVE_CHUNK", "GRUOP"]
        assert read({f"KCONSUME_{name}": text for name, text in zip(names, ["", " "] * 3, strict=True)}) == read({})

    def test_white_space_around_a_value_is_cut_off(self) -> None:
        environment = read({"KCONSUME_GROUP": " inventory\n", "KCONSUME_SHUTDOWN": "9\n"})
        assert (environment.group, environment.shutdown) == ("inventory", 9.0)

    @pytest.mark.parametrize(
        ("text", "size"),
        [("1", 1), ("1000", 1000), ("512k", 512 * 1024), ("512K", 512 * 1024), ("64M", 64 << 20), ("1G", 1 << 30),
         ("64Mi", 64 << 20), ("64 MB", 64 << 20), ("2GiB", 2 << 30)],
    )  # fmt: skip
    def test_memory_may_have_a_unit(self, text: str, size: int) -> None:
        assert read({"KCONSUME_MEMORY": text}).memory == size

    @pytest.mark.parametrize("text", ["0", "-1", "0M", "64X", "M", "1.5G", "1_000", "٣", "64MM", "lots"])
    def test_memory_that_is_none_is_refused_with_the_fix(self, text: str) -> None:
        with pytest.raises(ConfigurationError) as raised:
            read({"KCONSUME_MEMORY": text})
        assert str(raised.value) == (
            f"KCONSUME_MEMORY={text!r} cannot be read: write bytes above zero, for example 67108864, 512k, 64M or 1G"
        )

    @pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "25s"])
    def test_a_shutdown_that_is_no_time_is_refused_with_the_fix(self, text: str) -> None:
        with pytest.raises(ConfigurationError, match=f"^KCONSUME_SHUTDOWN='{text}' .* for example 25.0$"):
            read({"KCONSUME_SHUTDOWN": text})


class TestKafkaProperties:
    def test_underscores_are_dots_and_values_stay_text(self) -> None:
        variables = {
            "KCONSUME_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "KCONSUME_KAFKA_FETCH_WAIT_MAX_MS": "50",
            "KCONSUME_KAFKA_SOCKET_KEEPALIVE_ENABLE": "false",
            "KCONSUME_KAFKA_SASL_PASSWORD": " white space is mine ",
        }
        assert read(variables).kafka == {
            "security.protocol": "SASL_SSL",
            "fetch.wait.max.ms": "50",
            "socket.keepalive.enable": "false",
            "sasl.password": " white space is mine ",
        }

    def test_the_one_property_that_has_an_underscore_keeps_it(self) -> None:
        assert read({"KCONSUME_KAFKA_LOG_LEVEL": "7"}).kafka == {"log_level": "7"}

    @pytest.mark.parametrize(
        ("name", "instead"),
        [
            ("GROUP_ID", "KCONSUME_GROUP"),
            ("BOOTSTRAP_SERVERS", "KCONSUME_BROKERS"),
            ("METADATA_BROKER_LIST", "KCONSUME_BROKERS"),
            ("AUTO_OFFSET_RESET", "KCONSUME_HANDLER_<NAME>_START"),
        ],
    )
    def test_what_has_a_variable_of_its_own_is_refused_with_its_name(self, name: str, instead: str) -> None:
        with pytest.raises(ConfigurationError) as raised:
            read({f"KCONSUME_KAFKA_{name}": "x"})
        assert str(raised.value) == f"KCONSUME_KAFKA_{name} is refused: set {instead} instead"

    def test_what_would_break_a_promise_is_refused_as_in_the_code(self) -> None:
        with pytest.raises(ConfigurationError, match=r"^KCONSUME_KAFKA_ENABLE_AUTO_COMMIT .* never by a timer"):
            read({"KCONSUME_KAFKA_ENABLE_AUTO_COMMIT": "true"})


class TestHandlers:
    def test_each_option_is_read_as_what_it_is(self) -> None:
        texts = {
            "TOPICS": "orders, payments",
            "GROUP": "audit",
            "OFFSETS": "sqlite:///shop.db",
            "PATTERN": "orders-.*",
            "CONCURRENCY": "4",
            "CHUNK": "100",
            "EXECUTOR": "inline",
            "START": "latest",
            "ON_ERROR": "skip",
            "ORDER": "partition",
            "TO": "reserved",
            "RATE": "50",
            "TIMEOUT": "2.5",
            "BATCH": "500",
            "PARTITIONS": "0, 1,12",
            "REPEATS": "drop",
        }
        environment = read({f"KCONSUME_HANDLER_RESERVE_{name}": text for name, text in texts.items()})
        assert handler(environment, "reserve") == {
            "topics": ("orders", "payments"),
            "group": "audit",
            "offsets": "sqlite:///shop.db",
            "pattern": "orders-.*",
            "concurrency": 4,
            "chunk": 100,
            "executor": "inline",
            "start": "latest",
            "on_error": "skip",
            "order": "partition",
            "to": "reserved",
            "rate": Rate(50),
            "timeout": 2.5,
            "batch": Batching(500),
            "partitions": (0, 1, 12),
            "repeats": "drop",
        }
        assert {*handler(environment, "reserve"), "retry"} == OPTIONS
        assert handler(environment, "other") == {}

    @pytest.mark.parametrize(
        ("text", "retries"),
        [
            ("5", [Retry(5)]),
            ("5/0.5", [Retry(5, wait=0.5)]),
            ("+60,600", [RetryTopics((60, 600))]),
            ("2/0+1.5", [Retry(2, wait=0.0), RetryTopics((1.5,))]),
        ],
    )
    def test_a_retry_is_attempts_in_place_and_delays_of_topics(self, text: str, retries: list[object]) -> None:
        said = handler(read({"KCONSUME_HANDLER_RESERVE_RETRY": text}), "reserve")["retry"]
        assert [str(retry) for retry in (said if isinstance(said, tuple) else [said])] == [str(r) for r in retries]

    @pytest.mark.parametrize("text", ["0", "five", "5/soon", "5/-1", "+", "+0", "5+", "5+1,", "/1"])
    def test_what_is_no_retry_is_refused_with_how_it_is_written(self, text: str) -> None:
        with pytest.raises(ConfigurationError, match=r"for example 5/0\.5\+60,600"):
            handler(read({"KCONSUME_HANDLER_RESERVE_RETRY": text}), "reserve")

    def test_a_rate_and_a_batch_may_say_the_time_too(self) -> None:
        variables = {"KCONSUME_HANDLER_RESERVE_RATE": "50/60", "KCONSUME_HANDLER_RESERVE_BATCH": "500/0.5"}
        assert handler(read(variables), "reserve") == {"rate": Rate(50, 60.0), "batch": Batching(500, 0.5)}

    @pytest.mark.parametrize(
        ("option", "text", "written"),
        [
            ("TOPICS", "orders,,payments", "names separated by commas"),
            ("TOPICS", ",", "names separated by commas"),
            ("CONCURRENCY", "0", "a whole number above zero"),
            ("CONCURRENCY", "many", "a whole number above zero"),
            ("CHUNK", "1.5", "a whole number above zero"),
            ("EXECUTOR", "fork", "thread or inline"),
            ("START", "beginning", "earliest or latest or error"),
            ("ON_ERROR", "explode", "stop or hold or skip"),
            ("ORDER", "random", "partition or key or none"),
            ("RATE", "0", "records, or records/seconds, above zero"),
            ("RATE", "50/0", "records, or records/seconds, above zero"),
            ("RATE", "50/", "records, or records/seconds, above zero"),
            ("RATE", "fast", "records, or records/seconds, above zero"),
            ("BATCH", "0/1", "records, or records/seconds to wait"),
            ("BATCH", "500/-1", "records, or records/seconds to wait"),
            ("PARTITIONS", "0,-1", "partition numbers separated by commas"),
            ("PARTITIONS", "0-3", "partition numbers separated by commas"),
        ],
    )
    def test_what_cannot_be_read_is_refused_with_the_variable_its_value_and_the_fix(
        self, option: str, text: str, written: str
    ) -> None:
        with pytest.raises(ConfigurationError) as raised:
            read({f"KCONSUME_HANDLER_RESERVE_{option}": text})
        assert str(raised.value).startswith(
            f"KCONSUME_HANDLER_RESERVE_{option}={text!r} cannot be read: write {written}"
        )

    def test_a_handler_whose_name_begins_another_one_gets_only_its_own(self) -> None:
        environment = read(
            {
                "KCONSUME_HANDLER_RESERVE_GROUP": "a",
                "KCONSUME_HANDLER_RESERVE_STOCK_GROUP": "b",
                "KCONSUME_HANDLER_MOVE_TO": "c",
                "KCONSUME_HANDLER_MOVE_TO_TO": "d",
            }
        )
        names = ["reserve", "reserve_stock", "move", "move_to"]
        assert [handler(environment, name) for name in names] == [
            {"group": "a"},
            {"group": "b"},
            {"to": "c"},
            {"to": "d"},
        ]
        assert environment.unread(names) == []

    def test_no_option_ends_like_another_or_a_name_could_be_divided_in_two_ways(self) -> None:
        options = OPTIONS
        assert not [(one, other) for one in options for other in options if one.endswith(f"_{other}")]

    @given(
        name=st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True),
        option=st.sampled_from(["group", "to", "topics", "on_error", "order"]),
    )
    def test_any_function_name_can_be_told_apart_from_the_option(self, name: str, option: str) -> None:
        text = {"on_error": "skip", "order": "key"}.get(option, "x")
        environment = read({f"KCONSUME_HANDLER_{name.upper()}_{option.upper()}": text})
        assert list(handler(environment, name)) == [option]
        assert environment.unread([name]) == []


class TestSecrets:
    ADDRESS = "postgresql://shop:hunter2@db/shop?sslpassword=hunter2"

    @pytest.mark.parametrize(
        "name", ["SHUTDOWN", "MEMORY", "HANDLER_RESERVE_CHUNK", "HANDLER_RESERVE_RATE", "HANDLER_RESERVE_START"]
    )
    def test_an_address_in_the_wrong_variable_is_covered(self, name: str) -> None:
        with pytest.raises(ConfigurationError) as raised:
            read({f"KCONSUME_{name}": self.ADDRESS})
        assert "hunter2" not in str(raised.value)
        assert MASK in str(raised.value)
        assert raised.value.__cause__ is None
        assert raised.value.__suppress_context__

    @pytest.mark.parametrize("name", ["OFFSETS", "HANDLER_RESERVE_OFFSETS"])
    def test_a_password_in_a_text_that_is_no_address_is_covered(self, name: str) -> None:
        with pytest.raises(ConfigurationError) as raised:
            read({f"KCONSUME_{name}": "shop:hunter2@db/shop"})
        assert str(raised.value) == (
            f"KCONSUME_{name}='{MASK}' cannot be read: write an address, for example kafka:// or sqlite:///shop.db"
        )

    def test_a_repr_shows_none(self) -> None:
        variables = {
            "KCONSUME_OFFSETS": self.ADDRESS,
            "KCONSUME_HANDLER_RESERVE_OFFSETS": self.ADDRESS,
            "KCONSUME_KAFKA_SASL_PASSWORD": "hunter2",
            "KCONSUME_STRAY": "hunter2",
        }
        assert "hunter2" not in repr(read(variables))
        assert "hunter2" not in "".join(map(str, read(variables).unread([])))


class TestUnknown:
    @pytest.mark.parametrize(
        ("variable", "meant"),
        [
            ("KCONSUME_GRUOP", "KCONSUME_GROUP"),
            ("KCONSUME_BROKER", "KCONSUME_BROKERS"),
            ("KCONSUME_LOGLEVEL", "KCONSUME_LOG_LEVEL"),
            ("KCONSUME_KAFAK_SASL_USERNAME", "KCONSUME_KAFKA_SASL_USERNAME"),
            ("KCONSUME_HANDLER_RESERV_GROUP", "KCONSUME_HANDLER_RESERVE_GROUP"),
            ("KCONSUME_HANDLER_RESERVE_CONCURENCY", "KCONSUME_HANDLER_RESERVE_CONCURRENCY"),
            ("KCONSUME_HANDLERS_RESERVE_GROUP", "KCONSUME_HANDLER_RESERVE_GROUP"),
        ],
    )
    def test_a_misspelt_variable_is_named_with_the_one_that_was_meant(self, variable: str, meant: str) -> None:
        (told,) = read({variable: "x"}).unread(["reserve", "reserve_stock"])
        assert str(told) == f"{variable} is set, but nothing reads it: did you mean {meant}?"

    @pytest.mark.parametrize("variable", ["KCONSUME_COLOUR", "KCONSUME_HANDLER_SHIP_GROUP", "KCONSUME_KAFKA_"])
    def test_one_that_is_like_none_is_named_without_a_guess(self, variable: str) -> None:
        (told,) = read({variable: "x"}).unread(["reserve"])
        assert str(told).startswith(f"{variable} is set, but nothing reads it: remove it")

    def test_several_are_in_order(self) -> None:
        told = read({"KCONSUME_Z": "1", "KCONSUME_HANDLER_SHIP_TO": "1", "KCONSUME_A": "1"}).unread([])
        assert [variable.name for variable in told] == ["KCONSUME_A", "KCONSUME_HANDLER_SHIP_TO", "KCONSUME_Z"]

    def test_every_variable_that_the_code_reads_is_known(self) -> None:
        files = [ROOT / "Makefile", *(ROOT / "kconsume").rglob("*.py")]
        mentioned = {
            name
            for file in files
            if file.name != "environment.py"
            for name in re.findall(r"KCONSUME_[A-Z_]*[A-Z]", file.read_text())
        }
        assert "KCONSUME_APP" in mentioned
        readable = {"KCONSUME_SHUTDOWN": "1", "KCONSUME_MEMORY": "1", "KCONSUME_OFFSETS": "kafka://"}
        assert read({name: readable.get(name, "x") for name in mentioned}).strays == ()
