"""Consumers frozen past their eviction, and woken: they can neither write nor be in the way (P3).

The proof needs that the zombie tries: what the store refused it is in its log, and without the fence it writes twice.
"""

from __future__ import annotations

import fcntl
import os
import re
import time

import psycopg
import pytest

from tests.chaos.effects import Effects, EffectsOf, PostgresEffects, SqliteEffects
from tests.chaos.fleet import Work, Worker, fill, fleet
from tests.chaos.form import PATIENCE, TIMEOUT, form
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(TIMEOUT)

PARTITIONS = 2
RECORDS = form(short=4_000, long=24_000)
HOT_RECORDS = form(short=1_600, long=6_000)
"""Of handlers that all update one row: one after the other."""
WAITING = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
REFUSED = re.compile(r"refused transaction .* as=(Fenced|StoreUnavailable)")
SAYS_SO = re.compile(r"fenced partition=|broke the connection|lost partitions=")


@pytest.mark.parametrize("store", ["sqlite", "postgres", "redis"])
def test_a_frozen_consumer_that_wakes_after_its_partitions_moved_writes_nothing(
    effects_of: EffectsOf, work: Work, store: str
) -> None:
    effects = effects_of(store)
    zombie = freeze_and_wake(effects, work)
    assert effects.rows == effects.distinct, "the zombie wrote"
    assert REFUSED.search(zombie), f"the zombie was never refused, so nothing was proven: {zombie}"


@pytest.mark.parametrize("store", ["sqlite", "postgres", "redis"])
def test_without_the_fence_the_same_zombie_writes_twice(effects_of: EffectsOf, work: Work, store: str) -> None:
    effects = effects_of(store)
    freeze_and_wake(effects, work, "--no-fence")
    assert effects.rows > effects.distinct


@pytest.mark.parametrize("protocol", ["classic", "kip-848"])
def test_a_consumer_frozen_inside_its_transaction_holds_up_nobody_and_goes_on_when_it_wakes(
    postgres_url: str, work: Work, protocol: str
) -> None:
    """It holds the lock on a row that every handler updates."""
    effects = PostgresEffects(postgres_url)
    flags = ("--hot-row", *(["--kip-848"] if protocol == "kip-848" else []))
    job = work(effects.offsets, HOT_RECORDS, PARTITIONS, *flags)
    with fleet(job) as workers:
        zombie = workers.grow()
        workers.await_work(lambda: effects.rows > 100, within=60, what="the first owner works")
        freeze_with_the_row_locked(zombie, effects)
        before = effects.rows
        successor = workers.grow()
        # Its start, the eviction (2 s classic, 6 s by KIP-848) and the claim, and then it works.
        eventually(lambda: effects.rows > before, within=60, what="the successor makes progress")
        eventually(lambda: effects.distinct == HOT_RECORDS, within=PATIENCE, what="the successor finishes")
        zombie.wake()
        eventually(lambda: SAYS_SO.search(zombie.log), what="the zombie says that it is one")
        its_own = effects.by(zombie.name)
        assert successor.stop() == 0
        workers.members.remove(successor)
        fill(job, 400, PARTITIONS)
        workers.await_work(
            lambda: effects.distinct == HOT_RECORDS + 400,
            within=60,
            what="the zombie goes on as a member like any other",
        )
        assert effects.by(zombie.name) == its_own + 400
        workers.assert_liveness(PARTITIONS)
        assert REFUSED.search(zombie.log), f"the zombie was never refused, so nothing was proven: {zombie.log}"
    assert effects.rows == effects.distinct == effects.counted, "each record has one effect"


@pytest.mark.parametrize(
    ("store", "protocol"),
    [("redis", "classic"), ("redis", "kip-848"), *form(short=[], long=[("sqlite", "kip-848")])],
)
def test_a_consumer_that_wakes_as_a_zombie_goes_on_as_a_member(
    effects_of: EffectsOf, work: Work, store: str, protocol: str
) -> None:
    """Not inside a transaction: what counts is that it is refused, and what it does then."""
    effects = effects_of(store)
    flags = ("--slow-to-notice", *(["--kip-848"] if protocol == "kip-848" else []))
    job = work(effects.offsets, RECORDS, PARTITIONS, *flags)
    with fleet(job) as workers:
        zombie = workers.grow()
        workers.await_work(lambda: effects.rows > 200, within=60, what="the first owner works")
        freeze_in_between(zombie, effects)
        successor = workers.grow()
        eventually(lambda: effects.distinct == RECORDS, within=PATIENCE, what="the second owner finishes")
        zombie.wake()
        eventually(lambda: SAYS_SO.search(zombie.log), what="the zombie says that it is one")
        assert successor.stop() == 0
        workers.members.remove(successor)
        its_own = effects.by(zombie.name)
        fill(job, 400, PARTITIONS)
        workers.await_work(
            lambda: effects.distinct == RECORDS + 400, within=60, what="the zombie goes on as a member like any other"
        )
        assert effects.by(zombie.name) == its_own + 400
        workers.assert_liveness(PARTITIONS)
        assert REFUSED.search(zombie.log), f"the zombie was never refused, so nothing was proven: {zombie.log}"
    assert effects.rows == effects.distinct, "each record has one effect"


def test_without_the_fence_a_consumer_frozen_inside_its_transaction_holds_up_its_successor(
    postgres_url: str, work: Work
) -> None:
    effects = PostgresEffects(postgres_url)
    with fleet(work(effects.offsets, HOT_RECORDS, PARTITIONS, "--hot-row", "--no-fence")) as workers:
        zombie = workers.grow()
        workers.await_work(lambda: effects.rows > 100, within=60, what="the first owner works")
        freeze_with_the_row_locked(zombie, effects)
        before, waiting = effects.rows, effects.ask(WAITING)
        successor = workers.grow()
        eventually(lambda: "assigned partitions=2" in successor.log, what="the successor has its partitions")
        eventually(lambda: effects.ask(WAITING) == waiting + PARTITIONS, what="its handlers wait for the row")
        assert effects.rows == before


def freeze_and_wake(effects: Effects, work: Work, *flags: str) -> str:
    """Freeze the only owner, let another take over and finish, wake it, and let both go on; the zombie's log."""
    job = work(effects.offsets, RECORDS, PARTITIONS, "--slow-to-notice", *flags)
    with fleet(job) as workers:
        zombie = workers.grow()
        workers.await_work(lambda: effects.rows > 200, within=60, what="the first owner works")
        freeze_in_between(zombie, effects)
        workers.grow()
        eventually(lambda: effects.distinct == RECORDS, within=PATIENCE, what="the second owner finishes")
        zombie.wake()
        fill(job, 400, PARTITIONS)
        workers.await_work(
            lambda: effects.distinct == RECORDS + 400, within=60, what="both go on, and the new records are handled"
        )
        eventually(lambda: "lost partitions" in zombie.log, what="the zombie has learnt that it is one")
        workers.assert_liveness(PARTITIONS)
        return zombie.log


def freeze_in_between(zombie: Worker, effects: Effects) -> None:
    """SQLite has one writer: a process frozen inside its transaction would hold everybody, and nobody can evict it.
    So we go through the turnstile first and freeze the process while it waits behind us."""
    if not isinstance(effects, SqliteEffects):
        return zombie.freeze()
    turnstile = os.open(f"{effects.path}-turnstile", os.O_RDWR)
    try:
        fcntl.flock(turnstile, fcntl.LOCK_EX)
        # Every thread of it: one that has not noticed yet would take the turnstile with it into the freeze.
        zombie.freeze()
    finally:
        os.close(turnstile)
    return None


def freeze_with_the_row_locked(zombie: Worker, effects: PostgresEffects) -> None:
    """Again and again until it is so, also after what was on its way to the server has been done."""
    for _ in range(200):
        zombie.freeze()
        eventually(lambda: not _busy(effects), what="the server has done what was asked of it")
        if _is_locked(effects):
            return
        zombie.wake()
        time.sleep(0.005)  # the fault's own timing
    raise AssertionError("the worker was never caught with the row locked")


def _busy(effects: PostgresEffects) -> int:
    """Not those that wait for a lock; nor, for a pipeline counts as active until its end, for the client."""
    return effects.ask(
        "select count(*) from pg_stat_activity where application_name = 'kconsume' and state = 'active' "
        "and datname = current_database() and coalesce(wait_event_type, '') not in ('Lock', 'Client')"
    )


def _is_locked(effects: PostgresEffects) -> bool:
    with psycopg.connect(effects.looked_at, autocommit=True) as connection:
        try:
            connection.execute("select n from counter where id = 1 for update nowait")
        except psycopg.errors.LockNotAvailable:
            return True
    return False
