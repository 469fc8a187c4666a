"""Order and concurrency: which worker runs what, and when.

A *lane* is records that must be handled one after the other: here, those of one partition. A lane is run by at
most one worker at a time, and by any worker; chunks, not records, cross threads. What happens in a chunk is
`work.py`'s business, what its outcome means is the loop's.

The owner thread opens, fills and closes lanes; workers only run them and report.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from kconsume.failures.passed_over import Tally
from kconsume.records import Message, Partition
from kconsume.runtime.budget import Pace
from kconsume.runtime.ownership import Ownership

if TYPE_CHECKING:
    from kconsume.runtime.gathering import Gathering
    from kconsume.runtime.under_way import UnderWay


class Chunk(NamedTuple):
    """Records of one lane that were fetched together, ascending by offset."""

    messages: list[Message]
    first: int
    last: int
    end: int | None = None
    """Of a chunk without records: where the log ends, for a lane that moves its own offset."""


class Progress(NamedTuple):
    """Of the chunk that begins at `first`, everything below `upto` is finished."""

    lane: Lane
    first: int
    upto: int
    handled: int
    skipped: int = 0
    leader_epoch: int | None = None
    stored: bool = False
    """Whether the store has it already, because it was committed with the work."""
    part: Sequence[Message] = ()
    """The records, so that they are freed where they were made: on the thread that takes this."""
    held: bool = False
    """Whether it has waited for letters; its records were `Worked` off before."""


class Worked(NamedTuple):
    """Records of the lane are done, and not passed yet: letters before them are under way."""

    lane: Lane
    records: int


class Ended(NamedTuple):
    """The lane has moved its row to the end of the log: behind its last record there was nothing more to handle."""

    lane: Lane
    offset: int


class Failure(NamedTuple):
    """A record failed for good and its offset was not passed; the lane has stopped before it."""

    lane: Lane
    handler: str
    message: Message
    error: BaseException
    holds: bool = False
    """Whether only its partition stops."""


class Crashed(NamedTuple):
    """The framework itself failed in a worker. Nothing of the chunk is known to be finished."""

    lane: Lane
    error: BaseException


class Ejected(NamedTuple):
    """The store did not take the lane's work (fenced, away, or an unknown outcome); the lane has stopped."""

    lane: Lane
    error: BaseException
    holds: bool = False
    """Whether a record that fails stops only its partition."""


class Undelivered(NamedTuple):
    """Letters of the lane that were on their way could not be written; nothing behind them is passed before they are.
    An empty chunk has the lane see to it."""

    lane: Lane


Outcome = Progress | Worked | Ended | Failure | Ejected | Crashed | Undelivered
Outcomes = SimpleQueue[Outcome]
Report = Callable[[Outcome], None]


class Parked(NamedTuple):
    """A chunk that goes on later: nobody waits for it meanwhile, and nothing else of its lane is run."""

    seconds: float
    resume: Callable[[], Awaitable[Parked | None] | Parked | None]


class Work(Protocol):
    """Handles a chunk of a lane and reports how far it came. Returns early once `lane.stop` is not empty, or to go on
    later. On an event loop it is awaited."""

    def __call__(self, lane: Lane, chunk: Chunk, report: Report, /) -> Awaitable[Parked | None] | Parked | None: ...


class Lane:
    """One partition's records in order, under one claim. Its identity is the token of the assignment:
    outcomes of a lane that was closed are recognised by it and dropped."""

    __slots__ = (
        "busy", "bytes", "chunks", "commits_itself", "epoch", "gathering", "given_up", "lanes", "leader_epoch",
        "lock", "pace", "parked", "partition", "records", "reset_epoch", "save", "scope", "stop", "stored", "tally",
        "tried", "under_way", "work",
    )  # fmt: skip

    def __init__(
        self,
        partition: Partition,
        lanes: Lanes,
        work: Work,
        *,
        epoch: int,
        start: int,
        scope: str,
        pace: Pace,
        gathering: Gathering | None = None,
        tried: tuple[int, int] | None = None,
        commits_itself: bool = False,
        leader_epoch: int | None = None,
        reset_epoch: int = 0,
    ) -> None:
        self.partition = partition
        self.lanes = lanes
        self.work = work
        self.epoch = epoch
        self.stored = start
        """The offset that the store has for us; moved by the worker, inside its transaction."""
        self.commits_itself = commits_itself
        """Whether its work moves the stored offset, inside its transactions; then nobody else does."""
        self.leader_epoch = leader_epoch
        """Of the last record that its work has stored."""
        self.given_up = False
        """Whether its handler was given up: whatever it still does, the fence keeps out."""
        self.save: Future[Any] | None = None
        """The last save of its offset that was sent off."""
        self.scope = scope
        self.reset_epoch = reset_epoch
        """That of the partition's row: what is remembered of records is remembered under it."""
        self.pace = pace
        self.gathering = gathering
        """Where records wait until they are a batch, for handlers of batches."""
        self.tried = tried
        """The offset of a record and how often an earlier owner has tried it, until it is come to."""
        self.chunks: deque[Chunk] = deque()
        self.stop: list[str] = []
        """Not empty once the lane must stop; a list, because looking at one costs a runner nothing."""
        self.busy = False
        self.parked: Parked | None = None
        """What goes on before the next chunk. A lane with it is busy."""
        self.under_way: UnderWay | None = None
        """Letters that are not confirmed yet, once there was one; a lane with it need not be busy."""
        self.tally = Tally()
        """What the log is told of records that were passed over."""
        self.lock = threading.Lock()
        self.records = 0
        self.bytes = 0
        """What waits for a worker or is with one, counted on the owner thread."""

    @property
    def unfinished(self) -> bool:
        """Whether something of it may still be reported without a further chunk."""
        return self.busy or (self.under_way is not None and self.under_way.moves)

    @property
    def occupied(self) -> bool:
        """Whether another lane of its partition must wait for its handler."""
        return self.busy and not self.given_up

    @property
    def is_saved(self) -> bool:
        """Whether no save of its offset is under way."""
        return self.save is None or self.save.done()

    @property
    def batch(self) -> int:
        """How many records its handler is given at once; 0 for one that is given them one by one."""
        return 0 if self.gathering is None else self.gathering.most

    def took_on(self, chunk: Chunk) -> None:
        self.records += len(chunk.messages)
        self.bytes += sum(map(len, chunk.messages))

    def worked_off(self, records: int) -> None:
        records = min(records, self.records)  # what was run by the owner itself never waited here
        if records:
            self.bytes -= self.bytes * records // self.records
            self.records -= records

    def brake(self, reason: str) -> int:
        """Stop after the record that runs now and drop what has not started; answers how many were dropped."""
        with self.lock:
            self.stop.append(reason)
            dropped = sum(len(chunk.messages) for chunk in self.chunks)
            self.chunks.clear()
        if self.gathering is not None:
            dropped += self.gathering.drop()
        self.tally.close()
        return dropped


class Lanes(Protocol):
    """Where chunks are run, and reported from."""

    def open(self) -> None:
        """One more lane is to be run here."""
        ...

    def shut(self) -> None:
        """One lane less."""
        ...

    def submit(self, lane: Lane, chunk: Chunk) -> None: ...

    def abandon(self, lane: Lane) -> None:
        """The lane's worker does not come back; go on without it."""
        ...

    def close(self) -> None:
        """No chunk will follow."""
        ...


class InlineLanes:
    """Runs chunks at once, on the owner thread: the fastest, for handlers that never wait."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._report = outcomes.put

    def open(self) -> None:
        """Nothing to prepare."""

    def shut(self) -> None:
        """Nothing to let go of."""

    def submit(self, lane: Lane, chunk: Chunk) -> None:
        if not lane.stop:
            lane.work(lane, chunk, self._report)

    def abandon(self, lane: Lane) -> None:
        """Cannot happen: the owner thread itself runs the handler."""

    def close(self) -> None:
        """Nothing to let go of."""


class ThreadLanes:
    """Runs lanes on worker threads: one for each open lane, up to `most`. The chunks of a swift handler are run by
    the owner itself, which another thread replaces if that takes long after all."""

    def __init__(self, outcomes: Outcomes, name: str, most: int, ownership: Ownership) -> None:
        self._report = outcomes.put
        self._ownership = ownership
        self._name = name
        self._most = most
        self._ready: SimpleQueue[Lane | None] = SimpleQueue()
        self._alarm = Alarm(name, self._ready.put)
        self._open = 0
        self._started = 0
        self._abandoned = 0
        self._count = threading.Lock()

    def open(self) -> None:
        self._open += 1
        self._hire()

    def shut(self) -> None:
        self._open -= 1

    def submit(self, lane: Lane, chunk: Chunk) -> None:
        if lane.pace.swift and not lane.busy and not lane.stop:
            lane.busy = True
            self._ownership.enter_handler()
            self._handle(lane, chunk)
            return self._ownership.leave_handler()
        lane.took_on(chunk)
        with lane.lock:
            if lane.stop:
                return None
            lane.chunks.append(chunk)
            if lane.busy:
                return None
            lane.busy = True
        return self._ready.put(lane)

    def abandon(self, lane: Lane) -> None:  # noqa: ARG002  (any worker will do)
        with self._count:
            self._abandoned += 1
        self._hire()

    def close(self) -> None:
        for _ in range(self._started):
            self._ready.put(None)

    def _hire(self) -> None:
        with self._count:
            first = self._started + 1
            last = max(self._started, min(self._open, self._most) + self._abandoned)
            self._started = last
        for number in range(first, last + 1):
            # Daemons: a handler that hangs must not keep the process from ending.
            threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True).start()

    def _too_many(self) -> bool:
        """Whether this worker was given up and replaced, and has come back after all."""
        if not self._abandoned:
            return False
        with self._count:
            if self._started <= self._most:
                return False
            self._started -= 1
            self._abandoned -= 1
            return True

    def _run(self) -> None:
        while (lane := self._ready.get()) is not None:
            with lane.lock:
                chunk = lane.chunks.popleft() if lane.chunks and lane.parked is None else None
            self._handle(lane, chunk)
            if self._too_many():
                return

    def _handle(self, lane: Lane, chunk: Chunk | None) -> None:
        parked, lane.parked = lane.parked, None
        try:
            if parked is not None:
                parked = cast("Parked | None", parked.resume())
            elif chunk is not None:
                parked = cast("Parked | None", lane.work(lane, chunk, self._report))
        except BaseException as error:  # noqa: BLE001  (reported, and the thread goes on)
            parked = None
            lane.brake("crashed")
            self._report(Crashed(lane, error))
        if parked is not None:
            lane.parked = parked
            return self._alarm.wake(lane, parked.seconds)
        with lane.lock:
            lane.busy = again = bool(lane.chunks)
        return self._ready.put(lane) if again else None


class Alarm:
    """Hands lanes back when their time has come. One thread, while there is something to wait for."""

    LINGERS = 5.0
    """Seconds that it stays for the next one: a rate has a lane wait many times a second."""

    def __init__(self, name: str, wake: Callable[[Lane], None]) -> None:
        self._name = name
        self._wake = wake
        self._due: list[tuple[float, int, Lane]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._runs = False

    def wake(self, lane: Lane, seconds: float) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), lane))
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name=f"{self._name}-alarm", daemon=True).start()
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while self._due or self._changed.wait(self.LINGERS):
                if (left := self._due[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    self._wake(heapq.heappop(self._due)[2])
            self._runs = False
