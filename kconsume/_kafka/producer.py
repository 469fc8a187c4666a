"""The producer of everything that an app sends, and its settings.

A `Producer` takes records from any thread and returns a future, which ends when the broker has confirmed all of them.
Behind it is a `DeliveryThread`, made by the first delivery; after a fatal error the next delivery makes a new one. This
file decides which properties a producer has. It must not encode records (`_kafka/outgoing.py`).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import cast

from kconsume._config.client_settings import ClientValue, connection_settings
from kconsume._kafka.delivery import ANY_PARTITION, Delivery, DeliveryResult, DeliveryThread
from kconsume._kafka.outgoing import Outgoing
from kconsume.errors import SendFailed
from kconsume.records import Partition

# Defaults that differ from the client's own, and why.
DEFAULTS: Mapping[str, ClientValue] = {
    # A whole slice is handed over and waited for, so lingering gains nothing: at 0, 1 and 5 ms one record took
    # 0.4, 1.5 and 5.6 ms to a nearby broker, and a thousand records 3.6, 3.6 and 7.5 ms (measured).
    "linger.ms": 0,
    "message.timeout.ms": 60_000,  # default 300 s: a partition would stand still that long before the error is known
    "queue.buffering.max.kbytes": 65_536,  # default 1 GB: memory is bounded even if the broker is slow
    "socket.keepalive.enable": True,  # a dead connection is noticed behind a firewall
}
RELAY_DEFAULTS: Mapping[str, ClientValue] = {
    # No handler waits for an outbox row. At 0 ms the client sends many rows in dozens of requests while they are still
    # being handed over: the broker and the client's thread then took 50 µs of CPU for a record, at 5 ms 6 µs
    # (measured). At 25 ms a request holds more rows, and rows are collected for 100 ms anyway.
    "linger.ms": 25,
}
# A confirmed delivery depends on these properties, so the user cannot change them.
_KEPT: Mapping[str, ClientValue] = {
    "acks": "all",
    "enable.idempotence": True,  # a retry neither duplicates nor reorders records
    "delivery.report.only.error": False,
}
_LETTERS: Mapping[str, ClientValue] = {"linger.ms": 10}
_DROPPED = {*_KEPT, "request.required.acks", "transactional.id", "transaction.timeout.ms", "log_level"}

_FRAMING = 64  # bytes of a record on the wire that are neither key, value nor header


def producer_settings(brokers: str, overrides: Mapping[str, ClientValue]) -> dict[str, ClientValue]:
    """Return all properties of the producer: defaults, then the user's, then those that confirmed delivery needs.

    The client ignores properties that only a consumer has.

    Args:
        brokers: the address of the brokers.
        overrides: the user's properties.
    """
    chosen = {name: value for name, value in overrides.items() if name not in _DROPPED}
    client = {"client.id": f"kconsume-{socket.gethostname()}-{os.getpid()}"}
    return {**DEFAULTS, **client, **connection_settings(brokers, chosen), **_KEPT}


def letter_settings(brokers: str, overrides: Mapping[str, ClientValue]) -> dict[str, ClientValue]:
    """Return the properties of the producer of dead letters that no handler waits for.

    The producer sends several letters in one request. Without lingering, its thread is busy all the time while many
    records fail: 200 µs of CPU for a letter on a busy machine, and 12 to 25 µs with lingering (measured).
    """
    return producer_settings(brokers, {**_LETTERS, **overrides})


def relay_settings(brokers: str, overrides: Mapping[str, ClientValue]) -> dict[str, ClientValue]:
    """Return the properties of the producer that sends outbox rows.

    With `message.timeout.ms=0` the client never gives up a record. So after an outage the client itself finishes the
    records in flight, and the relay does not send them a second time.
    """
    chosen = {name: value for name, value in overrides.items() if name != "delivery.timeout.ms"}
    return {**producer_settings(brokers, {**RELAY_DEFAULTS, **chosen}), "message.timeout.ms": 0}


def most_bytes(settings: Mapping[str, ClientValue]) -> int:
    """Return how many bytes the key, value and headers of a record may have, by the properties of the client."""
    return int(settings.get("message.max.bytes", 1_000_000)) - _FRAMING


class Producer:
    """Delivers records to Kafka, from any thread.

    The first delivery, or `open`, makes the client, in the process of that call.

    Args:
        settings: all properties of the client.
        name: for the name of its thread and for errors.
        awaited: whether a thread waits for deliveries. Then each confirmation is reported at once, else within some
            hundredths of a second.
    """

    def __init__(self, settings: Mapping[str, ClientValue], name: str, *, awaited: bool = True) -> None:
        self.name = name
        self._settings = dict(settings)
        self._awaited = awaited
        self._lock = threading.Lock()
        self._thread: DeliveryThread | None = None
        self._process: int | None = None
        self._closed = False

    @property
    def largest_batch(self) -> int:
        """Bytes of the largest batch that the client makes, of one or several records."""
        settings = self._settings
        return max(int(settings.get("message.max.bytes", 1_000_000)), int(settings.get("batch.size", 1_000_000)))

    @property
    def max_message_bytes(self) -> int:
        """How many bytes the key, the value and the headers of a record may have together."""
        return most_bytes(self._settings)

    def open(self) -> None:
        """Make the client now.

        Properties that the client refuses are then an error at the start, and the first record does not wait the half
        second in which an idempotent producer gets its id.
        """
        self._current()

    def deliver(self, outgoing: Sequence[Outgoing]) -> Future[None]:
        """Send records in this order.

        The future ends when the broker has confirmed every record, or with `SendFailed`; then some records may have
        been written, and none is still in flight. The call waits only while the client's queue is full. The call
        raises `SendFailed` if the producer is closed or belongs to another process. A callback of the future runs on
        the serving thread: it must not wait and must not deliver.

        Args:
            outgoing: records that `encoded` returned.
        """
        delivery = Delivery(len(outgoing))
        if outgoing:
            self._send(delivery, outgoing, ANY_PARTITION)
        else:
            delivery.end()
        return cast("Future[None]", delivery.future)

    def deliver_each(self, outgoing: Sequence[Outgoing]) -> Future[DeliveryResult]:
        """Like `deliver`, but the future returns whether each record was confirmed. The future does not fail."""
        delivery = Delivery(len(outgoing), wants_each=True)
        self._send(delivery, outgoing, ANY_PARTITION)
        return cast("Future[DeliveryResult]", delivery.future)

    def write(self, outgoing: Outgoing, partition: int | None = None) -> Future[tuple[Partition, int]]:
        """Send one record. The future returns its partition and its offset.

        Args:
            outgoing: a record that `encoded` returned.
            partition: the partition; None lets the client choose by the key.
        """
        delivery = Delivery(1, wants_offset=True)
        self._send(delivery, [outgoing], ANY_PARTITION if partition is None else partition)
        return cast("Future[tuple[Partition, int]]", delivery.future)

    def close(self, seconds: float) -> int:
        """Wait until all records are confirmed. Return how many were not; their futures fail.

        Args:
            seconds: the longest time to wait.
        """
        if self._is_forked():
            return 0  # the client's threads run in the parent process
        with self._lock:
            self._closed, thread = True, self._thread
        return 0 if thread is None else thread.close(seconds)

    def _send(self, delivery: Delivery, outgoing: Sequence[Outgoing], partition: int) -> None:
        while not self._current().send(delivery, outgoing, partition):
            pass  # that client has just ended, and `_current` makes a new one

    def _current(self) -> DeliveryThread:
        if self._is_forked():
            raise SendFailed(
                f"producer {self.name!r} belongs to process {self._process} and cannot send here, because this "
                f"process is a fork of that one: start the app in this process, or start processes by spawn"
            )
        with self._lock:
            if self._closed:
                raise SendFailed(f"producer {self.name!r} is closed: nothing can be sent after the app has stopped")
            if self._thread is None or self._thread.ended:
                self._thread = DeliveryThread(self._settings, self.name, awaited=self._awaited)
                self._process = os.getpid()
            return self._thread

    def _is_forked(self) -> bool:
        return self._process is not None and self._process != os.getpid()


class RelayProducer(Producer):
    """Sends outbox rows: rows for one partition of a topic are written in the order in which they were sent.

    After the broker has refused a batch, an idempotent producer continues with the next batch, so later rows would pass
    the refused ones. With `enable.gapless.guarantee` it fails instead, with everything in flight, and the next delivery
    makes a new client. A row that may be refused is sent by a client of its own (`deliver_alone`), so that its refusal
    affects no other row.
    """

    def __init__(self, settings: Mapping[str, ClientValue], name: str) -> None:
        super().__init__({**settings, "enable.gapless.guarantee": True}, name, awaited=False)
        alone = {name: value for name, value in settings.items() if name != "enable.gapless.guarantee"}
        # One record in each batch: in a shared batch, both rows would be refused because of one.
        alone = {**alone, "linger.ms": 0, "batch.num.messages": 1}
        self._alone = Producer(alone, f"{name}-alone", awaited=False)

    def deliver_alone(self, outgoing: Outgoing) -> Future[DeliveryResult]:
        """Send one record. No other record of its partition may be in flight to the same topic."""
        return self._alone.deliver_each([outgoing])

    def close(self, seconds: float) -> int:
        return super().close(seconds) + self._alone.close(seconds)
