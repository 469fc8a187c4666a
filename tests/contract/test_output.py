"""What handlers send: confirmed before the offset passes, nothing of what failed, and a broker is no record's fault."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from kconsume import App, Batch, BatchError, Batching, Outgoing, Partition, Record, Sender
from kconsume._config.client_settings import ClientValue
from kconsume._embedded.address import resolve
from kconsume._kafka.producer import Producer
from kconsume.backends import open_store
from kconsume.errors import ConfigurationError, InvalidHandler, SendFailed
from kconsume.testing.services import KafkaService, LocalKafka
from tests.fix_arena import Arena
from tests.fix_kafka import create_topic, produce, unique
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
# A client takes a topic for a new one, of which it will hear, for half a minute.
HASTY: Mapping[str, ClientValue] = {"topic.metadata.propagation.max.ms": 500, "message.timeout.ms": 10_000}


def everything(bootstrap: str, topic: str) -> list[Message]:
    """What a topic holds, partition after partition, each in order."""
    reader = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": unique("reader"),
            "enable.auto.commit": False,
            "enable.partition.eof": True,  # the offsets cannot say it: transaction markers have some of them
            "fetch.wait.max.ms": 10,
            "log_level": 0,
        }
    )
    try:
        unread = set(reader.list_topics(topic, timeout=20).topics[topic].partitions)
        reader.assign([TopicPartition(topic, number, 0) for number in sorted(unread)])
        found: list[Message] = []

        def all_read() -> bool:
            for message in reader.consume(10_000, 0.2):
                if (error := message.error()) is None:
                    found.append(message)
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    unread.discard(message.partition() or 0)
            return not unread

        eventually(all_read, what=f"all of {topic} to the end of each partition")
    finally:
        reader.close()
    return sorted(found, key=lambda message: (message.partition() or 0, message.offset() or 0))


def texts(arena: Arena, topic: str) -> list[str]:
    return [(message.value() or b"").decode() for message in everything(arena.bootstrap, topic)]


def stored(arena: Arena, group: str, topic: str) -> int | None:
    found = open_store("kafka://", brokers=arena.bootstrap).load(group, [Partition(topic, 0)])
    return found[Partition(topic, 0)].next_offset if found else None


def fed(arena: Arena, records: int = 10) -> tuple[str, str]:
    """A topic with numbered records, and an empty one to send to."""
    source, out = arena.topic(1), arena.topic(1)
    arena.produce(source, [str(n) for n in range(records)], 0)
    return source, out


# What is sent


class Shipped(msgspec.Struct):
    id: int


@pytest.mark.dense
@pytest.mark.parametrize(
    ("result", "sent"),
    [
        (b"\x00\xff", [b"\x00\xff"]),
        ("tea ☕", ["tea ☕".encode()]),
        ({"id": 1}, [b'{"id":1}']),
        (Shipped(1), [b'{"id":1}']),
        (Outgoing(None, key="gone"), [None]),
        ([b"a", "b", Shipped(2), None], [b"a", b"b", b'{"id":2}']),
        ([], []),
        (None, []),
        (0, [b"0"]),
        ("", [b""]),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_returned_is_sent(
    arena: Arena, group: str, result: object, sent: list[bytes | None], is_async: bool
) -> None:
    source, out = fed(arena, 1)
    app = arena.app(group)

    def plain(value: str) -> object:
        return result

    async def later(value: str) -> object:
        await asyncio.sleep(0)
        return result

    app.consume(source, to=out)(later if is_async else plain)
    assert app.catch_up(idle=0.2).handled == 1
    assert [message.value() for message in everything(arena.bootstrap, out)] == sent


@pytest.mark.dense
def test_keys_headers_and_other_topics_are_as_they_were_given(arena: Arena, group: str) -> None:
    source, out = fed(arena, 1)
    other, large = arena.topic(1), os.urandom(900_000)
    app = arena.app(group)

    @app.consume(source, to=out)
    def handle(value: str, sender: Sender) -> list[Outgoing]:
        sender.send(other, large, key=b"k", headers={"trace": "1"})
        return [
            Outgoing("first", key="k", headers=[("a", b"1"), ("a", "2")]),
            Outgoing("elsewhere", topic=other),
        ]

    app.catch_up(idle=0.2)
    (message,) = everything(arena.bootstrap, out)
    assert (message.key(), message.value(), message.headers()) == (b"k", b"first", [("a", b"1"), ("a", b"2")])
    first, second = everything(arena.bootstrap, other)
    assert (first.key(), first.value(), first.headers()) == (b"k", large, [("trace", b"1")])
    assert second.value() == b"elsewhere"


@pytest.mark.dense
@pytest.mark.parametrize("form", ["thread", "async", "batch", "async batch"])
def test_what_a_partition_s_records_send_arrives_in_their_order(arena: Arena, group: str, form: str) -> None:
    source, out = fed(arena, 500)
    app = arena.app(group)

    def one(value: str, sender: Sender) -> None:
        sender.send(out, f"{value}a")
        sender.send(out, f"{value}b")

    async def one_later(value: str, sender: Sender) -> None:
        one(value, sender)

    def many(values: list[str], sender: Sender) -> None:
        for value in values:
            one(value, sender)

    async def many_later(values: list[str], sender: Sender) -> None:
        many(values, sender)

    forms: dict[str, Callable[..., Any]] = {
        "thread": one,
        "async": one_later,
        "batch": many,
        "async batch": many_later,
    }
    app.consume(source)(forms[form])
    app.catch_up(idle=0.2)
    assert texts(arena, out) == [f"{n}{letter}" for n in range(500) for letter in "ab"]


# Before the offset passes (P1)


@pytest.mark.dense
def test_the_offset_does_not_pass_before_what_was_sent_is_confirmed(
    arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = fed(arena)
    gate, delivered = threading.Event(), threading.Event()
    deliver = Producer.deliver

    def held_back(self: Producer, outgoing: Sequence[Outgoing]) -> Future[None]:
        """The broker's confirmation comes, and is not told until the gate is open."""
        answer: Future[None] = Future()

        def pass_on(done: Future[None]) -> None:
            gate.wait(30)
            answer.set_result(done.result())

        def tell(done: Future[None]) -> None:
            delivered.set()
            threading.Thread(target=pass_on, args=(done,)).start()

        deliver(self, outgoing).add_done_callback(tell)
        return answer

    monkeypatch.setattr(Producer, "deliver", held_back)
    app = arena.app(group)

    @app.consume(source, to=out)
    def handle(value: str) -> str:
        return value

    with app.running() as running:
        assert delivered.wait(20)
        supervisor = running._supervisor
        assert supervisor is not None
        before = supervisor.consumers[0].loop.snapshot
        eventually(lambda: supervisor.consumers[0].loop.snapshot is not before, what="a commit was due")
        assert stored(arena, group, source) in (None, 0)
        gate.set()
        eventually(lambda: stored(arena, group, source) == 10, what="confirmed, and passed")


@pytest.mark.dense
def test_killed_between_the_confirmation_and_the_commit_repeats_and_never_loses(
    arena: Arena, group: str, tmp_path: Path
) -> None:
    """The offset is committed once a second at most: the kill comes when all is sent and nothing is committed."""
    source, out = fed(arena, 300)
    program = tmp_path / "sends.py"
    program.write_text(
        f"from kconsume import App\n"
        f"from kconsume._runtime import loop\n"
        f"loop.COMMIT_EVERY = 3600.0\n"
        f"app = App({arena.bootstrap!r}, group={group!r}, kafka={arena.quick({})!r})\n"
        f"@app.consume({source!r}, to={out!r})\n"
        f"def handle(value: str) -> str:\n"
        f"    return value\n"
        f"app.run()\n"
    )
    process = subprocess.Popen([sys.executable, str(program)], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: len(texts(arena, out)) == 300, within=40, what="all sent")
    finally:
        process.kill()
        process.wait(10)
    assert stored(arena, group, source) in (None, 0)
    if arena.embedded is None:
        arena.put_out(group, {})  # or the group would wait for the end of its session
    app = arena.app(group)

    @app.consume(source, to=out)
    def handle(value: str) -> str:
        return value

    eventually(lambda: app.catch_up(idle=0.3).handled == 300, within=40, what="the new owner has it")
    assert Counter(texts(arena, out)) == Counter({str(n): 2 for n in range(300)})


# What failed has not sent


@pytest.mark.dense
@pytest.mark.parametrize("offsets", ["kafka", "sqlite"])
@pytest.mark.parametrize("form", ["thread", "async", "batch", "named"])
def test_what_a_failing_record_sent_does_not_leave_and_its_neighbours_is_not_lost(
    arena: Arena, group: str, sqlite_url: str, offsets: str, form: str
) -> None:
    source, out = fed(arena, 100)
    app = arena.app(group, sqlite_url if offsets == "sqlite" else "kafka://")
    bad = {"0", "17", "18", "99"}

    def one(value: str, sender: Sender) -> None:
        sender.send(out, value)
        if value in bad:
            raise LookupError(value)

    async def later(value: str, sender: Sender) -> None:
        await asyncio.sleep(0)
        one(value, sender)

    def many(values: list[str], sender: Sender) -> None:
        for value in values:
            one(value, sender)

    def names(values: list[str], sender: Sender) -> None:
        for value in values:
            sender.send(out, value)
        errors = {index: LookupError(value) for index, value in enumerate(values) if value in bad}
        if errors:
            raise BatchError(errors)

    forms: dict[str, Callable[..., Any]] = {"thread": one, "async": later, "batch": many, "named": names}
    handle = forms[form]
    if offsets == "sqlite":
        handle = in_transaction(handle)
    app.consume(source, on_error="skip")(handle)
    report = app.catch_up(idle=0.2)
    assert (report.handled, report.skipped) == (96, 4)
    assert texts(arena, out) == [str(n) for n in range(100) if str(n) not in bad], "each once, in order"


def in_transaction(handle: Callable[..., Any]) -> Callable[..., Any]:
    """The same handler, asking for the store's transaction as well."""
    hint = handle.__annotations__["value" if "value" in handle.__annotations__ else "values"]

    def stores(value: Any, sender: Sender, tx: sqlite3.Connection) -> None:
        handle(value, sender)

    async def stores_later(value: Any, sender: Sender, tx: sqlite3.Connection) -> None:
        await handle(value, sender)

    made = stores_later if asyncio.iscoroutinefunction(handle) else stores
    made.__annotations__["value"] = hint
    return made


@pytest.mark.dense
def test_a_sender_that_was_kept_is_refused_and_sends_nothing(arena: Arena, group: str) -> None:
    source, out = fed(arena, 3)
    app, kept, refusals = arena.app(group), list[Sender](), list[SendFailed]()

    @app.consume(source)
    def handle(value: str, sender: Sender) -> None:
        sender.send(out, value)
        for old in kept:
            try:
                old.send(out, "late")
            except SendFailed as refusal:
                refusals.append(refusal)
        kept.append(sender)

    app.catch_up(idle=0.2)
    assert len(refusals) == 3
    with pytest.raises(SendFailed, match="after the handler had returned, and would be lost"):
        kept[-1].send(out, "later still")
    assert texts(arena, out) == ["0", "1", "2"]


@pytest.mark.dense
def test_a_value_that_can_never_be_sent_is_its_record_s_failure(arena: Arena, group: str) -> None:
    source, out = fed(arena, 4)
    app = arena.app(group)
    too_large = {"1": 1_000_001, "2": 999_990}  # over the limit, and under it with what Kafka adds

    @app.consume(source, to=out, on_error="skip")
    def handle(value: str) -> object:
        return b"x" * too_large[value] if value in too_large else value

    report = app.catch_up(idle=0.2)
    assert (report.handled, report.skipped) == (2, 2)
    assert texts(arena, out) == ["0", "3"]


# A broker that does not take it is no record's fault


@pytest.fixture
def real(kafka: KafkaService) -> Iterator[Arena]:
    """The embedded broker makes every topic that a producer names."""
    arena = Arena("real", kafka.bootstrap, None)
    yield arena
    arena.clean_up()


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("form", ["thread", "async", "batch"])  # with an outbox it waits there: test_outbox.py
def test_a_topic_that_is_not_there_stops_the_app_whatever_the_policy_and_passes_nothing(
    real: Arena, group: str, on_error: Any, form: str
) -> None:
    source, _ = fed(real)
    app = real.app(group, "kafka://", kafka=HASTY)

    def one(value: str) -> str:
        return value

    async def later(value: str) -> str:
        return value

    def many(values: list[str]) -> list[str]:
        return values

    forms: dict[str, Callable[..., Any]] = {"thread": one, "async": later, "batch": many}
    app.consume(source, to="nowhere", on_error=on_error)(forms[form])
    with pytest.raises(SendFailed, match=r"^topic 'nowhere' does not exist on .*: create it, or correct the name\n"):
        app.catch_up(idle=0.2)
    assert stored(real, group, source) in (None, 0)


def test_a_program_that_cannot_send_ends_with_exit_code_1_and_one_sentence(
    real: Arena, group: str, tmp_path: Path
) -> None:
    source, _ = fed(real)
    program = tmp_path / "nowhere.py"
    program.write_text(
        f"from kconsume import App\n"
        f"app = App({real.bootstrap!r}, group={group!r}, kafka={real.quick(HASTY)!r})\n"
        f"@app.consume({source!r}, to='nowhere', on_error='skip')\n"
        f"def handle(value: str) -> str:\n"
        f"    return value\n"
        f"app.run()\n"
    )
    ended = subprocess.run([sys.executable, str(program)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "topic 'nowhere' does not exist" in ended.stderr
    assert "skipped 0" in ended.stderr


@pytest.mark.parametrize("offsets", ["kafka", "sqlite"])
def test_a_property_that_no_producer_can_have_is_an_error_at_the_start(
    arena: Arena, group: str, sqlite_url: str, offsets: str
) -> None:
    """At the first record it would be taken for the store's fault, or for the record's."""
    source, out = fed(arena)
    app = arena.app(group, sqlite_url if offsets == "sqlite" else "kafka://", kafka={"max.in.flight": 100})
    called: list[str] = []

    @app.consume(source, to=out, on_error="skip")
    def handle(value: str) -> str:
        called.append(value)
        return value

    with pytest.raises(ConfigurationError, match="refused its configuration as a producer"):
        app.catch_up(idle=0.2)
    assert called == []


@pytest.mark.dense
def test_a_value_that_nobody_takes_stops_at_the_first_record_whatever_the_policy(arena: Arena, group: str) -> None:
    source, _ = fed(arena)
    app = arena.app(group)

    @app.consume(source, on_error="skip")
    def handle(value: str):  # type: ignore[no-untyped-def]
        return value

    with pytest.raises(InvalidHandler, match=r"returned a value \(str\), and nothing takes it"):
        app.catch_up(idle=0.2)
    assert stored(arena, group, source) in (None, 0)


# A broker that does not answer (P8)


@pytest.fixture
def breakable() -> Iterator[LocalKafka]:
    with LocalKafka() as broker:
        yield broker


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_sigterm_ends_by_the_deadline_though_the_broker_froze_while_sending(
    breakable: LocalKafka, group: str, tmp_path: Path, kind: str
) -> None:
    admin = AdminClient({"bootstrap.servers": breakable.bootstrap, "log_level": 0})
    create_topic(admin, "orders", 1)
    create_topic(admin, "shipped", 1)
    (tmp_path / "frozen.py").write_text(
        f"import time\n"
        f"from kconsume import App\n"
        f"app = App({breakable.bootstrap!r}, group={group!r}, shutdown=4.0)\n"
        f"@app.consume('orders', to='shipped')\n"
        f"{kind} handle(value: str) -> str:\n"
        f"    print(value, flush=True)\n"
        f"    return value\n"
        f"app.run()\n"
    )
    out, err = tmp_path / "out.txt", tmp_path / "err.txt"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen([sys.executable, "frozen.py"], cwd=tmp_path, stdout=stdout, stderr=stderr)
    try:
        produce(breakable.bootstrap, "orders", ["first"])
        eventually(lambda: "first" in out.read_text(), within=40, what="a record is handled and sent")
        eventually(lambda: len(everything(breakable.bootstrap, "shipped")) == 1, what="and sent")
        produce(breakable.bootstrap, "orders", [b"x"] * 20_000)
        breakable.freeze()
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 3, "ended by itself, with work left behind"
        took = time.monotonic() - asked
    finally:
        breakable.thaw()
        process.kill()
        process.wait(10)
    # The one time that is promised: the deadline, with a little for what cannot be waited for, on a busy machine.
    assert took < 4.0 + 8.0, err.read_text()


# app.send


@pytest.mark.dense
def test_app_send_before_during_and_after_a_run(arena: Arena, group: str) -> None:
    source, out = fed(arena, 1)
    app, started = arena.app(group), threading.Event()

    @app.consume(source)
    def handle(value: str) -> None:
        app.send(out, "from a handler")
        started.set()

    app.send(out, "before", key="k", headers={"a": "b"})
    with app.running():
        assert started.wait(20)
        app.send(out, "during")
    app.send(out, "after")
    app.catch_up(idle=0.2)
    app.send(out, {"once": "more"})
    assert texts(arena, out) == ["before", "from a handler", "during", "after", '{"once":"more"}']
    first = everything(arena.bootstrap, out)[0]
    assert (first.key(), first.headers()) == (b"k", [("a", b"b")])


@pytest.mark.dense
def test_app_send_from_many_threads_while_runs_begin_and_end(arena: Arena, group: str) -> None:
    source, out = fed(arena, 1)
    app, refused = arena.app(group), list[str]()
    over = threading.Event()

    @app.consume(source)
    def handle(value: str) -> None: ...

    confirmed: list[str] = []

    def send(name: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            try:
                app.send(out, f"{name}:{number}")
            except SendFailed as error:
                refused.append(str(error))
            else:
                confirmed.append(f"{name}:{number}")

    threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            app.catch_up(idle=0.2)
    finally:
        over.set()
        for thread in threads:
            thread.join(30)
    assert all("after the app has stopped" in why or "had to stop" in why for why in refused), refused[:1]
    sent = Counter(texts(arena, out))
    assert set(confirmed) <= set(sent), "what was confirmed is there"
    assert all(count == 1 for count in sent.values())


def test_app_send_to_a_topic_that_is_not_there_says_so(real: Arena, group: str) -> None:
    app = real.app(group, kafka=HASTY)
    with pytest.raises(SendFailed, match="topic 'nowhere' does not exist"):
        app.send("nowhere", b"x")
    with pytest.raises(SendFailed, match="is no topic name"):
        app.send("no where", b"x")


def test_app_send_on_the_embedded_broker_makes_the_topic_also_while_it_runs(group: str) -> None:
    first, second, third = unique("new"), unique("new"), unique("new")
    app, seen = App("embedded://", group=group), list[str]()

    @app.consume(first, to=third)
    def handle(record: Record) -> None:
        seen.append((record.value or b"").decode())

    app.send(first, "a")
    with app.running():
        app.send(first, "b")
        app.send(second, "c")
        eventually(lambda: sorted(seen) == ["a", "b"], what="both are handled")
    (message,) = everything(resolve("embedded://"), second)
    assert message.value() == b"c"


@pytest.mark.dense
def test_a_batch_handler_returns_for_all_of_its_records(arena: Arena, group: str) -> None:
    source, out = fed(arena, 50)
    app = arena.app(group)

    @app.consume(source, to=out, batch=Batching(20, wait=1.0))
    def handle(values: list[str], batch: Batch) -> list[Outgoing]:
        return [Outgoing(value, key=str(batch.partition)) for value in values]

    assert app.catch_up(idle=0.3).handled == 50
    assert texts(arena, out) == [str(n) for n in range(50)]
