"""Worker processes that are killed, frozen, woken and replaced."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from kconsume import Partition
from tests.chaos.phases import Board, Phase
from tests.fix_kafka import produce
from tests.liveness import WITHIN, assert_liveness, offsets_of, published, write_one_each
from tests.waiting import eventually

REPOSITORY = Path(__file__).parents[2]

_WATCH_SECONDS = 3.0
_PATIENT_SECONDS = 45.0
"""For those who must be seen: on a busy machine a worker takes long to start, and to be given partitions."""
_LOOK_EVERY_SECONDS = 0.00005


@dataclass(frozen=True)
class Job:
    """What every worker of a fleet is told."""

    brokers: str
    topic: str
    group: str
    offsets: str
    folder: Path
    flags: tuple[str, ...] = ()
    source: Path = REPOSITORY
    """Where the workers' kconsume is."""


class Work(Protocol):
    """Makes a topic with that many records, and the job to handle them."""

    def __call__(self, offsets: str, records: int, partitions: int, *flags: str) -> Job: ...


def numbered(number: int) -> bytes:
    return b"%d" % number


def fill(job: Job, records: int, partitions: int, value: Callable[[int], bytes] = numbered) -> None:
    """Add records to the job's topic, as many in each partition, with transaction markers between them. `value`: of the
    record with this number in its partition, from 0."""
    for partition in range(partitions):
        produce(job.brokers, job.topic, map(value, range(records // partitions)), partition=partition, gaps=True)


class Worker:
    """One process. What it says is in `log`."""

    def __init__(self, job: Job, name: str) -> None:
        self.name = name
        self._log = job.folder / f"{name}.log"
        board = job.folder / f"{name}.board"
        self._causes = board.with_suffix(".causes")
        self._board = Board(board)
        told = {"brokers": job.brokers, "topic": job.topic, "group": job.group, "offsets": job.offsets}
        told |= {"name": name, "board": str(board), "out": str(job.folder / "seen.txt")}
        command = [sys.executable, "-m", "tests.chaos.worker", *(f"--{key}={value}" for key, value in told.items())]
        here = {**os.environ, "PYTHONPATH": str(job.source)}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([*command, *job.flags], stdout=log, stderr=log, cwd=job.source, env=here)

    @property
    def phase(self) -> Phase:
        return self._board.deepest

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def causes(self) -> dict[Partition, str]:
        """Why its partitions stand still, and the last line of its log that names each; of a worker of another version
        nothing is known."""
        lines = self.log.splitlines()[::-1]

        def last(partition: Partition) -> str:
            return next((line for line in lines if str(partition) in line), "no word in its log")

        return {p: f"{cause} in {self.name}: {last(p)}" for p, cause in published(self._causes).items()}

    def kill(self) -> Phase:
        """`kill -9`, and where it hit."""
        self.process.kill()
        self.process.wait(10)
        return self.phase

    def freeze(self) -> None:
        """Every thread of it is stopped when this returns."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        eventually(lambda: {_state_of(task) for task in tasks.iterdir()} == {"T"}, what="the process is stopped")

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self, within: float = 40.0) -> int:
        """SIGTERM; answers with the exit code."""
        self.process.terminate()
        return self.process.wait(within)

    def bury(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # also ends one that is frozen
            self.process.wait(10)
        self._board.close()


class Fleet:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._all: list[Worker] = []
        self.members: list[Worker] = []

    def grow(
        self, *flags: str, source: Path | None = None, brokers: str | None = None, offsets: str | None = None
    ) -> Worker:
        """Another worker; with flags of its own, of another version, if `source` says where that is, or by another way
        to its servers."""
        job = self._job
        job = replace(job, source=source or job.source, brokers=brokers or job.brokers, offsets=offsets or job.offsets)
        job = replace(job, flags=(*job.flags, *flags))
        worker = Worker(job, f"worker-{len(self._all) + 1}")
        self._all.append(worker)
        self.members.append(worker)
        return worker

    def seen_in(self, phase: Phase, within: float = _PATIENT_SECONDS) -> Worker | None:
        """The first member that is seen there, at the moment when it is; none if nobody is for so many seconds."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            for worker in self.members:
                if worker.phase is phase:
                    return worker
            time.sleep(_LOOK_EVERY_SECONDS)
        return None

    def caught_in(self, phase: Phase, within: float = _PATIENT_SECONDS) -> Worker | None:
        """The first member that is seen there, and is there still when it has been frozen: on a busy machine, one that
        is only seen has often left when a kill arrives. None if nobody is seen for so many seconds, or caught in three
        times as many."""
        deadline = time.monotonic() + 3 * within
        while time.monotonic() < deadline and (worker := self.seen_in(phase, within)) is not None:
            worker.freeze()
            if worker.phase is phase:
                return worker
            worker.wake()
        return None

    def kill(self, worker: Worker) -> Phase:
        self.members.remove(worker)
        return worker.kill()

    def check_alive(self) -> None:
        """A worker that ended by itself is a failure, and says why at the end of its log."""
        for worker in self.members:
            code = worker.process.poll()
            assert code is None, f"{worker.name} ended by itself with {code}: {worker.log[-2000:]}"

    def await_work(self, done: Callable[[], bool], *, within: float, what: str) -> None:
        def looked() -> bool:
            self.check_alive()
            return done()

        eventually(looked, within=within, what=what)

    def assert_liveness(self, partitions: int, within: float = WITHIN) -> None:
        """One more record in each partition is handled, and its offset passed."""
        assert_workers_live(self._job, self.members, partitions, within)
        self.check_alive()

    def stop(self) -> None:
        """SIGTERM, all at once; each must end well."""
        for worker in self.members:
            worker.process.terminate()
        for worker in self.members:
            assert worker.process.wait(40) == 0, worker.log[-2000:]

    def end(self) -> None:
        for worker in self._all:
            worker.bury()


def assert_workers_live(job: Job, members: Sequence[Worker], partitions: int, within: float = WITHIN) -> None:
    def causes() -> dict[Partition, str]:
        ended = [worker for worker in members if worker.process.poll() is not None]
        assert not ended, f"{ended[0].name} ended by itself: {ended[0].log[-2000:]}"
        return {partition: cause for worker in members for partition, cause in worker.causes.items()}

    with offsets_of(job.offsets, job.group, job.topic, partitions, job.brokers) as stored:
        write = partial(write_one_each, job.brokers, job.topic, partitions)
        assert_liveness(write, stored, causes, within=within)


@contextmanager
def fleet(job: Job) -> Iterator[Fleet]:
    workers = Fleet(job)
    try:
        yield workers
    finally:
        workers.end()


class Hits(Counter[Phase]):
    """Kills by where they hit."""

    @property
    def in_transaction(self) -> int:
        return self[Phase.HANDLER] + self[Phase.TRANSACTION] + self[Phase.COMMIT]

    def __str__(self) -> str:
        return " ".join(f"{phase.name.lower()}={self[phase]}" for phase in Phase)


def kill_while_working(
    workers: Fleet,
    kills: int,
    progress: Callable[[], int],
    expected: int,
    chance: random.Random,
    phases: Sequence[Phase],
    *,
    within: float,
) -> Hits:
    """Kill and replace members, spread over the work: each when a certain number of records has been handled.

    Every third at that moment, wherever it is; the others when one is next caught in a phase that chance has chosen.
    """
    hits = Hits()
    for number in range(kills):
        due = int(expected * (number + chance.random()) / (kills + 1))
        workers.await_work(partial(_reached, progress, due), within=within, what=f"{due} records before kill {number}")
        chance.shuffle(workers.members)
        victim = None if number % 3 == 2 else workers.caught_in(chance.choice(phases), _WATCH_SECONDS)
        hits[workers.kill(victim or workers.members[0])] += 1
        workers.grow()
    print(f"kills {hits}")  # noqa: T201  (shown when the test fails, and by -s)
    return hits


def kill_one_in(
    workers: Fleet,
    phase: Phase,
    progress: Callable[[], int],
    expected: int,
    chance: random.Random,
    *,
    within: float,
) -> Hits:
    """Kill and replace one member there, when a part of the work has been done."""
    due = int(expected * chance.random() / 2)
    workers.await_work(partial(_reached, progress, due), within=within, what=f"{due} records before the kill")
    victim = workers.caught_in(phase)
    assert victim is not None, f"nobody was caught in phase {phase.name}"
    hits = Hits([workers.kill(victim)])
    workers.grow()
    print(f"kills {hits}")  # noqa: T201  (as above)
    return hits


def _reached(progress: Callable[[], int], due: int) -> bool:
    return progress() >= due


def _state_of(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "T"  # a thread that has ended meanwhile
