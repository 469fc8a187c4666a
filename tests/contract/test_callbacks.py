"""What goes wrong inside the client's callbacks: an error there ends the app with its cause, takes no record with it
and holds up nobody; a signal that arrives there is heard (rules 3, 4 and 16 of `notes/reliability.md`)."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn, Self

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from kconsume import App, Partition, Record
from kconsume._config.client_settings import client_settings
from kconsume._embedded.controls import KafkaControls
from kconsume._kafka.commit_result import OffsetToCommit
from kconsume._kafka.consumer import KafkaConsumer, StartAt
from kconsume._runtime.assignment.assignment import Assignment
from kconsume._runtime.deadlines import Deadline
from kconsume.backends import open_store
from tests.fix_arena import PROTOCOLS, Arena
from tests.liveness import assert_app_lives
from tests.waiting import eventually


@pytest.fixture
def arena(embedded: KafkaControls) -> Iterator[Arena]:
    yield Arena("embedded", embedded.bootstrap, embedded)
    for api in ("OffsetCommit", "Heartbeat", "ConsumerGroupHeartbeat"):
        embedded.clear_failures(api)


# At the source: what poll and consume have in hand


class Lodger:
    """Starts everything at its beginning."""

    def assigned(self, partitions: list[Partition]) -> Mapping[Partition, StartAt]:
        return {p: StartAt(0) for p in partitions}

    def revoked(self, partitions: list[Partition]) -> None: ...

    def lost(self, partitions: list[Partition]) -> None: ...


RECORDS = 20_000


class Burst(Exception):
    """What the callbacks of these tests raise."""


def count_amid_raising_callbacks(
    arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch, *, guarded: bool
) -> tuple[int, int]:
    """Read a topic to its end while every answer to a commit raises in its callback: how many records came, and how
    many faults."""
    topic = arena.topic(1)
    arena.produce(topic, (b"x" * 50 for _ in range(RECORDS)), 0)
    settings = client_settings(arena.bootstrap, group, arena.quick({}))
    source, place = KafkaConsumer(settings, Lodger(), batch=100), Partition(topic, 0)
    came = faults = 0

    def burst(*_: object) -> None:
        raise Burst

    def at_the_end() -> bool:
        """Whether the client has handed out, or thrown away, the last record."""
        (position,) = source._consumer.position([TopicPartition(*place)])
        return position.offset == RECORDS

    with monkeypatch.context() as patch:
        patch.setattr(KafkaConsumer, "_note_commit", burst)
        if not guarded:
            patch.setattr(KafkaConsumer, "_guarded", lambda _, step, *arguments: step(*arguments))
        source.subscribe([topic])
        deadline = Deadline(20.0)
        while not at_the_end():
            assert not deadline.passed
            try:
                came += sum(len(run) for _, run in source.fetch(0.1))
            except Burst:
                faults += 1
            source.commit({place: OffsetToCommit(0, None, "")})
    closing = threading.Thread(target=close, args=(source,), daemon=True)
    closing.start()
    closing.join(20.0 if guarded else 0.0)  # without the guard it may never come back
    assert not guarded or not closing.is_alive()
    return came, faults


def close(source: KafkaConsumer) -> None:
    with suppress(Burst):  # the last one may be parked
        source.close()


@pytest.mark.dense
def test_callbacks_that_raise_swallow_no_record(arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    came, faults = count_amid_raising_callbacks(arena, group, monkeypatch, guarded=True)
    assert faults, "each is raised by a fetch"
    assert came == RECORDS


@pytest.mark.dense
def test_control_callbacks_that_are_not_total_destroy_the_records_in_hand(
    arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, faults = count_amid_raising_callbacks(arena, group, monkeypatch, guarded=False)
    assert faults
    assert came < RECORDS


# In an app: what moves in and out


class Shop:
    """A group, and the apps that handle a topic of two partitions for it."""

    def __init__(self, arena: Arena, group: str, protocol: str) -> None:
        assert arena.embedded is not None
        self.arena, self.broker, self.group, self.protocol = arena, arena.embedded, group, protocol
        self.topic = arena.topic(2)
        self.written = 0
        self.seen: list[tuple[int, int]] = []

    def member(self) -> App:
        kafka = self.arena.quick(PROTOCOLS[self.protocol])
        app = App(self.arena.bootstrap, group=self.group, kafka=kafka, shutdown=3.0)

        @app.consume(self.topic)
        def handle(record: Record) -> None:
            self.seen.append((record.partition, record.offset))

        return app

    def write(self) -> None:
        self.arena.fill(self.topic, 50, partitions=2)
        self.written += 50

    def missing(self) -> set[tuple[int, int]]:
        return {(partition, n) for partition in range(2) for n in range(self.written)} - set(self.seen)

    def passed(self) -> set[tuple[int, int]]:
        """What would never be handled: the next process begins after it."""
        partitions = [Partition(self.topic, number) for number in range(2)]
        stored = open_store("kafka://", brokers=self.arena.bootstrap).load(self.group, partitions)
        return {(p.number, n) for p, position in stored.items() for n in range(position.next_offset)} - set(self.seen)


def assignment_of(app: App) -> Assignment:
    assert app._supervisor is not None
    return app._supervisor.consumers[0].assignment


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fall_over(*_: object) -> NoReturn:
        raise error

    return fall_over


def make_revoke(shop: Shop, others: ExitStack) -> None:
    """Another member joins. On another thread: the failure ends what this one does, and must not end its start."""
    leave = threading.Event()

    def live() -> None:
        with shop.member().running() as app:
            leave.wait(60)
            # The client does not take leave of a KIP-848 group that it is about to join: it would be waited for.
            eventually(lambda: len(assignment_of(app).partitions) == 2, what="the other has taken over", within=40)

    other = threading.Thread(target=live)
    other.start()
    others.callback(other.join)
    others.callback(leave.set)


def make_lose(shop: Shop, others: ExitStack) -> None:
    api = "ConsumerGroupHeartbeat" if shop.protocol == "consumer" else "Heartbeat"
    shop.broker.fail_next(api, KafkaError.UNKNOWN_MEMBER_ID)


ERRORS = {
    "python": LookupError("no room"),
    # Out of a callback it would come as a KafkaError, which is no exception and which nothing catches (rule 16).
    "client": KafkaException(KafkaError(KafkaError._STATE, "no room")),
}


@pytest.mark.dense
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("callback", "provoke"), [("revoked", make_revoke), ("lost", make_lose)])
def test_an_error_when_partitions_go_ends_the_app_with_its_cause_and_loses_nothing(
    arena: Arena, group: str, protocol: str, callback: str, provoke: Callable[[Shop, ExitStack], None], kind: str
) -> None:
    shop, error = Shop(arena, group, protocol), ERRORS[kind]
    one = shop.member()

    def run() -> None:
        with ExitStack() as others, one.running():
            eventually(lambda: len(assignment_of(one).partitions) == 2, what="assigned")
            setattr(assignment_of(one), callback, raising(error))
            provoke(shop, others)
            eventually(lambda: False, what="the error ends this")

    shop.write()
    with pytest.raises(type(error), match="no room"):
        run()
    assert_all_is_handled_by_the_next(shop)


@pytest.mark.dense
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_error_when_partitions_come_ends_the_app_with_its_cause_and_nothing_flows(
    arena: Arena, group: str, protocol: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, error = Shop(arena, group, protocol), ERRORS[kind]
    shop.write()
    with monkeypatch.context() as patch:
        patch.setattr(Assignment, "assigned", raising(error))
        with pytest.raises(type(error), match="no room"):
            shop.member().catch_up()
    assert shop.seen == [], "the client did not start anything at an offset of its own"
    assert_all_is_handled_by_the_next(shop)


def assert_all_is_handled_by_the_next(shop: Shop) -> None:
    name = f"kconsume-{shop.group}"  # of the owner's thread, which says that it has ended a moment before it does
    eventually(lambda: name not in {t.name for t in threading.enumerate()}, what="the client was closed")
    assert shop.passed() == set()
    shop.write()
    with shop.member().running() as app:
        eventually(lambda: not shop.missing(), what="all handled")
        assert_app_lives(
            app, bootstrap=shop.arena.bootstrap, topic=shop.topic, group=shop.group, offsets="kafka://", partitions=2
        )


# Signals


PROGRAM = """
import threading
from kconsume import App
from kconsume.backends import MemoryStore

def say(word):
    print(f"{{word}}\\n", end="", flush=True)

def dally(*_):
    say("inside")
    threading.Event().wait({seconds})

class Store(MemoryStore):
    def claim(self, *arguments):
        if {where!r} == "claim":
            dally()
        return super().claim(*arguments)

app = App({bootstrap!r}, group={group!r}, offsets=Store(), kafka={kafka!r}, shutdown=4.0)

@app.consume({topic!r})
def handle(value: str) -> None:
    say(value)

if {where!r} != "claim":
    getattr(app, {where!r})(lambda partitions: dally())
app.run()
"""


class Program:
    """An app in a process of its own, which is held up in one place of a rebalance."""

    def __init__(self, folder: Path, arena: Arena, group: str, protocol: str, where: str, seconds: float) -> None:
        topic = arena.topic(1)
        arena.produce(topic, ["handled"], 0)
        (folder / "program.py").write_text(
            PROGRAM.format(
                where=where,
                seconds=seconds,
                bootstrap=arena.bootstrap,
                group=group,
                kafka=arena.quick(PROTOCOLS[protocol]),
                topic=topic,
            )
        )
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen([sys.executable, "program.py"], cwd=folder, stdout=out, stderr=err)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)

    def await_word(self, word: str) -> None:
        eventually(lambda: word in self._out.read_text().split() or self.process.poll() is not None, what=word)
        assert word in self._out.read_text().split(), self._err.read_text()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def ends_with(self) -> int:
        return self.process.wait(30)


@pytest.mark.parametrize("seconds", [1.0, 60.0], ids=["slow", "hangs"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("where", ["claim", "on_assigned"])
def test_a_signal_while_partitions_come_is_heard_and_the_app_leaves_by_its_deadline(
    tmp_path: Path, arena: Arena, group: str, protocol: str, where: str, seconds: float
) -> None:
    with Program(tmp_path, arena, group, protocol, where, seconds) as program:
        program.await_word("inside")
        program.terminate()
        assert program.ends_with() == 0


@pytest.mark.parametrize("seconds", [1.0, 60.0], ids=["slow", "hangs"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_signal_while_partitions_go_leaves_at_once(
    tmp_path: Path, arena: Arena, group: str, protocol: str, seconds: float
) -> None:
    with Program(tmp_path, arena, group, protocol, "on_revoked", seconds) as program:
        program.await_word("handled")
        program.terminate()
        program.await_word("inside")
        program.terminate()
        assert program.ends_with() == 128 + signal.SIGTERM, "the second one"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_listener_that_hangs_when_the_app_leaves_does_not_keep_it(
    tmp_path: Path, arena: Arena, group: str, protocol: str
) -> None:
    with Program(tmp_path, arena, group, protocol, "on_revoked", 60.0) as program:
        program.await_word("handled")
        program.terminate()
        assert program.ends_with() == 0
