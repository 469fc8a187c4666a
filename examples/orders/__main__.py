"""Run the three services, kill their processes while orders are placed, and check the resulting tables.

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

from examples.database import database
from examples.ship import Ended
from examples.stage import clean_environment, new_stage, topics
from kconsume.testing.services import postgres_service

from . import books, demand
from .fleet import Fleet
from .load import Load


@click.command(help=__doc__.partition("\n")[0])
@click.option("--brokers", help="A Kafka. Without it, an embedded broker is used.")
@click.option("--database", "server", help="A PostgreSQL that may get a new database. Without it, one is started.")
@click.option("--orders", default=600, show_default=True, help="How many orders are placed.")
@click.option("--kills", default=10, show_default=True, help="How often a process is killed.")
@click.option("--seed", default=1, show_default=True, help="Decides which process is killed when.")
@click.option("--session", default=6.0, show_default=True, help="Seconds until the group notices a killed member.")
@click.option("--within", default=300.0, show_default=True, help="Seconds within which every order must be processed.")
def main(
    brokers: str | None, server: str | None, orders: int, kills: int, seed: int, session: float, within: float
) -> None:
    console = Console(highlight=False)
    stage = new_stage()
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kconsume-orders-")))
        if server is None:
            console.print("starting PostgreSQL …")
            server = opened.enter_context(postgres_service()).url
        console.print("creating the database …")
        shop = opened.enter_context(database(server, stage))
        books.prepare(shop)
        console.print("starting an embedded broker …" if brokers is None else "creating the topics …")
        names = [f"{stage}.orders", f"{stage}.reservations"]
        environment = {
            **clean_environment(),
            "SHOP": shop,
            "STAGE": f"{stage}.",
            "KCONSUME_BROKERS": opened.enter_context(topics(brokers, stage, names)),
            # Production uses 45 s. Here a user waits for each kill.
            "KCONSUME_KAFKA_SESSION_TIMEOUT_MS": f"{1000 * session:.0f}",
        }
        look = opened.enter_context(psycopg.connect(shop, autocommit=True))
        console.print("starting web, inventory, notifications and the letter office …")
        fleet = Fleet(environment, folder, seed)
        opened.callback(fleet.end)
        went_well = True
        try:
            _storm(fleet, look, orders, kills, time.monotonic() + within, console)
            console.print("stopping the services …")
            fleet.stop()
            _report(fleet, look, orders, console)
        except (Ended, TimeoutError) as failure:
            went_well = False
            console.print(str(failure), style="bold red", markup=False)
        balanced = books.show(books.open_books(look, orders), console)
    sys.exit(0 if balanced and went_well else 1)


def _storm(
    fleet: Fleet, database: psycopg.Connection, orders: int, kills: int, deadline: float, console: Console
) -> None:
    """Place orders and kill processes meanwhile. Then wait until every order has been processed."""
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
                    if killed + 1 == kills:
                        console.print("waiting until every order has been processed …")
                if time.monotonic() > deadline:
                    raise TimeoutError("not every order was processed in time")
                _count_a_shelf(database, letters)
                time.sleep(0.1)
        finally:
            load.stopped = True


def _count_a_shelf(database: psycopg.Connection, letters: int) -> None:
    """Lock the stock row of one article for a moment, like a user who counts stock. Reservations fail meanwhile."""
    with database.transaction():
        database.execute("select * from stock offset %s limit 1 for update", (letters % len(demand.CATALOGUE),))
        time.sleep(0.05)


def _all_is_done(ordering: Future[None], database: psycopg.Connection, orders: int) -> bool:
    if not ordering.done():
        return False
    ordering.result()  # raises the error of the load generator, if it failed
    return all(book.balances for book in books.open_books(database, orders))


def _report(fleet: Fleet, database: psycopg.Connection, orders: int, console: Console) -> None:
    killed = ", ".join(f"{name} {times}" for name, times in sorted(fleet.killed.items()))
    seen = books.witness(database)
    console.print(
        f"{orders:,} orders; killed with kill -9: {killed or 'no process'}. {seen.retried} reservations and "
        f"{seen.asked_again} letters were tried again; {seen.repeats} events that came twice were dropped."
    )


def _count(database: psycopg.Connection) -> int:
    row = database.execute("select count(*) from letters").fetchone()
    return 0 if row is None else int(row[0])


if __name__ == "__main__":
    main()
