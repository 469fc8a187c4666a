"""What is logged inside a handler says which record it is about, whatever logging set-up shows it."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import logging
import logging.handlers
import pickle
import queue
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kconsume import _log_context as logs
from kconsume._console import LOG_FORMAT, JsonLines, TextLines
from kconsume._log_context import LogContext
from tests.unit.fakes import FakeMessage, messages_at

NAMES = ("topic", "partition", "offset", "attempt")
PLACED = "%(topic)s/%(partition)s@%(offset)s #%(attempt)s %(message)s"


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    before = logging.getLogRecordFactory()
    logs.install()
    yield
    logging.setLogRecordFactory(before)


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """A logger that shows what it gets only to the handlers that a test adds."""
    logger = logging.getLogger("tests.logs")
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept(log: logging.Logger) -> Kept:
    handler = Kept()
    log.addHandler(handler)
    return handler


class Elsewhere(pickle.Unpickler):
    """Reads pickles where kconsume is not installed."""

    def find_class(self, module: str, name: str) -> object:
        assert not module.startswith("kconsume"), f"needs {module}.{name}"
        return super().find_class(module, name)


@contextmanager
def in_hand(message: FakeMessage, attempt: int = 1) -> Iterator[None]:
    token = logs.enter([message], None, attempt)
    yield
    logs.leave(token)


ORDER = FakeMessage(topic="orders", partition=3, offset=1042)


def shown_by(formatter: logging.Formatter, log: logging.Logger) -> io.StringIO:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    log.addHandler(handler)
    return stream


def values(record: logging.LogRecord) -> tuple[object, ...]:
    return tuple(getattr(record, name) for name in NAMES)


class TestHere:
    def test_there_is_no_place_outside_handlers(self) -> None:
        assert logs.here() is None

    def test_it_is_that_of_the_message_which_the_iterator_handed_out_last(self) -> None:
        messages = messages_at([5, 6, 9])
        turn = iter(messages)
        token = logs.enter(messages, turn)
        assert [logs.here() for _ in turn] == [LogContext("orders", 0, offset, 1) for offset in (5, 6, 9)]
        logs.leave(token)
        assert logs.here() is None

    def test_it_is_that_of_the_message_whose_value_is_decoded(self) -> None:
        messages = messages_at([5, 6, 9])
        turn = iter(messages)
        token = logs.enter(messages, turn)
        assert [logs.here() for _ in map(FakeMessage.value, turn)] == [
            LogContext("orders", 0, offset, 1) for offset in (5, 6, 9)
        ]
        logs.leave(token)

    def test_before_the_first_message_and_without_any_there_is_none(self) -> None:
        for messages in (messages_at([5, 6]), []):
            token = logs.enter(messages, iter(messages))
            assert logs.here() is None
            logs.leave(token)
        token = logs.enter([], None)
        assert logs.here() is None
        logs.leave(token)

    def test_of_a_batch_it_is_that_of_its_first_record(self) -> None:
        token = logs.enter(messages_at([5, 6, 9]), None, attempt=2)
        assert logs.here() == LogContext("orders", 0, 5, 2)
        logs.leave(token)

    def test_what_was_before_holds_again_after_a_record_within_a_record(self) -> None:
        with in_hand(ORDER):
            with in_hand(FakeMessage(topic="payments", offset=7), attempt=2):
                assert logs.here() == LogContext("payments", 0, 7, 2)
            assert logs.here() == LogContext("orders", 3, 1042, 1)

    def test_it_is_written_as_everywhere_else(self) -> None:
        assert str(LogContext("orders", 3, 1042, 2)) == "orders/3@1042"


class TestAtTheSameTime:
    def test_threads_that_take_turns_log_each_its_own_record(self, log: logging.Logger, kept: Kept) -> None:
        together = threading.Barrier(3, timeout=60)

        def walk(topic: str) -> None:
            messages = [FakeMessage(topic=topic, offset=offset) for offset in range(20)]
            turn = iter(messages)
            token = logs.enter(messages, turn)
            for message in turn:
                together.wait()
                log.info("%s %d", topic, message.offset())
            logs.leave(token)

        threads = [threading.Thread(target=walk, args=[topic]) for topic in ("a", "b", "c")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(kept.records) == 60
        assert all(record.args == values(record)[::2] for record in kept.records)

    def test_tasks_that_take_turns_in_one_thread_log_each_its_own_record(self, log: logging.Logger, kept: Kept) -> None:
        async def handle(message: FakeMessage, messages: Sequence[FakeMessage]) -> None:
            token = logs.enter(messages, None)
            for _ in range(5):
                await asyncio.sleep(0)
                log.info("%s %d", message.topic(), message.offset())
                await asyncio.to_thread(log.info, "%s %d", message.topic(), message.offset())
            logs.leave(token)
            assert logs.here() is None

        async def all_of_them() -> None:
            await asyncio.gather(*(handle(m, [m]) for m in messages_at(range(8))))

        asyncio.run(all_of_them())
        assert len(kept.records) == 80
        assert {record.args for record in kept.records} == {("orders", offset) for offset in range(8)}
        assert all(record.args == values(record)[::2] for record in kept.records)

    def test_control_with_one_walk_for_all_the_tasks_would_log_the_wrong_record(
        self, log: logging.Logger, kept: Kept
    ) -> None:
        async def handle(message: FakeMessage) -> None:
            await asyncio.sleep(0)
            log.info("%s %d", message.topic(), message.offset())

        async def all_of_them() -> None:
            messages = messages_at(range(8))
            turn = iter(messages)
            token = logs.enter(messages, turn)
            await asyncio.gather(*[handle(message) for message in turn])
            logs.leave(token)

        asyncio.run(all_of_them())
        assert not all(record.args == values(record)[::2] for record in kept.records)


class TestLogRecords:
    def test_outside_handlers_they_are_as_python_makes_them(self, log: logging.Logger, kept: Kept) -> None:
        log.info("outside")
        (record,) = kept.records
        assert type(record) is logging.LogRecord
        assert type(vars(record)) is dict
        assert not any(hasattr(record, name) for name in NAMES)

    def test_the_place_is_there_before_anybody_asks_for_the_message(self, log: logging.Logger, kept: Kept) -> None:
        with in_hand(ORDER, attempt=2):
            log.info("inside")
        (record,) = kept.records
        assert values(record) == ("orders", 3, 1042, 2)
        assert {name: value for name, value in vars(record).items() if name in NAMES} == {
            "topic": "orders", "partition": 3, "offset": 1042, "attempt": 2,
        }  # fmt: skip
        assert all(name in vars(record) for name in NAMES)

    def test_a_filter_can_use_it(self, log: logging.Logger, kept: Kept) -> None:
        kept.addFilter(lambda record: getattr(record, "partition", None) == 3)
        log.info("outside")
        with in_hand(ORDER):
            log.info("inside")
        assert [record.getMessage() for record in kept.records] == ["inside"]

    def test_a_format_can_name_it(self, log: logging.Logger) -> None:
        stream = shown_by(logging.Formatter(PLACED), log)
        with in_hand(ORDER):
            log.info("reserved %d", 4)
        assert stream.getvalue() == "orders/3@1042 #1 reserved 4\n"

    @pytest.mark.parametrize(
        ("style", "form"), [("%", "%(topic)s %(message)s"), ("{", "{topic} {message}"), ("$", "$topic $message")]
    )
    def test_a_format_with_defaults_serves_lines_from_everywhere(
        self, log: logging.Logger, style: str, form: str
    ) -> None:
        stream = shown_by(logging.Formatter(form, style=style, defaults={"topic": "-"}), log)  # type: ignore[arg-type]
        log.info("outside")
        with in_hand(ORDER):
            log.info("inside")
        assert stream.getvalue() == "- outside\norders inside\n"

    def test_what_a_person_gives_as_extra_wins(self, log: logging.Logger, kept: Kept) -> None:
        with in_hand(ORDER):
            log.info("moved", extra={"topic": "elsewhere", "attempt": "x", "customer": 7})
        (record,) = kept.records
        assert values(record) == ("elsewhere", 3, 1042, "x")
        assert vars(record)["customer"] == 7

    def test_an_extra_that_logging_refuses_is_still_refused(self, log: logging.Logger, kept: Kept) -> None:
        with in_hand(ORDER), pytest.raises(KeyError, match="overwrite"):
            log.info("moved", extra={"name": "mine"})

    def test_control_a_plain_attribute_would_break_a_persons_extra(self, log: logging.Logger) -> None:
        def plain(*args: object, **kwargs: object) -> logging.LogRecord:
            record = logging.LogRecord(*args, **kwargs)  # type: ignore[arg-type]
            record.topic = "orders"
            return record

        logging.setLogRecordFactory(plain)
        with pytest.raises(KeyError, match="overwrite"):
            log.info("moved", extra={"topic": "elsewhere"})

    def test_the_place_is_that_of_the_moment_of_logging_not_of_formatting(
        self, log: logging.Logger, kept: Kept
    ) -> None:
        messages = messages_at([5, 6])
        turn = iter(messages)
        token = logs.enter(messages, turn)
        for _ in turn:
            log.info("inside")
        logs.leave(token)
        lines: list[str] = []
        later = threading.Thread(target=lambda: lines.extend(logging.Formatter(PLACED).format(r) for r in kept.records))
        later.start()
        later.join()
        assert lines == ["orders/0@5 #1 inside", "orders/0@6 #1 inside"]

    def test_copies_and_pickles_keep_it(self, log: logging.Logger, kept: Kept) -> None:
        with in_hand(ORDER):
            log.info("inside %s", "a")
        (record,) = kept.records
        for again in (copy.copy(record), copy.deepcopy(record), pickle.loads(pickle.dumps(record))):
            assert values(again) == ("orders", 3, 1042, 1)
            assert again.getMessage() == "inside a"
            assert vars(again) == vars(record)

    def test_a_pickle_can_be_read_without_kconsume(self, log: logging.Logger, kept: Kept) -> None:
        with in_hand(ORDER):
            log.info("inside")
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            Elsewhere(io.BytesIO(pickle.dumps(kept.records[0], protocol))).load()

    def test_it_passes_through_a_queue(self, log: logging.Logger) -> None:
        lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        log.addHandler(logging.handlers.QueueHandler(lines))
        end = Kept()
        listener = logging.handlers.QueueListener(lines, end)
        listener.start()
        with in_hand(ORDER):
            log.info("inside")
        listener.stop()
        assert [values(record) for record in end.records] == [("orders", 3, 1042, 1)]

    def test_it_passes_through_a_socket_handler(self, log: logging.Logger, kept: Kept) -> None:
        with in_hand(ORDER):
            log.info("inside")
        sent = logging.handlers.SocketHandler("nowhere", 0).makePickle(kept.records[0])
        received = logging.makeLogRecord(pickle.loads(sent[struct.calcsize(">L") :]))
        assert values(received) == ("orders", 3, 1042, 1)

    def test_a_formatter_that_makes_the_record_anew_from_its_dict_sees_it(
        self, log: logging.Logger, kept: Kept
    ) -> None:
        with in_hand(ORDER):
            log.info("inside")
        assert values(logging.makeLogRecord(vars(kept.records[0]))) == ("orders", 3, 1042, 1)

    def test_a_persons_test_sees_it(self, caplog: pytest.LogCaptureFixture) -> None:
        with in_hand(ORDER):
            logging.getLogger("shop").warning("low stock")
        (record,) = caplog.records
        assert values(record) == ("orders", 3, 1042, 1)

    def test_they_do_not_keep_the_messages_alive(self, log: logging.Logger, kept: Kept) -> None:
        with in_hand(ORDER):
            log.info("inside")
        assert all(isinstance(value, (str, int)) for value in (vars(kept.records[0])[name] for name in NAMES))


class TestOtherFactories:
    def test_installing_again_adds_nothing(self) -> None:
        before = logging.getLogRecordFactory()
        logs.install()
        assert logging.getLogRecordFactory() is before

    def test_one_that_was_set_before_still_makes_the_records(self, log: logging.Logger, kept: Kept) -> None:
        class Tagged(logging.LogRecord):
            pass

        def tagged(*args: object, **kwargs: object) -> logging.LogRecord:
            record = Tagged(*args, **kwargs)  # type: ignore[arg-type]
            record.tenant = "acme"
            record.attempt = "theirs"
            return record

        logging.setLogRecordFactory(tagged)
        logs.install()
        with in_hand(ORDER):
            log.info("inside")
        (record,) = kept.records
        assert isinstance(record, Tagged)
        assert vars(record)["tenant"] == "acme"
        assert values(record) == ("orders", 3, 1042, "theirs")

    def test_one_that_is_set_later_over_ours_keeps_the_place(self, log: logging.Logger, kept: Kept) -> None:
        ours = logging.getLogRecordFactory()

        def later(*args: object, **kwargs: object) -> logging.LogRecord:
            record = ours(*args, **kwargs)
            record.tenant = "acme"
            return record

        logging.setLogRecordFactory(later)
        for _ in range(3):
            logs.install()
        with in_hand(ORDER):
            log.info("inside", extra={"topic": "elsewhere"})
        (record,) = kept.records
        assert vars(record)["tenant"] == "acme"
        assert values(record) == ("elsewhere", 3, 1042, 1)

    def test_one_that_replaces_ours_takes_the_place_away_until_the_next_start(
        self, log: logging.Logger, kept: Kept
    ) -> None:
        logging.setLogRecordFactory(logging.LogRecord)
        with in_hand(ORDER):
            log.info("inside")
        logs.install()
        with in_hand(ORDER):
            log.info("inside")
        assert [hasattr(record, "topic") for record in kept.records] == [False, True]


class TestOurOwnLines:
    def test_text_ends_with_the_record_it_is_about(self, log: logging.Logger) -> None:
        stream = shown_by(TextLines("%(levelname)s %(message)s"), log)
        log.info("outside")
        with in_hand(ORDER):
            log.info("first")
        with in_hand(ORDER, attempt=2):
            log.info("second")
        assert stream.getvalue().splitlines() == [
            "INFO outside",
            "INFO first  record=orders/3@1042",
            "INFO second  record=orders/3@1042 attempt=2",
        ]

    def test_a_traceback_stands_below_the_line_with_the_record(self, log: logging.Logger) -> None:
        stream = shown_by(TextLines(LOG_FORMAT), log)
        with in_hand(ORDER):
            try:
                raise ValueError("no stock")
            except ValueError:
                log.exception("failed")
        lines = stream.getvalue().splitlines()
        assert lines[0].endswith("ERROR   tests.logs failed  record=orders/3@1042")
        assert lines[-1] == "ValueError: no stock"

    def test_text_shows_the_record_even_where_extra_says_something_else(self, log: logging.Logger) -> None:
        stream = shown_by(TextLines("%(message)s"), log)
        log.info("outside", extra={"topic": "elsewhere", "partition": 1, "offset": 2, "attempt": 3})
        with in_hand(ORDER):
            log.info("inside", extra={"topic": "elsewhere"})
        assert stream.getvalue().splitlines() == ["outside", "inside  record=orders/3@1042"]

    def test_json_has_the_four_fields_and_none_elsewhere(self, log: logging.Logger) -> None:
        stream = shown_by(JsonLines(), log)
        log.info("outside")
        with in_hand(ORDER):
            log.info("inside", extra={"customer": 7})
        outside, inside = map(json.loads, stream.getvalue().splitlines())
        assert not set(NAMES) & set(outside)
        assert {name: inside[name] for name in (*NAMES, "message", "customer")} == {
            "topic": "orders", "partition": 3, "offset": 1042, "attempt": 1, "message": "inside", "customer": 7,
        }  # fmt: skip
