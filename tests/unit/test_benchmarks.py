"""The pure parts of `benchmarks/`: statistics, records, marks, the order of rounds, the command line.

No test asserts a time; whether the bars are met is for `make bench` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks import __main__ as entry
from benchmarks import marks, orders
from benchmarks.__main__ import main
from benchmarks.case import Case, Measured, Side, Task
from benchmarks.cases import CASES
from benchmarks.cases.memory import parse_peak
from benchmarks.consumed import committed_rate
from benchmarks.marks import Moment, Tally, between, between_tallies
from benchmarks.orders import LEAD_OUT, MARKS, PARTITIONS, Form, Order
from benchmarks.ratios import Bar, spread
from benchmarks.results import Result, Run, table, write
from benchmarks.rounds import Round, order, play
from benchmarks.witness import witnessed
from kconsume.errors import StoreError, StoreUnavailable

NS = Bar(600, at_least=False, unit="ns")
TASK = Task("localhost:9092", "orders", 1000)


class Fake(Case):
    name = "fake"
    about = "two numbers"
    bar = Bar(1.0)

    def ours(self, task: Task) -> Measured:
        raise AssertionError("runs in a process of its own")

    theirs = ours


class Runs:
    """Stands for the processes: notes who ran with what, and answers with figures that differ."""

    def __init__(self) -> None:
        self.sides: list[Side] = []
        self.transactions: list[int | None] = []

    def __call__(self, case: Case, side: Side, task: Task) -> Measured:
        self.sides.append(side)
        if side == "theirs":
            self.transactions.append(task.transaction)
            return Measured(100.0, 1.0, 1000)
        return Measured(100.0 + len(self.sides), 1.0, 1000, transaction=len(self.sides))


def rounds_of(*figures: tuple[float, float]) -> list[Round]:
    return [Round(Measured(ours, 1.0, 1000), Measured(theirs, 2.0, 1000)) for ours, theirs in figures]


def test_the_ratio_is_formed_inside_each_round() -> None:
    # Of the sides' medians it would be 2.0; the machine was slow for both sides of the last round.
    found = spread([(200, 100), (90, 100), (10, 20)], Bar(1.0))
    assert (found.median, found.low, found.high) == (0.9, 0.5, 2.0)


def test_where_the_bar_is_a_difference_it_is_formed_inside_each_round_too() -> None:
    found = spread([(1500, 1000), (900, 500), (2000, 1300)], NS)
    assert (found.median, found.low, found.high) == (500, 400, 700)


@pytest.mark.parametrize("pairs", [[], [(1.0, 0.0)], [(0.0, 1.0)]])
def test_a_round_without_figures_is_not_compared(pairs: list[tuple[float, float]]) -> None:
    for bar in (Bar(1.0), NS):
        with pytest.raises(ValueError, match="nothing to compare"):
            spread(pairs, bar)


def test_a_bar_is_met_at_its_limit_from_either_side() -> None:
    assert [Bar(0.9).met_by(ratio) for ratio in (0.89, 0.9, 2.0)] == [False, True, True]
    assert [Bar(1.5, at_least=False).met_by(ratio) for ratio in (0.5, 1.5, 1.51)] == [True, True, False]
    assert [NS.met_by(more) for more in (-5, 600, 601)] == [True, True, False]


def test_a_bar_says_what_it_is_about() -> None:
    assert [str(Bar(0.92)), str(Bar(1.1, at_least=False)), str(NS)] == ["≥ 0.92", "≤ 1.1", "≤ +600 ns"]
    assert [Bar(0.92).text(0.9), Bar(1.01, digits=3).text(1.0149), NS.text(1234.5), NS.text(-3)] == [
        "0.90",
        "1.015",
        "+1,234 ns",
        "-3 ns",
    ]


def test_the_bars_are_those_that_were_promised() -> None:
    assert {case.name: str(case.bar) for case in CASES.values()} == {
        "inline": "≥ 0.95",
        "thread": "≥ 0.7",
        "defaults": "≥ 4",
        "typed": "≥ 0.85",
        "batch": "≥ 0.85",
        "async": "≥ 0.55",
        "resource": "≤ 1.01",
        "table": "≤ +600 ns",
        "policies": "≤ 1.02",
        "dead-letters": "≥ 0.8",
        "sqlite": "≥ 0.75",
        "postgres": "≥ 2.5",
        "postgres-pipeline": "≥ 0.85",
        "postgres-copy": "≥ 0.85",
        "postgres-loop": "≥ 80",
        "postgres-outbox": "≥ 0.5",
        "redis": "≥ 1.1",
        "spark-sink": "≥ 0.9",
        "spark-foreach": "≥ 0.97",
        "spark-stream": "≥ 1.25",
        "spark-ledger": "≥ 0.9",
        "memory": "≤ 1.1",
        "start": "≤ 1.5",
    }


def test_the_median_decides_and_a_round_that_disagrees_is_shown() -> None:
    agreed, split = Result(Fake(), rounds_of((2, 1), (3, 1))), Result(Fake(), rounds_of((2, 1), (1, 1), (1, 2)))
    missed = Result(Fake(), rounds_of((1, 2), (1, 3)))
    assert [(r.met, r.clear) for r in (agreed, split, missed)] == [(True, True), (True, False), (False, True)]
    assert table([agreed, split, missed]).row_count == 3


def test_a_difference_decides_as_a_ratio_does_and_is_shown_with_its_unit() -> None:
    class More(Fake):
        bar = NS

    split = Result(More(), rounds_of((1500, 1000), (2000, 1300), (900, 500)))
    assert (split.met, split.clear) == (True, False)
    assert list(table([split]).columns[4].cells) == ["+500 ns\n+400–+700"]


@pytest.mark.parametrize("form", ["bytes", "typed"])
def test_a_topic_has_every_order_once_between_the_marks_of_its_partitions(form: Form) -> None:
    partitions = [list(orders.values(n, 4003, form)) for n in range(PARTITIONS)]
    marks = [(p, at) for p, values in enumerate(partitions) for at, value in enumerate(values) if is_mark(value, form)]
    assert marks == [(p, at) for p in range(PARTITIONS) for at in (0, 1001)]
    everything = [value for values in partitions for value in values]
    assert orders.counted(4003) == 4000
    assert len(everything) == orders.total(4003) == 4000 + MARKS + PARTITIONS * LEAD_OUT
    assert len(set(everything)) == len(everything) - MARKS + 1


def test_an_order_is_json_of_about_120_bytes() -> None:
    values = [v for v in orders.values(3, 1_000_000, "bytes") if v]
    assert 115 <= sum(map(len, values)) / len(values) <= 125
    assert msgspec.json.decode(values[0], type=Order).id == 1 + 3 * (250_000 + LEAD_OUT)


def test_the_clock_runs_from_the_first_mark_to_the_last_in_whatever_order_threads_noted_them() -> None:
    marks = [Moment(float(n), n / 2) for n in (3, 1, 2, 5, 4, 9, 7, 8)]
    assert between(marks) == (8.0, 4.0)


@pytest.mark.parametrize("count", [0, MARKS - 1, MARKS + 1])
def test_a_mark_that_is_missing_or_repeated_spoils_the_run(count: int) -> None:
    with pytest.raises(AssertionError, match="lost or repeated"):
        between([Moment(1.0, 1.0)] * count)


def tallies(*batches: tuple[int, float]) -> list[Tally]:
    return [Tally(records, Moment(at, at / 2)) for records, at in batches]


def test_without_marks_the_clock_runs_from_the_first_batch_until_the_counted_records_are_there() -> None:
    # 8 are counted; the first batch was made before the clock ran, the last is the lead-out. Threads noted them.
    assert between_tallies(tallies((3, 3.0), (2, 1.0), (4, 7.0), (1000, 9.0)), 8) == ((6.0, 3.0), 7)


@pytest.mark.parametrize("batches", [((8, 1.0),), ((3, 1.0), (4, 2.0))], ids=["one batch", "too few records"])
def test_without_marks_too_few_batches_spoil_the_run(batches: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(AssertionError, match="too few to measure"):
        between_tallies(tallies(*batches), 8)


class Begun:
    """A transaction of a store that is not there."""

    connection = object()

    def __init__(self) -> None:
        self.moved: list[tuple[int, int, int | None]] = []

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        self.moved.append((old, new, leader_epoch))

    def fault(self, error: BaseException) -> StoreError | None:
        return StoreUnavailable(str(error))


def test_a_transaction_is_tallied_with_its_records_once_it_has_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Tally] = []
    monkeypatch.setattr(marks, "_tallies", noted)
    begun, committed = Begun(), list[int]()

    @contextmanager
    def begin() -> Iterator[Begun]:
        yield begun
        committed.append(len(noted))  # nothing is noted before

    with witnessed(begin()) as tx:
        assert tx.connection is begun.connection
        assert isinstance(tx.fault(ValueError("broke")), StoreUnavailable)
        tx.advance(40, 100, 7)
    assert (begun.moved, committed, [tally.records for tally in noted]) == ([(40, 100, 7)], [0], [60])
    with witnessed(begin()) as tx:
        tx.advance(100, 120)
    assert (marks.tallied(), marks.mean_tally()) == (80, 40)


def test_a_transaction_that_does_not_commit_is_not_tallied(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Tally] = []
    monkeypatch.setattr(marks, "_tallies", noted)

    @contextmanager
    def fenced() -> Iterator[Begun]:
        yield Begun()
        raise ValueError("fenced")

    def run() -> None:
        with witnessed(fenced()) as tx:
            tx.advance(0, 10)

    with pytest.raises(ValueError, match="fenced"):
        run()
    with witnessed(nullcontext(Begun())):
        pass  # nothing was passed
    assert noted == []


def test_rates_of_commits_are_refused_when_a_record_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    total = orders.total(TASK.records)
    monkeypatch.setattr(marks, "_tallies", tallies((1000, 1.0), (total - 1000, 3.0)))
    assert committed_rate(TASK, total) == Measured((total - 1000) / 2, 1.0, total - 1000, transaction=total // 2)
    with pytest.raises(AssertionError, match="the topic has"):
        committed_rate(TASK, total - 1)
    monkeypatch.setattr(marks, "_tallies", tallies((1000, 1.0), (total - 1001, 3.0)))
    with pytest.raises(AssertionError, match="the topic has"):
        committed_rate(TASK, total)


def test_a_handler_of_lists_notes_every_mark_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Moment] = []
    monkeypatch.setattr(marks, "_marks", noted)
    marks.batch_noop([b"order"])
    assert noted == []
    marks.batch_noop([b"", b"order", b""])
    assert len(noted) == 2


def test_who_goes_first_alternates_and_the_warm_up_does_not_count() -> None:
    runs, said = Runs(), list[str]()
    played = play(Fake(), (TASK, TASK), 2, said.append, runs)
    assert runs.sides == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert [one.ours.figure for one in played] == [104.0, 105.0]
    assert len(said) == 3
    assert order(2) == order(0)


def test_the_other_side_is_told_the_transaction_size_that_kconsume_had_last() -> None:
    runs = Runs()
    play(Fake(), (TASK, TASK), 2, lambda _: None, runs)
    assert runs.transactions == [1, 1, 5]


def test_a_case_with_long_rounds_has_fewer() -> None:
    class Long(Fake):
        most_rounds = 3
        warm_up = False

    assert [len(play(Long(), (TASK, TASK), n, lambda _: None, Runs())) for n in (2, 8)] == [2, 3]


def test_the_file_has_every_round(tmp_path: Path) -> None:
    rounds = rounds_of((3, 2), (5, 4))
    write(tmp_path / "run.json", [Result(Fake(), rounds)], "localhost:9092 by address", 1000)
    run = msgspec.json.decode((tmp_path / "run.json").read_bytes(), type=Run)
    assert run.results[0].rounds == rounds
    assert (run.results[0].case, run.results[0].met, run.records) == ("fake", True, 1000)


def test_peak_memory_is_read_from_what_the_kernel_tells() -> None:
    assert parse_peak("Name:\tpython\nVmPeak:\t  999 kB\nVmHWM:\t  50120 kB\n") == 50120 * 1024
    with pytest.raises(ValueError, match="needs Linux"):
        parse_peak("Name:\tpython\n")


@pytest.mark.parametrize("arguments", [["unknown"], ["inline", "--rounds", "0"], ["--records", "10"]])
def test_what_cannot_be_measured_is_refused_before_a_broker_is_started(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, arguments).exit_code == 2


def test_only_the_databases_that_a_chosen_case_needs_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def service(url: str) -> Callable[[], AbstractContextManager[SimpleNamespace]]:
        @contextmanager
        def start() -> Iterator[SimpleNamespace]:
            started.append(url)
            yield SimpleNamespace(url=url, way="process")

        return start

    monkeypatch.setattr(entry, "postgres_service", service("postgresql://there"))
    monkeypatch.setattr(entry, "redis_service", service("redis://there"))
    with ExitStack() as services:
        assert entry.databases([CASES["inline"], CASES["sqlite"]], services) == {}
        assert entry.databases([CASES["postgres"], CASES["postgres-copy"]], services) == {
            "postgres": "postgresql://there"
        }
        assert started == ["postgresql://there"]
        addresses = entry.databases([CASES["redis"]], services)
    task = entry.with_addresses(TASK, CASES["redis"], addresses)
    assert (task.redis, task.postgres, entry.with_addresses(TASK, CASES["inline"], addresses)) == (
        "redis://there",
        "",
        TASK,
    )


def test_help_names_every_case_and_its_bar() -> None:
    text = CliRunner().invoke(main, ["--help"]).output
    assert all(f"{case.name:<17} {case.bar}" in text for case in CASES.values())


def is_mark(value: bytes, form: Form) -> bool:
    return not value if form == "bytes" else msgspec.json.decode(value, type=Order).quantity == 0
