"""One partition's rows, by random turns of its writer, its reader and the broker: all are sent, once, and in order."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kconsume.backends.outbox_table import Posted
from kconsume.line import Delivery
from kconsume.output import Outgoing
from kconsume.runtime.strand import Strand

TURNS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 9)),
        st.tuples(st.just("write, unnumbered"), st.integers(1, 9)),
        st.tuples(st.just("write while it is read"), st.integers(1, 9)),
        st.tuples(st.just("write, told late"), st.integers(1, 9)),
        st.tuples(st.just("open"), st.just(0)),
        st.tuples(st.just("somebody writes"), st.integers(1, 3)),
        st.tuples(st.just("send"), st.just(0)),
        st.tuples(st.just("send, refused from"), st.integers(0, 5)),
    ),
    max_size=40,
)


class Table:
    """The rows, and a strand that is served as the relay serves it."""

    def __init__(self, width: int, trusts: bool) -> None:
        self.strand, self.trusts = Strand(1), trusts
        self.strand.width = width
        self.rows: list[Posted] = []
        self.sent: list[int] = []
        self.reads = 0
        self._last = 0
        self._while_read: list[int] = []
        self._late: list[list[Posted]] = []

    def commit(self, count: int) -> list[Posted]:
        rows = [Posted(self._last + n, Outgoing(b"x" * (self._last + n))) for n in range(1, count + 1)]
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
        else:
            self.send(number if what == "send, refused from" else None)

    def _tell(self) -> None:
        """What is committed is told before the next transaction of the partition begins."""
        for rows in self._late:
            self.strand.wrote(len(rows), rows)
        self._late.clear()

    def send(self, refused_from: int | None = None) -> None:
        strand = self.strand
        if not strand.is_ready(0.0):
            return
        in_memory = strand.is_in_memory
        if not in_memory or not self.trusts:
            known, strand.unread = strand.pending, False
            self.reads += 1
            rows = self.rows[: 1 if in_memory else strand.width]
            for number in self._while_read:
                self._tell()
                strand.wrote(number, self.commit(number))
            self._while_read.clear()
            if not in_memory:
                strand.take(rows, known)
            elif strand.begins_with(rows):
                strand.take_tail()
        else:
            strand.take_tail()
        self._tell()
        if strand.lot:
            self._deliver(refused_from)

    def _deliver(self, refused_from: int | None) -> None:
        strand, lot = self.strand, self.strand.lot
        confirmed = [refused_from is None or index < refused_from for index in range(len(lot))]
        self.sent += [row.number for row, done in zip(lot, confirmed, strict=True) if done]
        strand.sending = Future()
        strand.sending.set_result(Delivery(confirmed, None if all(confirmed) else "no"))
        strand.collect()
        gone = set(strand.confirmed)
        self.rows = [row for row in self.rows if row.number not in gone]
        strand.deleted()


@pytest.mark.parametrize("trusts", [True, False], ids=["trusted", "looks each time"])
@settings(deadline=None, max_examples=150)
@given(turns=TURNS, width=st.integers(1, 7))
def test_every_row_is_sent_once_and_in_order(trusts: bool, turns: list[tuple[str, int]], width: int) -> None:
    table = Table(width, trusts)
    for what, number in turns:
        table.turn(what, number)
    table._tell()
    for _ in range(table._last + 10):
        table.send()
    assert table.rows == []
    assert table.sent == list(range(1, len(table.sent) + 1))
    assert len(table.sent) == table._last
    assert table.strand.clear


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
        test_every_row_is_sent_once_and_in_order(True)


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
