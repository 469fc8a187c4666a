"""Every error kconsume raises. Each names the cause and the fix in one sentence.

KconsumeError
├── ConfigurationError         what was asked for cannot be run (exit code 2)
│   ├── InvalidHandler         the decorated function's signature
│   ├── UnknownStore           no offset store answers to this address
│   ├── MissingExtra           an optional package is not installed
│   ├── TopicNotFound          the cluster has no such topic
│   ├── InstanceTaken          another process has the name of this static member
│   ├── StreamTaken            another Spark query of the group is running
│   └── CheckpointMismatch     a Spark checkpoint is not that of this query
├── BrokerUnavailable          no broker answered in time
├── ClientFailed               the Kafka client gave up for good
│   └── NotAuthorized          the brokers do not allow it
├── UnreadableBatch            records are in the log that the client cannot read
├── GroupRefused               the group does not take this member: another assignor, too many members
├── StartTimeout               running() was not ready in time, so its block was not entered
├── HandlerFailed              a handler raised on a record, and no policy took it
├── HandlerTimeout             a call of a handler took longer than its timeout=
├── DecodeError                the payload is not what the annotation says
├── Rejected                   a handler gave the record to batch.reject; the cause in its dead letter
├── TaskFailed                 what a handler raised in a Spark executor
├── BatchError                 which records of a batch failed; raised by handlers
├── ResourceFailed             what a handler asks for could not be built, or closed
├── SendFailed                 what a handler sends cannot be sent, or was not confirmed
├── LetterFailed               a dead letter could not be written; tried again
├── TooManyFailures            more records failed, or calls hang, than there is a limit to
├── StoreError                 the offset store
│   ├── StoreUnavailable       … did not answer; tried again
│   ├── Conflict               … undid a transaction that met another's; run again
│   ├── Fenced                 … says that another consumer owns the partition now
│   └── TransactionMisused     a handler ended the transaction that is not its own
├── OffsetError                where to start cannot be decided without a person
│   ├── StartRequired          no stored offset, and start="error"
│   │   └── RowLost            no stored offset any more, and nobody has deleted it
│   ├── OffsetOutOfRange       the stored offset is not in the log
│   ├── OffsetGap              a Spark batch begins behind the stored offset: records would be lost
│   ├── TopicRecreated         the topic is not the one the offset was stored for
│   └── Undecided              a record failed half-way in a store that cannot undo: a person decides
├── NotHeld                    the state of a partition that is not ours
├── ShutdownTimeout            the deadline passed with work abandoned (exit code 3)
├── EmbeddedBrokerError        the embedded broker could not do what was asked
└── ServiceUnavailable         a service that the tests need cannot be had
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kconsume.records import Partition


class KconsumeError(Exception):
    """Base of all errors of kconsume."""

    exit_code: ClassVar[int] = 1


class ConfigurationError(KconsumeError):
    """What was asked for cannot be run; nothing was consumed."""

    exit_code: ClassVar[int] = 2


class InvalidHandler(ConfigurationError):
    """The decorated function cannot be a handler as it is written."""


class UnknownStore(ConfigurationError):
    """No offset store answers to this address."""


class MissingExtra(ConfigurationError):
    """An optional package is needed and not installed."""


class TopicNotFound(ConfigurationError):
    """The cluster has no such topic."""


class InstanceTaken(ConfigurationError):
    """Another process is a member of the group under the same `instance=`."""


class StreamTaken(ConfigurationError):
    """Another Spark query of the same group reads the same topic, and is alive."""


class CheckpointMismatch(ConfigurationError):
    """The checkpoint folder belongs to another query, or to none of kconsume's."""


class BrokerUnavailable(KconsumeError):
    """No broker answered in time."""


class ClientFailed(KconsumeError):
    """The Kafka client reported an error from which it does not recover."""


class NotAuthorized(ClientFailed):
    """The brokers do not allow this principal to read a topic."""


class GroupRefused(KconsumeError):
    """The group does not take this member, for a reason that does not pass by itself."""


class StartTimeout(KconsumeError):
    """The group's first assignment, or its claim in the store, was not there in time, so the block of `running()` was
    not entered. `__cause__` says why, where it is known."""


class UnreadableBatch(KconsumeError):
    """The log has records that the client cannot read: damaged, too large, or of a form that it does not know."""


class HandlerFailed(KconsumeError):
    """A handler raised on a record, and no policy took the record. `__cause__` is what it raised."""

    def __init__(self, handler: str, place: str, error: BaseException) -> None:
        super().__init__(f"{handler} failed on {place}: {type(error).__name__}: {error}")
        self.place = place
        """The record, written `orders/3@1042`."""
        self.__cause__ = error

    @property
    def try_command(self) -> str:
        """The command that runs today's handler on the record, and rolls back."""
        return f"kconsume try {os.environ.get('KCONSUME_APP') or 'MODULE:APP'} {self.place}"


class HandlerTimeout(KconsumeError, TimeoutError):
    """A call of a handler took longer than its `timeout=`, and was cancelled, or given up if it cannot be."""


class DecodeError(KconsumeError):
    """The payload is not what the handler's annotation says."""


class Rejected(KconsumeError):
    """Why a handler gave a record of a Spark batch to `reject`: what its dead letter names."""


class TaskFailed(KconsumeError):
    """What a handler raised in a Spark executor, in words, with its trace there."""


class BatchError(KconsumeError):
    """Raised by a handler of batches: these records failed, by their index in the batch, and all others are done.

    What the others wrote through the store's transaction, or sent, is undone with the call: then the handler is called
    again without those that failed.
    """

    def __init__(self, errors: Mapping[int, BaseException]) -> None:
        self.errors = dict(errors)
        said = "; ".join(f"{i}: {type(error).__name__}: {error}" for i, error in sorted(self.errors.items())[:3])
        more = f"; and {len(self.errors) - 3} more" if len(self.errors) > 3 else ""
        super().__init__(f"{len(self.errors)} records of the batch failed: {said}{more}")


class ResourceFailed(KconsumeError):
    """A resource could not be built, so nothing was consumed; or it could not be closed. `__cause__` says why."""


class SendFailed(KconsumeError):
    """What was to be sent cannot be, or the broker did not confirm it; the offset was not passed."""


class LetterFailed(KconsumeError):
    """A dead letter could not be written; its record is not passed, and it is tried again."""


class TooManyFailures(KconsumeError):
    """More records failed than `DeadLetter(limit=...)` allows, or more calls hang than can be left behind: the consumer
    stops."""


class StoreError(KconsumeError):
    """The offset store failed."""


class StoreUnavailable(StoreError):
    """The offset store did not answer; the work is tried again."""


class Conflict(StoreError):
    """The store undid a transaction because it met another (a deadlock, a serialization failure); it is run again."""


class Fenced(StoreError):
    """Another consumer has claimed the partition; what was written in this transaction is undone."""


class TransactionMisused(StoreError):
    """A handler ended, or broke, the transaction in which its offset is kept."""


class OffsetError(KconsumeError):
    """Where to start cannot be decided without a person."""


class StartRequired(OffsetError):
    """There is no stored offset, and `start="error"` asks not to choose one."""

    def __init__(self, sentence: str, partitions: Iterable[Partition] = ()) -> None:
        super().__init__(sentence)
        self.partitions = frozenset(partitions)
        """Those without an offset, and no others."""


class RowLost(StartRequired):
    """The store has no row of a partition, had one before, and nobody has deleted it."""


class OffsetOutOfRange(OffsetError):
    """The stored offset is not in the partition's log."""


class OffsetGap(OffsetError):
    """A Spark batch begins after the stored offset, so that the records between would be lost."""


class TopicRecreated(OffsetError):
    """The topic was deleted and made again; the stored offset belongs to the old one."""


class Undecided(OffsetError):
    """A record was applied in part, by a store that cannot undo. The partition stays stopped, also across restarts,
    until a person has decided about the record."""

    def __init__(self, sentence: str, partitions: Iterable[Partition] = ()) -> None:
        super().__init__(sentence)
        self.partitions = frozenset(partitions)
        """Those that wait for a decision, and no others: what was asked for together with them can be had without."""


class NotHeld(KconsumeError, KeyError):
    """The state of a partition was asked for that is not ours, or could not be loaded."""

    # A KeyError shows the repr of its key, which a sentence is not.
    __str__ = Exception.__str__


class ShutdownTimeout(KconsumeError):
    """The shutdown deadline passed with work abandoned."""

    exit_code: ClassVar[int] = 3


class EmbeddedBrokerError(KconsumeError):
    """The embedded broker could not do what was asked."""


class ServiceUnavailable(KconsumeError):
    """A service that the tests need cannot be had here."""
