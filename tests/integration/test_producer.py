"""What is delivered is confirmed by the broker, in order, or its future says why not; nothing hangs."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from kconsume._config.client_settings import ClientValue
from kconsume._embedded.controls import KafkaControls
from kconsume._kafka.outgoing import Outgoing, encoded
from kconsume._kafka.producer import Producer, producer_settings
from kconsume.errors import ConfigurationError, SendFailed
from kconsume.records import Partition
from kconsume.testing.services import KafkaService, LocalKafka
from tests.fix_arena import Arena
from tests.fix_kafka import MakeTopic, create_topic, unique
from tests.waiting import eventually

WITHIN = 30.0
MOST = 900_000


@contextmanager
def outlet_to(
    bootstrap: str, kafka: Mapping[str, ClientValue] | None = None, *, awaited: bool = True
) -> Iterator[Producer]:
    outlet = Producer(producer_settings(bootstrap, kafka or {}), "test", awaited=awaited)
    try:
        yield outlet
    finally:
        outlet.close(0)


@pytest.fixture(params=[True, False], ids=["awaited", "unawaited"])
def awaited(request: pytest.FixtureRequest) -> bool:
    """Whether somebody waits for deliveries, as for what handlers send, or nobody, as for dead letters."""
    return bool(request.param)


@pytest.fixture
def outlet(arena: Arena, awaited: bool) -> Iterator[Producer]:
    with outlet_to(arena.bootstrap, awaited=awaited) as made:
        yield made


def record(topic: str, value: object, key: str | None = None, **headers: str) -> Outgoing:
    return encoded(Outgoing(value, key, headers), topic, MOST)


def records(topic: str, numbers: range, key: str | None = None) -> list[Outgoing]:
    return [record(topic, str(number), key) for number in numbers]


def written(bootstrap: str, topic: str) -> dict[int, list[Message]]:
    """Everything that the topic holds, by partition."""
    reader = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": unique("reader"),
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "log_level": 0,
        }
    )
    found: dict[int, list[Message]] = defaultdict(list)
    try:
        numbers = reader.list_topics(topic, timeout=20).topics[topic].partitions
        ends = {n: reader.get_watermark_offsets(TopicPartition(topic, n), timeout=20)[1] for n in numbers}
        reader.assign([TopicPartition(topic, number, 0) for number in numbers])

        def all_read() -> bool:
            for message in reader.consume(10_000, 0.2):
                assert message.error() is None, message.error()
                found[message.partition() or 0].append(message)
            return all(len(found[number]) >= end for number, end in ends.items())

        eventually(all_read, within=WITHIN, what=f"all of {topic} up to {ends}")
    finally:
        reader.close()
    return found


def values(bootstrap: str, topic: str) -> list[bytes | None]:
    return [message.value() for messages in written(bootstrap, topic).values() for message in messages]


# What is delivered


@pytest.mark.dense
def test_what_was_confirmed_is_in_the_topic_as_it_was_given(arena: Arena, outlet: Producer) -> None:
    topic = arena.topic(1)
    sent = [record(topic, {"id": 1}, "k", a="b", c=""), record(topic, None, "k"), record(topic, b"", "")]
    assert outlet.deliver(sent).result(WITHIN) is None

    first, tombstone, empty = written(arena.bootstrap, topic)[0]
    assert (first.key(), first.value()) == (b"k", b'{"id":1}')
    assert first.headers() == [("a", b"b"), ("c", b"")]
    assert (tombstone.key(), tombstone.value(), tombstone.headers()) == (b"k", None, None)
    assert (empty.key(), empty.value()) == (b"", b"")


def test_nothing_to_send_is_done_at_once_and_opens_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kconsume._kafka.delivery.Producer", lambda *_, **__: pytest.fail("a client was made"))
    before = serving_threads()
    outlet = Producer(producer_settings("127.0.0.1:1", {}), "test")
    assert outlet.deliver([]).done()
    assert outlet.close(WITHIN) == 0
    assert set(serving_threads()) <= set(before)
    with pytest.raises(pytest.fail.Exception, match="a client was made"):  # the control
        Producer(producer_settings("127.0.0.1:1", {}), "test").open()


@pytest.mark.dense
def test_a_thread_that_delivers_in_turn_finds_its_records_in_that_order(arena: Arena, outlet: Producer) -> None:
    topic = arena.topic(4)

    def deliver(key: str) -> None:
        for first in range(0, 500, 25):
            outlet.deliver(records(topic, range(first, first + 25), key)).result(WITHIN)

    run_all([threading.Thread(target=deliver, args=(f"key-{n}",)) for n in range(4)])
    by_key: dict[bytes | None, list[int]] = defaultdict(list)
    for messages in written(arena.bootstrap, topic).values():
        for message in messages:
            by_key[message.key()].append(int(message.value() or b"-1"))
    assert by_key == {b"key-%d" % n: list(range(500)) for n in range(4)}


@pytest.mark.dense
def test_fifty_thousand_records_from_four_threads_are_all_confirmed_and_once(arena: Arena, outlet: Producer) -> None:
    topic = arena.topic(4)
    done: list[Future[None]] = []

    def deliver(thread: int) -> None:
        begin = thread * 12_500
        done.extend(outlet.deliver(records(topic, range(n, n + 500))) for n in range(begin, begin + 12_500, 500))

    run_all([threading.Thread(target=deliver, args=(n,)) for n in range(4)])
    for future in done:
        future.result(WITHIN)
    found = values(arena.bootstrap, topic)
    assert len(found) == 50_000
    assert {int(value or b"-1") for value in found} == set(range(50_000))


def test_one_record_says_where_it_was_written(arena: Arena, outlet: Producer) -> None:
    topic = arena.topic(4)
    places = [outlet.write(record(topic, b"x"), 2).result(WITHIN) for _ in range(3)]
    assert places == [(Partition(topic, 2), offset) for offset in range(3)]
    assert outlet.write(record(topic, b"x", "k")).result(WITHIN)[0].topic == topic


@pytest.mark.dense
def test_a_full_queue_is_waited_out(arena: Arena) -> None:
    topic = arena.topic(1)
    with outlet_to(arena.bootstrap, {"queue.buffering.max.messages": 10}) as outlet:
        outlet.deliver(records(topic, range(1000))).result(WITHIN)
    assert values(arena.bootstrap, topic) == [b"%d" % number for number in range(1000)]


def test_a_broker_that_was_killed_and_restarted_costs_and_doubles_no_record(breakable: LocalKafka) -> None:
    with outlet_to(breakable.bootstrap) as outlet:
        first = [outlet.deliver(records("orders", range(n, n + 10))) for n in range(0, 1000, 10)]
        first[0].result(WITHIN)
        breakable.kill()
        later = [outlet.deliver(records("orders", range(n, n + 10))) for n in range(1000, 2000, 10)]
        breakable.start()
        for future in first + later:
            future.result(WITHIN)
    assert values(breakable.bootstrap, "orders") == [b"%d" % number for number in range(2000)]


# What fails


@pytest.mark.dense
def test_a_record_that_the_client_refuses_fails_the_future_and_stops_those_after_it(
    arena: Arena, outlet: Producer
) -> None:
    topic = arena.topic(1)
    large = Outgoing(b"x" * 2_000_000, None, (), topic)
    refused = outlet.deliver([record(topic, "before"), large, record(topic, "after")])
    with pytest.raises(SendFailed, match=f"to topic '{topic}' is too large .*message.max.bytes"):
        refused.result(WITHIN)
    with pytest.raises(SendFailed, match="is too large"):
        outlet.deliver([large]).result(WITHIN)
    outlet.deliver([record(topic, "next")]).result(WITHIN)
    assert values(arena.bootstrap, topic) == [b"before", b"next"]


@pytest.mark.parametrize("headers", [0, 3])
def test_a_record_of_as_many_bytes_as_the_outlet_allows_is_taken(arena: Arena, outlet: Producer, headers: int) -> None:
    topic = arena.topic(1)
    named = {f"h{n}": "v" for n in range(headers)}
    largest = Outgoing(b"x" * (outlet.max_message_bytes - 3 * headers), headers=named)
    outlet.deliver([encoded(largest, topic, outlet.max_message_bytes)]).result(WITHIN)


def test_a_record_that_the_broker_refuses_fails_only_its_own_future(kafka: KafkaService, topic: MakeTopic) -> None:
    name, compacted = topic(1), topic(1, config={"cleanup.policy": "compact"})
    with outlet_to(kafka.bootstrap) as outlet:
        mixed = outlet.deliver([record(name, "a"), record(compacted, "no key"), record(name, "b")])
        good = outlet.deliver([record(name, "c")])
        with pytest.raises(SendFailed, match=f"to topic '{compacted}' was refused .*needs a key"):
            mixed.result(WITHIN)
        good.result(WITHIN)
    assert values(kafka.bootstrap, name) == [b"a", b"b", b"c"]


def test_a_topic_that_is_not_there_is_an_error_that_names_it(kafka: KafkaService) -> None:
    name = unique("nowhere")
    with outlet_to(kafka.bootstrap, {"topic.metadata.propagation.max.ms": 1000}) as outlet:
        for _ in range(2):  # the second time, the client knows at once
            with pytest.raises(SendFailed, match=f"topic '{name}' does not exist on .*: create it"):
                outlet.deliver([record(name, "a"), record(name, "b")]).result(WITHIN)


def test_a_partition_that_is_not_there_is_an_error_that_names_it(arena: Arena, outlet: Producer) -> None:
    topic = arena.topic(2)
    outlet.write(record(topic, "a"), 1).result(WITHIN)
    with pytest.raises(SendFailed, match=f"topic '{topic}' on .* has no partition 2"):
        outlet.write(record(topic, "b"), 2).result(WITHIN)


def test_nobody_at_the_address_is_an_error_within_the_time_that_says_why() -> None:
    with outlet_to("127.0.0.1:1", {"message.timeout.ms": 500}) as outlet:
        with pytest.raises(SendFailed, match=r"not confirmed within 0.5 s .*refused.*: check that the brokers"):
            outlet.deliver([record("orders", "a")]).result(WITHIN)


def test_a_frozen_broker_fails_the_future_and_holds_up_nobody(breakable: LocalKafka) -> None:
    with outlet_to(breakable.bootstrap) as patient:  # a young broker may take seconds to hand out its first producer id
        patient.deliver([record("orders", "first")]).result(WITHIN)
    with outlet_to(breakable.bootstrap, {"message.timeout.ms": 5000}) as outlet:
        outlet.deliver([record("orders", "before")]).result(WITHIN)
        breakable.freeze()
        try:
            stuck = [outlet.deliver([record("orders", "while"), record("orders", "too")]) for _ in range(2)]
            for future in stuck:
                with pytest.raises(SendFailed, match=r"to topic 'orders' was not confirmed within 5 s"):
                    future.result(WITHIN)
        finally:
            breakable.thaw()
        outlet.deliver([record("orders", "after")]).result(WITHIN)


def test_a_queue_that_stays_full_is_an_error_and_not_a_hang() -> None:
    settings: dict[str, ClientValue] = {"queue.buffering.max.kbytes": 1, "message.timeout.ms": 300}
    with outlet_to("127.0.0.1:1", settings) as outlet:
        with pytest.raises(SendFailed, match=r"queue to 127.0.0.1:1 has been full for 0.3 s"):
            outlet.deliver([record("orders", b"x" * 2000)]).result(WITHIN)


def test_a_fatal_error_fails_all_that_is_under_way_and_the_next_delivery_starts_anew(
    embedded: KafkaControls, awaited: bool
) -> None:
    topic = unique("topic")
    embedded.create_topic(topic, 1)
    embedded.fail_next("InitProducerId", KafkaError.CLUSTER_AUTHORIZATION_FAILED)
    with outlet_to(embedded.bootstrap, awaited=awaited) as outlet:
        pending = [outlet.deliver([record(topic, "a")]) for _ in range(3)]
        for future in pending:
            with pytest.raises(SendFailed, match=r"the producer failed .*may write"):
                future.result(WITHIN)
        outlet.deliver([record(topic, "b")]).result(WITHIN)
        eventually(lambda: len(serving_threads()) == 1, what="the broken line's thread is gone")
    assert values(embedded.bootstrap, topic) == [b"b"]


def test_a_producer_that_broke_while_nobody_used_it_costs_no_delivery(embedded: KafkaControls) -> None:
    topic = unique("topic")
    embedded.create_topic(topic, 1)
    embedded.fail_next("InitProducerId", KafkaError.CLUSTER_AUTHORIZATION_FAILED)
    with outlet_to(embedded.bootstrap) as outlet:
        outlet.open()
        eventually(lambda: is_broken(outlet), what="a fatal error that nobody has asked for")
        outlet.deliver([record(topic, "a")]).result(WITHIN)
    assert values(embedded.bootstrap, topic) == [b"a"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"linger.msec": 1}, 'No such configuration property: "linger.msec"'),
        ({"message.timeout.ms": "soon"}, 'Invalid value for configuration property "message.timeout.ms"'),
        ({"max.in.flight": 50}, "max.in.flight"),
    ],
)
def test_settings_that_the_client_refuses_are_a_configuration_error_when_it_is_opened(
    settings: dict[str, ClientValue], told: str
) -> None:
    outlet = Producer(producer_settings("127.0.0.1:1", settings), "test")
    with pytest.raises(ConfigurationError, match=f"refused its configuration as a producer: .*{told}"):
        outlet.open()


def test_what_those_who_wait_for_a_delivery_raise_harms_nobody(
    embedded: KafkaControls, caplog: pytest.LogCaptureFixture
) -> None:
    topic = unique("topic")
    embedded.create_topic(topic, 1)

    def leave(_: Future[None]) -> None:
        raise SystemExit(1)

    with outlet_to(embedded.bootstrap) as outlet:
        outlet.deliver([record(topic, "a")]).result(WITHIN)
        embedded.round_trip(None, 2000)  # so that it is not done before it is waited for
        try:
            future = outlet.deliver([record(topic, "b")])
            future.add_done_callback(leave)
            future.result(WITHIN)
        finally:
            embedded.round_trip(None, 0)
        outlet.deliver([record(topic, "c")]).result(WITHIN)
    assert "delivery callback raised" in caplog.text


# The end


@pytest.mark.dense
def test_closing_waits_for_what_is_under_way(arena: Arena, outlet: Producer) -> None:
    topic = arena.topic(1)
    future = outlet.deliver(records(topic, range(5000)))
    assert outlet.close(WITHIN) == 0
    assert future.result(0) is None
    assert len(values(arena.bootstrap, topic)) == 5000


def test_closing_in_front_of_a_frozen_broker_counts_what_was_not_confirmed_and_fails_it(breakable: LocalKafka) -> None:
    with outlet_to(breakable.bootstrap) as outlet:
        outlet.deliver([record("orders", "before")]).result(WITHIN)
        breakable.freeze()
        try:
            stuck = outlet.deliver(records("orders", range(7)))
            assert outlet.close(0.3) == 7
            with pytest.raises(SendFailed, match="to topic 'orders' was not confirmed before the app had to stop"):
                stuck.result(0)
            eventually(lambda: not serving_threads(), what="no thread stays behind")
        finally:
            breakable.thaw()


def test_after_it_was_closed_nothing_can_be_sent(arena: Arena, outlet: Producer) -> None:
    topic = arena.topic(1)
    outlet.deliver([record(topic, "a")]).result(WITHIN)
    assert outlet.close(WITHIN) == 0
    assert outlet.close(WITHIN) == 0
    with pytest.raises(SendFailed, match="producer 'test' is closed"):
        outlet.deliver([record(topic, "b")])


@pytest.mark.dense
def test_in_a_fork_nothing_can_be_sent_through_the_parents_producer(arena: Arena, outlet: Producer) -> None:
    topic = arena.topic(1)
    outlet.deliver([record(topic, "a")]).result(WITHIN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn of what is tested here
        child = os.fork()
    if child == 0:
        try:
            outlet.deliver([record(topic, "b")])
        except SendFailed as error:
            os._exit(42 if outlet.close(WITHIN) == 0 and "this process is a fork of that one" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    outlet.deliver([record(topic, "c")]).result(WITHIN)
    assert values(arena.bootstrap, topic) == [b"a", b"c"]


def test_its_thread_sleeps_without_a_timer_while_nothing_is_under_way(arena: Arena, outlet: Producer) -> None:
    topic = arena.topic(1)
    outlet.deliver([record(topic, "a")]).result(WITHIN)
    (thread,) = serving_threads()

    def asleep() -> bool:
        frame = sys._current_frames()[thread.ident or 0]
        return frame.f_code is threading.Condition.wait.__code__ and frame.f_locals["timeout"] is None

    eventually(asleep, what="the thread waits to be told")
    outlet.deliver([record(topic, "b")]).result(WITHIN)


def test_where_nobody_waits_the_reports_are_served_by_whoever_delivers_next(
    embedded: KafkaControls, awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a thread that is busy with Python, another that takes the interpreter's lock for every report costs both
    more than the records do."""
    monkeypatch.setattr("kconsume._kafka.delivery._IDLE", WITHIN)
    topic = unique("topic")
    embedded.create_topic(topic, 1)
    ended_by: list[threading.Thread] = []
    with outlet_to(embedded.bootstrap, awaited=awaited) as outlet:

        def one_ended() -> bool:
            outlet.deliver([record(topic, "a")]).add_done_callback(
                lambda _: ended_by.append(threading.current_thread())
            )
            return bool(ended_by)

        eventually(one_ended, what="the end of one of them")
        (served_by,) = set(ended_by)
        assert (served_by in serving_threads()) == awaited
        assert outlet.close(WITHIN) == 0, "whoever closes it does not wait for somebody to come by"


# What the producer is told


def test_a_confirmed_delivery_stands_on_settings_that_stay() -> None:
    given: dict[str, ClientValue] = {
        "acks": 1,
        "request.required.acks": 0,
        "enable.idempotence": False,
        "delivery.report.only.error": True,
        "transactional.id": "mine",
        "linger.ms": 7,
        "message.timeout.ms": 5,
        "security.protocol": "SASL_SSL",
    }
    settings = producer_settings("broker:9092", given)
    assert (settings["acks"], settings["enable.idempotence"]) == ("all", True)
    assert settings["delivery.report.only.error"] is False
    assert not {"request.required.acks", "transactional.id"} & settings.keys()
    assert (settings["linger.ms"], settings["message.timeout.ms"]) == (7, 5)
    assert settings["security.protocol"] == "SASL_SSL"
    assert settings["bootstrap.servers"] == "broker:9092"


@pytest.mark.dense
def test_what_only_consumers_know_is_passed_over_in_silence(arena: Arena, capfd: pytest.CaptureFixture[str]) -> None:
    topic = arena.topic(1)
    known_to_consumers: dict[str, ClientValue] = {
        "session.timeout.ms": 2000,
        "fetch.wait.max.ms": 7,
        "isolation.level": "read_committed",
    }
    with outlet_to(arena.bootstrap, known_to_consumers) as outlet:
        outlet.deliver([record(topic, "a")]).result(WITHIN)
    assert capfd.readouterr().err == ""


# Helpers


@pytest.fixture
def breakable() -> Iterator[LocalKafka]:
    """A broker of the test's own, with the topic `orders` in one partition."""
    with LocalKafka() as broker:
        create_topic(AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0}), "orders", 1)
        yield broker


def serving_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kconsume-producer-test"]


def is_broken(outlet: Producer) -> bool:
    """Whether its client has failed for good, which it says to those who hand it a record."""
    assert outlet._thread is not None
    assert outlet._thread._producer is not None
    try:
        outlet._thread._producer.produce(unique("probe"), b"")
    except KafkaException as error:
        return bool(error.args[0].code() == KafkaError._FATAL)
    return False


def run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN)
    assert not any(thread.is_alive() for thread in threads)
