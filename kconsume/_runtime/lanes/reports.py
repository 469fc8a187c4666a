"""The reports of a lane to the loop. Values only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from kconsume.records import Message

if TYPE_CHECKING:
    from kconsume._runtime.lanes.lane import Lane


class Progress(NamedTuple):
    """In the chunk that begins at `first`, every record below `upto` is finished."""

    lane: Lane
    first: int
    upto: int
    handled: int
    skipped: int = 0
    leader_epoch: int | None = None
    stored: bool = False
    """True if the offset is in the store already, because it was committed with the handler's writes."""
    part: Sequence[Message] = ()
    """The finished records. They are sent to the owner thread, so that they are freed on the thread that made them."""
    waited_for_letters: bool = False
    """True if the report waited for dead letters. Its records were counted as finished by `Unblocked` before."""


class Unblocked(NamedTuple):
    """Records of the lane are done and make room for others. Their offset does not pass yet, because dead letters about
    earlier records are not confirmed."""

    lane: Lane
    records: int


class MovedToLogEnd(NamedTuple):
    """The lane moved its row in the store to the end of the log, because no record followed its last record."""

    lane: Lane
    offset: int


class Failure(NamedTuple):
    """A record failed for good and its offset does not pass. The lane has stopped before this record."""

    lane: Lane
    handler: str
    message: Message
    error: BaseException
    holds_partition: bool = False
    """True if only the partition stops; else the consumer stops."""


class Crashed(NamedTuple):
    """kconsume itself failed in a worker. No record of the chunk is known to be finished."""

    lane: Lane
    error: BaseException


class StoreRefused(NamedTuple):
    """The store did not accept the lane's work: the lane was fenced, the store did not answer, or the outcome is
    unknown. The lane has stopped."""

    lane: Lane
    error: BaseException
    holds_partition: bool = False
    """True if the policy of the handler is to stop only the partition when a record fails."""


class LettersFailed(NamedTuple):
    """Dead letters of the lane that were in flight could not be written. No later record is reported until they are
    written. The loop submits an empty chunk, so that the lane sends the letters again."""

    lane: Lane


LaneReport = Progress | Unblocked | MovedToLogEnd | Failure | StoreRefused | Crashed | LettersFailed
LaneReports = SimpleQueue[LaneReport]
SendReport = Callable[[LaneReport], None]


class Suspended(NamedTuple):
    """A chunk that continues later. Until then the chunk occupies no worker, and no other chunk of its lane runs."""

    seconds: float
    """How long to wait."""
    resume: Callable[[], Awaitable[Suspended | None] | Suspended | None]
    """Continues the chunk. Returns the same as `Work`."""
    code: str
    """What the partition waits for, as in `_runtime/observation/causes`."""
