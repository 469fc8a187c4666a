"""One partition's rows, by random turns of its writer, its reader and the broker: to each topic all are sent, once, and
in order; a row that is refused is passed by none to its topic, and holds none to another."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kconsume.backends.outbox_table import Posted
from kconsume.line import Delivery
from kconsume.output import Outgoing
from kconsume.runtime.limits import NO_LIMITS, Limit, record_bytes
from kconsume.runtime.strand import Part, Strand

TURNS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 9)),
        st.tuples(st.just("write, unnumbered"), st.integers(1, 9)),
        st.tuples(st.just("write while it is read"), st.integers(1, 9)),
        st.tuples(st.just("write, told late"), st.integers(1, 9)),
        st.tuples(st.just("open"), st.just(0)),
        st.tuples(st.just("somebody writes"), st.integers(1, 3)),
        st.tuples(st.just("send"), st.just(0)),
        st.tuples(st.just("refuse from now on"), st.integers(0, 7)),
        st.tuples(st.just("take from now on"), st.just(0)),
        st.tuples(st.just("drop what is refused"), st.just(0)),
        st.tuples(st.just("answer late"), st.just(0)),
    ),
    max_size=60,
)
LIMITS = {"a": Limit(300)}
"""Some three rows at once; one row in seven is larger than that."""


class Table:
    """The rows, and a strand that is served as the relay serves it."""

    def __init__(self, width: int, trusts: bool, *, two_topics: bool = False, limited: bool = False) -> None:
        self.strand, self.trusts = Strand(1), trusts
        self.strand.width = width
        self.two_topics, self.limits = two_topics, LIMITS if limited else NO_LIMITS
        self.rows: list[Posted] = []
        self.sent: list[int] = []
        self.dropped: set[int] = set()
        self.refused_from: int | None = None
        """The next rows but so many are refused; whatever stands behind one of them would be taken, if it is sent."""
        self.refused: set[int] = set()
        self.reads = 0
        self._last = 0
        self._while_read: list[int] = []
        self._late: list[list[Posted]] = []
        self._unanswered: list[Part] = []

    def topic(self, number: int) -> str:
        return "b" if self.two_topics and number % 3 == 0 else "a"

    def commit(self, count: int) -> list[Posted]:
        numbers = range(self._last + 1, self._last + count + 1)
        rows = [Posted(n, Outgoing(b"x" * (400 if n % 7 == 0 else 20), b"k", (), self.topic(n))) for n in numbers]
        self._last += count
        self.rows += rows
        return rows

    def turn(self, what: str, number: int) -> None:
        if what == "write":
            self._tell()
            self.strand.wrote(number, self.commit(number))
        elif what == "write, unnumbered":
            self._tell()
            self.commit(number)
            self.strand.wrote(number, ())
        elif what == "write while it is read":
            self._while_read.append(number)
        elif what == "write, told late":
            self._tell()
            self._late.append(self.commit(number))
        elif what == "open":
            self._tell()
            self.strand.open(1)
        elif what == "somebody writes":
            self._tell()
            self.commit(number)
            self.strand.open(1)  # whoever does, the owner learns of it by a claim
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
        return any(hold.number == row.number for hold in self.strand.holds.values())

    def _tell(self) -> None:
        """What is committed is told before the next transaction of the partition begins."""
        for rows in self._late:
            self.strand.wrote(len(rows), rows)
        self._late.clear()

    def send(self, *, late: bool = False) -> None:
        strand = self.strand
        if strand.is_ready(0.0):
            self._read()
            for part in strand.split() if strand.lot else ():
                self._deliver(part)
            if late and strand.parts:
                strand.parts[0].sending, kept = Future(), strand.parts[0].sending
                assert kept is not None
                self._unanswered.append(Part("", (), kept))
                strand.set_aside()
        for topic in strand.due_holds(float("inf")):
            self._try_alone(topic)
        self._collect()
        if not late:
            self._answer()

    def _collect(self) -> None:
        strand = self.strand
        strand.collect()
        strand.collect_held()
        gone = set(strand.confirmed)
        self.rows = [row for row in self.rows if row.number not in gone]
        strand.deleted()

    def _answer(self) -> None:
        """What was late."""
        for hold in self.strand.holds.values():
            if hold.part is not None and hold.part.sending is not None and not hold.part.is_answered:
                hold.part.sending.set_result(self._unanswered.pop(0).sending.result())  # type: ignore[union-attr]

    def _read(self) -> None:
        strand = self.strand
        in_memory = strand.is_in_memory
        if not in_memory or not self.trusts:
            known, strand.unread = strand.pending, False
            self.reads += 1
            chosen, width = strand.targets, 1 if in_memory else strand.width
            all_rows = [row for row in self.rows if chosen is None or row.outgoing.topic not in chosen.topics]
            rows = all_rows[:width]
            for number in self._while_read:
                self._tell()
                strand.wrote(number, self.commit(number))
            self._while_read.clear()
            if not in_memory:
                strand.take(rows, known, self.limits)
            elif strand.begins_with(rows):
                strand.take_tail(self.limits)
        else:
            strand.take_tail(self.limits)
        self._tell()

    def _deliver(self, part: Part) -> None:
        """As by a producer that stops at a refusal."""
        stop = next((i for i, row in enumerate(part.rows) if self._is_refused(row, part)), len(part.rows))
        confirmed = [index < stop for index in range(len(part.rows))]
        self.sent += [row.number for row in part.rows[:stop]]
        part.sending = Future()
        part.sending.set_result(Delivery(confirmed, None if all(confirmed) else "no"))

    def _is_refused(self, row: Posted, part: Part) -> bool:
        if self.limits and part.topic == "a" and sum(map(record_bytes, part.rows)) > LIMITS["a"].most_bytes:
            assert len(part.rows) == 1, "a row that may be refused leaves alone"
        return row.number in self.refused

    def _try_alone(self, topic: str) -> None:
        hold = self.strand.holds[topic]
        first = next((row for row in self.rows if row.outgoing.topic == topic), None)
        if first is None:
            self.strand.release(topic)
            return
        hold.part = Part(topic, [first])
        self._deliver(hold.part)

    def check(self) -> None:
        """To each topic in order, and nothing twice."""
        for topic in "ab":
            sent = [number for number in self.sent if self.topic(number) == topic]
            expected = [n for n in range(1, self._last + 1) if self.topic(n) == topic and n not in self.dropped]
            assert sent == expected[: len(sent)], f"to {topic}: nothing is passed, and nothing is there twice"


@pytest.mark.parametrize("limited", [True, False], ids=["limits known", "no limits"])
@pytest.mark.parametrize("two_topics", [True, False], ids=["two topics", "one topic"])
@pytest.mark.parametrize("trusts", [True, False], ids=["trusted", "looks each time"])
@settings(deadline=None, max_examples=40)
@given(turns=TURNS, width=st.integers(1, 7))
def test_every_row_is_sent_once_and_in_order(
    trusts: bool, two_topics: bool, limited: bool, turns: list[tuple[str, int]], width: int
) -> None:
    table = Table(width, trusts, two_topics=two_topics, limited=limited)
    for what, number in turns:
        table.turn(what, number)
        table.check()
    table._tell()
    table.refused = set()
    for _ in range(4 * table._last + 40):
        table.send()
    table.check()
    assert table.rows == []
    assert len(table.sent) + len(table.dropped) == table._last
    assert table.strand.clear


@pytest.mark.parametrize("limited", [True, False], ids=["limits known", "no limits"])
@settings(deadline=None, max_examples=40)
@given(turns=TURNS, width=st.integers(1, 7))
def test_a_row_that_is_refused_for_good_holds_no_row_to_another_topic(
    limited: bool, turns: list[tuple[str, int]], width: int
) -> None:
    table = Table(width, trusts=True, two_topics=True, limited=limited)
    for what, number in turns:
        table.turn(what, number)
    table._tell()
    table._while_read.clear()
    table._answer()
    table._collect()
    table.refused = {row.number for row in table.rows if row.outgoing.topic == "b"}
    for _ in range(4 * table._last + 40):
        table.send()
    table.check()
    assert {row.number for row in table.rows} == table.refused
    if table.refused:
        assert table.strand.holds["b"].number == min(table.refused)
        assert table.strand.is_stuck


def test_in_memory_nothing_is_read() -> None:
    table = Table(100, trusts=True)
    table.send()
    reads = table.reads
    for _ in range(50):
        table.turn("write", 9)
        table.send()
    assert (table.sent, table.reads) == (list(range(1, 451)), reads)
    assert reads == 1


def test_control_a_tail_with_a_gap_passes_rows_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in memory has to be an end of the table, without a gap."""
    monkeypatch.setattr(Strand, "_drop_tail", lambda _: None)
    monkeypatch.setattr(Strand, "is_in_memory", property(lambda strand: bool(strand._tail) and not strand.unread))
    with pytest.raises(AssertionError):
        test_every_row_is_sent_once_and_in_order(True, False, False)


def test_control_rows_that_are_told_late_are_sent_twice_if_nobody_looks_at_their_numbers() -> None:
    class Forgetful(Strand):
        _reached = property(lambda _: 0, lambda _, __: None)

    table = Table(100, trusts=True)
    table.strand = Forgetful(1)
    table.turn("write, told late", 3)
    table.send()
    table.turn("write", 2)
    table.strand.pending = 5
    table.send()
    assert table.sent == [1, 2, 3, 1, 2, 3, 4, 5]
