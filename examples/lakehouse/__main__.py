"""Keep a day's clicks in a lake and in a warehouse, kill both meanwhile, and see whether the books balance.

python -m examples.lakehouse                                       a Kafka and a PostgreSQL of its own
python -m examples.lakehouse --brokers localhost:9092 --database postgresql://localhost/postgres
python -m examples.lakehouse --embedded                            the lake alone, on an embedded broker
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

from examples.ship import Ended, Ship
from examples.stage import clean_environment, database, new_stage, topics
from kconsume.testing.services import kafka_service, postgres_service

from . import books, picture, traffic
from .sides import Lake, Side, Warehouse
from .storm import Feed, Storm

SPARK = (
    "--master local[2] --conf spark.ui.enabled=false --conf spark.sql.shuffle.partitions=2"
    " --conf 'spark.driver.defaultJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Djava.io.tmpdir={scratch}'"
    " pyspark-shell"
)
"""Small, and quick to start: two of them share this machine, and live for seconds."""


@click.command(help=__doc__.partition("\n")[0])
@click.option("--brokers", help="A Kafka; without it one is started.")
@click.option("--database", "server", help="A PostgreSQL in which a database may be made; without it one is started.")
@click.option("--embedded", is_flag=True, help="The lake alone, on an embedded broker, which Spark itself cannot read.")
@click.option("--clicks", "number", default=20_000, show_default=True, help="How many clicks the day has.")
@click.option("--kills", default=2, show_default=True, help="How often each side is killed.")
@click.option("--seed", default=1, show_default=True, help="Which clicks there are, and when the kills come.")
@click.option("--session", default=6.0, show_default=True, help="Seconds until a killed member is missed.")
@click.option("--within", default=600.0, show_default=True, help="Seconds until everything must have come through.")
@click.option(
    "--plot", default="lakehouse.png", show_default=True, type=click.Path(dir_okay=False, path_type=Path),
    help="Where the picture goes.",
)  # fmt: skip
def main(
    brokers: str | None, server: str | None, embedded: bool, number: int, kills: int, seed: int, session: float,
    within: float, plot: Path,
) -> None:  # fmt: skip
    if embedded and (brokers or server):
        raise click.UsageError("--embedded is instead of --brokers and --database")
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
            # Production has 45 s, and no kills that a person waits for.
            "KCONSUME_KAFKA_SESSION_TIMEOUT_MS": f"{1000 * session:.0f}",
            "PYSPARK_SUBMIT_ARGS": SPARK.format(scratch=scratch),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(scratch),
        }
        if not embedded:
            url = opened.enter_context(database(server or opened.enter_context(postgres_service()).url, stage))
            sides.append(Warehouse(opened.enter_context(psycopg.connect(url, autocommit=True))))
            environment["WAREHOUSE"] = url
            brokers = brokers or opened.enter_context(kafka_service()).bootstrap
        topic = f"{stage}.clicks"
        address = opened.enter_context(topics(brokers, stage, [topic]))
        environment["BROKERS"] = address
        ships = [Ship(side.name, list(side.command), environment, folder / f"{side.name}.log") for side in sides]
        for ship in ships:
            opened.callback(ship.kill)
        storm = Storm(Feed(address, topic, clicks), list(zip(sides, ships, strict=True)), kills, seed)
        went_well = True
        try:
            storm.run(time.monotonic() + within, console)
            for ship in ships:
                ship.stop()
        except (Ended, TimeoutError) as failure:
            went_well = False
            console.print(str(failure), style="bold red", markup=False)
        balanced = books.show([book for side in sides for book in side.books(clicks)], console)
        killed = ", ".join(f"{name} {times}" for name, times in storm.killed.items()) or "nobody"
        title = f"{number:,} clicks of a day; killed with kill -9 meanwhile: {killed}"
        picture.draw({side.legend: side.clicks() for side in sides}, title, plot)
    console.print(f"The picture is in {plot}.")
    sys.exit(0 if balanced and went_well else 1)


def _folder() -> tempfile.TemporaryDirectory[str]:
    """For the lake, and all else. A Java outlives a driver that was killed by a moment, and may write while it goes."""
    return tempfile.TemporaryDirectory(prefix="kconsume-lakehouse-", ignore_cleanup_errors=True)


if __name__ == "__main__":
    main()
