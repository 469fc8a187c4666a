"""A claim that comes late: its process was frozen before it, and another member has been given the partitions since.

The rightful owner must not be fenced. The late claim carries the generation of its own assignment, which the row shows
to be over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.effects import PostgresEffects
from tests.chaos.fleet import Job, Work, Worker, assert_workers_live
from tests.chaos.form import PATIENCE, TIMEOUT
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(TIMEOUT)

PARTITIONS, RECORDS = 2, 1_200
FENCED = "fenced partition="
PROTOCOL_FLAGS = {"cooperative": (), "eager": ("--eager",), "consumer": ("--kip-848",)}


@pytest.mark.parametrize("protocol", PROTOCOL_FLAGS)
def test_a_claim_that_comes_late_does_not_fence_the_rightful_owner(
    postgres_url: str, work: Work, tmp_path: Path, protocol: str
) -> None:
    effects = PostgresEffects(postgres_url)
    job = work(effects.offsets, RECORDS, PARTITIONS, "--work=0.002", *PROTOCOL_FLAGS[protocol])
    with claim_late(job, effects, tmp_path / "gate") as (late, rightful):
        assert f"through the gate refused={PARTITIONS}" in late.log, "it did not come late, so nothing was proven"
        eventually(lambda: effects.distinct == RECORDS, within=PATIENCE, what="all records are handled")
        assert_workers_live(job, [late, rightful], PARTITIONS)
        assert FENCED not in rightful.log
        assert [each.process.poll() for each in (late, rightful)] == [None, None]
    assert effects.rows == effects.distinct


def test_control_without_the_order_of_claims_it_does(postgres_url: str, work: Work, tmp_path: Path) -> None:
    effects = PostgresEffects(postgres_url)
    job = work(effects.offsets, RECORDS, PARTITIONS, "--work=0.002", "--no-order")
    with claim_late(job, effects, tmp_path / "gate") as (_, rightful):
        eventually(lambda: FENCED in rightful.log, what="the rightful owner is fenced")
        eventually(lambda: effects.distinct == RECORDS, within=PATIENCE, what="all records are handled")
    assert effects.rows == effects.distinct, "which costs time, and no record"


@contextmanager
def claim_late(job: Job, effects: PostgresEffects, gate: Path) -> Iterator[tuple[Worker, Worker]]:
    """One process is frozen between its assignment and its claim; another takes over and works; the first goes on with
    its claim when it wakes, before it learns that it has lost its partitions."""
    late = Worker(replace(job, flags=(*job.flags, f"--gate={gate}", "--slow-to-notice")), "late")
    rightful = None
    try:
        eventually(lambda: "at the gate" in late.log, within=60, what="the first is about to claim")
        late.freeze()
        rightful = Worker(job, "rightful")
        eventually(lambda: effects.rows > 50, within=60, what="the second has taken over, and works")
        gate.touch()
        late.wake()
        eventually(lambda: "through the gate" in late.log, what="the first has claimed")
        yield late, rightful
    finally:
        for worker in (late, rightful):
            if worker is not None:
                worker.bury()
