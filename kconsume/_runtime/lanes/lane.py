"""A lane: records that must be handled one after the other, under one claim of their partition.

Currently a lane is one partition. At most one worker runs a lane at a time; any worker may run it. Records pass from
thread to thread in chunks, not one by one. This module has the state of a lane and the interface of the classes that
run lanes (`Lanes`). It must not decide what happens to a record (`_runtime/processing`) or what a report means
(`_runtime/loop.py`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kconsume._runtime.lanes.pacing import Pace
from kconsume._runtime.lanes.reports import SendReport, Suspended
from kconsume.failures.skip_log import SkipLog
from kconsume.records import Message, Partition

if TYPE_CHECKING:
    from kconsume._runtime.lanes.batching import BatchBuffer
    from kconsume._runtime.output.letters_in_flight import LettersInFlight


class Chunk(NamedTuple):
    """Records of one lane that were fetched together, ascending by offset."""

    messages: list[Message]
    first: int
    """Offset of the first record."""
    last: int
    """Offset of the last record."""
    end: int | None = None
    """The end of the log, to which the offset moves. Set only in a chunk without records, for a lane that stores its
    own offset."""


class Work(Protocol):
    """Handles a chunk of a lane and reports the progress.

    Returns early once `lane.stop_reasons` is not empty. Returns `Suspended` if the chunk continues later. On an event
    loop the result is awaited.
    """

    def __call__(
        self, lane: Lane, chunk: Chunk, report: SendReport, /
    ) -> Awaitable[Suspended | None] | Suspended | None: ...


class Lane:
    """One partition's records in order, under one claim.

    The lane object is the token of the assignment: by this token the loop recognises reports of a closed lane, and
    drops them.

    Threads: the *owner* is the thread that runs the loop; the *worker* is the thread or task that runs the lane now (it
    may be the owner). Each field says who writes and who reads it. `lock` guards `busy`, `chunks` and the step from an
    empty `stop_reasons` to the first reason.

    Args:
        partition: the partition of the records.
        lanes: runs the chunks of this lane.
        work: handles the chunks.
        epoch: the fencing epoch of the claim.
        start: the offset in the store when the lane began.
        scope: `group:topic_id`, the beginning of `Record.id`.
        pace: measures the handler and sizes the slices.
        batch_buffer: collects records into batches, for a handler of batches.
        earlier_attempts: an offset, and how often an earlier owner tried its record.
        commits_itself: True if `work` stores the offset inside its transactions; then the loop must not store it.
        leader_epoch: the leader epoch of the offset `start`, if the store knows it.
        reset_epoch: the reset epoch of the row in the store. Handled records are remembered under this epoch.
    """

    __slots__ = (
        "abandoned", "batch_buffer", "busy", "chunks", "commits_itself", "earlier_attempts", "epoch", "lanes",
        "last_save", "leader_epoch", "letters", "lock", "pace", "partition", "queued_bytes", "queued_records",
        "reset_epoch", "scope", "skip_log", "stop_reasons", "stored", "suspended", "work",
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
        batch_buffer: BatchBuffer | None = None,
        earlier_attempts: tuple[int, int] | None = None,
        commits_itself: bool = False,
        leader_epoch: int | None = None,
        reset_epoch: int = 0,
    ) -> None:
        # Written only here, read by every thread.
        self.partition = partition
        self.lanes = lanes
        self.work = work
        self.epoch = epoch
        self.commits_itself = commits_itself
        self.scope = scope
        self.reset_epoch = reset_epoch
        self.lock = threading.Lock()

        # Written and read only by the worker. A worker passes the lane to the next worker through a queue or a lock.
        self.stored = start
        """The offset in the store, for a lane that `commits_itself`. The transactions of the lane move this offset."""
        self.leader_epoch = leader_epoch
        """The leader epoch of the last record whose offset the work has stored."""
        self.earlier_attempts = earlier_attempts
        """Attempts of an earlier owner. None once the first record was reached."""

        # Written and read by the worker. The owner reads it without a lock, and accepts an old value.
        self.suspended: Suspended | None = None
        """The run that continues before the next chunk. A suspended lane is busy."""
        self.pace = pace
        self.letters: LettersInFlight | None = None
        """The letters that are not confirmed yet. None until the lane had a letter. A lane with unconfirmed letters
        need not be busy. Has its own lock."""
        self.skip_log = SkipLog()
        """Logs skipped records. The worker adds, the owner flushes. Has its own lock."""

        # Written by the owner and the worker under `lock`.
        self.chunks: deque[Chunk] = deque()
        """The records that wait for the worker."""
        self.busy = False
        """True while a worker runs the lane or is about to. The owner reads this field without the lock."""
        self.stop_reasons: list[str] = []
        """Not empty once the lane must stop. This is a list, because a runner checks it for each record, and the check
        whether a list is empty costs nothing. The worker reads it without the lock. A worker that crashes also adds a
        reason."""

        # Written and read only by the owner.
        self.batch_buffer = batch_buffer
        self.abandoned = False
        """True if the owner no longer waits for the handler: the fence rejects its later writes."""
        self.last_save: Future[Any] | None = None
        """The last save of the lane's offset that was sent to the store."""
        self.queued_records = 0
        self.queued_bytes = 0
        """Number and bytes of the records that wait for a worker or that a worker has."""

    @property
    def unfinished(self) -> bool:
        """True if the lane may still send a report without getting another chunk."""
        return self.busy or (self.letters is not None and self.letters.may_report)

    @property
    def occupied(self) -> bool:
        """True if another lane of the same partition must wait for this lane's handler."""
        return self.busy and not self.abandoned

    @property
    def is_saved(self) -> bool:
        """True if no save of the lane's offset is under way."""
        return self.last_save is None or self.last_save.done()

    @property
    def batch_size(self) -> int:
        """How many records the handler gets at once; 0 if it gets them one by one."""
        return 0 if self.batch_buffer is None else self.batch_buffer.batch_size

    def count_queued(self, chunk: Chunk) -> None:
        """Count a chunk as in flight, for back-pressure."""
        self.queued_records += len(chunk.messages)
        self.queued_bytes += sum(map(len, chunk.messages))

    def count_finished(self, records: int) -> None:
        """Count records as finished, for back-pressure."""
        records = min(records, self.queued_records)  # 0 for an inline lane, which counts no records as queued
        if records:
            self.queued_bytes -= self.queued_bytes * records // self.queued_records
            self.queued_records -= records

    def request_stop(self, reason: str) -> int:
        """Stop after the record that runs now, and drop records that have not started. Returns how many were
        dropped."""
        with self.lock:
            self.stop_reasons.append(reason)
            dropped = sum(len(chunk.messages) for chunk in self.chunks)
            self.chunks.clear()
        if self.batch_buffer is not None:
            dropped += self.batch_buffer.drop()
        self.skip_log.close()
        return dropped


class Lanes(Protocol):
    """Runs the chunks of lanes, each lane in order. Called by the owner thread; no method waits for a handler."""

    def lane_opened(self) -> None:
        """Prepare for one more lane that submits chunks."""
        ...

    def lane_closed(self) -> None:
        """Note that one lane submits no more chunks."""
        ...

    def submit(self, lane: Lane, chunk: Chunk) -> None:
        """Run a chunk after the earlier chunks of the lane. A lane that must stop ignores the chunk."""
        ...

    def abandon(self, lane: Lane) -> None:
        """Continue without the worker of this lane, because its handler does not return."""
        ...

    def close(self) -> None:
        """Note that no chunk will follow."""
        ...
