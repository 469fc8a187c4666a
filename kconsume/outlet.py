"""The way out to Kafka: the producer of everything that an app sends. (`cli/redrive_topic.py` has one in transactions.)

An `Outlet` takes records from any thread and answers with a future that ends when the broker has confirmed all of
them. Behind it is a `Line` (`line.py`), made by the first delivery; one that has broken is replaced by the next. Which
properties a producer has is decided here; what a record is and how it is encoded is `output.py`'s.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import cast

from kconsume.errors import SendFailed
from kconsume.line import ANY_PARTITION, Delivery, Line, Shipment
from kconsume.output import Outgoing
from kconsume.records import Partition
from kconsume.settings import ClientValue, connection_settings

# Where they differ from the client's own, and why.
DEFAULTS: Mapping[str, ClientValue] = {
    # A whole slice is handed over and waited for, so nothing is gained by lingering: at 0, 1 and 5 ms one record
    # took 0.4, 1.5 and 5.6 ms on a broker next door, and a thousand 3.6, 3.6 and 7.5 ms.
    "linger.ms": 0,
    "message.timeout.ms": 60_000,  # 300 s: a partition would stand still that long before it says why
    "queue.buffering.max.kbytes": 65_536,  # 1 GB: memory is bounded whatever the broker does
    "socket.keepalive.enable": True,  # a dead connection is noticed behind a firewall
}
RELAY_DEFAULTS: Mapping[str, ClientValue] = {
    # Nobody waits for a row of an outbox, and at 0 the client sends a lot in dozens of requests while it is still being
    # handed over: the broker and the client's own thread then took 50 µs of CPU for a record, and at 5 ms 6 µs. At 25
    # more of them are in a request, and beside the 100 ms for which rows are collected it is not noticed.
    "linger.ms": 25,
}
# What a confirmed delivery stands on; the person's own settings do not reach them.
_KEPT: Mapping[str, ClientValue] = {
    "acks": "all",
    "enable.idempotence": True,  # a retry neither doubles nor reorders
    "delivery.report.only.error": False,
}
_LETTERS: Mapping[str, ClientValue] = {"linger.ms": 10}
_DROPPED = {*_KEPT, "request.required.acks", "transactional.id", "transaction.timeout.ms", "log_level"}

_FRAMING = 64  # bytes of a record on the wire that are neither key, value nor header


def producer_settings(brokers: str, overrides: Mapping[str, ClientValue]) -> dict[str, ClientValue]:
    """All properties of the producer: ours, the person's over them, then what a confirmed delivery needs.

    What only consumers know, the client passes over (`connection_settings`).
    """
    chosen = {name: value for name, value in overrides.items() if name not in _DROPPED}
    client = {"client.id": f"kconsume-{socket.gethostname()}-{os.getpid()}"}
    return {**DEFAULTS, **client, **connection_settings(brokers, chosen), **_KEPT}


def letter_settings(brokers: str, overrides: Mapping[str, ClientValue]) -> dict[str, ClientValue]:
    """Of the producer of letters that nobody waits for. It sends several in one request: without lingering, its thread
    is busy all the time while many records fail (on a busy machine 200 µs of CPU a letter, and 12 to 25 with it)."""
    return producer_settings(brokers, {**_LETTERS, **overrides})


def relay_settings(brokers: str, overrides: Mapping[str, ClientValue]) -> dict[str, ClientValue]:
    """Of the producer that sends what an outbox keeps: it never gives up by itself, and so what it sent before an
    outage is not sent again after it."""
    chosen = {name: value for name, value in overrides.items() if name != "delivery.timeout.ms"}
    return {**producer_settings(brokers, {**RELAY_DEFAULTS, **chosen}), "message.timeout.ms": 0}


def most_bytes(settings: Mapping[str, ClientValue]) -> int:
    """How many bytes of a record's own fit into a message, with these properties of the client."""
    return int(settings.get("message.max.bytes", 1_000_000)) - _FRAMING


class Outlet:
    """Delivers records to Kafka, from any thread. `name` is for its thread and its errors.

    The producer is made by the first delivery (or by `open`), in the process that makes that delivery.
    """

    def __init__(self, settings: Mapping[str, ClientValue], name: str, *, awaited: bool = True) -> None:
        """`awaited`: somebody waits for deliveries, so that each is told at once when it is confirmed; else within
        some hundredths of a second."""
        self.name = name
        self._settings = dict(settings)
        self._awaited = awaited
        self._guard = threading.Lock()
        self._line: Line | None = None
        self._home: int | None = None
        self._closed = False

    @property
    def largest_batch(self) -> int:
        """Bytes of the largest batch that its producer makes: one large record, or several."""
        settings = self._settings
        return max(int(settings.get("message.max.bytes", 1_000_000)), int(settings.get("batch.size", 1_000_000)))

    @property
    def most(self) -> int:
        """How many bytes the key, the value and the headers of a record may have together."""
        return most_bytes(self._settings)

    def open(self) -> None:
        """Connect now: settings that the client refuses are an error at the start, and the first record is not held
        up by the half second in which an idempotent producer gets its id."""
        self._current()

    def deliver(self, outgoing: Sequence[Outgoing]) -> Future[None]:
        """Send records that were `encoded`, in this order. The future ends when the broker has confirmed every one,
        or with `SendFailed`; then some may have been written, and none is still under way.

        Waits only while the client's queue is full. Raises `SendFailed` if the outlet is closed, or another process's.
        What is added to the future runs on the serving thread: it must neither wait nor deliver.
        """
        shipment = Shipment(len(outgoing))
        if outgoing:
            self._carry(shipment, outgoing, ANY_PARTITION)
        else:
            shipment.end()
        return cast("Future[None]", shipment.future)

    def deliver_each(self, outgoing: Sequence[Outgoing]) -> Future[Delivery]:
        """As `deliver`, for who wants to know of each record whether it was confirmed. The future does not fail."""
        shipment = Shipment(len(outgoing), wants_each=True)
        self._carry(shipment, outgoing, ANY_PARTITION)
        return cast("Future[Delivery]", shipment.future)

    def write(self, outgoing: Outgoing, partition: int | None = None) -> Future[tuple[Partition, int]]:
        """Send one `encoded` record, to this partition if one is given; the future says where it was written."""
        shipment = Shipment(1, wants_place=True)
        self._carry(shipment, [outgoing], ANY_PARTITION if partition is None else partition)
        return cast("Future[tuple[Partition, int]]", shipment.future)

    def close(self, seconds: float) -> int:
        """Wait until everything is confirmed, at most so long; how many records were not. Their futures fail."""
        if self._is_forked():
            return 0  # the threads behind the producer are the parent's
        with self._guard:
            self._closed, line = True, self._line
        return 0 if line is None else line.close(seconds)

    def _carry(self, shipment: Shipment, outgoing: Sequence[Outgoing], partition: int) -> None:
        while not self._current().carry(shipment, outgoing, partition):
            pass  # that line ended a moment ago, and a new one takes its place

    def _current(self) -> Line:
        if self._is_forked():
            raise SendFailed(
                f"outlet {self.name!r} belongs to process {self._home}, of which this one is a fork, and cannot send "
                f"from here: start the app in this process, or start processes by spawn"
            )
        with self._guard:
            if self._closed:
                raise SendFailed(f"outlet {self.name!r} is closed: nothing can be sent after the app has stopped")
            if self._line is None or self._line.ended:
                self._line = Line(self._settings, self.name, awaited=self._awaited)
                self._home = os.getpid()
            return self._line

    def _is_forked(self) -> bool:
        return self._home is not None and self._home != os.getpid()


class RelayOutlet(Outlet):
    """The way out of what an outbox keeps: what was handed over for a partition of a topic is written in its order.

    An idempotent producer goes on behind a batch that the broker has refused, and what stands behind it passes. With
    `enable.gapless.guarantee` it fails instead, with all that is under way, and the next delivery makes a new one. A
    row that may be refused goes by a producer of its own (`deliver_alone`), so that its refusal disturbs nobody.
    """

    def __init__(self, settings: Mapping[str, ClientValue], name: str) -> None:
        super().__init__({**settings, "enable.gapless.guarantee": True}, name, awaited=False)
        alone = {name: value for name, value in settings.items() if name != "enable.gapless.guarantee"}
        # Each in a batch of its own: in one with a row of another partition, both would be refused for one of them.
        alone = {**alone, "linger.ms": 0, "batch.num.messages": 1}
        self._alone = Outlet(alone, f"{name}-alone", awaited=False)

    def deliver_alone(self, outgoing: Outgoing) -> Future[Delivery]:
        """Send one record while no other to its topic is under way for the same partition."""
        return self._alone.deliver_each([outgoing])

    def close(self, seconds: float) -> int:
        return super().close(seconds) + self._alone.close(seconds)
