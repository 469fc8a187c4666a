"""A producer, what it carries, and who serves its delivery reports. Only `outlet.py` has one.

One daemon thread serves the reports, and sleeps without a timer while nothing is under way. The client takes the
interpreter's lock once for every report. Beside a thread that is busy with Python, each time is a change of threads: it
costs more than the record did. So where nobody waits for a delivery (dead letters), whoever delivers next serves the
reports that are there, and the thread only those for which nobody has come by for a moment.

A line that breaks (the client says "fatal", which an idempotent producer does when it no longer knows what was written)
fails everything that it carries; it is not mended.

Delivery reports only count; futures are ended on the same thread, but outside the client's call, so that nothing that
waits for one can raise into librdkafka.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from types import MethodType
from typing import Any, NamedTuple, cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from kconsume.errors import ConfigurationError, SendFailed
from kconsume.output import Outgoing
from kconsume.records import Partition
from kconsume.refusals import NOT_IN_TIME, Refusal, broken, sentence
from kconsume.runtime.budget import Deadline
from kconsume.runtime.client_log import client_log
from kconsume.settings import ClientValue

Report = Callable[[KafkaError | None, Message], None]

ANY_PARTITION = -1
_NOW = 0  # of the client's own clock
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_GLANCE = 1.0  # how long the serving thread waits at most before it looks whether it still should
_MOMENT = 0.01
_LULL = 0.02  # how long it leaves the reports to those who deliver

_log = logging.getLogger("kconsume.output")


class Delivery(NamedTuple):
    """What became of records that were sent together."""

    confirmed: list[bool]
    why: str | None
    """Of the first that was not."""


class Shipment:
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
        self.finished: Callable[[Shipment], None] = _nobody
        """Told when the last report has come; by the line that carries it."""
        self._expected = records
        self._reported = 0
        self._last: Message | None = None
        self._wants_place = wants_place

    @property
    def left(self) -> int:
        return self._expected - self._reported

    def report(self, index: int, error: KafkaError | None, message: Message) -> None:
        """A record was confirmed, or not. Runs inside the client, on the thread that serves it: must not raise."""
        if error is None:
            if self.confirmed is not None:
                self.confirmed[index] = True
        elif self.refusal is None:
            self.refusal = Refusal(error, *_partition_of(message))
        self._last = message
        self._reported += 1
        if self._reported >= self._expected:
            self.finished(self)

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


class Line:
    """A producer, and the thread that serves its delivery reports."""

    def __init__(self, settings: Mapping[str, ClientValue], name: str, *, awaited: bool) -> None:
        """`awaited`: somebody waits for what it carries, so each confirmation is told at once."""
        self._trouble: deque[KafkaError] = deque(maxlen=8)
        self._producer: Producer | None = _producer(settings, self._trouble.append)
        self._brokers = settings["bootstrap.servers"]
        self._patience = _timeout(settings)
        self._finished: list[Shipment] = []
        self._pending: set[Shipment] = set()
        self._guard = threading.Lock()
        self._work = threading.Condition(self._guard)
        self._calm = threading.Condition(self._guard)
        self._closing = threading.Event()
        self._over = threading.Event()
        self._is_awaited = awaited
        self._serving = threading.Lock()
        """One thread at a time: it alone counts what is reported."""
        self._was_served = False
        self._thread = threading.Thread(target=self._serve, name=f"kconsume-outlet-{name}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return self._over.is_set()

    # Handing over, on any thread

    def carry(self, shipment: Shipment, outgoing: Sequence[Outgoing], partition: int) -> bool:
        """Hand the records to the client; False, with nothing done, if this line has ended."""
        with self._guard:
            producer = self._producer
            if producer is None or self._closing.is_set():
                return False
            self._pending.add(shipment)
            self._work.notify()
        shipment.finished = self._note
        report, handed, is_over = shipment.report, 0, self._over.is_set
        alike = MethodType(report, 0) if shipment.confirmed is None else None
        try:
            for each in outgoing:  # nothing is called here that need not be: it is gone through for every record
                if is_over():
                    raise KafkaException(KafkaError(KafkaError._PURGE_QUEUE))
                told: Report = alike or MethodType(report, handed)  # a `partial` takes thrice as long
                moment = _NOW if each.timestamp is None else (each.timestamp - _EPOCH) // _MILLISECOND
                headers = list(each.headers) or None
                # By position: the client takes half as long again to find them by their names.
                record: Any = each.topic, each.value, each.key, partition, told, None, moment, headers
                try:
                    producer.produce(*record)
                except BufferError:
                    self._produce_once_there_is_room(producer, record)
                handed += 1
        except KafkaException as error:
            return self._refuse(shipment, handed, Refusal(error.args[0], str(outgoing[handed].topic), partition))
        except BaseException:
            self._cut(shipment, handed)
            raise
        if not self._is_awaited:
            self._serve_in_passing(producer)
        return True

    def _refuse(self, shipment: Shipment, handed: int, refusal: Refusal) -> bool:
        """The client did not take the next record; False if another line may take the shipment."""
        if _is_fatal(refusal.error):
            untouched = handed == 0 and self._forget(shipment)  # it broke while nobody used it
            self._break(broken(refusal.error))
            return not untouched
        shipment.refusal = shipment.refusal or refusal
        self._cut(shipment, handed)
        return True

    def _cut(self, shipment: Shipment, handed: int) -> None:
        shipment.cut(handed)
        if shipment.left <= 0:
            self._end([shipment])

    def _produce_once_there_is_room(self, producer: Producer, record: Any) -> None:
        """What is in the queue is confirmed, or its time is up: either way there will be room."""
        deadline = Deadline(self._patience)
        while not deadline.passed:
            if self._over.wait(_MOMENT):
                raise KafkaException(KafkaError(KafkaError._PURGE_QUEUE))
            with contextlib.suppress(BufferError):
                producer.produce(*record)
                return
        raise KafkaException(KafkaError(KafkaError._QUEUE_FULL))

    # Serving what was reported

    def _serve(self) -> None:
        """The serving thread."""
        try:
            while (producer := self._awaited()) is not None:
                if self._is_awaited or self._closing.is_set():
                    self._poll(producer, _GLANCE)
                elif self._nobody_comes_by():
                    self._poll(producer, 0)
        except KafkaException as error:
            self._break(broken(error.args[0]))
        except BaseException as error:  # noqa: BLE001  (told to all who wait)
            self._break(f"the thread that serves the producer failed ({error!r}): this is a fault of kconsume")
        finally:
            self._producer = None

    def _serve_in_passing(self, producer: Producer) -> None:
        """By a thread that delivers; not if another is at it."""
        if not self._serving.acquire(blocking=False):
            return
        try:
            self._was_served = True
            self._poll_alone(producer, 0)
        except KafkaException as error:
            self._break(broken(error.args[0]))
        finally:
            self._serving.release()

    def _nobody_comes_by(self) -> bool:
        self._was_served = False
        self._closing.wait(_LULL)
        return not self._was_served

    def _poll(self, producer: Producer, seconds: float) -> None:
        with self._serving:
            self._poll_alone(producer, seconds)

    def _poll_alone(self, producer: Producer, seconds: float) -> None:
        try:
            producer.poll(seconds)  # raises when the client has failed for good
        finally:
            finished, self._finished = self._finished, []
            self._end(finished)

    def _note(self, shipment: Shipment) -> None:
        """Inside the client: must not raise."""
        self._finished.append(shipment)

    def _awaited(self) -> Producer | None:
        """The producer, once there is something to wait for; None at the end."""
        with self._guard:
            while not self._pending and not self._closing.is_set():
                self._work.wait()
            return self._producer if self._pending else None

    # Ending shipments: whoever takes one out of `_pending` ends it, and nobody else

    def _end(self, shipments: Iterable[Shipment]) -> None:
        for shipment in shipments:
            if self._forget(shipment):
                refusal = shipment.refusal
                if refusal is None:
                    self._trouble.clear()
                _settle(shipment, None if refusal is None else SendFailed(self._why(refusal)))

    def _break(self, why: str) -> None:
        """The end of this line: what it carries has failed."""
        with self._guard:
            self._closing.set()
            self._over.set()
            self._work.notify()
            pending = list(self._pending)
        for shipment in pending:
            if self._forget(shipment):
                _settle(shipment, SendFailed(why))

    def _forget(self, shipment: Shipment) -> bool:
        with self._guard:
            if shipment not in self._pending:
                return False
            self._pending.remove(shipment)
            if not self._pending:
                self._calm.notify_all()
            return True

    def close(self, seconds: float) -> int:
        with self._guard:
            self._closing.set()
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


def _nobody(_: Shipment) -> None:
    """Is told of a shipment that no line carries yet."""


def _settle(shipment: Shipment, failure: SendFailed | None) -> None:
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
