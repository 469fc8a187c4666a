"""The relay of the outbox, with neither broker nor database: in order, one lot at a time, and nothing lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from kconsume._kafka.delivery import DeliveryResult
from kconsume._kafka.outgoing import Outgoing
from kconsume._kafka.topic_limits import TopicLimits
from kconsume._runtime.deadlines import Deadline
from kconsume._runtime.output import outbox_relay as implementation
from kconsume._runtime.output import partition_outbox
from kconsume._runtime.output.outbox_relay import FULL, OutboxRelay
from kconsume._runtime.output.partition_outbox import MAX_ROWS, PartitionOutbox
from kconsume.backends.outbox.tables import ALL_TARGETS, LEASE, NO_TARGETS, UNOWNED, Posted, Targets
from kconsume.errors import SendFailed, StoreUnavailable
from kconsume.records import Partition
from tests.waiting import eventually

FIRST, SECOND = Partition("orders", 0), Partition("orders", 1)


class Rows:
    """An outbox in memory."""

    def __init__(self) -> None:
        self.rows: dict[Partition, list[Posted]] = {}
        self.epochs: dict[Partition, int] = {}
        self.away = False
        self.reads = self.deletes = self.renewals = 0
        self.forgotten = 0
        self.asked: list[int] = []
        """How many were asked for, each time."""
        self.above: list[int] = []
        """Above which number, each time."""
        self.after_read: Callable[[], None] = lambda: None
        self.before_delete: Callable[[], None] = lambda: None
        self._guard = threading.RLock()
        self._number = 0

    def leave(self, partition: Partition, values: Sequence[str], topic: str = "out") -> list[Posted]:
        """As a transaction that commits."""
        with self._guard:
            first = self._number + 1
            self._number += len(values)
            rows = [Posted(number, outgoing(value, topic)) for number, value in enumerate(values, first)]
            self.rows.setdefault(partition, []).extend(rows)
            return rows

    def reserve(self, value: str) -> Posted:
        """As a transaction that has its number, and does not commit yet."""
        with self._guard:
            self._number += 1
            return Posted(self._number, outgoing(value))

    def show(self, partition: Partition, row: Posted) -> None:
        """As that transaction when it commits."""
        with self._guard:
            rows = [*self.rows.get(partition, []), row]
            self.rows[partition] = sorted(rows, key=lambda each: each.number)

    def fail_once(self) -> None:
        def fail() -> None:
            raise StoreUnavailable("the database is away")

        self.once_read(fail)

    def once_read(self, then: Callable[[], None]) -> None:
        """Do this after the next read, while its caller waits for the answer."""

        def after_read() -> None:
            self.after_read = lambda: None
            then()

        self.after_read = after_read

    def left(self, partition: Partition = FIRST) -> list[str]:
        with self._guard:
            return [value_of(row.outgoing) for row in self.rows.get(partition, [])]

    def posted(
        self, group: str, epochs: Mapping[Partition, int], most: int, targets: Mapping[Partition, Targets] = NO_TARGETS
    ) -> dict[Partition, list[Posted]]:
        assert group == "shop"
        with self._guard:
            self.reads += 1
            self.asked.append(most)
            self.above += [each.above for each in targets.values()]
            self._must_be_here()
            ours = [p for p, epoch in epochs.items() if self.epochs.get(p) == epoch and self.rows.get(p)]
            found = {p: chosen(self.rows[p], targets.get(p))[:most] for p in ours}
        self.after_read()
        return found

    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        self.before_delete()
        with self._guard:
            self._must_be_here()
            self.deletes += 1
            for partition, gone in numbers.items():
                assert group == ("" if partition == UNOWNED else "shop")
                self.rows[partition] = [row for row in self.rows[partition] if row.number not in set(gone)]

    def unowned_rows(self, owner: str, most: int, targets: Targets | None = None) -> list[Posted]:
        assert owner == "me"
        with self._guard:
            self.renewals += 1
            self._must_be_here()
            return chosen(self.rows.get(UNOWNED, []), targets)[:most]

    def forget_origins(self) -> None:
        self.forgotten += 1

    def _must_be_here(self) -> None:
        if self.away:
            raise StoreUnavailable("the database is away")


class Lot:
    """What was sent together."""

    def __init__(self, sent: Sequence[Outgoing]) -> None:
        self.values = [value_of(each) for each in sent]
        self.future: Future[DeliveryResult] = Future()

    def confirm(self) -> None:
        self.future.set_result(DeliveryResult([True] * len(self.values), None))

    def refuse(self, *values: str, why: str = "the topic is not there") -> None:
        self.future.set_result(DeliveryResult([value not in values for value in self.values], why))


class Broker:
    """An outlet whose confirmations come when the test says so; or, with `refused`, at once."""

    def __init__(self) -> None:
        self.lots: list[Lot] = []
        self.refused: set[str] | None = None
        self.closed = False

    def deliver_each(self, sent: Sequence[Outgoing]) -> Future[DeliveryResult]:
        if self.closed:
            raise SendFailed("the outlet is closed")
        lot = Lot(sent)
        self.lots.append(lot)
        if self.refused is not None:
            bad = self.refused.intersection(lot.values)
            if bad:
                lot.refuse(*bad)
            else:
                lot.confirm()
        return lot.future

    def deliver_alone(self, sent: Outgoing) -> Future[DeliveryResult]:
        return self.deliver_each([sent])

    @property
    def sent(self) -> list[str]:
        return [value for lot in self.lots for value in lot.values]

    def next(self) -> Lot:
        """The lot that is under way and that nobody has answered."""
        lot = eventually(lambda: next((lot for lot in self.lots if not lot.future.done()), None), what="a lot")
        assert lot is not None
        return lot


def outgoing(value: str, topic: str = "out") -> Outgoing:
    return Outgoing(value.encode(), None, (), topic)


def chosen(rows: Sequence[Posted], targets: Targets | None) -> list[Posted]:
    topics, others, above = targets or ALL_TARGETS
    return [row for row in rows if row.number > above and (row.outgoing.topic in topics) is not others]


def value_of(sent: Outgoing) -> str:
    assert isinstance(sent.value, bytes)
    return sent.value.decode()


class Stage:
    """A relay between the two."""

    def __init__(self) -> None:
        self.store, self.broker = Rows(), Broker()
        self.relay = self.another()

    def another(self, limits: TopicLimits | None = None) -> OutboxRelay:
        return OutboxRelay(self.store, "shop", self.broker, "me", limits)  # type: ignore[arg-type]

    def open(self, *partitions: Partition, epoch: int = 1) -> None:
        for partition in partitions or (FIRST,):
            self.store.epochs[partition] = epoch
            self.relay.open(partition, epoch)

    def write(self, values: Sequence[str], partition: Partition = FIRST, topic: str = "out") -> None:
        self.store.leave(partition, values, topic)
        self.relay.rows_committed(partition, len(values))

    def answered(self, lot: Lot) -> None:
        eventually(lambda: stage_is_past(self, lot), what="what was confirmed is deleted, and the next is sent")

    def is_empty(self, *partitions: Partition) -> bool:
        return not any(self.store.left(p) for p in partitions or (FIRST,))

    def settled(self, partition: Partition = FIRST) -> None:
        eventually(lambda: self.relay._outboxes[partition].is_done, what="all is sent and deleted")


def stage_is_past(stage: Stage, lot: Lot) -> bool:
    return stage.broker.lots[-1] is not lot or stage.is_empty()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(partition_outbox, "_LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(implementation, "_POLL_EVERY", 0.05)
    stage = Stage()
    stage.relay.start()
    yield stage
    stage.broker.refused, stage.store.away = set(), False
    for lot in stage.broker.lots:
        if not lot.future.done():
            lot.confirm()
    stage.relay.close(Deadline(5.0))
    assert not stage.relay._thread.is_alive()


# In order, one lot at a time


def test_what_was_written_is_sent_in_order_and_deleted_when_it_is_confirmed(stage: Stage) -> None:
    stage.open()
    stage.write(["1", "2", "3"])
    lot = stage.broker.next()
    assert lot.values == ["1", "2", "3"]
    assert stage.store.left() == ["1", "2", "3"], "not confirmed yet, so it is still there"
    lot.confirm()
    stage.settled()
    assert stage.is_empty()
    assert stage.broker.sent == ["1", "2", "3"]


def test_while_a_lot_is_under_way_nothing_behind_it_is_sent(stage: Stage) -> None:
    stage.open(FIRST, SECOND)
    stage.write(["1"])
    lot = stage.broker.next()
    stage.write(["2", "3"])
    stage.write(["other"], SECOND)
    eventually(lambda: "other" in stage.broker.sent, what="the other partition goes on")
    reads = stage.store.reads
    eventually(lambda: stage.store.renewals > 3, what="the relay has looked around meanwhile")
    assert (stage.broker.sent, stage.store.reads) == (["1", "other"], reads)
    lot.confirm()
    eventually(lambda: stage.broker.sent == ["1", "other", "2", "3"], what="then what stands behind it")


def test_many_rows_leave_lot_by_lot_also_those_of_an_earlier_owner(stage: Stage) -> None:
    stage.broker.refused = set()
    values = [str(n) for n in range(2 * MAX_ROWS + 5)]
    stage.store.leave(FIRST, values)  # and nobody here was told
    stage.open()
    eventually(lambda: len(stage.broker.sent) >= len(values) and stage.is_empty(), what="all is sent and deleted")
    assert stage.broker.sent == values
    assert max(len(lot.values) for lot in stage.broker.lots) <= MAX_ROWS
    assert stage.is_empty()


@pytest.mark.parametrize("earlier", [0, 3])
def test_what_is_written_while_the_relay_reads_is_not_forgotten(stage: Stage, earlier: int) -> None:
    """It is not in what was read, and nothing else will ever be written."""
    stage.broker.refused = set()
    stage.store.leave(FIRST, [f"earlier {n}" for n in range(earlier)])
    late = iter([["late"]])

    def write_late() -> None:
        for values in late:
            stage.write(values)

    stage.store.after_read = write_late
    stage.open()
    eventually(lambda: "late" in stage.broker.sent, what="sent all the same")
    stage.settled()
    assert len(stage.broker.sent) == earlier + 1


def test_what_is_opened_anew_while_the_relay_reads_is_read_again(stage: Stage) -> None:
    """Under the old epoch there was nothing to be had."""
    stage.broker.refused = set()
    stage.store.leave(FIRST, ["1"])
    again = iter([2])

    def claim_anew() -> None:
        for epoch in again:
            stage.open(epoch=epoch)

    stage.store.after_read = claim_anew
    stage.store.epochs[FIRST] = 2
    stage.relay.open(FIRST, 1)
    eventually(lambda: stage.broker.sent == ["1"], what="sent under the new epoch")
    stage.settled()


def test_a_relay_that_was_told_too_much_finds_out(stage: Stage) -> None:
    """What was committed before it read, and told after it."""
    stage.broker.refused = set()
    stage.open()
    stage.write(["1"])
    stage.relay.rows_committed(FIRST, 7)
    stage.settled()
    assert not stage.relay.is_full(FIRST)
    assert stage.broker.sent == ["1"]


def test_large_rows_leave_few_at_a_time(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is in memory, and one partition should not fill the producer's queue for all."""
    monkeypatch.setattr(partition_outbox, "MAX_BYTES", 5_000)
    stage.broker.refused = set()
    values = [str(n).ljust(1_000) for n in range(50)] + ["x" * 6_000]
    stage.store.leave(FIRST, values)
    stage.open()
    stage.settled()
    assert stage.broker.sent == values
    assert max(sum(map(len, lot.values)) for lot in stage.broker.lots) == 6_000, "one is always sent, however large"
    assert max(stage.store.asked[1:]) <= 10, "nor are more read than twice as many as were sent"


# Where a read begins


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> Stage:
    """One that has looked at the table, and found nothing, and need not begin at its start again for a long time."""
    monkeypatch.setattr(partition_outbox, "FROM_THE_START_EVERY", 1000.0)
    stage.broker.refused = set()
    stage.open()
    stage.settled()
    return stage


def sent_and_settled(stage: Stage, values: Sequence[str]) -> None:
    stage.write(values)
    stage.settled()


def test_a_read_begins_above_the_last_row_that_was_read(calm: Stage) -> None:
    sent_and_settled(calm, ["1", "2"])
    sent_and_settled(calm, ["3"])
    sent_and_settled(calm, ["4"])
    assert calm.broker.sent == ["1", "2", "3", "4"]
    assert (min(calm.store.above), calm.store.above[-1]) == (0, 3)


def test_an_owner_that_was_frozen_sends_nothing_of_what_it_has_written(calm: Stage) -> None:
    calm.store.epochs[FIRST] = 2  # another's, and nobody here knows
    calm.write(["1", "2"])
    calm.settled()
    assert (calm.broker.sent, calm.store.left()) == ([], ["1", "2"])


def test_what_somebody_else_has_left_before_it_is_sent_before_it(calm: Stage) -> None:
    calm.store.leave(FIRST, ["nobody told"])
    calm.write(["1", "2"])
    calm.settled()
    assert calm.broker.sent == ["nobody told", "1", "2"]


def test_what_an_earlier_owner_has_left_is_sent_before_what_was_just_written(calm: Stage) -> None:
    old, new = [f"old {n}" for n in range(50)], [f"new {n}" for n in range(MAX_ROWS)]
    calm.store.leave(FIRST, old)
    calm.store.leave(FIRST, new)
    calm.broker.refused = None
    calm.relay.open(FIRST, 1)
    calm.relay.rows_committed(FIRST, MAX_ROWS)
    lot = calm.broker.next()
    calm.broker.refused = set()
    lot.confirm()
    calm.settled()
    assert calm.broker.sent == old + new


def test_a_row_that_becomes_visible_behind_what_was_sent_is_sent(calm: Stage) -> None:
    """Its transaction took its number before that of another one, and committed after it."""
    late = calm.store.reserve("late")
    sent_and_settled(calm, ["1", "2"])
    calm.store.show(FIRST, late)
    calm.relay.rows_committed(FIRST, 1)
    eventually(lambda: calm.broker.sent == ["1", "2", "late"], what="the late row")
    calm.settled()
    assert calm.is_empty()


def test_a_late_row_of_which_nobody_told_is_found_with_the_next_rows(
    calm: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = calm.store.reserve("late")
    sent_and_settled(calm, ["1"])
    calm.store.show(FIRST, late)
    sent_and_settled(calm, ["2"])
    assert calm.broker.sent == ["1", "2"], "the control: not above what was read"
    monkeypatch.setattr(partition_outbox, "FROM_THE_START_EVERY", 0.0)
    sent_and_settled(calm, ["3"])
    assert calm.broker.sent == ["1", "2", "late", "3"]


def test_after_an_error_and_after_a_claim_a_read_begins_at_the_start(calm: Stage) -> None:
    troubles: list[Callable[[], None]] = [calm.store.fail_once, lambda: calm.open(epoch=2)]
    for number, trouble in enumerate(troubles):
        late = calm.store.reserve(f"late {number}")
        sent_and_settled(calm, [str(number)])
        calm.store.show(FIRST, late)
        trouble()
        sent_and_settled(calm, ["behind"])
        assert calm.broker.sent[-2:] == [f"late {number}", "behind"]


def test_a_claim_while_the_relay_reads_lets_no_row_pass_a_held_one(calm: Stage) -> None:
    """The claim ends the hold, and the read had left out what was held."""

    def claim_anew() -> None:
        calm.store.leave(FIRST, ["behind"], "missing")
        calm.broker.refused = set()
        calm.open(epoch=2)

    calm.broker.refused = {"bad"}
    calm.write(["bad"], topic="missing")
    eventually(lambda: calm.relay.blocked, what="it is held")
    tried = len(calm.broker.sent)
    calm.store.once_read(claim_anew)
    calm.write(["1"])
    calm.settled()
    assert calm.broker.sent[tried:] == ["bad", "1", "behind"]


# What is refused


def test_what_is_refused_stays_and_comes_again_and_what_is_confirmed_does_not(stage: Stage) -> None:
    stage.open()
    stage.write(["1", "2", "3", "4"])
    stage.broker.next().refuse("2", "4")
    eventually(lambda: stage.store.left() == ["2", "4"], what="only what was confirmed is deleted")
    while not stage.is_empty():
        lot = stage.broker.next()
        assert set(lot.values) <= {"2", "4"}
        lot.confirm()
        stage.answered(lot)
    assert stage.broker.sent == ["1", "2", "3", "4", "2", "4"]


def test_a_row_that_is_refused_alone_holds_those_behind_it_and_no_other_partition(stage: Stage) -> None:
    stage.broker.refused = {"bad"}
    stage.open(FIRST, SECOND)
    stage.write(["bad"])
    eventually(lambda: len(stage.broker.lots) > 2, what="tried again")
    stage.write(["behind"])
    stage.write(["other"], SECOND)
    eventually(lambda: stage.is_empty(SECOND), what="the other partition goes on")
    known = len(stage.broker.lots)
    eventually(lambda: len(stage.broker.lots) > known + 2, what="tried again")
    assert stage.store.left() == ["bad", "behind"]
    assert "behind" not in stage.broker.sent
    stage.broker.refused = set()
    stage.settled()
    assert stage.broker.sent[-2:] == ["bad", "behind"]


def test_records_that_are_refused_by_the_batch_leave_in_smaller_ones(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic takes so many bytes at once, and each of them is small enough."""
    deliver = stage.broker.deliver_each

    def at_most_ten(sent: Sequence[Outgoing]) -> Future[DeliveryResult]:
        stage.broker.refused = {value_of(each) for each in sent} if len(sent) > 10 else set()
        return deliver(sent)

    monkeypatch.setattr(stage.broker, "deliver_each", at_most_ten)
    values = [str(n) for n in range(100)]
    stage.store.leave(FIRST, values)
    stage.open()
    stage.settled()
    taken = [value for lot in stage.broker.lots if lot.future.result().why is None for value in lot.values]
    assert taken == values, "each once, in order"


def test_that_something_is_refused_is_said_once_and_not_each_time(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kconsume.outbox")
    stage.broker.refused = {"1"}
    stage.open()
    stage.write(["1"])
    eventually(lambda: len(stage.broker.lots) > 5, what="tried again and again")
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("outbox blocked partition=orders/0 group=shop topic=out row=1 rows=1 cause=")
    assert 'cause="the topic is not there" ' in said
    assert "kconsume outbox drop 1 --yes, or kconsume outbox dead-letter 1 --to TOPIC --yes" in said


def test_a_row_that_is_refused_is_named_with_its_cause_and_holds_its_topic_alone(stage: Stage) -> None:
    stage.broker.refused = {"bad"}
    stage.open()
    stage.write(["bad"], topic="missing")
    stage.write(["1", "2"])
    eventually(lambda: stage.relay.blocked, what="it is known")
    stage.write(["behind"], topic="missing")
    (blocked,) = stage.relay.blocked
    assert (blocked.partition, blocked.topic, blocked.number) == (FIRST, "missing", 1)
    assert blocked.cause == "the topic is not there"
    stage.write(["3"])
    eventually(lambda: stage.store.left() == ["bad", "behind"], what="the other topic goes on")
    assert [value for value in stage.broker.sent if value.isdigit()] == ["1", "2", "3"]
    assert "behind" not in stage.broker.sent
    stage.broker.refused = set()
    stage.settled()
    assert stage.broker.sent[-2:] == ["bad", "behind"]
    assert not stage.relay.blocked


def test_a_row_that_is_deleted_while_it_is_blocked_is_not_sent_again(stage: Stage) -> None:
    stage.broker.refused = {"bad"}
    stage.open()
    stage.write(["bad"])
    eventually(lambda: stage.relay.blocked, what="it is known")
    stage.write(["behind"])
    with stage.store._guard:
        stage.store.rows[FIRST] = [row for row in stage.store.rows[FIRST] if value_of(row.outgoing) != "bad"]
        stage.broker.refused = set()
        tried = len(stage.broker.lots)
    stage.settled()
    assert stage.broker.sent[tried + 1 :] in ([], ["behind"])
    assert stage.broker.sent[-1] == "behind"
    assert not stage.relay.blocked


def test_what_is_blocked_is_said_again_after_a_minute(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "kconsume.outbox")
    monkeypatch.setattr(partition_outbox, "_LOG_BLOCKED_EVERY", 0.2)
    stage.broker.refused = {"1"}
    stage.open()
    stage.write(["1"])
    eventually(lambda: len(caplog.messages) >= 3, what="said again")
    assert all(message.startswith("outbox blocked partition=orders/0") for message in caplog.messages)


def test_who_leaves_does_not_wait_for_what_is_blocked(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.broker.refused = {"bad"}
    stage.open()
    stage.write(["bad"])
    eventually(lambda: stage.relay.blocked, what="it is known")
    stage.write(["behind"])
    budget = Deadline(3600.0)
    assert stage.relay.finish([FIRST], budget) == 2
    assert not stage.relay.blocked
    assert stage.store.left() == ["bad", "behind"], "the next owner sends them"


def test_a_row_that_is_blocked_while_the_store_is_away_is_sent_when_both_are_back(stage: Stage) -> None:
    stage.broker.refused = {"bad"}
    stage.open()
    stage.write(["bad"])
    eventually(lambda: stage.relay.blocked, what="it is known")
    stage.store.away = True
    known = stage.store.renewals
    eventually(lambda: stage.store.renewals > known + 2, what="it is asked again")
    assert stage.store.renewals < known + 1_000, "after a rest"
    stage.broker.refused, stage.store.away = set(), False
    stage.settled()
    assert stage.is_empty()


def test_a_topic_whose_broker_does_not_answer_holds_up_no_other_topic(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_outbox, "SLOW", 0.2)
    stage.open()
    stage.write(["slow"], topic="slow")
    lot = stage.broker.next()
    stage.write(["behind"], topic="slow")
    stage.write(["1"])
    eventually(lambda: "1" in stage.broker.sent, what="the other topic goes on")
    assert "behind" not in stage.broker.sent
    stage.broker.refused = set()
    for each in stage.broker.lots:
        if each is not lot and not each.future.done():
            each.confirm()
    lot.confirm()
    stage.settled()
    assert stage.broker.sent == ["slow", "1", "behind"]


def test_an_outlet_that_raises_is_like_one_that_refuses(stage: Stage) -> None:
    stage.broker.closed, stage.broker.refused = True, set()
    stage.open()
    stage.write(["1"])
    eventually(lambda: stage.relay._outboxes[FIRST].tries > 1, what="tried again")
    stage.broker.closed = False
    stage.settled()
    assert stage.broker.sent == ["1"]


# A store that is away


def test_a_store_that_is_away_when_it_is_read_is_read_when_it_is_back(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.broker.refused = set()
    stage.store.away = True
    stage.open()
    stage.write(["1", "2"])
    eventually(lambda: stage.store.reads > 3, what="tried again and again")
    assert stage.broker.sent == []
    stage.store.away = False
    stage.settled()
    assert stage.broker.sent == ["1", "2"]
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


@pytest.mark.parametrize("refused", [(), ("2",)], ids=["all confirmed", "some refused"])
def test_what_was_confirmed_is_not_sent_again_although_the_store_was_away_when_it_was_to_be_deleted(
    stage: Stage, caplog: pytest.LogCaptureFixture, refused: tuple[str, ...]
) -> None:
    tried = list[None]()
    stage.open()
    stage.write(["1", "2"])
    lot = stage.broker.next()
    stage.store.away, stage.store.before_delete = True, lambda: tried.append(None)
    if refused:
        lot.refuse(*refused)
    else:
        lot.confirm()
    eventually(lambda: len(tried) > 3, what="tried to delete again and again")
    assert stage.broker.sent == ["1", "2"]
    stage.broker.refused, stage.store.away = set(), False
    stage.settled()
    assert stage.broker.sent == ["1", "2", *refused]
    assert stage.is_empty()
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_an_error_that_nobody_expects_is_said_and_the_relay_goes_on(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.broker.refused = set()
    errors = iter([ZeroDivisionError("unexpected")])

    def fail_once() -> None:
        for error in errors:
            raise error

    stage.store.after_read = fail_once
    stage.open()
    stage.write(["1"])
    stage.settled()
    assert stage.broker.sent == ["1"]
    assert "outbox relay failed group=shop" in caplog.text


# Owners


def test_under_a_stale_epoch_nothing_is_sent(stage: Stage) -> None:
    stage.broker.refused = set()
    stage.store.leave(FIRST, ["1"])
    stage.relay.open(FIRST, 1)
    stage.store.epochs[FIRST] = 2  # another has claimed it
    stage.relay.rows_committed(FIRST, 1)
    stage.settled()
    assert stage.store.reads > 0
    assert stage.broker.sent == []
    assert stage.store.left() == ["1"]


def test_what_is_under_way_when_a_partition_is_claimed_anew_is_not_sent_again(stage: Stage) -> None:
    stage.open()
    stage.write(["1"])
    lot = stage.broker.next()
    stage.open(epoch=2)
    stage.write(["2"])
    eventually(lambda: stage.store.renewals > 3, what="the relay has looked around meanwhile")
    lot.confirm()
    stage.broker.next().confirm()
    stage.settled()
    assert stage.broker.sent == ["1", "2"]


def test_what_left_too_late_for_its_revoke_is_deleted_all_the_same_and_not_sent_again_here(stage: Stage) -> None:
    stage.open()
    stage.write(["1"])
    lot = stage.broker.next()
    stage.relay.finish([FIRST], Deadline(0.01))
    stage.write(["2"])  # by a handler that outlasted it
    stage.open(epoch=2)  # and back again, before the broker has answered
    lot.confirm()
    stage.broker.next().confirm()
    stage.settled()
    assert stage.broker.sent == ["1", "2"]
    assert stage.is_empty()


def test_a_partition_that_went_is_deleted_from_when_the_broker_answers_late_and_not_read(stage: Stage) -> None:
    stage.open()
    stage.write(["1"])
    lot = stage.broker.next()
    stage.relay.finish([FIRST], Deadline(0.01))
    stage.store.leave(FIRST, ["2"])
    stage.relay.rows_committed(FIRST, 1)
    lot.confirm()
    eventually(lambda: stage.store.left() == ["2"], what="what was confirmed is deleted")
    eventually(lambda: FIRST not in stage.relay._outboxes, what="and the partition is forgotten")
    assert stage.broker.sent == ["1"]


# Back-pressure


def test_a_partition_is_full_until_enough_of_it_is_deleted(stage: Stage) -> None:
    stage.open(FIRST, SECOND)
    stage.settled()  # it has looked for what an earlier owner left: what it found then would be counted twice
    stage.write([str(n) for n in range(FULL)])
    assert stage.relay.is_full(FIRST)
    assert not stage.relay.is_full(SECOND)
    assert not stage.relay.is_full(Partition("unknown", 0))
    stage.broker.next().confirm()
    eventually(lambda: not stage.relay.is_full(FIRST), what="there is room again")
    lot = stage.broker.next()  # before the broker confirms at once: the relay may not have sent it yet
    stage.broker.refused = set()
    lot.confirm()
    stage.settled()
    assert stage.broker.sent == [str(n) for n in range(FULL)]


# Leaving


def test_who_leaves_sends_what_is_left_first(stage: Stage) -> None:
    stage.broker.refused = set()
    stage.open(FIRST, SECOND)
    stage.write([str(n) for n in range(3 * MAX_ROWS)])
    assert stage.relay.finish([FIRST, SECOND], Deadline(10.0)) == 0
    assert stage.is_empty()
    assert len(stage.broker.sent) == 3 * MAX_ROWS
    assert list(stage.relay._outboxes) == [UNOWNED]


def test_a_broker_that_never_answers_holds_nobody_longer_than_the_budget(stage: Stage) -> None:
    stage.open()
    stage.write(["1"])
    stage.broker.next()
    budget = Deadline(0.2)
    assert stage.relay.finish([FIRST], budget) == 1, "it stays"
    assert budget.passed, "it waited for it"
    assert stage.store.left() == ["1"], "the next owner sends it"


def test_what_stays_in_the_outbox_is_said(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.open(FIRST, SECOND)
    stage.settled()
    stage.settled(SECOND)
    stage.write(["1", "2"])
    stage.write(["3"], SECOND)
    assert stage.relay.finish([FIRST], Deadline(0.01)) == 2
    assert caplog.messages == [f'outbox rows kept partition={FIRST} rows=2 hint="the next owner sends them"']
    assert stage.relay.finish([FIRST], Deadline(0.01)) == 0, "it is counted once"
    assert stage.relay.close(Deadline(0.01)) == 1, "of those that it still had"
    assert len(caplog.messages) == 2


def test_where_nothing_goes_on_the_budget_is_not_used_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_PATIENCE", 0.1)
    stage.open()
    stage.write(["1"])
    stage.broker.next()
    budget = Deadline(3600.0)
    stage.relay.finish([FIRST], budget)
    assert not budget.passed


def test_a_relay_that_is_closed_has_sent_everything_and_its_thread_has_ended(stage: Stage) -> None:
    stage.broker.refused = set()
    stage.open()
    stage.write([str(n) for n in range(MAX_ROWS + 1)])
    stage.relay.close(Deadline(10.0))
    assert stage.is_empty()
    assert not stage.relay._thread.is_alive()
    stage.write(["late"])
    assert stage.store.left() == ["late"]


def test_a_relay_that_never_began_is_closed_at_once(stage: Stage) -> None:
    deadline = Deadline(3600.0)
    stage.another().close(deadline)
    assert not deadline.passed


def test_a_relay_whose_broker_never_answers_is_closed_within_its_deadline(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementation, "_PATIENCE", 0.1)
    stage.open()
    stage.write(["1"])
    stage.broker.next()
    stage.relay.close(Deadline(3600.0))
    assert not stage.relay._thread.is_alive()
    assert stage.store.left() == ["1"]


def test_a_relay_that_closes_and_waits_is_not_busy(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, send = list[None](), OutboxRelay._send

    def counted(self: OutboxRelay, ready: Any) -> None:
        turns.append(None)
        send(self, ready)

    monkeypatch.setattr(OutboxRelay, "_send", counted)
    monkeypatch.setattr(implementation, "_PATIENCE", 0.5)
    stage.open()
    stage.write(["1"])
    stage.broker.next()
    turns.clear()
    stage.relay.close(Deadline(3600.0))
    assert len(turns) < 50


# What is nobody's


def test_what_is_nobody_s_is_found_and_sent_once(stage: Stage) -> None:
    stage.broker.refused = set()
    stage.store.leave(UNOWNED, ["1", "2"])
    eventually(lambda: stage.is_empty(UNOWNED), what="sent and deleted")
    stage.store.leave(UNOWNED, ["3"])
    eventually(lambda: stage.is_empty(UNOWNED), what="sent and deleted")
    assert stage.broker.sent == ["1", "2", "3"]


def test_while_it_is_under_way_it_stays_ours_and_is_not_sent_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another app would send it as well, once the lease is over."""
    monkeypatch.setattr(implementation, "LEASE", LEASE / 100)
    stage.store.leave(UNOWNED, ["1"])
    lot, known = stage.broker.next(), stage.store.renewals
    eventually(lambda: stage.store.renewals > known + 3, what="the lease is renewed")
    assert stage.broker.sent == ["1"]
    lot.confirm()
    eventually(lambda: stage.is_empty(UNOWNED), what="deleted")


def test_a_relay_that_closes_waits_for_what_is_nobody_s_and_takes_no_more_of_it(stage: Stage) -> None:
    stage.store.leave(UNOWNED, ["1"])
    lot = stage.broker.next()
    closing = threading.Thread(target=stage.relay.close, args=(Deadline(60.0),))
    closing.start()
    eventually(lambda: stage.relay._closing, what="it is told to close")
    stage.store.leave(UNOWNED, ["2"])
    lot.confirm()
    closing.join(20)
    assert stage.store.left(UNOWNED) == ["2"], "what was confirmed is deleted, and what came after it is for another"
    assert stage.broker.sent == ["1"]


def test_a_store_that_was_away_for_long_is_looked_at_as_often_as_before(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.store.away = True
    eventually(lambda: stage.relay._outboxes[UNOWNED].tries > 5, what="tried again and again")
    stage.store.away = False
    eventually(lambda: stage.relay._outboxes[UNOWNED].tries == 0, what="the next rest is short again")


def test_what_was_taken_in_long_ago_is_forgotten_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_FORGET_EVERY", 0.05)
    monkeypatch.setattr(implementation, "_POLL_EVERY", 0.05)
    stage = Stage()
    stage.relay.start()
    eventually(lambda: stage.store.forgotten > 1, what="forgotten")
    stage.relay.close(Deadline(5.0))


# The controls: a relay without its guards is noticed


def test_control_a_relay_that_deletes_before_it_is_confirmed_is_noticed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship = OutboxRelay._deliver

    def too_soon(self: OutboxRelay, outbox: PartitionOutbox) -> None:
        if outbox.in_flight:
            stage.store.delivered("shop", {FIRST: [row.number for row in outbox.in_flight]})
        ship(self, outbox)

    monkeypatch.setattr(OutboxRelay, "_deliver", too_soon)
    with pytest.raises(AssertionError, match="so it is still there"):
        test_what_was_written_is_sent_in_order_and_deleted_when_it_is_confirmed(stage)
