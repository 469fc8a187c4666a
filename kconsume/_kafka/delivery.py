"""One client producer, its records in flight, and the thread that serves its delivery reports.

One daemon thread serves the reports, and sleeps without a timer while no record is in flight. The client takes the
interpreter lock once for each report. While another thread runs Python code, each report costs a thread switch, which
takes longer than sending the record. So if no thread waits for a delivery (dead letters), a thread that delivers serves
the reports that have arrived. The daemon thread then serves reports only when no delivery has come for a moment.

A producer that reports a fatal error (an idempotent one does so when it no longer knows what was written) fails
all records in flight. Such a producer is not repaired; `Producer` replaces it.

Inside the client, a delivery report is only counted. Futures end on the same thread but outside the client's call, so
that an exception of their callbacks cannot reach librdkafka.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from types import MethodType
from typing import Any, NamedTuple, cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from kconsume._config.client_settings import ClientValue
from kconsume._event_log import EventLog
from kconsume._kafka.client_log import client_log
from kconsume._kafka.outgoing import Outgoing
from kconsume._kafka.send_errors import NOT_IN_TIME, SendError, broken, sentence
from kconsume._runtime.deadlines import Deadline
from kconsume.errors import ConfigurationError, SendFailed
from kconsume.records import Partition

Report = Callable[[KafkaError | None, Message], None]

ANY_PARTITION = -1
_NOW = 0  # the client's own clock
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_CHECK_INTERVAL = 1.0
"""Seconds after which the serving thread checks whether it is still needed."""
_RETRY_INTERVAL = 0.01
"""Seconds between two attempts to put a record into a full queue."""
_IDLE = 0.02
"""Seconds without a delivery after which the serving thread serves the reports."""

_log = EventLog("output")


class DeliveryResult(NamedTuple):
    """The outcome of records that were sent together."""

    confirmed: list[bool]
    """Whether each record was confirmed."""
    why: str | None
    """Why the first unconfirmed record was not confirmed; None if all were."""


class Delivery:
    """Records that are sent together, and the future that waits for them.

    Two threads count, and no lock is taken for a record: only the serving thread changes `_reported`, only the
    delivering thread changes `_expected`. Each compares the two after its change, so one of them sees the end.

    Args:
        records: how many records there are.
        wants_offset: the future returns the partition and the offset of the record.
        wants_each: the future returns a `DeliveryResult`, and never fails.
    """

    def __init__(self, records: int, *, wants_offset: bool = False, wants_each: bool = False) -> None:
        self.confirmed: list[bool] | None = [False] * records if wants_each else None
        """Whether each record was confirmed, if that was requested."""
        self.future: Future[object] = Future()
        self.future.set_running_or_notify_cancel()  # a record in flight cannot be cancelled
        self.refusal: SendError | None = None
        """Why the first record that was not written was refused."""
        self.finished: Callable[[Delivery], None] = _ignore
        """Called when the last report has come. The thread that carries the delivery sets it."""
        self._expected = records
        self._reported = 0
        self._last: Message | None = None
        self._wants_offset = wants_offset

    @property
    def left(self) -> int:
        """How many records have no report yet."""
        return self._expected - self._reported

    def report(self, index: int, error: KafkaError | None, message: Message) -> None:
        """Count a report. Runs inside the client, on the serving thread: it must not raise."""
        if error is None:
            if self.confirmed is not None:
                self.confirmed[index] = True
        elif self.refusal is None:
            self.refusal = SendError(error, *_partition_of(message))
        self._last = message
        self._reported += 1
        if self._reported >= self._expected:
            self.finished(self)

    def cut(self, records: int) -> None:
        """Expect only this number of reports: the client took no more records."""
        self._expected = records

    def end(self, failure: SendFailed | None = None) -> None:
        """End the future: with its result, or with the failure."""
        if self.confirmed is not None:
            self.future.set_result(DeliveryResult(self.confirmed, None if failure is None else str(failure)))
        elif failure is not None:
            self.future.set_exception(failure)
        elif self._wants_offset and self._last is not None:
            self.future.set_result((_partition_of(self._last), self._last.offset()))
        else:
            self.future.set_result(None)


class DeliveryThread:
    """A client producer, and the thread that serves its delivery reports.

    Args:
        settings: all properties of the producer.
        name: a part of the thread's name.
        awaited: whether a thread waits for the deliveries, so that each confirmation is reported at once.
    """

    def __init__(self, settings: Mapping[str, ClientValue], name: str, *, awaited: bool) -> None:
        self._connection_errors: deque[KafkaError] = deque(maxlen=8)
        self._producer: Producer | None = _producer(settings, self._connection_errors.append)
        self._brokers = settings["bootstrap.servers"]
        self._timeout_seconds = _timeout(settings)
        self._finished: list[Delivery] = []
        self._pending: set[Delivery] = set()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._all_ended = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._broken = threading.Event()
        self._awaited = awaited
        self._serving = threading.Lock()
        """Held by the one thread that serves reports."""
        self._was_served = False
        self._thread = threading.Thread(target=self._serve, name=f"kconsume-producer-{name}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether this producer has failed or was closed."""
        return self._broken.is_set()

    # Handing over, on any thread

    def send(self, delivery: Delivery, outgoing: Sequence[Outgoing], partition: int) -> bool:
        """Hand the records to the client. Return False, with nothing sent, if this producer has ended.

        Args:
            delivery: counts the reports.
            outgoing: the records, encoded.
            partition: the partition of the records, or `ANY_PARTITION`.
        """
        with self._lock:
            producer = self._producer
            if producer is None or self._closing.is_set():
                return False
            self._pending.add(delivery)
            self._work.notify()
        delivery.finished = self._note
        report, handed, is_over = delivery.report, 0, self._broken.is_set
        alike = MethodType(report, 0) if delivery.confirmed is None else None
        try:
            for each in outgoing:  # this loop runs for each record, so it makes no call that can be avoided
                if is_over():
                    raise KafkaException(KafkaError(KafkaError._PURGE_QUEUE))
                on_report: Report = alike or MethodType(report, handed)  # a `partial` takes three times as long
                moment = _NOW if each.timestamp is None else (each.timestamp - _EPOCH) // _MILLISECOND
                headers = list(each.headers) or None
                # Positional arguments: with keywords the call takes 1.5 times as long.
                record: Any = each.topic, each.value, each.key, partition, on_report, None, moment, headers
                try:
                    producer.produce(*record)
                except BufferError:
                    self._produce_once_there_is_room(producer, record)
                handed += 1
        except KafkaException as error:
            return self._refuse(delivery, handed, SendError(error.args[0], str(outgoing[handed].topic), partition))
        except BaseException:
            self._cut(delivery, handed)
            raise
        if not self._awaited:
            self._serve_if_free(producer)
        return True

    def _refuse(self, delivery: Delivery, handed: int, refusal: SendError) -> bool:
        """Handle a record that the client did not take. Return False if another producer may take the delivery."""
        if _is_fatal(refusal.error):
            untouched = handed == 0 and self._forget(delivery)  # the producer failed before this delivery
            self._break(broken(refusal.error))
            return not untouched
        delivery.refusal = delivery.refusal or refusal
        self._cut(delivery, handed)
        return True

    def _cut(self, delivery: Delivery, handed: int) -> None:
        delivery.cut(handed)
        if delivery.left <= 0:
            self._end([delivery])

    def _produce_once_there_is_room(self, producer: Producer, record: Any) -> None:
        """Try again while the queue is full. Queued records are confirmed or time out; both make room."""
        deadline = Deadline(self._timeout_seconds)
        while not deadline.passed:
            if self._broken.wait(_RETRY_INTERVAL):
                raise KafkaException(KafkaError(KafkaError._PURGE_QUEUE))
            with contextlib.suppress(BufferError):
                producer.produce(*record)
                return
        raise KafkaException(KafkaError(KafkaError._QUEUE_FULL))

    # Serving the reports

    def _serve(self) -> None:
        """The body of the serving thread."""
        try:
            while (producer := self._next_producer()) is not None:
                if self._awaited or self._closing.is_set():
                    self._poll(producer, _CHECK_INTERVAL)
                elif self._is_idle():
                    self._poll(producer, 0)
        except KafkaException as error:
            self._break(broken(error.args[0]))
        except BaseException as error:  # noqa: BLE001  (every waiting future gets it)
            self._break(
                f"the thread that serves the producer failed ({error!r}): this is a fault in kconsume, please report it"
            )
        finally:
            self._producer = None

    def _serve_if_free(self, producer: Producer) -> None:
        """Serve the reports on a delivering thread, unless another thread serves them now."""
        if not self._serving.acquire(blocking=False):
            return
        try:
            self._was_served = True
            self._poll_locked(producer, 0)
        except KafkaException as error:
            self._break(broken(error.args[0]))
        finally:
            self._serving.release()

    def _is_idle(self) -> bool:
        self._was_served = False
        self._closing.wait(_IDLE)
        return not self._was_served

    def _poll(self, producer: Producer, seconds: float) -> None:
        with self._serving:
            self._poll_locked(producer, seconds)

    def _poll_locked(self, producer: Producer, seconds: float) -> None:
        try:
            producer.poll(seconds)  # raises after a fatal error
        finally:
            finished, self._finished = self._finished, []
            self._end(finished)

    def _note(self, delivery: Delivery) -> None:
        """Note that the last report has come. Runs inside the client: it must not raise."""
        self._finished.append(delivery)

    def _next_producer(self) -> Producer | None:
        """Wait until a record is in flight and return the producer; None at the end."""
        with self._lock:
            while not self._pending and not self._closing.is_set():
                self._work.wait()
            return self._producer if self._pending else None

    # Ending deliveries: the thread that removes a delivery from `_pending` ends its future

    def _end(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            if self._forget(delivery):
                refusal = delivery.refusal
                if refusal is None:
                    self._connection_errors.clear()
                _settle(delivery, None if refusal is None else SendFailed(self._why(refusal)))

    def _break(self, why: str) -> None:
        """End this producer: all deliveries in flight fail."""
        with self._lock:
            self._closing.set()
            self._broken.set()
            self._work.notify()
            pending = list(self._pending)
        for delivery in pending:
            if self._forget(delivery):
                _settle(delivery, SendFailed(why))

    def _forget(self, delivery: Delivery) -> bool:
        with self._lock:
            if delivery not in self._pending:
                return False
            self._pending.remove(delivery)
            if not self._pending:
                self._all_ended.notify_all()
            return True

    def close(self, seconds: float) -> int:
        """Wait until all records are reported, and end. Return how many were not; their futures fail.

        Args:
            seconds: the longest time to wait.
        """
        with self._lock:
            self._closing.set()
            self._work.notify()
            self._all_ended.wait_for(self._has_ended_all, seconds)
            left = sum(delivery.left for delivery in self._pending)
            producer = self._producer
        if left and producer is not None:
            producer.purge(blocking=False)
            with self._lock:  # the reports of purged records come at once and name their topics
                self._all_ended.wait_for(self._has_ended_all, _CHECK_INTERVAL)
        self._break(f"a record {NOT_IN_TIME}")
        self._thread.join(_CHECK_INTERVAL)
        return left

    def _has_ended_all(self) -> bool:
        return not self._pending

    def _why(self, refusal: SendError) -> str:
        return sentence(refusal, str(self._brokers), self._timeout_seconds, self._reason())

    def _reason(self) -> str:
        """Return the last connection error that names a cause. The error that all brokers are down names none."""
        reasons = [error.str() for error in self._connection_errors if error.code() != KafkaError._ALL_BROKERS_DOWN]
        return f" ({reasons[-1]})" if reasons else ""


def _ignore(_: Delivery) -> None:
    """The default of `Delivery.finished`."""


def _settle(delivery: Delivery, failure: SendFailed | None) -> None:
    try:
        delivery.end(failure)
    except BaseException as error:  # noqa: BLE001  (raised by a callback of the future)
        _log.error("delivery callback raised", error=error, exc_info=error)


def _producer(settings: Mapping[str, ClientValue], on_error: Callable[[KafkaError], None]) -> Producer:
    try:
        return Producer({**settings, "error_cb": on_error}, logger=client_log())
    except KafkaException as error:
        raise ConfigurationError(
            f"the Kafka client refused its configuration as a producer: {error.args[0].str()}; check the property's "
            f"name and value in kafka={{...}}"
        ) from None


def _timeout(settings: Mapping[str, ClientValue]) -> float:
    """Seconds after which the client gives up a record. The property has two names, and 0 means never."""
    given = [float(settings[name]) for name in ("message.timeout.ms", "delivery.timeout.ms") if name in settings]
    return given[-1] / 1000 if given and given[-1] else math.inf


def _is_fatal(error: KafkaError) -> bool:
    return error.fatal() or error.code() == KafkaError._FATAL


def _partition_of(message: Message) -> Partition:
    return Partition(cast(str, message.topic()), cast(int, message.partition()))
