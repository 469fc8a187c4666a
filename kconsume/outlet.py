"""The way out to Kafka: the producer of everything that an app sends. (`cli/redrive_topic.py` has one in transactions.)

An `Outlet` takes records from any thread and answers with a future that ends when the broker has confirmed all of
them. Behind it is a `_Line`: a producer, and one daemon thread that serves its delivery reports. The thread sleeps
without a timer while nothing is under way. A line that breaks (the client says "fatal", which an idempotent producer
does when it no longer knows what was written) fails everything that it carries, and the next delivery makes a new one.

Delivery reports only count; futures are ended on the same thread, but outside the client's call, so that nothing that
waits for one can raise into librdkafka. What a record is and how it is encoded is `output.py`'s.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from kconsume.errors import ConfigurationError, SendFailed
from kconsume.output import Outgoing
from kconsume.records import Partition
from kconsume.refusals import NOT_IN_TIME, Refusal, broken, sentence
from kconsume.runtime.budget import Deadline
from kconsume.runtime.client_log import client_log
from kconsume.settings import ClientValue, connection_settings

Report = Callable[[KafkaError | None, Message], None]

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
    # handed over: the broker and the client's own thread then took 50 µs of CPU for a record, and at 5 ms 6 µs.
    "linger.ms": 5,
}
# What a confirmed delivery stands on; the person's own settings do not reach them.
_KEPT: Mapping[str, ClientValue] = {
    "acks": "all",
    "enable.idempotence": True,  # a retry neither doubles nor reorders
    "delivery.report.only.error": False,
}
_LETTERS: Mapping[str, ClientValue] = {"linger.ms": 10}
_DROPPED = {*_KEPT, "request.required.acks", "transactional.id", "transaction.timeout.ms", "log_level"}

_ANY_PARTITION = -1
_NOW = 0  # of the client's own clock
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_GLANCE = 1.0  # how long the serving thread waits at most before it looks whether it still should
_MOMENT = 0.01
_FRAMING = 64  # bytes of a record on the wire that are neither key, value nor header

_log = logging.getLogger("kconsume.output")


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

    def __init__(self, settings: Mapping[str, ClientValue], name: str) -> None:
        self.name = name
        self._settings = dict(settings)
        self._guard = threading.Lock()
        self._line: _Line | None = None
        self._home: int | None = None
        self._closed = False

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
        shipment = _Shipment(len(outgoing))
        if outgoing:
            self._carry(shipment, outgoing, _ANY_PARTITION)
        else:
            shipment.end()
        return cast("Future[None]", shipment.future)

    def deliver_each(self, outgoing: Sequence[Outgoing]) -> Future[Delivery]:
        """As `deliver`, for who wants to know of each record whether it was confirmed. The future does not fail."""
        shipment = _Shipment(len(outgoing), wants_each=True)
        self._carry(shipment, outgoing, _ANY_PARTITION)
        return cast("Future[Delivery]", shipment.future)

    def write(self, outgoing: Outgoing, partition: int | None = None) -> Future[tuple[Partition, int]]:
        """Send one `encoded` record, to this partition if one is given; the future says where it was written."""
        shipment = _Shipment(1, wants_place=True)
        self._carry(shipment, [outgoing], _ANY_PARTITION if partition is None else partition)
        return cast("Future[tuple[Partition, int]]", shipment.future)

    def close(self, seconds: float) -> int:
        """Wait until everything is confirmed, at most so long; how many records were not. Their futures fail."""
        if self._is_forked():
            return 0  # the threads behind the producer are the parent's
        with self._guard:
            self._closed, line = True, self._line
        return 0 if line is None else line.close(seconds)

    def _carry(self, shipment: _Shipment, outgoing: Sequence[Outgoing], partition: int) -> None:
        while not self._current().carry(shipment, outgoing, partition):
            pass  # that line ended a moment ago, and a new one takes its place

    def _current(self) -> _Line:
        if self._is_forked():
            raise SendFailed(
                f"outlet {self.name!r} belongs to process {self._home}, of which this one is a fork, and cannot send "
                f"from here: start the app in this process, or start processes by spawn"
            )
        with self._guard:
            if self._closed:
                raise SendFailed(f"outlet {self.name!r} is closed: nothing can be sent after the app has stopped")
            if self._line is None or self._line.ended:
                self._line = _Line(self._settings, self.name)
                self._home = os.getpid()
            return self._line

    def _is_forked(self) -> bool:
        return self._home is not None and self._home != os.getpid()


class Delivery(NamedTuple):
    """What became of records that were sent together."""

    confirmed: list[bool]
    why: str | None
    """Of the first that was not."""


class _Shipment:
    """Records that leave together, and the future that waits for them.

    Two threads count, and no lock is taken for a record: only the serving thread changes `_reported`, only the
    delivering one changes `_expected`, and each compares after its change, so that one of them sees the end.
    """

    def __init__(self, records: int, *, wants_place: bool = False, wants_each: bool = False) -> None:
        self.confirmed: list[bool] | None = [False] * records if wants_each else None
        """Of each record, whether it was; where that is asked for."""
        self.future: Future[object] = Future()
        self.future.set_running_or_notify_cancel()  # what is on its way cannot be called back
        self.refusal: Refusal | None = None
        """The first of its records that was not written."""
        self._expected = records
        self._reported = 0
        self._last: Message | None = None
        self._wants_place = wants_place

    @property
    def left(self) -> int:
        return self._expected - self._reported

    def report(self, index: int, error: KafkaError | None, message: Message) -> bool:
        """A record was confirmed, or not; whether it was the last. Runs inside the client: must not raise."""
        if error is None:
            if self.confirmed is not None:
                self.confirmed[index] = True
        elif self.refusal is None:
            self.refusal = Refusal(error, *_partition_of(message))
        self._last = message
        self._reported += 1
        return self._reported >= self._expected

    def cut(self, records: int) -> None:
        """Only so many were handed over."""
        self._expected = records

    def end(self, failure: SendFailed | None = None) -> None:
        if self.confirmed is not None:
            self.future.set_result(Delivery(self.confirmed, None if failure is None else str(failure)))
        elif failure is not None:
            self.future.set_exception(failure)
        elif self._wants_place and self._last is not None:
            self.future.set_result((_partition_of(self._last), self._last.offset()))
        else:
            self.future.set_result(None)


class _Line:
    """A producer, and the thread that serves its delivery reports."""

    def __init__(self, settings: Mapping[str, ClientValue], name: str) -> None:
        self._trouble: deque[KafkaError] = deque(maxlen=8)
        self._producer: Producer | None = _producer(settings, self._trouble.append)
        self._brokers = settings["bootstrap.servers"]
        self._patience = _timeout(settings)
        self._finished: list[_Shipment] = []
        self._pending: set[_Shipment] = set()
        self._guard = threading.Lock()
        self._work = threading.Condition(self._guard)
        self._calm = threading.Condition(self._guard)
        self._closing = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"kconsume-outlet-{name}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return self._over.is_set()

    # Handing over, on any thread

    def carry(self, shipment: _Shipment, outgoing: Sequence[Outgoing], partition: int) -> bool:
        """Hand the records to the client; False, with nothing done, if this line has ended."""
        with self._guard:
            producer = self._producer
            if producer is None or self._closing:
                return False
            self._pending.add(shipment)
            self._work.notify()
        report, handed = partial(self._report, shipment, 0), 0
        try:
            for each in outgoing:
                if shipment.confirmed is not None:  # else one object does for all
                    report = partial(self._report, shipment, handed)
                self._hand_over(producer, each, partition, report)
                handed += 1
        except KafkaException as error:
            return self._refuse(shipment, handed, Refusal(error.args[0], str(outgoing[handed].topic), partition))
        except BaseException:
            self._cut(shipment, handed)
            raise
        return True

    def _refuse(self, shipment: _Shipment, handed: int, refusal: Refusal) -> bool:
        """The client did not take the next record; False if another line may take the shipment."""
        if _is_fatal(refusal.error):
            untouched = handed == 0 and self._forget(shipment)  # it broke while nobody used it
            self._break(broken(refusal.error))
            return not untouched
        shipment.refusal = shipment.refusal or refusal
        self._cut(shipment, handed)
        return True

    def _cut(self, shipment: _Shipment, handed: int) -> None:
        shipment.cut(handed)
        if shipment.left <= 0:
            self._end([shipment])

    def _hand_over(self, producer: Producer, each: Outgoing, partition: int, report: Report) -> None:
        deadline: Deadline | None = None
        value: Any = each.value  # bytes or None, as all of it was `encoded`
        topic: Any = each.topic
        headers: Any = list(each.headers) or None
        moment = _NOW if each.timestamp is None else (each.timestamp - _EPOCH) // _MILLISECOND
        while not self._over.is_set():
            try:
                producer.produce(
                    topic, value, each.key, partition, on_delivery=report, timestamp=moment, headers=headers
                )
                return
            except BufferError:
                # What is in the queue is confirmed, or its time is up: either way there will be room.
                deadline = deadline or Deadline(self._patience)
                if deadline.passed:
                    raise KafkaException(KafkaError(KafkaError._QUEUE_FULL)) from None
                self._over.wait(_MOMENT)
        raise KafkaException(KafkaError(KafkaError._PURGE_QUEUE))

    # Inside the client, on the serving thread: must not raise

    def _report(self, shipment: _Shipment, index: int, error: KafkaError | None, message: Message) -> None:
        if shipment.report(index, error, message):
            self._finished.append(shipment)

    # The serving thread

    def _serve(self) -> None:
        try:
            while (producer := self._awaited()) is not None:
                self._poll(producer)
        except KafkaException as error:
            self._break(broken(error.args[0]))
        except BaseException as error:  # noqa: BLE001  (told to all who wait)
            self._break(f"the thread that serves the producer failed ({error!r}): this is a fault of kconsume")
        finally:
            self._producer = None

    def _poll(self, producer: Producer) -> None:
        try:
            producer.poll(_GLANCE)  # raises when the client has failed for good
        finally:
            finished, self._finished = self._finished, []
            self._end(finished)

    def _awaited(self) -> Producer | None:
        """The producer, once there is something to wait for; None at the end."""
        with self._guard:
            while not self._pending and not self._closing:
                self._work.wait()
            return self._producer if self._pending else None

    # Ending shipments: whoever takes one out of `_pending` ends it, and nobody else

    def _end(self, shipments: Iterable[_Shipment]) -> None:
        for shipment in shipments:
            if self._forget(shipment):
                refusal = shipment.refusal
                if refusal is None:
                    self._trouble.clear()
                _settle(shipment, None if refusal is None else SendFailed(self._why(refusal)))

    def _break(self, why: str) -> None:
        """The end of this line: what it carries has failed."""
        with self._guard:
            self._closing = True
            self._over.set()
            self._work.notify()
            pending = list(self._pending)
        for shipment in pending:
            if self._forget(shipment):
                _settle(shipment, SendFailed(why))

    def _forget(self, shipment: _Shipment) -> bool:
        with self._guard:
            if shipment not in self._pending:
                return False
            self._pending.remove(shipment)
            if not self._pending:
                self._calm.notify_all()
            return True

    def close(self, seconds: float) -> int:
        with self._guard:
            self._closing = True
            self._work.notify()
            self._calm.wait_for(self._is_calm, seconds)
            left = sum(shipment.left for shipment in self._pending)
            producer = self._producer
        if left and producer is not None:
            producer.purge(blocking=False)
            with self._guard:  # the reports of what was purged come at once, and say for which topic
                self._calm.wait_for(self._is_calm, _GLANCE)
        self._break(f"a record {NOT_IN_TIME}")
        self._thread.join(_GLANCE)
        return left

    def _is_calm(self) -> bool:
        return not self._pending

    def _why(self, refusal: Refusal) -> str:
        return sentence(refusal, str(self._brokers), self._patience, self._reason())

    def _reason(self) -> str:
        """What the client said of its connections; that all are down comes last and tells nothing."""
        reasons = [trouble.str() for trouble in self._trouble if trouble.code() != KafkaError._ALL_BROKERS_DOWN]
        return f" ({reasons[-1]})" if reasons else ""


def _settle(shipment: _Shipment, failure: SendFailed | None) -> None:
    try:
        shipment.end(failure)
    except BaseException:  # noqa: BLE001  (raised by what others have added to the future)
        _log.exception("a callback of a delivery raised")


def _producer(settings: Mapping[str, ClientValue], on_error: Callable[[KafkaError], None]) -> Producer:
    try:
        return Producer({**settings, "error_cb": on_error}, logger=client_log())
    except KafkaException as error:
        raise ConfigurationError(
            f"the Kafka client refused its configuration as a producer: {error.args[0].str()}; check the property's "
            f"name and value in kafka={{...}}"
        ) from None


def _timeout(settings: Mapping[str, ClientValue]) -> float:
    """Seconds after which the client gives a record up; it knows the property by two names, and takes 0 as never."""
    given = [float(settings[name]) for name in ("message.timeout.ms", "delivery.timeout.ms") if name in settings]
    return given[-1] / 1000 if given and given[-1] else math.inf


def _is_fatal(error: KafkaError) -> bool:
    return error.fatal() or error.code() == KafkaError._FATAL


def _partition_of(message: Message) -> Partition:
    return Partition(cast(str, message.topic()), cast(int, message.partition()))
