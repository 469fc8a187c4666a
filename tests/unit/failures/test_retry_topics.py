"""Records that are tried again later: names and values, what is refused, the course of a ladder, and the dedup."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconsume import App, BatchError, ConfigurationError, DeadLetter, DecodeError, Record, Retry, RetryTopics
from kconsume._handlers.binding import bind
from kconsume._kafka.outgoing import Outgoing
from kconsume._runtime.lanes.inline import InlineLanes
from kconsume._runtime.lanes.lane import Chunk, Lane
from kconsume._runtime.lanes.pacing import Pace
from kconsume._runtime.lanes.reports import Failure, LaneReport, Progress, Suspended
from kconsume._runtime.output.publisher import Publisher
from kconsume._runtime.processing.blocking_tx import off_the_loop
from kconsume._runtime.processing.dedup import Deduplication, named_in
from kconsume._runtime.processing.driver import LoopDriver, ThreadDriver
from kconsume._runtime.processing.plain import AsyncPlainAttempt, PlainAttempt
from kconsume._runtime.processing.rules import ChunkRules
from kconsume._runtime.processing.steps import CallHandler, SkipRecords
from kconsume._runtime.processing.transactional import AsyncTransactionalAttempt, TransactionalAttempt
from kconsume.backends import Position
from kconsume.backends.claim import granted
from kconsume.errors import StoreUnavailable
from kconsume.failures.letter_headers import RetryTarget, letter_of, read_added_headers
from kconsume.failures.policy import OnError, Policy, Retries
from kconsume.failures.retry_topics import Moment, RetryChain, retry_topic
from kconsume.records import Partition
from kconsume.testing import feed
from tests.unit.fakes import FakeMessage, ListStore, ListTx, Writes

GROUP = "shop"
FORMS = ["plain", "batch", "transaction", "batch transaction", "async", "async transaction"]
WEEK = 7 * 24 * 3600


# Values and names


def test_one_topic_for_each_delay_is_named_after_the_topic_the_group_and_its_number() -> None:
    ladder = Policy(retry=RetryTopics(delays=(5, 60, 600))).retry_chain(("orders", "returns"), "inventory")
    assert ladder is not None
    assert ladder.retry_topics == {
        "orders.inventory.retry.1": "orders",
        "orders.inventory.retry.2": "orders",
        "orders.inventory.retry.3": "orders",
        "returns.inventory.retry.1": "returns",
        "returns.inventory.retry.2": "returns",
        "returns.inventory.retry.3": "returns",
    }
    assert [ladder.number_of(f"orders.inventory.retry.{n}") for n in (1, 2, 3)] == [1, 2, 3]
    assert ladder.number_of("orders") == ladder.number_of("orders.other.retry.1") == 0


def test_who_has_no_retry_topics_has_no_ladder() -> None:
    assert Policy(retry=Retry(2)).retry_chain(("orders",), "g") is None
    assert Policy().retry_chain(("orders",), "g") is None


def test_the_delays_are_seconds_and_by_default_three() -> None:
    assert RetryTopics().delays == (5.0, 60.0, 600.0)
    assert RetryTopics(delays=[0.25, WEEK]).delays == (0.25, WEEK)
    assert repr(RetryTopics((1, 2))) == "RetryTopics(delays=(1.0, 2.0))"


@pytest.mark.parametrize(
    "delays",
    [(), [], (0,), (5, 0), (-1,), ("5",), "5", 5, None, (WEEK + 1,), (float("nan"),), (float("inf"),), (True,), {5: 1}],
    ids=str,
)
def test_delays_that_are_none_are_refused_with_the_form(delays: Any) -> None:
    with pytest.raises(ConfigurationError, match="delays must be seconds, above 0 and at most 7 days each"):
        RetryTopics(delays=delays)


@pytest.mark.parametrize(
    "retry",
    [
        (), (Retry(2), Retry(3)), (RetryTopics(), RetryTopics()), (Retry(2), 5), 5, "topics", RetryTopics, [Retry(2)],
        (Retry(2), RetryTopics(), Retry(3)),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_neither_a_retry_nor_retry_topics_nor_one_of_each_is_refused(retry: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"retry= takes a Retry, RetryTopics, or one of each in a tuple"):
        Policy(retry=retry)


def test_their_order_in_the_tuple_does_not_matter() -> None:
    for both in ((Retry(2), RetryTopics()), (RetryTopics(), Retry(2))):
        policy = Policy(retry=both)
        assert (str(policy.retry), str(policy.retry_topics)) == (str(Retry(2)), str(RetryTopics()))


def test_a_policy_says_in_words_what_becomes_of_a_record() -> None:
    assert str(Policy("skip", RetryTopics((5, 60)))) == (
        "a record that fails is tried again after 5 s, 60 s, by way of 2 topics, while other records go on; then it is "
        "logged, counted and skipped"
    )
    assert str(Policy("stop", (RetryTopics((0.5,)), Retry(3, wait=1)))) == (
        "a record that fails is tried up to 3 times, 1 s apart; then it is tried again after 0.5 s, by way of a topic, "
        "while other records go on; then it stops the process; the offset does not pass the record"
    )
    assert str(Policy(DeadLetter("dead"), RetryTopics((5,)))).endswith(
        "is written to topic dead, and the offset passes the record"
    )


# Which errors


def ladder_of(
    delays: Sequence[float] = (5, 60), retry: Retry | None = None, topics: Sequence[str] = ("orders",)
) -> RetryChain:
    both: Retries = RetryTopics(delays) if retry is None else (retry, RetryTopics(delays))
    ladder = Policy(retry=both).retry_chain(tuple(topics), GROUP)
    assert ladder is not None
    return ladder


@contextmanager
def at(moment: float) -> Iterator[SimpleNamespace]:
    """What the ladder takes for the time; `ahead`: by how much the wall clock was put forward."""
    clock = SimpleNamespace(now=moment, ahead=0.0)
    clocks = SimpleNamespace(time=lambda: clock.now + clock.ahead, monotonic=lambda: clock.now)
    with mock.patch("kconsume.failures.retry_topics.time", clocks):
        yield clock


def test_a_record_goes_from_rung_to_rung_and_then_nowhere() -> None:
    ladder, error = ladder_of((5, 60)), LookupError()
    with at(1000.0):
        assert ladder.next("orders", error) == RetryTarget("orders.shop.retry.1", 1, 1005.0)
        assert ladder.next("orders.shop.retry.1", error) == RetryTarget("orders.shop.retry.2", 2, 1060.0)
        assert ladder.next("orders.shop.retry.2", error) is None


def test_one_that_a_person_has_sent_back_begins_with_the_first_rung_of_its_topic() -> None:
    with at(0.0):
        assert ladder_of().next("orders.shop.redrive", LookupError()) == RetryTarget("orders.shop.retry.1", 1, 5.0)


@pytest.mark.parametrize(
    "error",
    [DecodeError("x"), ConfigurationError("x"), StoreUnavailable("x"), SystemExit(1), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_would_come_again_or_asks_to_stop_is_not_for_later(error: BaseException) -> None:
    assert ladder_of().next("orders", error) is None
    assert ladder_of(retry=Retry(2, on=Exception)).next("orders", error) is None


def test_what_the_retry_gives_up_on_is_not_for_later_and_what_it_is_on_is() -> None:
    ladder = ladder_of(retry=Retry(2, give_up_on=KeyError))
    assert ladder.next("orders", KeyError()) is None
    assert ladder.next("orders", ValueError()) is not None
    ladder = ladder_of(retry=Retry(2, on=TimeoutError))
    assert ladder.next("orders", ValueError()) is None
    assert ladder.next("orders", TimeoutError()) is not None


# When


def on_rung(due: bytes | None, **more: bytes) -> FakeMessage:
    headers = [("kconsume-due", due), *((f"kconsume-{name}", value) for name, value in more.items())]
    return FakeMessage(b"x", topic="orders.shop.retry.1", headers=cast(Any, headers))


def test_a_record_waits_until_its_header_says_so() -> None:
    ladder = ladder_of((6, 60))
    with at(1000.0) as clock:
        since = Moment.now()
        assert ladder.seconds_left(on_rung(b"1005250"), since) == pytest.approx(5.25)
        clock.now = 1005.25
        assert ladder.seconds_left(on_rung(b"1005250"), since) == 0.0
        assert ladder.seconds_left(on_rung(b"1005250"), Moment.now()) == 0.0
        clock.now = 2000.0
        assert ladder.seconds_left(on_rung(b"1005250"), since) == 0.0
        assert ladder.seconds_left(on_rung(b"1005250"), Moment.now()) == 0.0


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_a_step_of_the_clock_changes_nothing_for_a_record_that_waits(ahead: float) -> None:
    with at(10_000.0) as clock:
        since = Moment.now()
        clock.now, clock.ahead = 10_001.0, ahead
        assert ladder_of().seconds_left(on_rung(b"10005000"), since) == pytest.approx(4.0)
        clock.now = 10_005.0
        assert ladder_of().seconds_left(on_rung(b"10005000"), since) == 0.0


def test_the_longest_delay_is_kept_and_no_more_if_the_clock_of_the_writer_is_ahead() -> None:
    with at(0.0):
        due = on_rung(b"%d" % ((WEEK + 3600) * 1000))
        assert ladder_of((WEEK, 60)).seconds_left(due, Moment.now()) == pytest.approx(WEEK, abs=0.01)
        assert ladder_of((5, 60)).seconds_left(due, Moment.now()) == pytest.approx(5, abs=0.01)
        second = FakeMessage(b"x", topic="orders.shop.retry.2", headers=due.headers())
        assert ladder_of((5, 60)).seconds_left(second, Moment.now()) == pytest.approx(60, abs=0.01)


@pytest.mark.parametrize(
    "due",
    [None, b"", b"soon", b"-5", b"1e3", b"\xff", b"9" * 400, b"9" * 5000, b"99999999999999999", "٣".encode()],
    ids=lambda due: str(due)[:20],
)
def test_what_is_no_time_or_one_in_a_thousand_years_holds_nothing(due: bytes | None) -> None:
    with at(1000.0):
        assert ladder_of().seconds_left(on_rung(due), Moment.now()) == 0.0


def test_without_any_header_it_is_due() -> None:
    assert ladder_of().seconds_left(FakeMessage(b"x"), Moment.now()) == 0.0


def test_the_header_is_never_before_the_due_time() -> None:
    letter = letter_of(
        FakeMessage(b"x"), LookupError(), group=GROUP, scope="shop:T", attempts=1, retry=RetryTarget("r", 1, 1.0000001)
    )
    assert dict(letter.added_headers)["kconsume-due"] == b"1001"
    assert dict(letter.added_headers)["kconsume-rung"] == b"1"


# What a letter on a rung says


def letter_on(rung: RetryTarget | None, message: FakeMessage, attempts: int = 1) -> FakeMessage:
    """The record that is written for it."""
    letter = letter_of(message, LookupError("no"), group=GROUP, scope="shop:T", attempts=attempts, retry=rung)
    return FakeMessage(
        letter.value, key=letter.key, offset=77, partition=3, topic="elsewhere" if rung is None else rung.topic,
        headers=[*letter.headers, *letter.added_headers], timestamp=(2, 1_900_000_000_000),
    )  # fmt: skip


def test_through_all_rungs_the_first_place_stays_and_attempts_add_up() -> None:
    first = FakeMessage(b"v", offset=12, key=b"k", headers=[("tenant", b"eu")])
    one = letter_on(RetryTarget(retry_topic("orders", GROUP, 1), 1, 5.0), first, attempts=3)
    two = letter_on(RetryTarget(retry_topic("orders", GROUP, 2), 2, 9.0), one, attempts=2)
    dead = letter_on(None, two, attempts=1)
    assert dead.headers() is not None
    marks = read_added_headers(tuple(cast(Any, dead.headers())))
    assert (marks["topic"], marks["partition"], marks["offset"], marks["origin"]) == (
        "orders",
        "0",
        "12",
        "shop:T:0:12",
    )
    assert marks["attempts"] == "6"
    assert "rung" not in marks
    assert "due" not in marks
    assert marks["timestamp"] == "1700000000123", "also where the broker puts its own on each"
    assert [pair for pair in cast(Any, dead.headers()) if not pair[0].startswith("kconsume-")] == [("tenant", b"eu")]
    assert (dead.key(), dead.value()) == (b"k", b"v")


@pytest.mark.parametrize("written", [b"", b"x", b"-1", b"9" * 25])
def test_marks_that_somebody_else_wrote_on_a_rung_are_no_reason_to_stumble(written: bytes) -> None:
    message = on_rung(b"0", rung=b"1", attempts=written, timestamp=written, topic=b"orders", partition=b"0")
    letter = letter_of(message, LookupError(), group=GROUP, scope="shop:T", attempts=2)
    assert letter.attempts == 2
    assert letter.timestamp is not None


def reset_said(message: FakeMessage, reset_epoch: int) -> str | None:
    letter = letter_of(message, LookupError(), group=GROUP, scope="shop:T", attempts=1, reset_epoch=reset_epoch)
    return read_added_headers(letter.added_headers).get("reset")


def test_the_reset_of_the_first_place_stays_through_all_rungs() -> None:
    first = letter_of(FakeMessage(b"v"), LookupError(), group=GROUP, scope="shop:T", attempts=1, reset_epoch=5)
    one = FakeMessage(b"v", topic="r1", headers=list(first.added_headers))
    assert reset_said(one, reset_epoch=9) == "5", "and not that of the retry topic"
    assert reset_said(letter_on(None, FakeMessage(b"v")), reset_epoch=9) is None, "as the version before wrote it"


def test_the_reset_of_who_sent_a_record_is_not_that_of_who_fails_on_it() -> None:
    sent = FakeMessage(b"v", headers=[("kconsume-origin", b"upstream:T:0:1#0"), ("kconsume-reset", b"5")])
    assert reset_said(sent, reset_epoch=0) is None
    assert reset_said(sent, reset_epoch=9) == "9"


@pytest.mark.parametrize("written", [b"", b"x", b"-1", b"9" * 25])
def test_a_reset_that_somebody_else_wrote_is_none(written: bytes) -> None:
    first = letter_of(FakeMessage(b"v"), LookupError(), group=GROUP, scope="shop:T", attempts=1)
    assert reset_said(FakeMessage(b"v", headers=[*first.added_headers, ("kconsume-reset", written)]), 0) is None


# What is refused where the handler is decorated


def handle(value: bytes) -> None: ...


def refused(app: App, *topics: str, said: str, **options: Any) -> None:
    with pytest.raises(ConfigurationError, match=said):
        app.consume(*topics, **{"retry": RetryTopics(), **options})(handle)


def shop(group: str = GROUP, **options: Any) -> App:
    return App("nowhere.invalid:1", group=group, **options)


def test_a_group_whose_name_cannot_be_in_a_topic_s_is_refused() -> None:
    refused(shop("shop/eu"), "orders", said=r"'orders.shop/eu.retry.1' would be .* group= of at most 234 of")
    refused(shop("ä"), "orders", said="is no topic name: give the handler a group=")
    refused(shop("g" * 240), "orders", said="group= of at most 234 of")
    refused(shop(), "o" * 245, said="leaves no room for the name of a retry topic, so use Retry")


def test_reading_its_own_retry_topic_is_refused() -> None:
    refused(
        shop(),
        "orders",
        "orders.shop.retry.2",
        said="one of its own retry topics, so a failed record would be retried without end",
    )


def test_dead_letters_to_its_own_retry_topic_are_refused() -> None:
    refused(shop(), "orders", on_error=DeadLetter("orders.shop.retry.1"), said="would come back for ever")
    shop().consume("orders", retry=RetryTopics((5,)), on_error=DeadLetter("orders.shop.retry.2"))(handle)


def test_a_pattern_and_chosen_partitions_are_refused() -> None:
    refused(shop(), pattern="orders-.*", said="pattern= names none: name the topics, or use Retry")
    refused(shop(), "orders", partitions=[0], said="do not work with partitions=")


def test_an_inline_handler_is_refused() -> None:
    refused(shop(), "orders", executor="inline", said="has retry=, so it waits")


@pytest.mark.parametrize("first", [0, 1])
def test_a_handler_that_reads_the_retry_topic_of_another_in_its_group_is_refused(first: int) -> None:
    app, topics = shop(), ["orders", "orders.shop.retry.1"]
    app.consume(topics[first], retry=RetryTopics() if first == 0 else None)(handle)
    refused(
        app, topics[1 - first], retry=RetryTopics() if first == 1 else None, said="both handle 'orders.shop.retry.1'"
    )
    app.consume(topics[1 - first], group="another", retry=RetryTopics() if first == 1 else None)(handle)


@pytest.mark.parametrize("handlers", [2, 3])
def test_dead_letter_topics_that_form_a_circle_are_refused(handlers: int) -> None:
    app = shop()
    for n in range(handlers - 1):
        app.consume(f"t{n}", on_error=DeadLetter(f"t{n + 1}"), retry=RetryTopics())(handle)
    refused(
        app,
        f"t{handlers - 1}",
        on_error=DeadLetter("t0"),
        said="would come back to that topic through dead-letter topics",
    )
    app.consume(f"t{handlers - 1}", on_error=DeadLetter("end"), retry=RetryTopics())(handle)


def test_dead_letters_may_go_through_several_handlers_if_they_do_not_come_back() -> None:
    app = shop()
    app.consume("t0", on_error=DeadLetter("t1"), retry=RetryTopics())(handle)
    app.consume("t1", on_error=DeadLetter("t2"), retry=RetryTopics())(handle)
    app.consume("t2", on_error=DeadLetter("t3"), group="another", retry=RetryTopics())(handle)


@pytest.mark.parametrize("back", ["t0.shop.retry.1", "a pattern"])
def test_a_circle_by_way_of_a_retry_topic_or_a_pattern_is_refused(back: str) -> None:
    app = shop()
    app.consume("t0", on_error=DeadLetter("t1"), retry=RetryTopics())(handle)
    if back == "a pattern":
        refused(app, pattern="t[1]", retry=None, on_error=DeadLetter("t0"), said="would come back to that topic")
    else:
        refused(app, "t1", retry=None, on_error=DeadLetter(back), said="would come back to that topic")


def test_dropping_repeats_needs_a_database() -> None:
    for offsets in ("kafka://", "memory://", "redis://localhost"):
        refused(shop(offsets=offsets), "orders", repeats="drop", said="has repeats='drop', and its offsets are in")
    refused(shop(), "orders", repeats="once", said="repeats='once' is unknown: choose 'handle' or 'drop'")
    shop(offsets="sqlite:///x.db").consume("orders", repeats="drop")(handle)


def test_what_is_fed_has_its_terminal_action_at_once() -> None:
    app = shop()

    @app.consume("orders", retry=(Retry(2, wait=600.0), RetryTopics()), on_error=DeadLetter("dead"))
    def fail(record: Record) -> None:
        raise LookupError(record.attempt)

    fed = feed(app, "orders", b"x")
    assert (fed.outcome, [letter.topic for letter in fed.dead_letters]) == ("dead_lettered", ["dead"])
    assert str(fed.error) == "2"


# The course of a ladder, without a broker and with a clock that only waiting moves


class BoxStore(ListStore):
    """… with an outbox: what is left there is delivered once the transaction has committed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.deliver: Callable[[Sequence[Outgoing]], object] = lambda _: None

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[BoxTx]:  # type: ignore[override]
        with super().transaction(group, partition, epoch) as below:
            tx = BoxTx(below, self)
            yield tx
        self.seen |= tx.taken
        self.deliver(tx.rows)


class BoxTx:
    def __init__(self, below: ListTx, store: BoxStore) -> None:
        self.connection, self.advance, self.fault = below.connection, below.advance, below.fault
        self._store = store
        self.rows: list[Outgoing] = []
        self.taken: set[str] = set()

    def post(self, outgoing: Sequence[Outgoing]) -> None:
        self.rows += outgoing

    def record_origins(self, origins: Sequence[str]) -> set[str]:
        new = set(origins) - self._store.seen - self.taken
        self.taken |= new
        return new


class NoRelay:
    def rows_committed(self, partition: Partition, count: int) -> None: ...

    def is_full(self, partition: Partition) -> bool:
        return False


@dataclass
class World:
    """Topics as lists, a handler that fails on some values so many times each, and one lane for each topic."""

    form: str
    fails: Mapping[int, int]
    on_error: OnError = "stop"
    delays: tuple[float, ...] = (5.0, 60.0)
    retry: Retry | None = None
    outbox: bool = False
    repeats: str = "handle"
    names: bool = False
    topics: dict[str, list[FakeMessage]] = field(default_factory=lambda: defaultdict(list))
    effects_outside: list[int] = field(default_factory=list)
    calls: list[tuple[int, str, float]] = field(default_factory=list)
    """Each record that the handler was called with: its value, the topic, and the time."""
    early: list[Record] = field(default_factory=list)
    reports: list[LaneReport] = field(default_factory=list)
    sends_twice: bool = False
    most_bytes: int = 10**6

    def __post_init__(self) -> None:
        self.store = BoxStore() if self.outbox else ListStore()
        if isinstance(self.store, BoxStore):
            self.store.deliver = self.deliver
        self.now = 1_000_000.0
        self.failures: Counter[int] = Counter()
        self.policy = Policy(
            self.on_error, RetryTopics(self.delays) if self.retry is None else (self.retry, RetryTopics(self.delays))
        )
        self.retry_chain = self.policy.retry_chain(("orders",), GROUP)
        self.during_rest: Callable[[Lane], None] = lambda _: None
        self.binding = bind(self._handler(), [Writes] if "transaction" in self.form else [])

    def write(self, values: Sequence[int], topic: str = "orders", **marks: bytes) -> None:
        headers = [(f"kconsume-{name}", value) for name, value in marks.items()]
        for value in values:
            log = self.topics[topic]
            log.append(FakeMessage(b"%d" % value, offset=len(log), topic=topic, headers=[*headers]))

    def deliver(self, outgoing: Sequence[Outgoing]) -> Future[None]:
        for each in outgoing:
            assert each.topic is not None
            for _ in range(2 if self.sends_twice else 1):
                log = self.topics[each.topic]
                log.append(
                    FakeMessage(
                        cast(bytes, each.value),
                        offset=len(log),
                        topic=each.topic,
                        headers=cast(Any, list(each.headers)),
                    )
                )
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def run(self) -> None:
        """Topic by topic, down the ladder."""
        clocks = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now)
        with mock.patch("kconsume.failures.retry_topics.time", clocks):
            for topic in ("orders", *self.retry_topics):
                if self.topics[topic]:
                    self._run(topic, self.topics[topic])

    def run_from(self, offset: int) -> None:
        """The next owner of the topic itself."""
        self._run("orders", self.topics["orders"], offset)

    def _run(self, topic: str, messages: list[FakeMessage], start: int = 0) -> None:
        partition = Partition(topic, 0)
        position = granted(self.store.claim(GROUP, [partition], "me", lambda ps: dict.fromkeys(ps, Position(0))))[
            partition
        ]
        work = self._work()
        lane = Lane(
            partition, InlineLanes(SimpleQueue()), work, epoch=position.epoch, start=start, scope=f"shop:{topic}",
            pace=Pace(1000),
        )  # fmt: skip
        lane.pace.size = 100
        chunk = Chunk(cast(Any, messages), start, start + len(messages) - 1)
        if self.binding.is_async:
            asyncio.run(self._await(lane, chunk, work))
            return
        parked = cast("Suspended | None", work(lane, chunk, self.reports.append))
        while parked is not None:
            self._rested(lane, parked)
            parked = cast("Suspended | None", parked.resume())

    async def _await(self, lane: Lane, chunk: Chunk, work: Any) -> None:
        parked = await cast("Awaitable[Suspended | None]", work(lane, chunk, self.reports.append))
        while parked is not None:
            self._rested(lane, parked)
            parked = await cast("Awaitable[Suspended | None]", parked.resume())

    def _rested(self, lane: Lane, parked: Suspended) -> None:
        assert parked.seconds > 0
        self.now += parked.seconds
        self.during_rest(lane)

    def _work(self) -> Any:
        binding, batched = self.binding, self.binding.batched
        relay = NoRelay() if self.outbox else None
        stores = "transaction" in self.form or self.outbox
        mail = Publisher(self, self.policy.dead_letter, self, self.most_bytes, relay=relay)
        course = ChunkRules(
            binding,
            self.policy,
            stores=stores,
            group=GROUP,
            retry_chain=self.retry_chain,
            clock=self._moment,
        )
        dedup = Deduplication(self.retry_topics, self.repeats == "drop") if self.outbox else None
        lends = binding.transaction is not None
        if binding.is_async and stores:
            begin = off_the_loop(self.store)
            run = binding.async_runner()
            return LoopDriver(
                course, AsyncTransactionalAttempt(run, batched, begin, GROUP, mail, gives_tx=lends, dedup=dedup)
            )
        if binding.is_async:
            return LoopDriver(course, AsyncPlainAttempt(binding.async_runner(), batched, mail))
        if stores:
            run_ = binding.runner()
            return ThreadDriver(
                course, TransactionalAttempt(run_, batched, self.store, GROUP, mail, gives_tx=lends, dedup=dedup)
            )
        return ThreadDriver(course, PlainAttempt(binding.runner(), batched, mail))

    def _moment(self) -> Moment:
        return Moment(self.now, self.now)

    def _handler(self) -> Callable[..., Any]:
        def plain(record: Record) -> None:
            self.effects_outside.extend(self._look([record]))

        def batch(records: list[Record]) -> None:
            self.effects_outside.extend(self._look(records))

        def transaction(record: Record, tx: Writes) -> None:
            tx.extend(self._look([record]))

        def batch_transaction(records: list[Record], tx: Writes) -> None:
            tx.extend(self._look(records))

        async def awaited(record: Record) -> None:
            plain(record)

        async def awaited_transaction(record: Record, tx: Writes) -> None:
            transaction(record, tx)

        forms: dict[str, Callable[..., Any]] = {
            "plain": plain, "batch": batch, "transaction": transaction, "batch transaction": batch_transaction,
            "async": awaited, "async transaction": awaited_transaction,
        }  # fmt: skip
        return forms[self.form]

    def _look(self, records: Sequence[Record]) -> list[int]:
        for index, record in enumerate(records):
            value = int(record.value or b"-1")
            self.calls.append((value, record.topic, self.now))
            due = int(dict(record.headers).get("kconsume-due", b"0")) / 1000
            if record.topic != "orders" and self.now < due:
                self.early.append(record)
            if self.failures[value] < self.fails.get(value, 0):
                self.failures[value] += 1
                bad = LookupError(f"bad {value}")
                raise BatchError({index: bad}) if self.names else bad
        return [int(record.value or b"-1") for record in records]

    @property
    def retry_topics(self) -> list[str]:
        return [] if self.retry_chain is None else [*self.retry_chain.retry_topics]

    @property
    def effects(self) -> list[int]:
        return self.store.effects if "transaction" in self.form else self.effects_outside

    @property
    def dead(self) -> list[int]:
        return [int(message.value() or b"-1") for message in self.topics["dead"]]

    @property
    def failure(self) -> Failure | None:
        return next((report for report in self.reports if isinstance(report, Failure)), None)

    def reached(self, topic: str) -> int:
        told = [r.upto for r in self.reports if isinstance(r, Progress) and r.lane.partition.topic == topic]
        return max(told, default=0)

    def marks(self, topic: str) -> list[dict[str, str]]:
        return [read_added_headers(tuple(cast(Any, message.headers()))) for message in self.topics[topic]]


FOR_EVER = 10_000


@pytest.mark.parametrize("outbox", [False, True], ids=["sent", "outbox"])
@pytest.mark.parametrize("form", FORMS)
def test_a_record_that_fails_passes_later_and_those_behind_it_do_not_wait(form: str, outbox: bool) -> None:
    # A batch of eight is halved three times before it is known which record it was.
    world = World(form, {3: 4 if "batch" in form else 1}, outbox=outbox)
    world.write(range(8))
    world.run()
    assert list(dict.fromkeys(world.effects)) == [0, 1, 2, 4, 5, 6, 7, 3]
    assert world.early == []
    assert world.reached("orders") == 8
    assert world.reached("orders.shop.retry.1") == 1
    assert max(moment for value, _, moment in world.calls if value != 3) == 1_000_000.0, "nothing was waited for"
    assert world.failure is None


@pytest.mark.parametrize("form", FORMS)
def test_after_the_last_rung_comes_the_terminal_action(form: str) -> None:
    for on_error in (DeadLetter("dead"), "skip", "stop"):
        world = World(form, {1: FOR_EVER}, on_error)
        world.write(range(3))
        world.run()
        assert list(dict.fromkeys(world.effects)) == [0, 2]
        assert world.dead == ([1] if isinstance(on_error, DeadLetter) else [])
        last = "orders.shop.retry.2"
        assert world.reached(last) == (0 if on_error == "stop" else 1)
        assert (world.failure is not None) == (on_error == "stop")
        assert world.early == []


@pytest.mark.parametrize("form", FORMS)
def test_attempts_in_place_and_on_the_rungs_add_up(form: str) -> None:
    world = World(form, {0: FOR_EVER}, DeadLetter("dead"), (5.0, 60.0), Retry(3, wait=0.1))
    world.write([0])
    world.run()
    assert [marks["attempts"] for marks in world.marks("orders.shop.retry.1")] == ["3"]
    assert [marks["attempts"] for marks in world.marks("orders.shop.retry.2")] == ["6"]
    (dead,) = world.marks("dead")
    assert dead["attempts"] == "9"
    assert len(world.calls) == 9
    assert (dead["topic"], dead["offset"], dead["origin"]) == ("orders", "0", "shop:orders:0:0")


@pytest.mark.parametrize("form", FORMS)
def test_told_to_stop_while_it_waits_for_its_time_it_passes_nothing_and_runs_nothing(form: str) -> None:
    world = World(form, {0: 1})
    world.write([0])
    world.during_rest = lambda lane: lane.stop_reasons.append("revoked")
    world.run()
    assert [topic for _, topic, _ in world.calls] == ["orders"]
    assert world.reached("orders.shop.retry.1") == 0
    assert world.now - 1_000_000.0 <= 0.25, "it looks up within a quarter of a second"


def test_a_record_that_is_due_runs_though_the_one_behind_it_is_not() -> None:
    world = World("batch", {}, delays=(30.0, 60.0))
    world.write([0], "orders.shop.retry.1", due=b"0")
    world.write([1], "orders.shop.retry.1", due=b"1000030000")
    world.run()
    assert world.calls == [(0, "orders.shop.retry.1", 1_000_000.0), (1, "orders.shop.retry.1", mock.ANY)]
    assert world.early == []
    assert world.now >= 1_000_030.0


@pytest.mark.parametrize("form", FORMS)
def test_sys_exit_stops_and_sends_nothing_anywhere(form: str) -> None:
    world = World(form, {})
    error = SystemExit(3)

    def stops(self: World, records: Sequence[Record]) -> list[int]:
        raise error

    with mock.patch.object(World, "_look", stops):
        world.write([0])
        world.run()
    assert world.failure is not None
    assert world.failure.error is error
    assert world.topics["orders.shop.retry.1"] == []


def test_what_cannot_be_decoded_goes_straight_to_the_end() -> None:
    world = World("plain", {}, DeadLetter("dead"))
    world.binding = bind(_takes_text, [])
    world.topics["orders"] = [FakeMessage(b"\xff")]
    world.run()
    assert (len(world.topics["dead"]), world.topics["orders.shop.retry.1"]) == (1, [])


def _takes_text(value: str) -> None: ...


@pytest.mark.parametrize("form", ["plain", "async", "transaction"])
def test_a_letter_that_its_headers_make_too_large_holds_its_partition(form: str) -> None:
    world = World(form, {0: 1}, most_bytes=100)
    world.write([0])
    rests: list[Lane] = []

    def rested(lane: Lane) -> None:
        rests.append(lane)
        lane.stop_reasons.append("shutdown")

    world.during_rest = rested
    world.run()
    assert rests
    assert world.failure is None
    assert world.reached("orders") == 0


cases = st.dictionaries(st.integers(0, 14), st.integers(1, 9), max_size=6)


@given(
    st.sampled_from(FORMS), cases, st.lists(st.sampled_from([0.1, 5.0, 60.0]), min_size=1, max_size=3),
    st.integers(1, 3), st.sampled_from(["dead", "skip"]), st.booleans(),
)  # fmt: skip
def test_whatever_fails_good_later_and_dead_are_disjoint_and_all_and_nothing_runs_early(
    form: str, fails: dict[int, int], delays: list[float], attempts: int, end: str, outbox: bool
) -> None:
    on_error: OnError = DeadLetter("dead") if end == "dead" else "skip"
    retry = Retry(attempts, wait=0.05) if attempts > 1 else None
    world = World(form, fails, on_error, tuple(delays), retry, outbox=outbox)
    world.write(range(15))
    world.run()
    assert world.early == []
    later = [int(message.value() or b"") for message in world.topics["orders.shop.retry.1"]]
    once = list(dict.fromkeys(world.effects))  # without a transaction, those undone with a neighbour ran before
    if "transaction" in form or not outbox:
        assert world.effects == once, "each at most once"
    at_once = [value for value in once if value not in later]
    assert at_once == sorted(set(range(15)) - set(later)), "those that never failed for good, in order"
    assert later == sorted(later)
    assert set(later) <= set(fails)
    dead = world.dead if end == "dead" else sorted(set(range(15)) - set(once))
    assert sorted([*once, *dead]) == list(range(15)), "each exactly once, handled or dead"
    for topic, log in world.topics.items():
        if log and topic != "dead":
            assert world.reached(topic) == len(log)
    rungs = [f"orders.shop.retry.{n + 1}" for n in range(len(delays))]
    for shorter, longer in itertools.pairwise(rungs):
        longer_ones = [m["origin"] for m in world.marks(longer)]
        assert set(longer_ones) <= {m["origin"] for m in world.marks(shorter)}
        assert len(set(longer_ones)) == len(longer_ones)
    if "batch" not in form:  # a batch counts its attempts as a whole
        for marks in world.marks("dead"):
            assert int(marks["attempts"]) == attempts * (len(delays) + 1)
            assert marks["topic"] == "orders"


def test_control_a_ladder_that_does_not_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetryChain, "seconds_left", lambda *_: 0.0)
    with pytest.raises(AssertionError, match=r"early|Record"):
        test_a_record_that_fails_passes_later_and_those_behind_it_do_not_wait("plain", False)


# The dedup


def marked(value: int, topic: str = "orders", **marks: bytes | None) -> FakeMessage:
    return FakeMessage(
        b"%d" % value, offset=value, topic=topic, headers=[(f"kconsume-{name}", each) for name, each in marks.items()]
    )


@contextmanager
def opened(store: BoxStore, topic: str) -> Iterator[BoxTx]:
    partition = Partition(topic, 0)
    store.claim(GROUP, [partition], "me", lambda ps: dict.fromkeys(ps, Position(0)))
    with store.transaction(GROUP, partition, store.row(GROUP, partition).epoch) as tx:
        yield tx


def take(dedup: Deduplication, store: BoxStore, *messages: FakeMessage, reset_epoch: int = 0) -> list[int]:
    """The values of those that are fresh; what was noted is committed."""
    with opened(store, messages[0].topic()) as tx:
        step = dedup.without_repeats(CallHandler(cast(Any, messages), cast(Any, messages)), tx, reset_epoch)
        return [int(message.value() or b"") for message in cast(CallHandler, step).records]


def test_a_record_with_an_origin_is_taken_in_once_if_repeats_are_dropped() -> None:
    dedup, store = Deduplication([], True), BoxStore()
    assert take(dedup, store, marked(1, origin=b"a"), marked(2, origin=b"b")) == [1, 2]
    assert take(dedup, store, marked(3, origin=b"b"), marked(4, origin=b"c"), marked(5, origin=b"a")) == [4]


def test_the_same_origin_twice_in_one_slice_is_taken_in_once() -> None:
    dedup, store = Deduplication([], True), BoxStore()
    assert take(dedup, store, *(marked(n, origin=origin) for n, origin in enumerate([b"a", b"b", b"a", b"a"]))) == [
        0,
        1,
    ]


def test_records_without_an_origin_are_always_taken() -> None:
    dedup, store = Deduplication([], True), BoxStore()
    assert take(dedup, store, FakeMessage(b"1"), marked(2, origin=b""), marked(3, origin=None), FakeMessage(b"4")) == [
        1, 2, 3, 4,
    ]  # fmt: skip
    assert store.seen == set()


def test_who_did_not_ask_takes_repeats_but_those_on_its_own_topics() -> None:
    dedup, store = Deduplication(["r1", "r2"], False), BoxStore()
    assert not dedup.applies_to("orders")
    assert take(dedup, store, marked(1, origin=b"a"), marked(2, origin=b"a")) == [1, 2]
    assert dedup.applies_to("r1")
    one, again = (marked(1, "r1", origin=b"a", rung=b"1") for _ in range(2))
    two = marked(1, "r2", origin=b"a", rung=b"2")
    assert [take(dedup, store, one, again), take(dedup, store, one)] == [[1], []]
    assert [take(dedup, store, two), take(dedup, store, two)] == [[1], []], "once for each rung"


def test_after_a_reset_of_its_source_a_record_on_a_rung_is_another_and_its_repeat_is_not() -> None:
    dedup, store = Deduplication(["r1"], False), BoxStore()
    before = marked(1, "r1", origin=b"a", rung=b"1")
    after = marked(2, "r1", origin=b"a", rung=b"1", reset=b"5")
    assert [take(dedup, store, each) for each in (before, after, after, before)] == [[1], [2], [], []]
    assert take(dedup, store, after, reset_epoch=9) == [], "it is the reset of the source that counts"


def test_what_the_version_before_took_in_is_known_and_what_is_taken_in_without_a_reset_it_knows() -> None:
    dedup, store = Deduplication(["r1"], True), BoxStore()
    take(dedup, store, marked(1, "r1", origin=b"a", rung=b"1"))
    take(dedup, store, marked(1, origin=b"b"))
    assert store.seen == {"a/0/1", "b"}


def test_who_drops_repeats_takes_them_after_a_reset_of_the_sender_or_of_its_own() -> None:
    dedup, store = Deduplication([], True), BoxStore()
    plain, sent_anew = marked(1, origin=b"a"), marked(2, origin=b"a", reset=b"5")
    for message in (plain, sent_anew):
        for reset_epoch in (0, 9):
            taken = [take(dedup, store, message, reset_epoch=reset_epoch) for _ in range(2)]
            assert taken == [[int(message.value() or b"")], []]


def test_what_a_person_sends_back_again_is_taken_in_again() -> None:
    dedup, store = Deduplication(["back"], False), BoxStore()
    first, second = (marked(1, "back", origin=b"a", redriven=n) for n in (b"1", b"2"))
    assert [take(dedup, store, each) for each in (first, first, second, second)] == [[1], [], [1], []]


def test_a_letter_is_taken_in_once_for_each_topic_that_it_passes_and_each_time_that_it_was_sent_back() -> None:
    dedup, store = Deduplication(["back"], True), BoxStore()
    letter: dict[str, bytes | None] = {"origin": b"a", "topic": b"orders"}

    def in_(topic: str, **more: bytes | None) -> FakeMessage:
        headers = [(f"kconsume-{name}", each) for name, each in {**letter, **more}.items()]
        return FakeMessage(b"1", topic=topic, headers=headers)

    for message in (in_("back", redriven=b"1"), in_("dead"), in_("dead", redriven=b"1"), in_("deader")):
        assert take(dedup, store, message) == [1]
        assert take(dedup, store, message) == []


def test_one_that_is_rolled_back_has_taken_nothing_in() -> None:
    dedup, store = Deduplication([], True), BoxStore()
    store.before_commit = mock.Mock(side_effect=[StoreUnavailable("gone"), None, None])
    with pytest.raises(StoreUnavailable):
        take(dedup, store, marked(1, origin=b"a"))
    assert take(dedup, store, marked(1, origin=b"a")) == [1]


@pytest.mark.parametrize(
    "odd", [b"a\0b", b"\xff", b"\n", b"x" * 5000, "\u2028".encode(), "\ufffd".encode()], ids=lambda odd: repr(odd)[:9]
)
def test_an_origin_that_no_database_would_take_is_known_by_another_name(odd: bytes) -> None:
    dedup, store = Deduplication([], True), BoxStore()
    assert take(dedup, store, marked(1, origin=odd), marked(2, origin=odd + b"\xfe"), marked(3, origin=odd)) == [1, 2]
    assert all(len(key) < 100 and key.isprintable() for key in store.seen)


def test_a_repeat_that_failed_meanwhile_elsewhere_gets_no_letter_and_all_of_a_part_is_taken_in() -> None:
    """Two copies on two partitions: while this one failed, the other was done."""
    dedup, store = Deduplication(["r1"], False), BoxStore()
    other = [marked(n, "r1", origin=b"g:T:0:%d" % n, rung=b"1") for n in range(3)]
    assert take(dedup, store, other[0]) == [0]
    mine = [marked(n, "r1", origin=b"g:T:0:%d" % n, rung=b"1") for n in range(3)]
    letters = [letter_of(each, LookupError(), group=GROUP, scope="g:r1", attempts=1) for each in mine[:2]]
    with opened(store, "r1") as tx:
        step = dedup.without_repeats(CallHandler(cast(Any, mine), cast(Any, mine[2:]), 1, letters), tx)
        assert step == CallHandler(mine, mine[2:], 1, letters[1:])
    with opened(store, "r1") as tx:
        assert dedup.without_repeats(SkipRecords(cast(Any, mine), letters), tx) == SkipRecords(mine, [])


def test_what_a_batch_handler_names_is_told_by_its_index_in_the_part() -> None:
    part, first = cast(Any, [marked(n) for n in range(4)]), LookupError()
    assert named_in(part, [part[0], part[2], part[3]], BatchError({1: first, 2: first})).errors == {2: first, 3: first}
    assert named_in(part, [part[1]], BatchError({5: first})).errors == {4: first}, "what it was not given is nowhere"


@pytest.mark.parametrize("form", ["transaction", "batch transaction", "async transaction", "plain"])
def test_what_the_outbox_sent_twice_has_one_effect_on_every_rung(form: str) -> None:
    world = World(form, {0: 1, 1: 2, 2: FOR_EVER}, DeadLetter("dead"), outbox=True, sends_twice=True)
    world.write(range(4))
    world.run()
    assert Counter(world.effects) == Counter({0: 1, 1: 1, 3: 1}) or form == "plain"
    assert set(world.effects) == {0, 1, 3}
    assert len({marks["origin"] for marks in world.marks("dead")}) == 1


@pytest.mark.parametrize("form", ["transaction", "async transaction"])
@pytest.mark.parametrize("fails", [2, 3])
def test_a_record_that_fails_is_taken_in_as_well_so_that_its_repeat_does_not_pass(form: str, fails: int) -> None:
    """Else it would pass here by its repeat, and once more on the next rung."""
    world = World(form, {0: fails}, DeadLetter("dead"), outbox=True, sends_twice=True)
    world.write([0])
    world.run()
    assert world.effects == ([0] if fails == 2 else [])
    assert Counter(world.dead) == ({} if fails == 2 else {0: 2}), "the last is sent twice, and read by nobody here"


def test_one_that_is_dead_or_skipped_is_taken_in_as_well() -> None:
    for on_error in (DeadLetter("dead"), "skip"):
        world = World("transaction", {7: 1}, on_error, outbox=True, repeats="drop", delays=(5.0,))
        world.retry_chain = None
        world.write([7], origin=b"a")
        world.write([7], origin=b"a")
        world.run()
        assert world.effects == []


@pytest.mark.parametrize("form", ["transaction", "async transaction", "plain"])
def test_told_to_stop_in_the_middle_of_a_slice_it_has_not_taken_in_what_it_did_not_handle(form: str) -> None:
    """Else the next owner would drop it, and it would be lost."""
    world = World(form, {}, outbox=True, repeats="drop")
    for value in range(4):
        world.write([value], origin=b"%d" % value)
    look, lanes = World._look, list[Lane]()

    def stop_after_two(self: World, records: Sequence[Record]) -> list[int]:
        if records[0].value == b"1" and not lanes[0].stop_reasons:
            lanes[0].stop_reasons.append("revoked")
        return look(self, records)

    make = Lane.__init__

    def made(self: Lane, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        lanes.append(self)

    with mock.patch.object(World, "_look", stop_after_two), mock.patch.object(Lane, "__init__", made):
        world.run()
    reached = world.reached("orders")
    world.topics["orders"] = world.topics["orders"][reached:]
    world.run_from(reached)
    assert list(dict.fromkeys(world.effects)) == [0, 1, 2, 3]
    assert len(world.effects) == 4 or form == "plain"


def test_records_that_a_batch_handler_names_are_those_that_it_was_given() -> None:
    """A repeat that was dropped from the batch does not shift their indexes."""
    world = World("batch transaction", {5: 1}, DeadLetter("dead"), outbox=True, repeats="drop", names=True)
    for value, origin in ((4, b"4"), (4, b"4"), (5, b"5"), (6, b"6")):
        world.write([value], origin=origin)
    world.run()
    assert world.topics["dead"] == []
    assert [message.value() for message in world.topics["orders.shop.retry.1"]] == [b"5"]
    assert sorted(world.effects) == [4, 5, 6]
