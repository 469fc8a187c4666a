"""Every error kconsume raises. Each names the cause and the fix in one sentence.

KconsumeError
├── ConfigurationError         what was asked for cannot be run (exit code 2)
│   ├── InvalidHandler         the decorated function's signature
│   ├── UnknownStore           no offset store answers to this address
│   ├── MissingExtra           an optional package is not installed
│   └── TopicNotFound          the cluster has no such topic
├── BrokerUnavailable          no broker answered in time
├── ClientFailed               the Kafka client gave up for good
├── HandlerFailed              a handler raised on a record, and no policy took it
├── DecodeError                the payload is not what the annotation says
├── BatchError                 which records of a batch failed; raised by handlers
├── ResourceFailed             what a handler asks for could not be built, or closed
├── SendFailed                 what a handler sends cannot be sent, or was not confirmed
├── StoreError                 the offset store
│   ├── StoreUnavailable       … did not answer; tried again
│   ├── Fenced                 … says that another consumer owns the partition now
│   └── TransactionMisused     a handler ended the transaction that is not its own
├── OffsetError                where to start cannot be decided without a person
│   ├── StartRequired          no stored offset, and start="error"
│   ├── OffsetOutOfRange       the stored offset is not in the log
│   └── TopicRecreated         the topic is not the one the offset was stored for
├── ShutdownTimeout            the deadline passed with work abandoned (exit code 3)
├── EmbeddedBrokerError        the embedded broker could not do what was asked
└── ServiceUnavailable         a service that the tests need cannot be had
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


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


class BrokerUnavailable(KconsumeError):
    """No broker answered in time."""


class ClientFailed(KconsumeError):
    """The Kafka client reported an error from which it does not recover."""


class HandlerFailed(KconsumeError):
    """A handler raised on a record, and no policy took the record. `__cause__` is what it raised."""

    def __init__(self, handler: str, place: str, error: BaseException) -> None:
        super().__init__(f"{handler} failed on {place}: {type(error).__name__}: {error}")
        self.place = place
        """The record, written `orders/3@1042`."""
        self.__cause__ = error


class DecodeError(KconsumeError):
    """The payload is not what the handler's annotation says."""


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


class StoreError(KconsumeError):
    """The offset store failed."""


class StoreUnavailable(StoreError):
    """The offset store did not answer; the work is tried again."""


class Fenced(StoreError):
    """Another consumer has claimed the partition; what was written in this transaction is undone."""


class TransactionMisused(StoreError):
    """A handler ended, or broke, the transaction in which its offset is kept."""


class OffsetError(KconsumeError):
    """Where to start cannot be decided without a person."""


class StartRequired(OffsetError):
    """There is no stored offset, and `start="error"` asks not to choose one."""


class OffsetOutOfRange(OffsetError):
    """The stored offset is not in the partition's log."""


class TopicRecreated(OffsetError):
    """The topic was deleted and made again; the stored offset belongs to the old one."""


class ShutdownTimeout(KconsumeError):
    """The shutdown deadline passed with work abandoned."""

    exit_code: ClassVar[int] = 3


class EmbeddedBrokerError(KconsumeError):
    """The embedded broker could not do what was asked."""


class ServiceUnavailable(KconsumeError):
    """A service that the tests need cannot be had here."""
