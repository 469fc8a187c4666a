"""`python -m benchmarks [CASE…]`: measure on one real broker, and print the table. Exit code 1 means a missed bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

import click
import msgspec
from rich.console import Console

from benchmarks.broker import OrderTopics, order_topics
from benchmarks.case import Case, Database, Task
from benchmarks.cases import CASES
from benchmarks.results import Result, table, write
from benchmarks.rounds import SideFailed, play
from kconsume.errors import ServiceUnavailable
from kconsume.testing.services import kafka_service, postgres_service, redis_service

Addresses = Mapping[Database, str]

_TABLE_WIDTH = 100  # set explicitly, because a table that is written to a file would be cropped
_began = time.monotonic()


def _cases_help() -> str:
    return "\b\n" + "\n".join(f"{case.name:<17} {case.bar!s:<9} {case.about}" for case in CASES.values())


@click.command(help=f"{__doc__}\n\nCases (all by default) and their bars:\n\n{_cases_help()}")
@click.argument("cases", nargs=-1, type=click.Choice(list(CASES)))
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="An even number, so that each side is first equally often.",
)
@click.option(
    "--records",
    type=click.IntRange(min=4000),
    default=1_000_000,
    show_default=True,
    help="With fewer, the run is a smoke test, not a measurement.",
)
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the figures of every round to this file.",
)
def main(cases: tuple[str, ...], rounds: int, records: int, file: Path | None) -> None:
    chosen = [CASES[name] for name in dict.fromkeys(cases or CASES)]
    results: list[Result] = []
    try:
        with ExitStack() as services:
            kafka = services.enter_context(kafka_service())
            _say(f"broker {kafka.bootstrap} (by {kafka.way}), {records:,} records, {rounds} rounds")
            broker = f"{kafka.bootstrap} by {kafka.way}"
            addresses = databases(chosen, services)
            results.extend(_measure(chosen, kafka.bootstrap, addresses, rounds, records))
    except (ServiceUnavailable, SideFailed) as failed:
        _show(results)  # the cases that ended before the failure
        raise click.ClickException(str(failed)) from failed
    if file is not None:
        write(file, results, broker, records)
    _show(results)
    sys.exit(0 if all(result.met for result in results) else 1)


def databases(cases: Sequence[Case], services: ExitStack) -> Addresses:
    """Start the databases that the chosen cases need, and no others. Returns their addresses."""
    wanted = {need for case in cases for need in case.needs}
    addresses: dict[Database, str] = {}
    if "postgres" in wanted:
        postgres = services.enter_context(postgres_service())
        addresses["postgres"] = postgres.url
        _say(f"PostgreSQL by {postgres.way}")
    if "redis" in wanted:
        redis = services.enter_context(redis_service())
        addresses["redis"] = redis.url
        _say(f"Redis by {redis.way}")
    return addresses


def _measure(
    cases: Sequence[Case], bootstrap: str, addresses: Addresses, rounds: int, records: int
) -> Iterator[Result]:
    with order_topics(bootstrap, _say) as shared:
        for case in cases:
            yield _play(case, shared, bootstrap, addresses, rounds, records)


def _play(case: Case, shared: OrderTopics, bootstrap: str, addresses: Addresses, rounds: int, records: int) -> Result:
    with order_topics(bootstrap, _say) if case.own_topics else nullcontext(shared) as topics:
        ours, theirs = (with_addresses(task, case, addresses) for task in case.tasks(topics, records))
        return Result(case, play(case, (ours, theirs), rounds, _say))


def with_addresses(task: Task, case: Case, addresses: Addresses) -> Task:
    """Return the task with the addresses of the databases that its case needs."""
    return msgspec.structs.replace(task, **{need: addresses[need] for need in case.needs})


def _show(results: Sequence[Result]) -> None:
    if results:
        Console(width=max(Console().width, _TABLE_WIDTH)).print(table(results))


def _say(line: str) -> None:
    """Print progress to standard error. Standard output has only the table."""
    print(f"{time.monotonic() - _began:6.1f} s  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
