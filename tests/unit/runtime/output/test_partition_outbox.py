"""One partition's rows, by random turns of its writer, its reader and the broker: to each topic all are sent, once, and
in order; a row that is refused is passed by none to its topic, and holds none to another."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kconsume._kafka.delivery import DeliveryResult
from kconsume._kafka.outgoing import Outgoing
from kconsume._kafka.topic_limits import NO_LIMITS, TopicLimit, record_bytes
from kconsume._runtime.output.partition_outbox import PartitionOutbox, TopicRows
from kconsume.backends.outbox.tables import Posted

TURNS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 9)),
        st.tuples(st.just("take a number"), st.just(0)),
        st.tuples(st.just("commit late"), st.just(0)),
        st.tuples(st.just("write while it is read"), st.integers(1, 9)),
        st.tuples(st.just("write, told late"), st.integers(1, 9)),
        st.tuples(st.just("open"), st.just(0)),
        st.tuples(st.just("open while it is read"), st.just(0)),
        st.tuples(st.just("somebody writes"), st.integers(1, 3)),
        st.tuples(st.just("send"), st.just(0)),
        st.tuples(st.just("refuse from now on"), st.integers(0, 7)),
        st.tuples(st.just("take from now on"), st.just(0)),
        st.tuples(st.just("drop what is refused"), st.just(0)),
        st.tuples(st.just("answer late"), st.just(0)),
    ),
    max_size=60,
)
LIMITS = {"a": TopicLimit(300)}
"""Some three rows at once; one row in seven is larger than that."""


class Table:
    """The rows, and a outbox that is served as the relay serves it."""

    def __init__(self, read_size: int, *, two_topics: bool = False, limited: bool = False) -> None:
        self.outbox = PartitionOutbox(1)
        self.outbox.read_size = read_size
        self.two_topics, self.limits = two_topics, LIMITS if limited else NO_LIMITS
        self.rows: list[Posted] = []
        self.sent: list[int] = []
        self.dropped: set[int] = set()
        self.refused_from: int | None = None
        """The next rows but so many are refused; whatever stands behind one of them would be taken, if it is sent."""
        self.refused: set[int] = set()
        self.late: set[int] = set()
        """Rows that were committed after rows with higher numbers."""
        self._last = 0
        self._uncommitted: list[Posted] = []
        self._while_read: list[int] = []
        self._opened_while_read = False
        self._untold = 0
        """How many rows are committed and not told yet."""
        self._unanswered: list[TopicRows] = []

    def topic(self, number: int) -> str:
        return "b" if self.two_topics and number % 3 == 0 else "a"

    def commit(self, count: int) -> int:
        rows = self._new(count)
        self.rows += rows
        return count

    def _new(self, count: int) -> list[Posted]:
        numbers = range(self._last + 1, self._last + count + 1)
        self._last += count
        return [Posted(n, Outgoing(b"x" * (400 if n % 7 == 0 else 20), b"k", (), self.topic(n))) for n in numbers]

    def commit_late(self) -> None:
        self.late |= {row.number for row in self._uncommitted}
        self.rows = sorted(self.rows + self._uncommitted, key=lambda row: row.number)
        self.outbox.rows_committed(len(self._uncommitted))
        self._uncommitted.clear()

    def turn(self, what: str, number: int) -> None:
        if what == "write":
            self._tell()
            self.outbox.rows_committed(self.commit(number))
        elif what == "take a number":
            self._uncommitted += self._new(1)
        elif what == "commit late":
            self._tell()
            self.commit_late()
        elif what == "write while it is read":
            self._while_read.append(number)
        elif what == "write, told late":
            self._tell()
            self._untold = self.commit(number)
        elif what == "open":
            self._tell()
            self.outbox.open(1)
        elif what == "open while it is read":
            self._opened_while_read = True
        elif what == "somebody writes":
            self._tell()
            self.commit(number)
            self.outbox.open(1)  # whoever does, the owner learns of it by a claim
        elif what == "refuse from now on":
            self.refused = {row.number for row in self.rows[number:][:1]}
        elif what == "take from now on":
            self.refused = set()
        elif what == "drop what is refused":
            self.dropped |= self.refused & {row.number for row in self.rows if self._is_held(row)}
            self.rows = [row for row in self.rows if row.number not in self.dropped]
        else:
            self.send(late=what == "answer late")

    def _is_held(self, row: Posted) -> bool:
        return any(hold.number == row.number for hold in self.outbox.holds.values())

    def _tell(self) -> None:
        """What is committed is told before the next transaction of the partition begins."""
        if self._untold:
            self.outbox.rows_committed(self._untold)
        self._untold = 0

    def send(self, *, late: bool = False) -> None:
        outbox = self.outbox
        if outbox.is_ready(0.0):
            self._read()
            for part in outbox.split() if outbox.in_flight else ():
                self._deliver(part)
            if late and outbox.by_topic:
                outbox.by_topic[0].delivery, kept = Future(), outbox.by_topic[0].delivery
                assert kept is not None
                self._unanswered.append(TopicRows("", (), kept))
                outbox.hold_unanswered()
        for topic in outbox.due_holds(float("inf")):
            self._try_alone(topic)
        self._collect()
        if not late:
            self._answer()

    def _collect(self) -> None:
        outbox = self.outbox
        outbox.collect()
        outbox.collect_held()
        gone = set(outbox.confirmed)
        self.rows = [row for row in self.rows if row.number not in gone]
        outbox.deleted()

    def _answer(self) -> None:
        """What was late."""
        for hold in self.outbox.holds.values():
            if hold.in_flight is not None and hold.in_flight.delivery is not None and not hold.in_flight.is_answered:
                hold.in_flight.delivery.set_result(self._unanswered.pop(0).delivery.result())  # type: ignore[union-attr]

    def _read(self) -> None:
        outbox = self.outbox
        outbox.begin_read(0.0)  # the time stands still, so no read begins at the start because of the time
        topics, others, above = outbox.targets
        all_rows = [r for r in self.rows if r.number > above and (r.outgoing.topic in topics) is not others]
        rows = all_rows[: outbox.read_size]
        for number in self._while_read:
            self._tell()
            outbox.rows_committed(self.commit(number))
        self._while_read.clear()
        if self._opened_while_read:
            outbox.open(1)
        self._opened_while_read = False
        if outbox.reading:
            outbox.take(rows, self.limits)
        self._tell()

    def _deliver(self, part: TopicRows) -> None:
        """As by a producer that stops at a refusal."""
        stop = next((i for i, row in enumerate(part.rows) if self._is_refused(row, part)), len(part.rows))
        confirmed = [index < stop for index in range(len(part.rows))]
        self.sent += [row.number for row in part.rows[:stop]]
        part.delivery = Future()
        part.delivery.set_result(DeliveryResult(confirmed, None if all(confirmed) else "no"))

    def _is_refused(self, row: Posted, part: TopicRows) -> bool:
        if self.limits and part.topic == "a" and sum(map(record_bytes, part.rows)) > LIMITS["a"].most_bytes:
            assert len(part.rows) == 1, "a row that may be refused leaves alone"
        return row.number in self.refused

    def _try_alone(self, topic: str) -> None:
        hold = self.outbox.holds[topic]
        first = next((row for row in self.rows if row.outgoing.topic == topic), None)
        if first is None:
            self.outbox.release(topic)
            return
        hold.in_flight = TopicRows(topic, [first])
        self._deliver(hold.in_flight)

    def check(self) -> None:
        """To each topic in order, and nothing twice. A late row is passed by rows that were committed before it."""
        assert len(self.sent) == len(set(self.sent)), "nothing is there twice"
        absent = self.dropped | self.late | {row.number for row in self._uncommitted}
        for topic in "ab":
            sent = [n for n in self.sent if self.topic(n) == topic and n not in self.late]
            expected = [n for n in range(1, self._last + 1) if self.topic(n) == topic and n not in absent]
            assert sent == expected[: len(sent)], f"to {topic}: nothing is passed"


@pytest.mark.parametrize("limited", [True, False], ids=["limits known", "no limits"])
@pytest.mark.parametrize("two_topics", [True, False], ids=["two topics", "one topic"])
@settings(deadline=None, max_examples=40)
@given(turns=TURNS, read_size=st.integers(1, 7))
def test_every_row_is_sent_once_and_in_order(
    two_topics: bool, limited: bool, turns: list[tuple[str, int]], read_size: int
) -> None:
    table = Table(read_size, two_topics=two_topics, limited=limited)
    for what, number in turns:
        table.turn(what, number)
        table.check()
    table._tell()
    table.commit_late()
    table.refused = set()
    for _ in range(4 * table._last + 40):
        table.send()
    table.check()
    assert table.rows == []
    assert len(table.sent) + len(table.dropped) == table._last
    assert table.outbox.is_done


@pytest.mark.parametrize("limited", [True, False], ids=["limits known", "no limits"])
@settings(deadline=None, max_examples=40)
@given(turns=TURNS, read_size=st.integers(1, 7))
def test_a_row_that_is_refused_for_good_holds_no_row_to_another_topic(
    limited: bool, turns: list[tuple[str, int]], read_size: int
) -> None:
    table = Table(read_size, two_topics=True, limited=limited)
    for what, number in turns:
        table.turn(what, number)
    table._tell()
    table.commit_late()
    table._while_read.clear()
    table._answer()
    table._collect()
    table.refused = {row.number for row in table.rows if row.outgoing.topic == "b"}
    for _ in range(4 * table._last + 40):
        table.send()
    table.check()
    assert {row.number for row in table.rows} == table.refused
    if table.refused:
        assert table.outbox.holds["b"].number == min(table.refused)
        assert table.outbox.is_stuck


def late_row() -> Table:
    """A row that was committed after a row with a higher number was sent; then the relay has some turns."""
    table = Table(7)
    for what in ("take a number", "write", "send", "commit late", *["send"] * 5):
        table.turn(what, 1)
    return table


def test_a_row_that_becomes_visible_late_is_sent() -> None:
    assert (late_row().sent, late_row().rows) == ([2, 1], [])


def test_a_row_that_becomes_visible_late_is_sent_although_rows_of_another_hide_that_it_is_missing() -> None:
    """As many rows come as were told, and one of them is not ours: an earlier owner wrote it, and told nobody."""
    table = Table(1)
    for what in ("take a number", "write", "somebody writes", "send", "commit late", *["send"] * 9):
        table.turn(what, 1)
    assert (sorted(table.sent), table.rows) == ([1, 2, 3], [])
    assert table.outbox.is_done


def test_control_a_late_row_stays_if_the_table_is_not_read_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionOutbox, "_read_from_start", lambda outbox: setattr(outbox, "unread", True))
    assert late_row().sent == [2]
