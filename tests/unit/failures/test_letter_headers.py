"""Dead letters: what they keep, what they add, how many may be written, and what is no place for them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconsume import ConfigurationError, DeadLetter
from kconsume._kafka.outgoing import Outgoing
from kconsume._runtime.output.publisher import Publisher, outgoing_of
from kconsume.backends.dead_letters import tables
from kconsume.errors import LetterFailed
from kconsume.failures import letter_headers as letters
from kconsume.failures.dead_letter import DeadLetterLimit
from kconsume.failures.letter_headers import (
    MOST_TEXT,
    MOST_TRACE,
    Letter,
    LetterDraft,
    RetryTarget,
    cause_of,
    letter_of,
    read_added_headers,
)
from kconsume.failures.policy import Policy, Verdict
from kconsume.failures.retry import Retry
from kconsume.records import Partition
from tests.unit.fakes import FakeMessage


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001  (with its trace)
        return caught


def letter(message: FakeMessage, error: BaseException | None = None, attempts: int = 3) -> Letter:
    return letter_of(
        message, error or raised(LookupError("no such order")), group="shop", scope="shop:T1", attempts=attempts
    )


def test_all_of_the_record_is_kept_and_what_happened_is_said() -> None:
    message = FakeMessage(b"\x00\xff", offset=7, key=b"k", topic="orders", partition=3, headers=[("trace", b"\x80")])
    written = outgoing_of(letter(message))
    assert (written.value, written.key, written.timestamp) == (
        b"\x00\xff", b"k", datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC)
    )  # fmt: skip
    headers = dict(written.headers)
    trace = headers.pop("kconsume-trace")
    assert headers == {
        "trace": b"\x80",
        "kconsume-topic": b"orders",
        "kconsume-partition": b"3",
        "kconsume-offset": b"7",
        "kconsume-timestamp": b"1700000000123",
        "kconsume-group": b"shop",
        "kconsume-attempts": b"3",
        "kconsume-exception": b"builtins.LookupError",
        "kconsume-message": b"no such order",
        "kconsume-origin": b"shop:T1:3:7",
    }
    assert b"Traceback" in trace
    assert b"LookupError: no such order" in trace


texts = st.text(max_size=20) | st.just("\udc80") | st.just("x" * 9_000)
names = st.sampled_from(["trace", "kconsume-attempts"])
record_headers = st.none() | st.lists(st.tuples(names, st.binary()), max_size=2)
timestamps = st.sampled_from([(0, 0), (1, 5), (2, 2**62)])


@given(texts, texts, record_headers, timestamps, st.none() | st.binary(), st.booleans(), st.sampled_from([0, 7]))
def test_a_letter_that_leaves_at_once_is_the_one_that_is_kept(
    text: str, group: str, headers: Any, timestamp: tuple[int, int], value: bytes | None, later: bool, reset: int
) -> None:
    message = FakeMessage(value, offset=7, key=value, partition=3, headers=headers, timestamp=timestamp)
    rung = RetryTarget("orders.retry.1", 1, 12.5) if later else None
    error = raised(LookupError(text))
    told = letter_of(message, error, group=group, scope=f"{group}:T", attempts=2, retry=rung, reset_epoch=reset)
    draft = LetterDraft(message, cause_of(error), group, f"{group}:T", 2, rung, reset)
    assert draft.letter() == told
    assert draft.outgoing("dead") == told.outgoing("dead")
    assert told.outgoing("dead").topic == ("orders.retry.1" if later else "dead")


class Nowhere:
    def deliver(self, outgoing: Sequence[Outgoing]) -> Future[None]:
        raise AssertionError(f"{outgoing} must not leave")


@pytest.mark.parametrize(
    "message",
    [
        FakeMessage(b"x" * 1_000_001),
        FakeMessage(b"", key=b"x" * 1_000_001),
        FakeMessage(b"", headers=[("own", b"x" * 1_000_001)]),
        FakeMessage(b"x" * 999_900),
    ],
    ids=["value", "key", "header", "marks"],
)
def test_a_letter_that_is_too_large_is_refused_before_it_leaves_whatever_makes_it_so(message: FakeMessage) -> None:
    mail = Publisher(Nowhere(), DeadLetter("dead"), Nowhere(), 1_000_000)
    draft = LetterDraft(message, cause_of(LookupError("no")), "shop", "shop:T", 1)
    with pytest.raises(LetterFailed, match=r"1,000,000 are allowed"):
        mail.hand_over([draft])
    with pytest.raises(LetterFailed, match=r"1,000,000 are allowed"):
        mail.post([], [draft.letter()])


def test_errors_that_differ_in_words_place_or_class_are_told_apart() -> None:
    def elsewhere() -> None:
        raise LookupError("a")

    first = raised(LookupError("a"))
    with pytest.raises(LookupError) as second:
        elsewhere()
    assert cause_of(first) is cause_of(raised(LookupError("a"))), "as many records fail"
    assert cause_of(raised(LookupError("b"))).message == "b"
    assert cause_of(raised(KeyError("a"))).exception == "builtins.KeyError"
    assert "in elsewhere" in cause_of(second.value).trace
    assert "in elsewhere" not in cause_of(first).trace


def test_an_error_says_what_it_came_from_also_when_another_like_it_came_from_nothing() -> None:
    def fails(first: Exception | None) -> BaseException:
        try:
            raise LookupError("no such order") from first
        except LookupError as error:
            return error

    assert "TimeoutError" not in cause_of(fails(None)).trace
    assert "TimeoutError: too late" in cause_of(fails(TimeoutError("too late"))).trace
    assert "TimeoutError: much too late" in cause_of(fails(TimeoutError("much too late"))).trace


def test_code_that_was_made_where_other_code_was_freed_is_not_taken_for_it() -> None:
    """As that of handlers that are made anew: it has the same address."""

    def trace(number: int) -> str:
        letters._frames.clear()  # which keep code as well
        scope: dict[str, Any] = {}
        exec(compile(f"def fail_{number}(): raise LookupError('no such order')", "<made>", "exec"), scope)
        try:
            scope[f"fail_{number}"]()
        except LookupError as error:
            return cause_of(error).trace
        return ""

    letters._causes.clear()
    assert all(f"in fail_{number}\n" in trace(number) for number in range(letters._MOST_CAUSES))


def test_what_is_remembered_of_errors_is_bounded() -> None:
    for number in range(3 * letters._MOST_CAUSES):
        cause_of(raised(LookupError(str(number))))
    for number in range(2 * letters._MOST_FRAMES):
        scope: dict[str, Any] = {}
        exec(compile("def fail(): raise LookupError", f"<{number}>", "exec"), scope)
        with pytest.raises(LookupError) as caught:
            scope["fail"]()
        cause_of(caught.value)
    assert len(letters._causes) <= letters._MOST_CAUSES
    assert len(letters._frames) <= letters._MOST_FRAMES


def test_a_tombstone_without_a_key_or_a_time_is_kept_as_it_is() -> None:
    made = letter(FakeMessage(None, timestamp=(0, -1)))
    assert (made.value, made.key, made.timestamp, made.headers) == (None, None, None, ())
    assert dict(made.added_headers)["kconsume-timestamp"] == b""


def test_a_letter_that_fails_again_keeps_where_it_came_from_first() -> None:
    first = letter(FakeMessage(b"v", offset=7, topic="orders", partition=3))
    headers = [(name, value) for name, value in (*first.headers, *first.added_headers)]
    again = FakeMessage(b"v", offset=0, topic="orders.dlq", partition=0, headers=[*headers, ("own", b"1")])
    second = letter(again, raised(KeyError("else")), attempts=1)
    assert (second.origin, second.partition, second.offset) == ("shop:T1:3:7", Partition("orders", 3), 7)
    assert (second.exception, second.attempts) == ("builtins.KeyError", 1)
    assert second.headers == (("own", b"1"),)
    assert [name for name, _ in second.added_headers].count("kconsume-origin") == 1


def test_headers_of_somebody_else_that_only_look_like_ours_do_no_harm() -> None:
    good = {
        "kconsume-topic": b"orders",
        "kconsume-partition": b"3",
        "kconsume-offset": b"7",
        "kconsume-origin": b"a:b:3:7",
    }
    assert letter(FakeMessage(b"v", headers=[*good.items()])).origin == "a:b:3:7"
    for name, odd in [
        ("kconsume-origin", b"\xff\xfe"), ("kconsume-origin", b"x"), ("kconsume-origin", b"a\x00:3:7"),
        ("kconsume-partition", b"three"), ("kconsume-partition", b"9999999999"), ("kconsume-offset", b""),
        ("kconsume-offset", b"99999999999999999999"), ("kconsume-topic", b"a/b"), ("kconsume-topic", b"a\x00b"),
    ]:  # fmt: skip
        made = letter(FakeMessage(b"v", offset=9, partition=1, headers=[*{**good, name: odd}.items()]))
        assert (made.partition, made.offset, made.origin) == (Partition("orders", 1), 9, "shop:T1:1:9"), (name, odd)


@given(st.text(max_size=3 * MOST_TEXT))
def test_whatever_an_error_says_fits_and_can_be_read_again(text: str) -> None:
    made = letter(FakeMessage(b"v"), raised(LookupError(text)))
    assert len(made.message) <= MOST_TEXT + 2
    assert len(made.trace) <= MOST_TRACE + 2
    marks = read_added_headers(made.added_headers)
    assert marks["attempts"] == "3"
    tables.row_of(made, "postgres")
    assert "\0" not in str(tables.row_of(made, "sqlite")["message"])


def test_a_long_trace_keeps_its_end_where_the_error_stands() -> None:
    made = letter(FakeMessage(b"v"), raised(LookupError("x" * MOST_TRACE + " the end")))
    assert made.trace.rstrip().endswith("the end")


# How many


class Watch:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fails(gauge: DeadLetterLimit) -> bool:
    """One more, if it may."""
    if gauge.exceeds(1):
        return False
    gauge.note(1, 1)
    return True


def test_a_number_is_how_many_may_fail_in_a_window() -> None:
    watch = Watch()
    gauge = DeadLetterLimit(3, 60.0, watch)
    assert [fails(gauge) for _ in range(4)] == [True, True, True, False]
    watch.now = 61.0
    assert fails(gauge), "those were long ago"


def test_a_share_is_of_the_records_handled_in_the_window() -> None:
    watch = Watch()
    gauge = DeadLetterLimit(0.1, 60.0, watch)
    gauge.note(90, 0)
    assert [fails(gauge) for _ in range(10)] == [True] * 10
    assert not fails(gauge)
    watch.now = 61.0
    assert fails(gauge), "one of one is no share"


def test_a_share_of_few_records_means_nothing() -> None:
    gauge = DeadLetterLimit(0.5, 60.0, Watch())
    assert [fails(gauge) for _ in range(20)] == [True] * 19 + [False]


def test_to_ask_is_not_to_fail() -> None:
    gauge = DeadLetterLimit(1, 60.0, Watch())
    assert [gauge.exceeds(1) for _ in range(9)] == [False] * 9


# What is chosen


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "takes a topic or a table"),
        ({"topic": "a", "table": "b"}, "takes a topic or a table"),
        ({"topic": "a/b"}, "names no topic"),
        ({"topic": ""}, "names no topic"),
        ({"topic": 5}, "names no topic"),
        ({"table": "a; drop table b"}, "names no table"),
        ({"table": "a.b.c"}, "names no table"),
        ({"table": ""}, "names no table"),
        ({"topic": "a", "limit": 0}, "no limit"),
        ({"topic": "a", "limit": 1.5}, "no limit"),
        ({"topic": "a", "limit": -0.1}, "no limit"),
        ({"topic": "a", "limit": True}, "no limit"),
        ({"topic": "a", "limit": 5, "window": 0}, "must be a number of seconds"),
    ],
)
def test_what_is_no_place_for_letters_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DeadLetter(**arguments)


def test_the_policy_is_one_sentence() -> None:
    assert (
        str(Policy(DeadLetter("orders.dlq")))
        == "a record that fails is written to topic orders.dlq, and its offset passes"
    )
    assert str(Policy(DeadLetter(table="failed", limit=0.25), Retry(3, wait=1))) == (
        "a record that fails is tried up to 3 times, 1 s apart; then it is written to table failed in the offset's "
        "transaction, and its offset passes; more than 25% of the records in 60 s stop the consumer"
    )


def test_what_cannot_be_run_and_who_asks_to_stop_are_not_buried() -> None:
    policy = Policy(DeadLetter("orders.dlq"))
    assert policy.verdict(LookupError()) is Verdict.DEAD_LETTER
    assert policy.verdict(ConfigurationError("no")) is Verdict.STOP
    assert policy.verdict(SystemExit(1)) is Verdict.STOP


@pytest.mark.parametrize(("given_", "words"), [("sip", "is unknown"), (5, "is unknown"), (None, "is unknown")])
def test_what_is_no_terminal_action_is_refused(given_: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Policy(given_)
    with pytest.raises(ConfigurationError, match="takes a Retry"):
        Policy("stop", cast(Any, given_ or 3))
