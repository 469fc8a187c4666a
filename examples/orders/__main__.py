"""Run the shop, kill its processes while orders come in, and see whether the books balance.

python -m examples.orders                                          an embedded broker, a PostgreSQL of its own
python -m examples.orders --brokers localhost:9092 --database postgresql://localhost/postgres
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import click
import psycopg
from rich.console import Console

from examples.ship import Ended
from examples.stage import clean_environment, database, new_stage, topics
from kconsume.testing.services import postgres_service

from . import books, demand
from .fleet import Fleet
from .load import Load


@click.command(help=__doc__.partition("\n")[0])
@click.option("--brokers", help="A Kafka; without it an embedded broker.")
@click.option("--database", "server", help="A PostgreSQL in which a database may be made; without it one is started.")
@click.option("--orders", default=600, show_default=True, help="How many orders are placed.")
@click.option("--kills", default=10, show_default=True, help="How many processes are killed meanwhile.")
@click.option("--seed", default=1, show_default=True, help="Who is killed when.")
@click.option("--session", default=6.0, show_default=True, help="Seconds until a killed member is missed.")
@click.option("--within", default=300.0, show_default=True, help="Seconds until everything must have come through.")
def main(
    brokers: str | None, server: str | None, orders: int, kills: int, seed: int, session: float, within: float
) -> None:
    console = Console(highlight=False)
    stage = new_stage()
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kconsume-orders-")))
        shop = opened.enter_context(database(server or opened.enter_context(postgres_service()).url, stage))
        books.prepare(shop)
        names = [f"{stage}.orders", f"{stage}.reservations"]
        environment = {
            **clean_environment(),
            "SHOP": shop,
            "STAGE": f"{stage}.",
            "KCONSUME_BROKERS": opened.enter_context(topics(brokers, stage, names)),
            # Production has 45 s, and no kills that a person waits for.
            "KCONSUME_KAFKA_SESSION_TIMEOUT_MS": f"{1000 * session:.0f}",
        }
        look = opened.enter_context(psycopg.connect(shop, autocommit=True))
        fleet = Fleet(environment, folder, seed)
        opened.callback(fleet.end)
        went_well = True
        try:
            _storm(fleet, look, orders, kills, time.monotonic() + within, console)
            fleet.stop()
            _tell(fleet, look, orders, console)
        except (Ended, TimeoutError) as failure:
            went_well = False
            console.print(str(failure), style="bold red", markup=False)
        balanced = books.show(books.open_books(look, orders), console)
    sys.exit(0 if balanced and went_well else 1)


def _storm(
    fleet: Fleet, database: psycopg.Connection, orders: int, kills: int, deadline: float, console: Console
) -> None:
    """Orders come in, processes are killed as the work goes on, and then there is time until all has come through."""
    load = Load(fleet.web, orders, deadline - time.monotonic())
    everything = orders + demand.events(orders).total()
    with ThreadPoolExecutor(1) as beside:
        ordering = beside.submit(load.run)
        try:
            while fleet.killed.total() < kills or not _all_is_done(ordering, database, orders):
                fleet.must_run()
                letters = _count(database)
                killed = fleet.killed.total()
                if killed < kills and load.placed + letters >= everything * (killed + 1) // (kills + 2):
                    name = fleet.kill_one()
                    console.print(f"kill -9 {name:<16} {load.placed:5,} orders placed, {letters:5,} letters")
                if time.monotonic() > deadline:
                    raise TimeoutError("not everything came through in time")
                _count_a_shelf(database, letters)
                time.sleep(0.1)
        finally:
            load.stopped = True


def _count_a_shelf(database: psycopg.Connection, letters: int) -> None:
    """Somebody does, now and then, and nobody can reserve from it meanwhile."""
    with database.transaction():
        database.execute("select * from stock offset %s limit 1 for update", (letters % len(demand.CATALOGUE),))
        time.sleep(0.05)


def _all_is_done(ordering: Future[None], database: psycopg.Connection, orders: int) -> bool:
    if not ordering.done():
        return False
    ordering.result()  # raises what the load generator could not do
    return all(book.balances for book in books.open_books(database, orders))


def _tell(fleet: Fleet, database: psycopg.Connection, orders: int, console: Console) -> None:
    killed = ", ".join(f"{name} {times}" for name, times in sorted(fleet.killed.items()))
    seen = books.witness(database)
    console.print(
        f"{orders:,} orders; killed with kill -9: {killed or 'nobody'}. On the way {seen.retried} reservations and "
        f"{seen.asked_again} letters were tried again, and {seen.repeats} events that came twice were dropped."
    )


def _count(database: psycopg.Connection) -> int:
    row = database.execute("select count(*) from letters").fetchone()
    return 0 if row is None else int(row[0])


if __name__ == "__main__":
    main()
