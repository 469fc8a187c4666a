"""Processes killed at any moment, on the real broker and real stores: rows = distinct = produced (P1, P2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kconsume.testing.services import LocalPgBouncer
from tests.chaos.effects import Effects, EffectsOf, FileEffects, PostgresEffects
from tests.chaos.fleet import Hits, Job, Work, fleet, kill_while_working
from tests.chaos.form import PATIENCE, TIMEOUT, form, printed_seed
from tests.chaos.phases import Phase

pytestmark = pytest.mark.timeout(TIMEOUT)

PROCESSES = form(short=2, long=3)
PARTITIONS = form(short=6, long=12)
RECORDS = form(short=9_000, long=100_008)
KILLS = form(short=6, long=40)
INSIDE = (Phase.HANDLER, Phase.TRANSACTION, Phase.COMMIT, Phase.COMMIT)
IN_TRANSACTION = form(short=2, long=20)
WINDOW = 100


@pytest.mark.parametrize("store", ["sqlite", "postgres", "redis"])
def test_killed_consumers_lose_nothing_and_repeat_nothing(effects_of: EffectsOf, work: Work, store: str) -> None:
    effects = effects_of(store)
    hits = kill_and_finish(work(effects.offsets, RECORDS, PARTITIONS), effects)
    assert hits.in_transaction >= IN_TRANSACTION, f"too few kills inside a transaction: {hits}"


def test_killed_consumers_behind_pgbouncer_lose_nothing_and_repeat_nothing(postgres_url: str, work: Work) -> None:
    with LocalPgBouncer(postgres_url) as bouncer:
        effects = PostgresEffects(postgres_url, bouncer.url)
        hits = kill_and_finish(work(effects.offsets, RECORDS, PARTITIONS), effects)
    assert hits.in_transaction >= IN_TRANSACTION, f"too few kills inside a transaction: {hits}"


def test_control_effects_outside_the_offsets_transaction_are_there_twice_after_a_kill(
    effects_of: EffectsOf, work: Work
) -> None:
    """The same kills, and the same look at what is there."""
    effects, few = effects_of("postgres"), 400 * PARTITIONS
    job = work(effects.offsets, few, PARTITIONS, "--effects-apart")
    with pytest.raises(AssertionError, match="rows = distinct = produced"):
        kill_and_finish(job, effects, 2, records=few, phases=(Phase.HANDLER, Phase.TRANSACTION))
    assert effects.rows > effects.distinct == few + PARTITIONS


def test_killed_consumers_lose_nothing_with_kafka_offsets_and_repeat_a_window_at_most(
    work: Work, tmp_path: Path
) -> None:
    """Without the clock, which commits sooner where handlers are slow; so one more record is not committed. They
    stop two windows ahead of what is committed, so that what comes again does not depend on how long a commit takes."""
    effects, kills = FileEffects(tmp_path / "seen.txt"), form(short=3, long=20)
    job = work(effects.offsets, RECORDS, PARTITIONS, "--window", str(WINDOW), "--chunk", "10")
    hits = kill_and_finish(job, effects, kills, phases=(Phase.HANDLER,), exactly=False, lives=False)
    assert hits[Phase.HANDLER] > 0
    assert 0 < max(effects.repeats) <= 2 * WINDOW + 1


def test_control_without_the_window_nothing_is_committed_before_the_clock(work: Work, tmp_path: Path) -> None:
    effects = FileEffects(tmp_path / "seen.txt")
    job = work(effects.offsets, RECORDS, PARTITIONS, "--window", str(WINDOW), "--chunk", "10", "--no-window")
    with pytest.raises(AssertionError, match=r"ended by itself with 1(?s:.*)a commit, with a window finished"):
        kill_and_finish(job, effects, 0, exactly=False, lives=False)


def kill_and_finish(
    job: Job,
    effects: Effects,
    kills: int = KILLS,
    *,
    records: int = RECORDS,
    phases: Sequence[Phase] = INSIDE,
    exactly: bool = True,
    lives: bool = True,
) -> Hits:
    chance = printed_seed()
    with fleet(job) as workers:
        for _ in range(PROCESSES):
            workers.grow()
        hits = kill_while_working(workers, kills, lambda: effects.rows, records, chance, phases, within=PATIENCE)
        workers.await_work(
            lambda: effects.rows >= records and effects.distinct == records,
            within=PATIENCE,
            what="every record has its effect",
        )
        if lives:
            workers.assert_liveness(PARTITIONS)
    if exactly:
        assert (effects.rows, effects.distinct) == (records + PARTITIONS,) * 2, "rows = distinct = produced"
    return hits
