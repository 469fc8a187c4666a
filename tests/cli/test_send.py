"""`kconsume send`, as a person types it: what is written is there, and its place is told."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest
from confluent_kafka import Consumer, Message, TopicPartition

from kconsume._embedded.named_broker import attach, find
from kconsume.testing.services import KafkaService
from tests.cli.conftest import Shop
from tests.fix_kafka import MakeTopic, unique
from tests.waiting import eventually

SHOP = ("--brokers", "embedded://shop")


def record_at(place: str, bootstrap: str | None = None) -> Message:
    """The record at `orders/3@1042`; on the shop's own broker unless said otherwise."""
    where, _, offset = place.partition("@")
    topic, _, number = where.rpartition("/")
    reader = Consumer(
        {
            "bootstrap.servers": bootstrap or attach("shop").bootstrap,
            "group.id": unique("reader"),
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    reader.assign([TopicPartition(topic, int(number), int(offset))])
    try:
        return eventually(lambda: reader.consume(1, 0.2), what=f"the record {place}")[0]
    finally:
        reader.close()


def the_value(place: str) -> bytes | None:
    return record_at(place).value()


# What is written


def test_a_value_is_written_and_its_place_is_told(shop: Shop) -> None:
    shop.broker(orders=1)
    first, second = (shop.run("send", "orders", value, *SHOP) for value in ('{"id": 1}', "tea ☕"))

    assert (first.returncode, first.stdout, first.stderr) == (0, "orders/0@0\n", "")
    assert second.stdout == "orders/0@1\n"
    assert the_value("orders/0@0") == b'{"id": 1}'
    assert the_value("orders/0@1") == "tea ☕".encode()


def test_a_record_has_the_key_the_headers_and_the_partition_that_were_asked_for(shop: Shop) -> None:
    shop.broker(orders=4)
    options = ("--key", "k", "--header", "trace=a=b", "--header", "empty=", "--partition", "2")
    sent = shop.run("send", "orders", "v", *options, *SHOP)
    found = record_at(sent.stdout.strip())

    assert sent.stdout == "orders/2@0\n"
    assert (found.key(), found.value()) == (b"k", b"v")
    assert found.headers() == [("trace", b"a=b"), ("empty", b"")]


@pytest.mark.parametrize(
    ("argument", "stdin", "written"),
    [("-", "two\nlines\n", b"two\nlines\n"), ("@order.json", "", b'{"id": 1}\n'), ("", "", b"")],
)
def test_a_value_comes_from_the_command_line_from_a_file_or_from_standard_input(
    shop: Shop, argument: str, stdin: str, written: bytes
) -> None:
    shop.broker(orders=1)
    (shop.folder / "order.json").write_text('{"id": 1}\n')
    assert shop.run("send", "orders", argument, *SHOP, stdin=stdin).stdout == "orders/0@0\n"
    assert the_value("orders/0@0") == written


def test_each_line_of_standard_input_becomes_a_record_in_order(shop: Shop) -> None:
    shop.broker(orders=1)
    count = 2500  # more than may be under way at once
    sent = shop.run("send", "orders", "--lines", *SHOP, stdin="".join(f"order {n}\r\n" for n in range(count)))

    assert sent.stdout.splitlines() == [f"orders/0@{n}" for n in range(count)]
    assert the_value("orders/0@0") == b"order 0"
    assert the_value(f"orders/0@{count - 1}") == b"order %d" % (count - 1)


def test_a_tombstone_has_a_key_and_no_value(shop: Shop) -> None:
    shop.broker(orders=1)
    found = record_at(shop.run("send", "orders", "--null", "--key", "k", *SHOP).stdout.strip())

    assert (found.key(), found.value()) == (b"k", None)


def test_as_json_one_document_says_where_each_landed(shop: Shop) -> None:
    shop.broker(orders=1)
    sent = shop.run("send", "orders", "--lines", "--json", *SHOP, stdin="a\nb\n")

    assert json.loads(sent.stdout) == {
        "topic": "orders",
        "records": [{"partition": 0, "offset": n, "place": f"orders/0@{n}"} for n in range(2)],
    }


# Where to


def test_an_embedded_broker_is_started_and_the_topic_made(shop: Shop) -> None:
    sent = shop.run("send", "orders", "v", "--partition", "0", *SHOP)
    broker = find("shop")

    assert sent.stdout == "orders/0@0\n"
    assert broker is not None
    assert "orders" in broker.topics()


def test_the_cluster_is_the_apps(shop: Shop) -> None:
    shop.write("shop")
    shop.broker(orders=1)

    assert shop.run("send", "orders", "1", "--app", "shop:app").stdout == "orders/0@0\n"
    assert shop.run("send", "orders", "2", KCONSUME_APP="shop").stdout == "orders/0@1\n"
    assert shop.run("send", "orders", "3", KCONSUME_BROKERS="embedded://shop").stdout == "orders/0@2\n"
    assert shop.run("send", "orders", "4", *SHOP, KCONSUME_APP="none:app").stdout == "orders/0@3\n"


def test_what_was_sent_can_be_tried_by_the_line_that_a_terminal_shows(shop: Shop) -> None:
    shop.write("shop")
    shop.make_table()
    shown = on_a_terminal(shop, "send", "orders", '{"id": 1}', "--partition", "3", "--app", "shop:app")
    *_, hint = shown.split()

    assert "orders/3@0\r\n" in shown
    assert f"kconsume try shop:app {hint}" in shown
    assert shop.run("try", "shop:app", hint).returncode == 0


def test_a_topic_that_the_app_does_not_handle_is_not_suggested_for_a_try(shop: Shop) -> None:
    shop.write("shop")
    assert "kconsume try" not in on_a_terminal(shop, "send", "payments", "1", "--app", "shop:app")


def on_a_terminal(shop: Shop, *arguments: str) -> str:
    """What a person sees of `kconsume …`."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kconsume", *arguments],
        cwd=shop.folder,
        env=shop._environment({}),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b"".join(iter(lambda: _read(ours), b""))
    os.close(ours)
    assert process.wait(20) == 0
    return seen.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1024)
    except OSError:  # how Linux says that the other side was closed
        return b""


# What is refused


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("orders",), "give one of VALUE, --lines and --null"),
        (("orders", "v", "--null"), "give one of VALUE, --lines and --null"),
        (("orders", "--null", "--lines"), "give one of VALUE, --lines and --null"),
        (("orders", "v", "--header", "trace"), "'trace' is not NAME=VALUE, as in trace=42"),
        (("orders", "v", "--header", "=42"), "'=42' is not NAME=VALUE, as in trace=42"),
        (("orders", "v", "--partition", "-1"), "-1 is not in the range"),
        (("orders", "v", "--app", "shop:app"), "--app and --brokers both name the cluster"),
        (("orders", "@nowhere.json"), "'nowhere.json' cannot be read (No such file or directory): name a file"),
        (("no topic", "v"), "'no topic' is not a topic name"),
        (("orders", "v", "--partition", "4"), "topic 'orders' has 4 partitions, numbered from 0: there is no orders/4"),
    ],
)
def test_what_makes_no_sense_ends_with_2_and_says_what_would(shop: Shop, arguments: tuple[str, ...], told: str) -> None:
    refused = shop.run("send", *arguments, *SHOP)

    assert refused.returncode == 2
    assert told in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr
    assert refused.stdout == ""


def test_without_a_cluster_it_ends_with_2_and_says_how_to_name_one(shop: Shop) -> None:
    refused = shop.run("send", "orders", "v")

    assert refused.returncode == 2
    assert refused.stderr.startswith("error: no cluster was named: add --app shop:app or --brokers localhost:9092")


def test_a_broker_inside_another_process_cannot_be_written_to(shop: Shop) -> None:
    refused = shop.run("send", "orders", "v", "--brokers", "embedded://")

    assert refused.returncode == 2
    assert "name the broker to share it, as in embedded://shop" in refused.stderr


def test_a_value_that_is_too_large_ends_with_1_and_is_not_written(shop: Shop) -> None:
    shop.broker(orders=1)
    refused = shop.run("send", "orders", "--lines", *SHOP, stdin=f"small\n{'x' * 2_000_000}\nafter\n")

    assert refused.returncode == 1
    assert "has 2,000,000 bytes" in refused.stderr
    assert "records that were written: 1" in refused.stderr
    assert refused.stdout == "orders/0@0\n"
    assert shop.run("send", "orders", "next", *SHOP).stdout == "orders/0@1\n"


def test_nobody_at_the_address_ends_with_1_within_10_seconds(shop: Shop) -> None:
    refused = shop.run("send", "orders", "v", "--brokers", "127.0.0.1:1")

    assert refused.returncode == 1
    assert refused.stderr.startswith("error: no broker answered at 127.0.0.1:1 within 10 s")
    assert refused.stdout == ""


def test_a_misspelt_topic_is_an_error_and_not_a_new_topic(shop: Shop, kafka: KafkaService, topic: MakeTopic) -> None:
    name = topic(2)
    for _ in range(2):
        refused = shop.run("send", f"{name}s", "v", "--brokers", kafka.bootstrap)
        assert refused.returncode == 2
        assert f"topic '{name}s' is not on the cluster" in refused.stderr
        assert f"did you mean '{name}'?" in refused.stderr


def test_on_a_real_broker_the_place_is_right_as_well(shop: Shop, kafka: KafkaService, topic: MakeTopic) -> None:
    name = topic(2)
    sent = shop.run("send", name, "--lines", "--partition", "1", "--brokers", kafka.bootstrap, stdin="a\nb\n")

    assert sent.stdout.split() == [f"{name}/1@0", f"{name}/1@1"]
    assert record_at(f"{name}/1@1", kafka.bootstrap).value() == b"b"
