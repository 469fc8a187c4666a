"""Reserves stock for orders. The reservation and the offset commit together, in one SQLite file.

python service.py                 consumes, on an embedded broker that all processes of this user share
python service.py --order cup 3   sends an order to that broker
"""

from __future__ import annotations

import sqlite3
import sys

import msgspec

from kconsume import App

BROKER = "embedded://inventory"
DATABASE = "inventory.db"

app = App(BROKER, group="inventory", offsets=f"sqlite:///{DATABASE}")


class Placed(msgspec.Struct):
    sku: str
    quantity: int


@app.consume("orders")
def reserve(order: Placed, tx: sqlite3.Connection) -> None:
    tx.execute(
        "insert into stock values (?, ?) on conflict (sku) do update set reserved = reserved + excluded.reserved",
        (order.sku, order.quantity),
    )


def prepare() -> None:
    """Create the table that the handler writes to."""
    with sqlite3.connect(DATABASE) as connection:
        connection.execute("create table if not exists stock (sku text primary key, reserved integer not null)")
    connection.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--order"]:
        app.send("orders", Placed(sys.argv[2], int(sys.argv[3])), key=sys.argv[2])
    else:
        prepare()
        app.run()
