"""Store a day's clicks in a lake and in a warehouse, kill both processes meanwhile, and check the stored clicks.

python -m examples.lakehouse                                       on a Kafka and a PostgreSQL that the command starts
python -m examples.lakehouse --brokers localhost:9092 --database postgresql://localhost/postgres
python -m examples.lakehouse --embedded                            only the lake, on an embedded broker
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import click
import psycopg
from rich.console import Console

from examples.database import database
from examples.ship import Ended, Ship
from examples.stage import clean_environment, new_stage, topics
from kconsume.spark.jars import connector_jars
from kconsume.testing.services import kafka_service, postgres_service

from . import books, picture, traffic
from .sides import Lake, Side, Warehouse
from .storm import Feed, Storm

SPARK = (
    "--master local[2] --conf spark.ui.enabled=false --conf spark.sql.shuffle.partitions=2"
    " --conf 'spark.driver.defaultJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Djava.io.tmpdir={scratch}'"
    " pyspark-shell"
)
"""Settings for a small session that starts fast: two sessions run on this machine, and are killed after seconds."""


@click.command(help=__doc__.partition("\n")[0])
@click.option("--brokers", help="A Kafka. Without it, one is started.")
@click.option("--database", "server", help="A PostgreSQL that may get a new database. Without it, one is started.")
@click.option("--embedded", is_flag=True, help="Only the lake, on an embedded broker, which Spark itself cannot read.")
@click.option("--clicks", "number", default=20_000, show_default=True, help="The number of clicks of the day.")
@click.option("--kills", default=2, show_default=True, help="How often each side is killed.")
@click.option("--seed", default=1, show_default=True, help="Decides the clicks and the times of the kills.")
@click.option("--session", default=6.0, show_default=True, help="Seconds until the group notices a killed member.")
@click.option("--within", default=600.0, show_default=True, help="Seconds within which every click must be stored.")
@click.option(
    "--plot", default="lakehouse.png", show_default=True, type=click.Path(dir_okay=False, path_type=Path),
    help="The file of the picture.",
)  # fmt: skip
def main(
    brokers: str | None, server: str | None, embedded: bool, number: int, kills: int, seed: int, session: float,
    within: float, plot: Path,
) -> None:  # fmt: skip
    if embedded and (brokers or server):
        raise click.UsageError("--embedded cannot be used with --brokers or --database")
    console = Console(highlight=False)
    stage = new_stage()
    clicks = list(traffic.day(number, seed))
    with ExitStack() as opened:
        folder = Path(opened.enter_context(_folder()))
        scratch = folder / "scratch"
        scratch.mkdir()
        sides: list[Side] = [Lake(folder / "lake")]
        environment = {
            **clean_environment(),
            "STAGE": f"{stage}.",
            "LAKE": str(folder / "lake"),
            "CHECKPOINT": str(folder / "checkpoint"),
            # Production uses 45 s. Here a user waits for each kill.
            "KCONSUME_KAFKA_SESSION_TIMEOUT_MS": f"{1000 * session:.0f}",
            "PYSPARK_SUBMIT_ARGS": SPARK.format(scratch=scratch),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(scratch),
        }
        if not embedded:
            console.print("preparing the jars of Spark's Kafka connector (the first run downloads them) …")
            connector_jars()
            if server is None:
                console.print("starting PostgreSQL …")
                server = opened.enter_context(postgres_service()).url
            console.print("creating the database …")
            url = opened.enter_context(database(server, stage))
            sides.append(Warehouse(opened.enter_context(psycopg.connect(url, autocommit=True))))
            environment["WAREHOUSE"] = url
            if brokers is None:
                console.print("starting Kafka (the first run downloads it) …")
                brokers = opened.enter_context(kafka_service()).bootstrap
        topic = f"{stage}.clicks"
        console.print("starting an embedded broker …" if brokers is None else "creating the topic …")
        address = opened.enter_context(topics(brokers, stage, [topic]))
        environment["BROKERS"] = address
        console.print(f"starting Spark, one process for each of: {', '.join(side.name for side in sides)} …")
        ships = [Ship(side.name, list(side.command), environment, folder / f"{side.name}.log") for side in sides]
        for ship in ships:
            opened.callback(ship.kill)
        storm = Storm(Feed(address, topic, clicks), list(zip(sides, ships, strict=True)), kills, seed)
        went_well = True
        try:
            storm.run(time.monotonic() + within, console)
            console.print("stopping Spark …")
            for ship in ships:
                ship.stop()
        except (Ended, TimeoutError) as failure:
            went_well = False
            console.print(str(failure), style="bold red", markup=False)
        balanced = books.show([book for side in sides for book in side.books(clicks)], console)
        killed = ", ".join(f"{name} {times}" for name, times in storm.killed.items()) or "no process"
        title = f"{number:,} clicks of a day; killed with kill -9 meanwhile: {killed}"
        console.print("drawing the picture …")
        picture.draw({side.legend: side.clicks() for side in sides}, title, plot)
    console.print(f"The picture is in {plot}.")
    sys.exit(0 if balanced and went_well else 1)


def _folder() -> tempfile.TemporaryDirectory[str]:
    """Make the folder for all files of the run. The Java process of a killed driver may still write for a moment."""
    return tempfile.TemporaryDirectory(prefix="kconsume-lakehouse-", ignore_cleanup_errors=True)


if __name__ == "__main__":
    main()
