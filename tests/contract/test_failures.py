"""Records that fail, on real brokers: tried again in their place, written as dead letters, and never lost."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, Message, Producer

from kconsume import (
    App,
    Batch,
    BatchError,
    Batching,
    DeadLetter,
    Record,
    Retry,
)
from kconsume._embedded.controls import KafkaControls
from kconsume._runtime.lanes.reports import Suspended
from kconsume._runtime.output.publisher import Publisher
from kconsume._runtime.processing.driver import ThreadDriver
from kconsume.records import Headers
from kconsume.testing.services import KafkaService
from tests.contract.test_output import HASTY, everything, stored, texts
from tests.contract.test_rebalance import assigned
from tests.fix_arena import Arena
from tests.fix_kafka import unique
from tests.waiting import eventually

FORMS = ["thread", "async", "batch", "async batch"]
NAMES = "topic partition offset timestamp group attempts exception message trace origin"
MARKS = {f"kconsume-{name}" for name in NAMES.split()}
AN_HOUR_AGO = int(time.time() * 1000) - 3_600_000
"""Older ones than a topic keeps are deleted, at any moment."""
UNDECODABLE = b"\xff\xfe"

Check = Callable[[Record], None]


def consume(app: App, topic: str, form: str, check: Check, seen: list[str], **options: Any) -> None:
    """A handler in this form, which notes the values that pass. A batch is checked as a whole before any of it is
    noted, so that one that fails has no effect; a `named` one says which of its records failed."""

    def one(value: str, record: Record) -> None:
        check(record)
        seen.append(value)

    async def later(value: str, record: Record) -> None:
        await asyncio.sleep(0)
        one(value, record)

    def many(values: list[str], batch: Batch) -> None:
        for record in batch:
            check(record)
        seen.extend(values)

    async def many_later(values: list[str], batch: Batch) -> None:
        await asyncio.sleep(0)
        many(values, batch)

    def named(values: list[str], batch: Batch) -> None:
        errors: dict[int, BaseException] = {}
        for index, record in enumerate(batch):
            try:
                one(values[index], record)
            except LookupError as error:
                errors[index] = error
        if errors:
            raise BatchError(errors)

    forms: dict[str, Callable[..., Any]] = {
        "thread": one, "async": later, "batch": many, "async batch": many_later, "named batch": named
    }  # fmt: skip
    if "batch" in form:
        options["batch"] = Batching(7, wait=0.05)
    app.consume(topic, **options)(forms[form])


def text_of(record: Record) -> str:
    return (record.value or b"").decode(errors="replace")


def headers_of(n: int) -> Headers:
    return (("trace", b"\x00\x80"), ("trace", b"twice"), ("n", str(n).encode()))


def write(arena: Arena, topic: str, values: list[bytes]) -> None:
    """With all that a record can have."""
    producer = Producer({"bootstrap.servers": arena.bootstrap, "enable.idempotence": True, "log_level": 0})
    for n, value in enumerate(values):
        producer.produce(topic, value, f"key-{n}".encode(), 0, timestamp=AN_HOUR_AGO + n, headers=list(headers_of(n)))
    assert producer.flush(20) == 0


def own_headers(message: Message) -> Headers:
    pairs = cast(Headers, message.headers())
    return tuple(pair for pair in pairs if not pair[0].startswith("kconsume-"))


def marks(message: Message) -> dict[str, str]:
    found = [pair for pair in cast(Headers, message.headers()) if pair[0].startswith("kconsume-")]
    assert len(found) == len(MARKS), "each once"
    return {name: value.decode() for name, value in found}


# Dead letters


@pytest.mark.dense
@pytest.mark.parametrize("form", [*FORMS, "named batch"])
def test_good_and_dead_are_disjoint_and_all_and_a_letter_keeps_its_record(arena: Arena, group: str, form: str) -> None:
    source, dead = arena.topic(1), arena.topic(1)
    bad = {"0", "5", "6", "29"}
    written = [str(n).encode() for n in range(30)]
    written[12] = UNDECODABLE
    write(arena, source, written)
    ids: dict[int, str] = {}

    def check(record: Record) -> None:
        ids[record.offset] = record.id
        if text_of(record) in bad:
            raise LookupError(f"no such order: {record.offset}")

    app, seen = arena.app(group), list[str]()
    consume(app, source, form, check, seen, on_error=DeadLetter(dead))
    report = app.catch_up(idle=0.2)

    assert (report.handled, report.skipped) == (25, 5)
    assert stored(arena, group, source) == 30
    assert seen == [str(n) for n in range(30) if str(n) not in bad and n != 12], "each once, in order"
    letters = everything(arena.bootstrap, dead)
    assert [int(marks(letter)["kconsume-offset"]) for letter in letters] == [0, 5, 6, 12, 29]
    for letter in letters:
        said = marks(letter)
        offset = int(said["kconsume-offset"])
        assert (letter.key(), letter.value()) == (f"key-{offset}".encode(), written[offset])
        assert letter.timestamp() == (1, AN_HOUR_AGO + offset)
        assert own_headers(letter) == headers_of(offset)
        assert set(said) == MARKS
        assert (said["kconsume-topic"], said["kconsume-partition"]) == (source, "0")
        assert (said["kconsume-group"], said["kconsume-attempts"]) == (group, "1")
        assert said["kconsume-timestamp"] == str(AN_HOUR_AGO + offset)
        if offset == 12:
            assert said["kconsume-exception"] == "kconsume.errors.DecodeError"
            assert said["kconsume-origin"] == ids[11].removesuffix("11") + "12"
        else:
            assert said["kconsume-exception"] == "builtins.LookupError"
            assert said["kconsume-message"] == f"no such order: {offset}"
            assert "Traceback" in said["kconsume-trace"]
            assert "test_failures.py" in said["kconsume-trace"], "where in the handler it was raised"
            assert said["kconsume-origin"] == ids[offset]


def test_a_dead_letter_of_a_dead_letter_says_where_it_came_from_first_and_why_it_failed_now(
    arena: Arena, group: str
) -> None:
    source, dead, deader = arena.topic(1), arena.topic(1), arena.topic(1)
    write(arena, source, [b"good", b"bad"])
    later, ids = unique("later"), list[str]()

    def check(record: Record) -> None:
        if record.value == b"bad":
            ids.append(record.id)
            raise LookupError("at first") if record.topic == source else ArithmeticError("again")

    for who, topic, then in ((group, source, dead), (later, dead, deader)):
        app = arena.app(who)
        consume(app, topic, "thread", check, [], on_error=DeadLetter(then))
        app.catch_up(idle=0.2)
    ((first,), (second,)) = (everything(arena.bootstrap, topic) for topic in (dead, deader))
    before, now = marks(first), marks(second)
    assert now["kconsume-origin"] == before["kconsume-origin"] == ids[0] != ids[1]
    kept = ("topic", "partition", "offset", "timestamp", "origin")
    assert [now[f"kconsume-{name}"] for name in kept] == [source, "0", "1", str(AN_HOUR_AGO + 1), ids[0]]
    of_its_own = ("group", "exception", "message")
    assert [before[f"kconsume-{name}"] for name in of_its_own] == [group, "builtins.LookupError", "at first"]
    assert [now[f"kconsume-{name}"] for name in of_its_own] == [later, "builtins.ArithmeticError", "again"]
    assert (second.key(), second.value(), second.timestamp()) == (b"key-1", b"bad", first.timestamp())
    assert own_headers(second) == headers_of(1), "and the record's own headers, and each mark once"


def test_a_tombstone_without_a_key_stays_one(arena: Arena, group: str) -> None:
    source, dead = arena.topic(1), arena.topic(1)
    arena.produce(source, [None, "", "good"], 0)
    app = arena.app(group)

    @app.consume(source, on_error=DeadLetter(dead))
    def handle(record: Record) -> None:
        if not record.value:
            raise LookupError("nothing in it")

    assert app.catch_up(idle=0.2).skipped == 2
    assert [(letter.key(), letter.value()) for letter in everything(arena.bootstrap, dead)] == [
        (None, None),
        (None, b""),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_the_letter_says_how_often_it_was_tried(arena: Arena, group: str, form: str) -> None:
    source, dead = arena.topic(1), arena.topic(1)
    arena.produce(source, ["bad"], 0)
    attempts: list[int] = []

    def check(record: Record) -> None:
        attempts.append(record.attempt)
        raise LookupError("never")

    app = arena.app(group)
    # Longer than the app would wait for more: a record that waits for its turn is not "nothing to do".
    consume(app, source, form, check, [], on_error=DeadLetter(dead), retry=Retry(3, wait=0.5))
    assert app.catch_up(idle=0.1).skipped == 1
    assert attempts == [1, 2, 3]
    (letter,) = everything(arena.bootstrap, dead)
    assert marks(letter)["kconsume-attempts"] == "3"


def test_what_cannot_be_decoded_is_not_tried_again(arena: Arena, group: str) -> None:
    source, dead = arena.topic(1), arena.topic(1)
    write(arena, source, [UNDECODABLE])
    app = arena.app(group)
    consume(app, source, "thread", lambda _: None, [], on_error=DeadLetter(dead), retry=Retry(9, wait=0.0))
    app.catch_up(idle=0.1)
    (letter,) = everything(arena.bootstrap, dead)
    assert marks(letter)["kconsume-attempts"] == "1"


@pytest.fixture
def one_broker(embedded: KafkaControls) -> Arena:
    return Arena("embedded", embedded.bootstrap, embedded)


@pytest.mark.parametrize("form", ["thread", "async"])
def test_control_letters_that_are_not_posted_are_noticed(
    one_broker: Arena, group: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(*_: object) -> None: ...

    monkeypatch.setattr(Publisher, "post", lambda *_: None)
    monkeypatch.setattr(Publisher, "post_async", lose)
    monkeypatch.setattr(Publisher, "hand_over", lambda *_: None)
    with pytest.raises(AssertionError, match=r"\[\] == \[0, 5, 6, 12, 29\]"):
        test_good_and_dead_are_disjoint_and_all_and_a_letter_keeps_its_record(one_broker, group, form)


# Tried again, in its place


class Held:
    """Two partitions and one worker: a record of partition 0 fails until it is let go."""

    def __init__(self, arena: Arena, group: str, form: str) -> None:
        self.arena, self.group = arena, group
        self.topic = arena.topic(2)
        self.app = arena.app(group, kafka={"max.poll.interval.ms": 2000})
        self.seen: list[str] = []
        self.attempts: list[int] = []
        self.let_go = False
        consume(self.app, self.topic, form, self.check, self.seen, concurrency=1, retry=Retry(100, wait=0.3))

    def check(self, record: Record) -> None:
        if (text := text_of(record)).startswith("bad"):
            self.attempts.append(record.attempt)
            if not self.let_go:
                raise LookupError(text)

    def of(self, partition: int) -> list[str]:
        return [value for value in self.seen if value.partition(":")[0].endswith(str(partition))]

    def run(self, warm_up: int, waits: int, within: float = 20.0) -> None:
        """Hold partition 0 for so many attempts, and see the other flow meanwhile."""
        expected = [[f"{p}:{n}" for n in range(warm_up)] for p in range(2)]
        for partition in range(2):
            self.arena.produce(self.topic, expected[partition], partition)
        with self.app.running():
            eventually(lambda: len(self.seen) == 2 * warm_up, what="warmed up")
            eventually(self.app.rebalances, what="the first rebalance is told")
            before = self.app.rebalances()
            self.arena.produce(self.topic, ["bad0", "0:after", "0:last"], 0)
            eventually(lambda: self.attempts, what="it failed")
            for n in range(waits):  # one by one, so that the other partition flows between all attempts
                self.arena.produce(self.topic, [f"1:more{n}"], 1)
                eventually(lambda: self.seen[-1:] == [f"1:more{n}"], within=within, what="the other flows")  # noqa: B023
                eventually(lambda: len(self.attempts) > n + 1, what="another attempt")  # noqa: B023
            assert "0:after" not in self.seen, "nothing overtakes it"
            self.let_go = True
            eventually(lambda: "0:last" in self.seen, what="it goes on")
            assert self.app.rebalances() == before, "it never left the group"
        assert self.of(0) == [*expected[0], "bad0", "0:after", "0:last"]
        assert self.of(1) == [*expected[1], *(f"1:more{n}" for n in range(waits))]
        assert self.attempts == list(range(1, len(self.attempts) + 1))


@pytest.mark.parametrize("form", FORMS)
def test_a_record_that_waits_for_its_next_attempt_holds_its_own_partition_only(
    arena: Arena, group: str, form: str
) -> None:
    Held(arena, group, form).run(warm_up=1, waits=3)


@pytest.mark.parametrize("form", FORMS)
def test_so_does_that_of_a_fast_handler_and_the_group_is_not_left(arena: Arena, group: str, form: str) -> None:
    Held(arena, group, form).run(warm_up=2000, waits=8)  # longer than the poll interval


def test_control_a_worker_that_sleeps_until_the_next_attempt_is_noticed(
    one_broker: Arena, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out, held = ThreadDriver._go_on, Held(one_broker, group, "thread")

    def sleeps(self: ThreadDriver, lane: Any, steps: Any, answer: Any) -> None:
        parked = carry_out(self, lane, steps, answer)
        while parked is not None:
            time.sleep(parked.seconds)
            parked = cast("Suspended | None", parked.resume())

    monkeypatch.setattr(ThreadDriver, "_go_on", sleeps)
    with pytest.raises(AssertionError, match="the other flows"):
        held.run(warm_up=1, waits=1, within=1.5)


# Told to stop while it waits


@pytest.mark.dense
@pytest.mark.parametrize("form", FORMS)
def test_an_app_that_is_stopped_does_not_wait_for_the_next_attempt_and_passes_nothing(
    arena: Arena, group: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, dead = arena.topic(1), arena.topic(1)
    arena.produce(source, ["bad", "after"], 0)
    tried: list[int] = []

    def check(record: Record) -> None:
        tried.append(record.attempt)
        raise LookupError("not now")

    app = arena.app(group)
    consume(app, source, form, check, [], retry=Retry(9, wait=30.0), on_error=DeadLetter(dead))
    with app.running():
        eventually(lambda: tried, what="it failed")
        asked = time.monotonic()
    # The one time that is promised: at once, and not when the wait, or the drain's part of the deadline, is over.
    assert time.monotonic() - asked < 12.0
    assert "abandoned partition" not in caplog.text
    assert tried == [1]
    assert stored(arena, group, source) in (None, 0)
    assert texts(arena, dead) == []

    again, attempts, next_app = list[str](), list[int](), arena.app(group)
    consume(next_app, source, form, lambda record: attempts.append(record.attempt), again)
    next_app.catch_up(idle=0.2)
    assert again == ["bad", "after"]
    assert attempts == [1, 1]


@pytest.mark.parametrize("form", ["thread", "async"])
def test_a_partition_that_is_revoked_while_its_record_waits_goes_to_the_next_owner_with_it(
    arena: Arena, group: str, form: str
) -> None:
    source = arena.topic(2)
    for partition in range(2):
        arena.produce(source, [f"{partition}:bad", f"{partition}:after"], partition)
    tried: list[str] = []
    attempts: list[int] = []

    def check(record: Record) -> None:
        tried.append(text_of(record))
        raise LookupError("not now")

    one, ones = arena.app(group), list[str]()
    two, twos = arena.app(group), list[str]()
    consume(one, source, form, check, ones, retry=Retry(9, wait=30.0), on_error="skip")
    consume(two, source, form, lambda record: attempts.append(record.attempt), twos)
    with one.running():
        eventually(lambda: len(tried) == 2, what="both wait")
        with two.running():
            (moved,) = eventually(lambda: assigned(two), what="one is handed over")
            eventually(lambda: len(twos) == 2, what="and handled there")
            assert not any(rebalance.abandoned for rebalance in one.rebalances()), "it was let go of at once"
    assert (ones, twos) == ([], [f"{moved}:bad", f"{moved}:after"])
    assert sorted(tried) == ["0:bad", "1:bad"]
    assert attempts == [1, 1]


# Letters that cannot be written


@pytest.fixture
def real(kafka: KafkaService) -> Iterator[Arena]:
    """The embedded broker makes every topic that a producer names."""
    arena = Arena("real", kafka.bootstrap, None)
    yield arena
    arena.clean_up()


@pytest.mark.dense
@pytest.mark.parametrize("form", ["thread", "async", "batch"])
def test_a_dead_letter_topic_that_is_missing_holds_the_lane_until_it_is_made(
    real: Arena, group: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, dead = real.topic(2), unique("dead")
    app, seen = real.app(group, kafka={**HASTY, "max.poll.interval.ms": 2000}), list[str]()

    def check(record: Record) -> None:
        if record.value == b"bad":
            raise LookupError("never")

    consume(app, source, form, check, seen, on_error=DeadLetter(dead))
    with app.running():
        real.produce(source, [f"0:{n}" for n in range(5)], 0)
        eventually(lambda: len(seen) == 5, what="warmed up")
        before = app.rebalances()
        real.produce(source, ["bad"], 0)

        def held() -> list[str]:
            return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR and "held" in r.getMessage()]

        eventually(held, what="it is said")
        assert f"dead letter unwritten record={source}/0@5" in held()[0]
        assert f"topic '{dead}' does not exist" in held()[0]
        real.produce(source, ["0:after"], 0)
        real.produce(source, ["1:0", "1:1"], 1)
        eventually(lambda: seen[-2:] == ["1:0", "1:1"], what="the other partition flows")
        eventually(lambda: len(held()) > 1, what="it is tried again")
        assert "0:after" not in seen
        eventually(lambda: stored(real, group, source) == 5, what="passed up to it, and no further")
        real.topic(1, dead)
        eventually(lambda: "0:after" in seen, within=40, what="it goes on by itself")
        assert app.rebalances() == before
    assert texts(real, dead) == ["bad"]
    assert stored(real, group, source) == 7


class NotYet(Exception):
    """Raised for the other partition, until it is to flow."""


@pytest.mark.dense
def test_replicas_that_are_not_in_sync_hold_the_lane_until_they_are(
    one_broker: Arena, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As where `min.insync.replicas` is not met, for which it takes two real brokers (`test_too_few_replicas.py`): one
    alone never asks for more than it has. Nothing at all can be written here meanwhile: the records were before."""
    source, dead, faults = one_broker.topic(2), one_broker.topic(1), one_broker.embedded
    assert faults is not None
    one_broker.produce(source, ["0:0", "bad", "0:after"], 0)
    one_broker.produce(source, ["1:0", "1:1"], 1)
    app, seen = one_broker.app(group, kafka={**HASTY, "message.timeout.ms": 1000}), list[str]()
    flows = threading.Event()

    def check(record: Record) -> None:
        if record.value == b"bad":
            raise LookupError("never")
        if record.partition == 1 and not flows.is_set():
            raise NotYet

    retry = Retry(100_000, wait=0.05, on=NotYet)
    consume(app, source, "async", check, seen, retry=retry, on_error=DeadLetter(dead))

    def held() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR and "held" in r.getMessage()]

    faults.fail_next("Produce", *[KafkaError.NOT_ENOUGH_REPLICAS] * 1000)
    try:
        with app.running():
            eventually(held, what="it is said")
            assert f"dead letter unwritten record={source}/0@1" in held()[0]
            assert f"a record to topic '{dead}' was not confirmed within 1 s" in held()[0]
            assert "as many replicas are in sync as the topic's min.insync.replicas requires" in held()[0]
            flows.set()
            eventually(lambda: seen[-2:] == ["1:0", "1:1"], what="the other partition flows")
            eventually(lambda: len(held()) > 1, what="it is tried again")
            eventually(lambda: stored(one_broker, group, source) == 1, what="passed up to it, and no further")
            assert texts(one_broker, dead) == []
            faults.clear_failures("Produce")
            eventually(lambda: stored(one_broker, group, source) == 3, what="it goes on by itself")
    finally:
        faults.clear_failures("Produce")
    assert texts(one_broker, dead) == ["bad"]
    assert sorted(seen) == ["0:0", "0:after", "1:0", "1:1"], "each once: those behind it may run, and are not passed"


@pytest.mark.dense
def test_a_dead_letter_that_is_too_large_holds_the_lane_and_is_written_once_it_may_be(
    arena: Arena, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, dead = arena.topic(2), arena.topic(1)
    large = b"x" * 999_500  # it fits, and with what is said of the error it does not
    arena.produce(source, [large], 0)
    arena.produce(source, ["other"], 1)

    def check(record: Record) -> None:
        if record.value == large:
            raise LookupError("never")

    app, seen = arena.app(group), list[str]()
    consume(app, source, "thread", check, seen, on_error=DeadLetter(dead))
    with app.running():
        eventually(lambda: "dead letter unwritten record=" in caplog.text, what="it is said")
        arena.produce(source, ["after"], 0)
        eventually(lambda: seen == ["other"], what="the other partition flows")
        eventually(lambda: caplog.text.count("dead letter unwritten record=") > 1, what="it is tried again")
        assert seen == ["other"]
    assert f"a record to topic '{dead}' has " in caplog.text
    assert stored(arena, group, source) in (None, 0)

    wider = arena.app(group, kafka={"message.max.bytes": 1_040_000})
    consume(wider, source, "thread", check, seen, on_error=DeadLetter(dead))
    wider.catch_up(idle=0.2)
    assert seen == ["other", "after"]
    assert [letter.value() for letter in everything(arena.bootstrap, dead)] == [large]
