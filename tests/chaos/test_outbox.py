"""What consumers send by the outbox, while they are killed, frozen, and cut off from their broker.

Every record is sent on. What is in the target is then, by its origin, all of them and nothing else, each key in the
order in which it first appears. Some may be there twice, where somebody was killed or frozen between a confirmation and
its deletion; an app that reads the target with `repeats="drop"` has each exactly once.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any, cast

import psycopg
import pytest
from confluent_kafka import Message
from confluent_kafka.admin import AdminClient

from kconsume import App, Outgoing, Record
from kconsume.records import Headers
from kconsume.testing.services import LocalKafka
from tests.chaos.effects import EffectsOf, PostgresEffects, SqliteEffects
from tests.chaos.fleet import Fleet, Job, Work, Worker, fill, fleet, kill_one_in, kill_while_working
from tests.chaos.form import PATIENCE, TIMEOUT, form, printed_seed
from tests.chaos.log import offsets_in, read_log
from tests.chaos.phases import Phase
from tests.chaos.test_zombie import REFUSED, freeze_in_between
from tests.contract.test_output import everything
from tests.fix_arena import STEADY
from tests.fix_kafka import MakeTopic, create_topic, produce, unique
from tests.liveness import assert_app_lives
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(TIMEOUT)

PARTITIONS = form(short=4, long=12)
RECORDS = form(short=4_000, long=120_000)
ALL = RECORDS + PARTITIONS
"""With one more in each partition, which shows that it goes on."""
MORE = 100 * PARTITIONS
"""That come when the zombie has woken."""
KILLS = form(short=2, long=30)
PHASES = (Phase.HANDLER, Phase.COMMIT, Phase.RELAY)
"""Of the kills but the first, which is in the relay."""
STORES = ["sqlite", "postgres"]

Effects = SqliteEffects | PostgresEffects


@pytest.mark.parametrize("store", STORES)
def test_killed_consumers_send_all_of_it_in_order_and_who_drops_repeats_has_each_once(
    effects_of: EffectsOf, work: Work, topic: MakeTopic, store: str
) -> None:
    effects, target = cast(Effects, effects_of(store)), topic(2)
    job = work(effects.offsets, RECORDS, PARTITIONS, f"--to={target}")
    with fleet(job) as workers:
        kill_and_finish(job, effects, workers)
    sent = everything(job.brokers, target)
    print(f"sent={len(sent)} repeated={len(sent) - ALL}")  # noqa: T201  (shown when the test fails, and by -s)
    check_all_are_there(sent, job, ALL)
    check_each_is_taken_once(job.brokers, target, effects, ALL)


def test_with_rows_deleted_before_they_are_confirmed_a_kill_loses_some(
    effects_of: EffectsOf, work: Work, topic: MakeTopic
) -> None:
    """The control: the same kills, and the same look at what is there."""
    effects, target = cast(Effects, effects_of("sqlite")), topic(2)
    job = work(effects.offsets, RECORDS, PARTITIONS, f"--to={target}", "--delete-first")
    with fleet(job) as workers:
        kill_and_finish(job, effects, workers, kills=1)
    with pytest.raises(AssertionError, match="nothing is missing"):
        check_all_are_there(everything(job.brokers, target), job, ALL)


@pytest.mark.parametrize("store", form(short=["postgres"], long=STORES))
def test_a_frozen_consumer_that_wakes_after_its_partitions_moved_puts_nothing_out_of_order(
    effects_of: EffectsOf, work: Work, topic: MakeTopic, store: str
) -> None:
    effects, target = cast(Effects, effects_of(store)), topic(2)
    job = work(effects.offsets, RECORDS, PARTITIONS, f"--to={target}", "--slow-to-notice")
    with fleet(job) as workers:
        zombie = workers.grow()
        workers.await_work(lambda: effects.rows > RECORDS // 8, within=PATIENCE, what="the first owner works")
        freeze_in_the_relay(workers, zombie, effects)
        successor = workers.grow()
        try:
            workers.await_work(lambda: effects.distinct == RECORDS, within=PATIENCE, what="the second owner finishes")
        except AssertionError:
            print(zombie.log, successor.log)  # noqa: T201  (shown when the test fails)
            raise
        zombie.wake()
        fill(job, MORE, PARTITIONS)
        workers.await_work(
            lambda: effects.distinct == RECORDS + MORE and waiting(effects) == 0,
            within=PATIENCE,
            what="both go on, and all is sent",
        )
        eventually(lambda: "lost partitions" in zombie.log, what="the zombie has learnt that it is one")
        assert_all_lives(workers, effects)
        assert REFUSED.search(zombie.log), f"the zombie was never refused, so nothing was proven: {zombie.log}"
    sent = everything(job.brokers, target)
    print(f"sent={len(sent)} repeated={len(sent) - ALL - MORE}")  # noqa: T201
    assert effects.rows == effects.distinct, "the zombie wrote"
    assert len(sent) > ALL + MORE, "what the zombie had sent and not deleted is sent again"
    check_all_are_there(sent, job, ALL + MORE)
    check_each_is_taken_once(job.brokers, target, effects, ALL + MORE)


def freeze_in_the_relay(workers: Fleet, zombie: Worker, effects: Effects) -> None:
    """Again and again until it is there: what it has sent is confirmed, and not deleted."""
    for _ in range(100):
        assert workers.seen_in(Phase.RELAY) is zombie, f"it is never seen in the relay: {zombie.log[-2000:]}"
        freeze_in_between(zombie, effects)
        if zombie.phase is Phase.RELAY:
            return
        zombie.wake()
    raise AssertionError("the worker was never caught in the relay")


@pytest.mark.parametrize("fault", form(short=["kill"], long=["kill", "stop", "freeze"]))
def test_a_broker_that_goes_while_the_outbox_fills_leaves_no_gap(effects_of: EffectsOf, fault: str) -> None:
    """Its producer never gives up, so what it sent before the outage is not sent again after it."""
    effects, group, source, target = effects_of("sqlite"), unique("group"), unique("source"), unique("target")
    assert isinstance(effects, SqliteEffects)
    with LocalKafka() as kafka:
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
        for name in (source, target):
            create_topic(admin, name, 1)
        produce(kafka.bootstrap, source, (str(n) for n in range(6_000)), partition=0, gaps=True)
        app = App(kafka.bootstrap, group=group, offsets=effects.offsets, kafka=STEADY)
        gate, most = threading.Event(), list[int]()

        @app.consume(source, to=target, chunk=20)
        def handle(value: str, record: Record, tx: sqlite3.Connection) -> Outgoing:
            if value == "1000":
                gate.wait(60)
            tx.execute("insert into seen values (0, ?, 'me')", (record.offset,))
            return Outgoing(value, key="k")

        with app.running():
            eventually(lambda: effects.rows >= 900, what="it works")
            {"kill": kafka.kill, "stop": kafka.stop, "freeze": kafka.freeze}[fault]()
            gate.set()
            eventually(lambda: waiting(effects) > 200, what="the outbox fills")
            most.append(waiting(effects))
            kafka.thaw() if fault == "freeze" else kafka.restart()
            eventually(lambda: effects.rows == 6_000, within=PATIENCE, what="all is handled")
            eventually(lambda: waiting(effects) == 0, within=PATIENCE, what="all is sent")
            assert_app_lives(
                app, bootstrap=kafka.bootstrap, topic=source, group=group, offsets=effects.offsets, partitions=1,
                value="6000",
            )  # fmt: skip
            eventually(lambda: waiting(effects) == 0, within=PATIENCE, what="the last is sent too")
        sent = [(message.value() or b"").decode() for message in everything(kafka.bootstrap, target)]
    print(f"waiting={most} repeated={len(sent) - 6_001}")  # noqa: T201
    assert list(dict.fromkeys(sent)) == [str(n) for n in range(6_001)], "no gap, and in order"
    assert len(sent) == 6_001, "each once"


def kill_and_finish(job: Job, effects: Effects, workers: Fleet, *, kills: int = KILLS) -> None:
    for _ in range(2):
        workers.grow()
    chance = printed_seed()
    kill_one_in(workers, Phase.RELAY, lambda: effects.rows, RECORDS // 4, chance, within=PATIENCE)
    kill_while_working(workers, kills - 1, lambda: effects.rows, RECORDS, chance, PHASES, within=PATIENCE)
    workers.await_work(
        lambda: effects.rows == RECORDS and waiting(effects) == 0, within=PATIENCE, what="all is handled, and sent"
    )
    assert_all_lives(workers, effects)
    workers.stop()


def assert_all_lives(workers: Fleet, effects: Effects) -> None:
    """Each partition goes on, and so does its outbox."""
    workers.assert_liveness(PARTITIONS)
    workers.await_work(lambda: waiting(effects) == 0, within=PATIENCE, what="and the outbox is sent")


def waiting(effects: Effects) -> int:
    """Rows in the outbox."""
    return effects.ask("select count(*) from kconsume_outbox")


def check_all_are_there(sent: list[Message], job: Job, records: int) -> None:
    log = read_log(job.brokers, job.topic, PARTITIONS, records // PARTITIONS)
    expected = {f"{partition}:{position}" for partition, position in log}
    by_origin: dict[str, str] = {}
    for message in sent:
        value = (message.value() or b"").decode()
        assert by_origin.setdefault(origin_of(message), value) == value, "an origin is that of one record"
    missing = expected - set(by_origin.values())
    assert not missing, f"nothing is missing: {sorted(missing)[:10]} and {len(missing)} in all"
    assert len(by_origin) == records, "and nothing is there under two origins"
    for partition in range(PARTITIONS):
        own = [(m.value() or b"").decode() for m in sent if m.key() == str(partition).encode()]
        assert list(dict.fromkeys(own)) == [f"{partition}:{n}" for n in offsets_in(log, partition)], "in order"


def origin_of(message: Message) -> str:
    (origin,) = [value for name, value in cast(Headers, message.headers()) if name == "kconsume-origin"]
    return origin.decode()


def check_each_is_taken_once(brokers: str, target: str, effects: Effects, records: int) -> None:
    """By an app that reads what was sent, and drops repeats, into a table of its own."""
    look = looker(effects)
    look("create table taken (value text)")
    app = App(brokers, group=unique("taker"), offsets=effects.offsets, kafka=STEADY)

    def take(value: str, tx: sqlite3.Connection) -> None:
        tx.execute("insert into taken values (?)", (value,))

    def take_in_postgres(value: str, tx: psycopg.Connection) -> None:
        tx.execute("insert into taken values (%s)", (value,))

    app.consume(target, repeats="drop")(take if isinstance(effects, SqliteEffects) else take_in_postgres)
    app.catch_up(idle=0.5)
    assert look("select count(*), count(distinct value) from taken") == [(records, records)], "each exactly once"


def looker(effects: Effects) -> Callable[[str], list[tuple[Any, ...]]]:
    def in_sqlite(query: str) -> list[tuple[Any, ...]]:
        assert isinstance(effects, SqliteEffects)
        with closing(sqlite3.connect(effects.path, timeout=30, isolation_level=None)) as connection:
            return connection.execute(query).fetchall()

    def in_postgres(query: str) -> list[tuple[Any, ...]]:
        assert isinstance(effects, PostgresEffects)
        with psycopg.connect(effects.looked_at, autocommit=True) as connection:
            answer = connection.execute(query)
            return answer.fetchall() if answer.description else []

    return in_sqlite if isinstance(effects, SqliteEffects) else in_postgres
