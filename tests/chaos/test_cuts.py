"""Asymmetric cuts: a member that reaches Kafka and not its store, one that reaches its store and not Kafka, and answers
that come after the partitions were lost and assigned anew (P1, P2, P3, P9, P12).

The broker has a second listener, behind a wire: who begins there meets the wire wherever it goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from kconsume import App, Partition, Record
from kconsume._runtime.assignment.owned_partitions import OwnedPartitions
from kconsume.testing.services import LocalKafka
from kconsume.testing.services.ports import free_port
from tests.chaos.effects import PostgresEffects
from tests.chaos.fleet import Fleet, Job, Worker, fill, fleet
from tests.chaos.form import PATIENCE, TIMEOUT, form
from tests.chaos.log import offsets_in, read_log
from tests.chaos.phases import Phase
from tests.chaos.test_zombie import REFUSED
from tests.chaos.wire import Wire
from tests.fix_arena import QUICK
from tests.fix_kafka import create_topic, produce, unique
from tests.liveness import assert_app_lives
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(TIMEOUT)

PARTITIONS = 4
RECORDS = form(short=800, long=8_000)
"""Before each cut, and again while it lasts: so that there is work however long a busy machine takes to cut."""
SLOW = "--work=0.004"
WORK_OF_ONE_CUT_OFF = form(short=0.1, long=0.01)
"""Seconds a record: what it has fetched lasts longer than its session, and than the claim of the other."""
LOOKS = 20
"""At a member whose answers are held: if nothing has changed over so many, it waits."""
MORE = form(short=80, long=8_000)
"""When it is back."""
ASSIGNED = "assigned partitions="
NO_ENCRYPTION = "sslmode=disable&gssencmode=disable"


@dataclass(frozen=True)
class Brokers:
    """One broker and two ways to it."""

    direct: str
    wired: str
    wire: Wire


@pytest.fixture(scope="module")
def one_broker() -> Iterator[Brokers]:
    broker, inside = LocalKafka(), free_port()
    with Wire(inside) as wire:
        broker._overrides |= {
            "listeners": f"CLIENT://{broker.address},WIRED://127.0.0.1:{inside},"
            f"CONTROLLER://127.0.0.1:{broker._controller_port}",
            "advertised.listeners": f"CLIENT://{broker.address},WIRED://127.0.0.1:{wire.port}",
            "listener.security.protocol.map": "CLIENT:PLAINTEXT,WIRED:PLAINTEXT,CONTROLLER:PLAINTEXT",
        }
        with broker:
            yield Brokers(broker.bootstrap, f"127.0.0.1:{wire.port}", wire)


@pytest.fixture
def brokers(one_broker: Brokers) -> Iterator[Brokers]:
    yield one_broker
    one_broker.wire.mend()


@pytest.fixture
def database_wire(postgres_url: str) -> Iterator[Wire]:
    port = psycopg.conninfo.conninfo_to_dict(postgres_url)["port"]
    with Wire(int(str(port))) as wire:
        yield wire


def made(brokers: Brokers, partitions: int = PARTITIONS) -> str:
    name = unique("topic")
    create_topic(AdminClient({"bootstrap.servers": brokers.direct, "log_level": 0}), name, partitions)
    return name


@pytest.fixture
def effects(postgres_url: str) -> PostgresEffects:
    return PostgresEffects(postgres_url)


@pytest.fixture
def job(brokers: Brokers, effects: PostgresEffects, tmp_path: Path) -> Job:
    return Job(brokers.direct, made(brokers), unique("group"), effects.offsets, tmp_path, (SLOW,))


def let_both_work(job: Job, workers: Fleet, effects: PostgresEffects, *members: Worker) -> None:
    """They share the partitions before there is anything to do, or a busy machine's first would do it all."""
    half = PARTITIONS // 2
    workers.await_work(
        lambda: all(len(worker.causes) == half for worker in members), within=PATIENCE, what="they share"
    )
    fill(job, RECORDS, PARTITIONS)
    workers.await_work(lambda: all(effects.by(worker.name) for worker in members), within=PATIENCE, what="both work")


def check(job: Job, workers: Fleet, effects: PostgresEffects, records: int) -> None:
    workers.await_work(lambda: effects.distinct >= records, within=PATIENCE, what="every record has its effect")
    workers.assert_liveness(PARTITIONS)
    assert (effects.rows, effects.distinct) == (records + PARTITIONS,) * 2, "rows = distinct = produced"
    log = read_log(job.brokers, job.topic, PARTITIONS, records // PARTITIONS + 1)
    for partition in range(PARTITIONS):
        assert effects.positions(partition) == offsets_in(log, partition), "in order"


@pytest.mark.parametrize("way", ["cut", "silence"])
def test_a_member_that_reaches_kafka_and_not_its_store_stands_still_with_a_cause_and_goes_on_when_it_is_back(
    job: Job, effects: PostgresEffects, database_wire: Wire, way: str
) -> None:
    """It stays a member, so its partitions stay its own; those of the other go on."""
    cut_from_its_store_and_mend(job, effects, database_wire, way, "claim_waiting")


def cut_from_its_store_and_mend(job: Job, effects: PostgresEffects, wire: Wire, way: str, cause: str) -> None:
    """`cause`: why it stands still, where it notices the cut."""
    with fleet(job) as workers:
        cut_off = workers.grow(offsets=f"{wire.by_it(effects.offsets)}?{NO_ENCRYPTION}")
        other = workers.grow()
        let_both_work(job, workers, effects, cut_off, other)
        batches = hold_the_answer_to_a_commit(job, wire, workers, cut_off, effects) if way == "cut" else 0
        getattr(wire, way)()
        fill(job, RECORDS, PARTITIONS)
        records = (2 + batches) * RECORDS
        each = records // PARTITIONS
        workers.await_work(
            lambda: all(len(effects.positions(p.number)) == each for p in other.causes),
            within=PATIENCE,
            what="the other does all of its own",
        )
        assert effects.distinct < records, "the one that is cut off does not"
        if way == "cut":
            eventually(lambda: cause in str(cut_off.causes), what="the cause is known")
        wire.mend()
        check(job, workers, effects, records)
        assert "partitions lost" not in cut_off.log, "it was a member all the time"
        if way == "cut":
            assert REFUSED.search(cut_off.log), f"no transaction was under way, so nothing was proven: {cut_off.log}"


def hold_the_answer_to_a_commit(job: Job, wire: Wire, workers: Fleet, cut_off: Worker, effects: PostgresEffects) -> int:
    """What a cut then leaves behind was committed, and the member does not know it. Returns how often records were
    written for that: on a starved machine the member may have done them all before its answers are held."""
    for batches in itertools.count(1):
        fill(job, RECORDS, PARTITIONS)
        wire.hold_answers()
        looks: list[tuple[Phase, int]] = []

        def stands_still() -> bool:
            looks.append((cut_off.phase, effects.by(cut_off.name)))  # noqa: B023  (called in this round only)
            return len(looks) > LOOKS and len(set(looks[-LOOKS:])) == 1  # noqa: B023

        workers.await_work(stands_still, within=PATIENCE, what="it waits for an answer, or has nothing to do")
        if looks[-1][0] is Phase.COMMIT:
            return batches
        wire.mend()
    raise AssertionError("unreachable")


def test_control_a_member_that_runs_again_what_it_had_under_way_at_the_cut_repeats_it(
    job: Job, effects: PostgresEffects, database_wire: Wire
) -> None:
    """Without the fence, that is: with it, the offset in the same transaction would tell."""
    unguarded = replace(job, flags=(*job.flags, "--no-fence", "--retry-unknown"))
    with pytest.raises(AssertionError, match="rows = distinct = produced"):
        cut_from_its_store_and_mend(unguarded, effects, database_wire, "cut", "handler_running")
    assert effects.rows > effects.distinct


@pytest.mark.parametrize(
    ("way", "protocol"),
    [("silence", "classic"), ("cut", "kip-848"), *form(short=[], long=[("cut", "classic"), ("silence", "kip-848")])],
)
def test_a_member_that_reaches_its_store_and_not_kafka_is_replaced_and_comes_back(
    brokers: Brokers, job: Job, effects: PostgresEffects, way: str, protocol: str
) -> None:
    """It goes on with what it has fetched, until another has claimed its partitions. It learns of that by the store."""
    if protocol == "kip-848":
        job = replace(job, flags=(*job.flags, "--kip-848"))
    told = job.folder / "told"
    with fleet(job) as workers:
        cut_off = workers.grow(f"--work={WORK_OF_ONE_CUT_OFF}", f"--notice-when={told}", brokers=brokers.wired)
        other = workers.grow()
        let_both_work(job, workers, effects, cut_off, other)
        getattr(brokers.wire, way)()
        fill(job, RECORDS, PARTITIONS)
        workers.await_work(lambda: effects.distinct >= 2 * RECORDS, within=PATIENCE, what="the other does the rest")
        claims, before = cut_off.log.count(ASSIGNED), effects.by(cut_off.name)
        told.touch()
        brokers.wire.mend()
        workers.await_work(lambda: cut_off.log.count(ASSIGNED) > claims, within=PATIENCE, what="the one is back")
        fill(job, MORE, PARTITIONS)
        check(job, workers, effects, 2 * RECORDS + MORE)
        assert effects.by(cut_off.name) > before
        assert REFUSED.search(cut_off.log), f"it was never refused, so nothing was proven: {cut_off.log}"


def test_control_without_the_fence_a_member_that_does_not_reach_kafka_writes_what_another_has_written(
    brokers: Brokers, job: Job, effects: PostgresEffects
) -> None:
    with pytest.raises(AssertionError, match="rows = distinct = produced"):
        test_a_member_that_reaches_its_store_and_not_kafka_is_replaced_and_comes_back(
            brokers, replace(job, flags=(*job.flags, "--no-fence")), effects, "silence", "classic"
        )
    assert effects.rows > effects.distinct


EACH = 300


@pytest.mark.parametrize("form", ["inside", "beside"])
def test_answers_that_come_after_the_partitions_were_lost_and_assigned_anew_change_nothing(
    brokers: Brokers, effects: PostgresEffects, database_wire: Wire, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    """Of transactions, where the handler works inside one: it is done, and its answer comes late. Else of a save that
    comes late as a whole, and is refused, because the epoch was raised meanwhile."""
    topic, group, seen = made(brokers, 2), unique("group"), list[tuple[int, int]]()
    app = App(
        brokers.wired, group=group, offsets=f"{database_wire.by_it(effects.offsets)}?{NO_ENCRYPTION}", kafka=QUICK
    )

    def inside(record: Record, tx: psycopg.Connection) -> None:
        tx.execute("insert into seen values (%s, %s, 'me')", (record.partition, record.offset))

    def beside(record: Record) -> None:
        seen.append((record.partition, record.offset))

    def more() -> None:
        for partition in range(2):
            produce(brokers.direct, topic, [b"x"] * EACH, partition=partition, gaps=True)

    def handled() -> int:
        return effects.distinct if form == "inside" else len(set(seen))

    app.consume(topic, chunk=20)(inside if form == "inside" else beside)
    with app.running():
        more()
        eventually(lambda: handled() == 2 * EACH, what="it works")
        if form == "inside":
            database_wire.hold_answers()
            more()
        else:
            database_wire.silence()
            more()
            eventually(lambda: handled() == 4 * EACH, what="they are handled")
            eventually(lambda: saves_wait(app), what="and their offsets on the way")
        brokers.wire.silence()
        eventually(lambda: not owned(app), what="the partitions are lost")
        brokers.wire.mend()
        eventually(lambda: owned(app) == {Partition(topic, 0), Partition(topic, 1)}, what="they are assigned anew")
        if form == "beside":
            effects.do("update kconsume_offsets set epoch = epoch + 1")
        database_wire.mend()
        eventually(lambda: handled() == 4 * EACH, what="all are handled")
        assert_app_lives(app, bootstrap=brokers.direct, topic=topic, group=group, offsets=effects.offsets, partitions=2)
    assert "fenced partition=" not in caplog.text, "a late answer was taken for one to the new assignment"
    log = read_log(brokers.direct, topic, 2, 2 * EACH + 1)
    if form == "inside":
        assert (effects.rows, effects.distinct) == (4 * EACH + 2,) * 2, "each has one effect"
        for partition in range(2):
            assert effects.positions(partition) == offsets_in(log, partition), "in order"
    else:
        assert set(seen) == set(log)


def test_control_without_the_token_of_an_answer_the_new_assignment_is_fenced(
    brokers: Brokers,
    effects: PostgresEffects,
    database_wire: Wire,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OwnedPartitions, "current", lambda self, partition, _: self.get(partition))
    # The answers of claims that have ended count too: whichever comes first.
    with pytest.raises((AssertionError, KeyError)):
        test_answers_that_come_after_the_partitions_were_lost_and_assigned_anew_change_nothing(
            brokers, effects, database_wire, caplog, "beside"
        )


def saves_wait(app: App) -> bool:
    supervisor = app._supervisor
    assert supervisor is not None
    return all(consumer.assignment.commits._committer.busy for consumer in supervisor.consumers)


def owned(app: App) -> set[Partition]:
    supervisor = app._supervisor
    assert supervisor is not None
    return {partition for consumer in supervisor.consumers for partition in consumer.loop.snapshot.assigned}
