"""Every error that kconsume raises. A message names the cause, the wrong value and the fix, in one sentence.

KconsumeError
├── ConfigurationError         the configuration cannot work (exit code 2)
│   ├── InvalidHandler         the decorated function cannot be a handler
│   ├── UnknownStore           no offset store has an address of this scheme
│   ├── MissingExtra           an optional package is not installed
│   ├── TopicNotFound          the cluster has no such topic
│   ├── InstanceTaken          another process has the name of this static member
│   ├── StreamTaken            another Spark query of the group is running
│   └── CheckpointMismatch     a Spark checkpoint belongs to another query
├── BrokerUnavailable          no broker answered in time
├── ClientFailed               the Kafka client gave up
│   └── NotAuthorized          the brokers do not allow reading a topic
├── UnreadableBatch            the log has records that the client cannot read
├── GroupRefused               the group does not accept this member: another assignor, too many members
├── StartTimeout               the block of running() was not entered, because its start took too long
├── HandlerFailed              a handler raised on a record, and no policy covers it
├── HandlerTimeout             a call of a handler took longer than its timeout=
├── DecodeError                the payload does not match the annotation
├── Rejected                   a Spark handler rejected the record with batch.reject
├── TaskFailed                 a handler raised in a Spark executor
├── BatchError                 some records of a batch failed; raised by handlers
├── ResourceFailed             a resource could not be built or closed
├── SendFailed                 a record cannot be sent, or was not confirmed
├── LetterFailed               a dead letter could not be written; it is tried again
├── TooManyFailures            more records failed, or more calls hang, than the limit allows
├── StoreError                 the offset store failed
│   ├── StoreUnavailable       the store did not answer; the work is tried again
│   ├── Conflict               a deadlock or a serialization failure; the transaction is run again
│   ├── Fenced                 another consumer owns the partition now
│   └── TransactionMisused     a handler ended the store's transaction
├── OffsetError                only a user can decide where to start
│   ├── StartRequired          there is no stored offset, and start="error"
│   │   └── RowLost            the row of a partition has disappeared, without a delete by kconsume
│   ├── OffsetOutOfRange       the stored offset is not in the log
│   ├── OffsetGap              a Spark batch begins after the stored offset: records would be lost
│   ├── TopicRecreated         the offset was stored for an earlier topic of the same name
│   └── Undecided              a record was applied in part by a store that cannot undo it
├── NotHeld                    this process does not have the state of the partition
├── ShutdownTimeout            the deadline passed with work abandoned (exit code 3)
├── EmbeddedBrokerError        the embedded broker could not do what was asked
└── ServiceUnavailable         a service that the tests need is not available
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kconsume.records import Partition


class KconsumeError(Exception):
    """The base class of all errors of kconsume."""

    exit_code: ClassVar[int] = 1


class ConfigurationError(KconsumeError):
    """The configuration cannot work; nothing was consumed."""

    exit_code: ClassVar[int] = 2


class InvalidHandler(ConfigurationError):
    """The decorated function cannot be a handler: its signature or its topics are wrong."""


class UnknownStore(ConfigurationError):
    """No offset store has an address of this scheme."""


class MissingExtra(ConfigurationError):
    """A feature needs an optional package that is not installed."""


class TopicNotFound(ConfigurationError):
    """The cluster has no such topic."""


class InstanceTaken(ConfigurationError):
    """Another process is a member of the group under the same `instance=`."""


class StreamTaken(ConfigurationError):
    """Another running Spark query of the same group reads the same topic."""


class CheckpointMismatch(ConfigurationError):
    """The checkpoint folder belongs to another query, or was not written by kconsume."""


class BrokerUnavailable(KconsumeError):
    """No broker answered in time."""


class ClientFailed(KconsumeError):
    """The Kafka client reported an error from which it cannot recover."""


class NotAuthorized(ClientFailed):
    """The brokers do not allow this principal to read a topic."""


class GroupRefused(KconsumeError):
    """The group does not accept this member, and another attempt is not expected to help."""


class StartTimeout(KconsumeError):
    """The first assignment or its claim in the store took too long, so the block of `running()` was not entered.

    `__cause__` is the reason, if it is known.
    """


class UnreadableBatch(KconsumeError):
    """The log has records that the client cannot read: damaged, too large, or in an unknown format."""


class HandlerFailed(KconsumeError):
    """A handler raised on a record, and no policy covers it. `__cause__` is the handler's exception.

    Args:
        handler: the name of the handler.
        place: the record, written `orders/3@1042`.
        error: the handler's exception.
    """

    def __init__(self, handler: str, place: str, error: BaseException) -> None:
        super().__init__(f"{handler} failed on {place}: {type(error).__name__}: {error}")
        self.place = place
        """The record, written `orders/3@1042`."""
        self.__cause__ = error

    @property
    def try_command(self) -> str:
        """The command that runs the handler on this record again, in a transaction that is rolled back."""
        return f"kconsume try {os.environ.get('KCONSUME_APP') or 'MODULE:APP'} {self.place}"


class HandlerTimeout(KconsumeError, TimeoutError):
    """A call of a handler took longer than its `timeout=`. An async call was cancelled, any other call abandoned."""


class DecodeError(KconsumeError):
    """The payload does not match the handler's annotation."""


class Rejected(KconsumeError):
    """A handler gave a record of a Spark batch to `reject`. The dead letter names this error as its cause."""


class TaskFailed(KconsumeError):
    """A handler raised in a Spark executor. The text holds the exception and its trace."""


class BatchError(KconsumeError):
    """Raised by a handler of batches: some records of the batch failed, and all others succeeded.

    The writes of the call through the store's transaction are rolled back, and the records that it sent are dropped.
    Then the handler is called again without the failed records.

    Args:
        errors: the exception of each failed record, by its index in the batch.
    """

    def __init__(self, errors: Mapping[int, BaseException]) -> None:
        self.errors = dict(errors)
        listed = "; ".join(f"{i}: {type(error).__name__}: {error}" for i, error in sorted(self.errors.items())[:3])
        more = f"; and {len(self.errors) - 3} more" if len(self.errors) > 3 else ""
        super().__init__(f"{len(self.errors)} records of the batch failed: {listed}{more}")


class ResourceFailed(KconsumeError):
    """A resource could not be built, so nothing was consumed, or could not be closed. `__cause__` is the reason."""


class SendFailed(KconsumeError):
    """A record cannot be sent, or the broker did not confirm it. The offset was not passed."""


class LetterFailed(KconsumeError):
    """A dead letter could not be written. The write is tried again, and the offset of the record is not passed."""


class TooManyFailures(KconsumeError):
    """The consumer stops: more records failed than `DeadLetter(limit=...)` allows, or too many calls hang."""


class StoreError(KconsumeError):
    """The offset store failed."""


class StoreUnavailable(StoreError):
    """The offset store did not answer. The work is tried again."""


class Conflict(StoreError):
    """The store rolled the transaction back: a deadlock or a serialization failure. The transaction is run again."""


class Fenced(StoreError):
    """Another consumer has claimed the partition. The writes of this transaction were rolled back."""


class TransactionMisused(StoreError):
    """A handler ended or broke the transaction that holds its offset."""


class OffsetError(KconsumeError):
    """Only a user can decide where the partition starts."""


class StartRequired(OffsetError):
    """There is no stored offset, and `start="error"` forbids choosing one.

    Args:
        sentence: the message.
        partitions: exactly the partitions that have no stored offset.
    """

    def __init__(self, sentence: str, partitions: Iterable[Partition] = ()) -> None:
        super().__init__(sentence)
        self.partitions = frozenset(partitions)


class RowLost(StartRequired):
    """The store has lost the row of a partition. The row was not deleted through kconsume."""


class OffsetOutOfRange(OffsetError):
    """The stored offset is not in the partition's log."""


class OffsetGap(OffsetError):
    """A Spark batch begins after the stored offset, so that the records between would be lost."""


class TopicRecreated(OffsetError):
    """The topic was deleted and created again. The stored offset belongs to the earlier topic."""


class Undecided(OffsetError):
    """A record was applied in part by a store that cannot undo it.

    The partition stays stopped, also across restarts, until a user has decided about the record.

    Args:
        sentence: the message.
        partitions: exactly the partitions that wait for a decision. Other partitions of the same call are not affected.
    """

    def __init__(self, sentence: str, partitions: Iterable[Partition] = ()) -> None:
        super().__init__(sentence)
        self.partitions = frozenset(partitions)


class NotHeld(KconsumeError, KeyError):
    """This process does not own the partition whose state was requested, or could not load that state."""

    # KeyError would show the repr of the message.
    __str__ = Exception.__str__


class ShutdownTimeout(KconsumeError):
    """The shutdown deadline passed, and work was abandoned."""

    exit_code: ClassVar[int] = 3


class EmbeddedBrokerError(KconsumeError):
    """The embedded broker could not do what was asked."""


class ServiceUnavailable(KconsumeError):
    """A service that the tests need is not available here."""
