"""A producer whose records are written in transactions: all records of a transaction become visible, or none.

A producer with a `transactional.id` fences every earlier producer of the same id (KIP-98): `fence` waits until the
transaction of its predecessor has ended, and the predecessor can write nothing from then on. Failures are raised
as `TransactionFailed`, with a kind; the caller knows what was being sent, and makes the message for the user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple, TypeAlias, cast

from confluent_kafka import KafkaError, KafkaException, Producer

from kconsume._config.client_settings import ClientValue
from kconsume._kafka.delivery import ANY_PARTITION
from kconsume._kafka.outgoing import Outgoing
from kconsume._kafka.producer import producer_settings
from kconsume._runtime.deadlines import Deadline
from kconsume.errors import ConfigurationError
from kconsume.records import Headers

FailureKind: TypeAlias = Literal["fenced", "not_allowed", "unavailable", "too_large", "queue_full", "refused"]

_PATIENCE = 60.0
"""Seconds for one step of a transaction; the transaction of a killed predecessor may have to end first."""
_ABORT = 1.0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KINDS: Mapping[int, FailureKind] = {
    KafkaError._FENCED: "fenced",
    KafkaError.PRODUCER_FENCED: "fenced",
    KafkaError.INVALID_PRODUCER_EPOCH: "fenced",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "not_allowed",
    KafkaError._TIMED_OUT: "unavailable",
    KafkaError._TRANSPORT: "unavailable",
    KafkaError._ALL_BROKERS_DOWN: "unavailable",
    KafkaError._RESOLVE: "unavailable",
    KafkaError.MSG_SIZE_TOO_LARGE: "too_large",
}


class TransactionFailed(Exception):
    """A step of a transaction failed; the transaction is aborted, now or by the broker after its timeout."""

    def __init__(self, kind: FailureKind, step: str, reason: str) -> None:
        super().__init__(f"{step}: {reason}")
        self.kind = kind
        self.step = step
        """`fence`, `send` or `commit`."""
        self.reason = reason
        """The message of the client."""


class PartitionedRecord(NamedTuple):
    """A record to send, and its partition."""

    outgoing: Outgoing
    """As `encoded` returns it."""
    partition: int | None
    """None lets the client choose by the key."""


class TransactionalProducer:
    """Writes records in transactions, under one `transactional.id`. Not safe for several threads."""

    def __init__(self, brokers: str, overrides: Mapping[str, ClientValue], transactional_id: str) -> None:
        """
        Args:
            brokers: the cluster's address.
            overrides: the user's own client properties.
            transactional_id: the name by which a later producer fences this one.
        """
        # The next producer waits for an open transaction at most until the broker's timeout for it.
        kept = {"transactional.id": transactional_id, "transaction.timeout.ms": 60_000, "linger.ms": 5}
        kafka = {name: value for name, value in overrides.items() if name != "delivery.timeout.ms"}
        settings = {**producer_settings(brokers, kafka), "message.timeout.ms": 30_000, **kept}
        try:
            self._producer = Producer(settings)
        except KafkaException as error:
            raise ConfigurationError(
                f"the Kafka client refused its configuration as a producer: {error.args[0].str()}; check kafka={{...}}"
            ) from None

    def fence(self) -> None:
        """Fence earlier producers of this id. Must be called once, before the first `send`."""
        try:
            self._producer.init_transactions(_PATIENCE)
        except KafkaException as error:
            raise self._failed("fence", error.args[0]) from error

    def send(self, records: Sequence[PartitionedRecord]) -> None:
        """Write all of these records in one transaction, or none. Returns when the transaction is committed."""
        try:
            self._producer.begin_transaction()
            for record in records:
                self._produce(record)
        except KafkaException as error:
            raise self._failed("send", error.args[0]) from error
        except BufferError as error:
            self._abort()
            raise TransactionFailed("queue_full", "send", str(error)) from error
        except BaseException:
            self._abort()
            raise
        try:
            self._commit()
        except KafkaException as error:
            raise self._failed("commit", error.args[0]) from error

    def _produce(self, record: PartitionedRecord) -> None:
        outgoing, moment = record.outgoing, record.outgoing.timestamp
        self._producer.produce(
            cast(str, outgoing.topic),
            cast("bytes | None", outgoing.value),
            outgoing.key,
            ANY_PARTITION if record.partition is None else record.partition,
            timestamp=0 if moment is None else (moment - _EPOCH) // timedelta(milliseconds=1),
            headers=cast("list[tuple[str, str | bytes | None]]", list(cast(Headers, outgoing.headers))),
        )

    def _commit(self) -> None:
        deadline = Deadline(_PATIENCE)
        while True:
            try:
                self._producer.commit_transaction(max(1.0, deadline.left))
                return
            except KafkaException as error:
                if not error.args[0].retriable() or deadline.passed:
                    raise

    def _failed(self, step: str, error: KafkaError) -> TransactionFailed:
        kind = _KINDS.get(error.code(), "refused")
        if kind not in ("fenced", "not_allowed"):
            self._abort()
        return TransactionFailed(kind, step, error.str())

    def _abort(self) -> None:
        """Abort if that is possible now; otherwise the next producer aborts, or the broker after a minute."""
        try:
            self._producer.abort_transaction(_ABORT)
        except KafkaException:
            return
