"""A rolling deployment: processes of the version before and of this one share a group and its tables."""

from __future__ import annotations

import subprocess
import tarfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from tests.chaos.effects import EffectsOf
from tests.chaos.fleet import REPOSITORY, Work, Worker, fill, fleet
from tests.chaos.form import PATIENCE, TIMEOUT, form

pytestmark = pytest.mark.timeout(3 * TIMEOUT)

BEFORE = "ed4b174"
"""The last commit of the version before: its rows have no generation."""
PARTITIONS, RECORDS = 4, 400
FENCED = "fenced partition="


@pytest.fixture(scope="module")
def version_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its source, from its commit."""
    folder = tmp_path_factory.mktemp("before")
    command = ["git", "archive", BEFORE, "kconsume", "tests"]
    archive = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False)
    if archive.returncode:
        pytest.fail(
            f"commit {BEFORE}, the version before, is not in this clone ({archive.stderr.decode().strip()}): fetch the "
            f"whole history, as with git fetch --unshallow"
        )
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as source:
        source.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("store", ["postgres", "sqlite", *form(short=[], long=["redis"])])
def test_processes_of_both_versions_run_side_by_side(
    effects_of: EffectsOf, work: Work, version_before: Path, store: str
) -> None:
    """The older one on tables that it made; this one beside it, and alone; then the older one again, which starts on
    tables that this one has added to."""
    effects = effects_of(store)
    job = replace(work(effects.offsets, RECORDS, PARTITIONS, "--work=0.002"), source=version_before)
    expected = RECORDS
    with fleet(job) as workers:

        def more(*by: Worker) -> None:
            nonlocal expected
            before = [effects.by(worker.name) for worker in by]
            fill(job, RECORDS, PARTITIONS)
            expected += RECORDS
            workers.await_work(lambda: effects.distinct == expected, within=PATIENCE, what=f"{expected} are handled")
            assert all(effects.by(worker.name) > had for worker, had in zip(by, before, strict=True))

        def joined(source: Path) -> Worker:
            worker = workers.grow(source=source)
            workers.await_work(lambda: "assigned partitions=2" in worker.log, within=60, what="it has half of them")
            return worker

        def gone(worker: Worker) -> None:
            assert worker.stop() == 0, worker.log[-2000:]
            workers.members.remove(worker)

        older = workers.grow()
        workers.await_work(lambda: effects.distinct == expected, within=PATIENCE, what="the older version works")
        newer = joined(REPOSITORY)
        more(older, newer)
        gone(older)
        more(newer)
        again = joined(version_before)
        more(newer, again)
        gone(newer)
        more(again)
        assert [FENCED in worker.log for worker in (older, newer, again)] == [False] * 3
    assert effects.rows == effects.distinct, "each record has one effect"
