"""`python -m benchmarks [CASE…]`: measure on one real broker, print the table, exit with 1 if a bar is missed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from rich.console import Console

from benchmarks.broker import OrderTopics, order_topics
from benchmarks.case import Case
from benchmarks.cases import CASES
from benchmarks.results import Result, table, write
from benchmarks.rounds import SideFailed, play
from kconsume.errors import ServiceUnavailable
from kconsume.testing.services import kafka_service

_began = time.monotonic()


def _cases_help() -> str:
    return "\b\n" + "\n".join(f"{case.name:<9} {case.bar!s:<7} {case.about}" for case in CASES.values())


@click.command(help=f"{__doc__}\n\nCases (all, if none is named) and their bars:\n\n{_cases_help()}")
@click.argument("cases", nargs=-1, type=click.Choice(list(CASES)))
@click.option(
    "--rounds", type=click.IntRange(min=1), default=8, show_default=True, help="Even: each side is first as often."
)
@click.option(
    "--records",
    type=click.IntRange(min=4000),
    default=1_000_000,
    show_default=True,
    help="Fewer are a smoke test, not a measurement.",
)
@click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write every round's figures here."
)
def main(cases: tuple[str, ...], rounds: int, records: int, file: Path | None) -> None:
    chosen = [CASES[name] for name in dict.fromkeys(cases or CASES)]
    results: list[Result] = []
    try:
        with kafka_service() as kafka:
            _say(f"broker {kafka.bootstrap} (by {kafka.way}), {records:,} records, {rounds} rounds")
            broker = f"{kafka.bootstrap} by {kafka.way}"
            results.extend(_measure(chosen, kafka.bootstrap, rounds, records))
    except (ServiceUnavailable, SideFailed) as failed:
        _show(results)  # what was measured before it
        raise click.ClickException(str(failed)) from failed
    if file is not None:
        write(file, results, broker, records)
    _show(results)
    sys.exit(0 if all(result.met for result in results) else 1)


def _measure(cases: Sequence[Case], bootstrap: str, rounds: int, records: int) -> Iterator[Result]:
    with order_topics(bootstrap, _say) as shared:
        for case in cases:
            yield _play(case, shared, bootstrap, rounds, records)


def _play(case: Case, shared: OrderTopics, bootstrap: str, rounds: int, records: int) -> Result:
    if not case.own_topics:
        return Result(case, play(case, case.tasks(shared, records), rounds, _say))
    with order_topics(bootstrap, _say) as own:
        return Result(case, play(case, case.tasks(own, records), rounds, _say))


def _show(results: Sequence[Result]) -> None:
    if results:
        Console().print(table(results))


def _say(line: str) -> None:
    """Progress, on standard error: the table alone is on standard output."""
    print(f"{time.monotonic() - _began:6.1f} s  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
