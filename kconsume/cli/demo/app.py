"""The consumer of `kconsume demo`: all the code that you would write.

The demo runs it twice, as `kconsume run kconsume.cli.demo.app:app`, and kills one of the two with kill -9.
"""

from __future__ import annotations

import os
import sqlite3
import time

import msgspec

from kconsume import App, Record

FILE = os.environ.get("KCONSUME_DEMO_FILE", "kconsume-demo.db")
ME = os.environ.get("KCONSUME_DEMO_CONSUMER", "consumer 1")

# No unique key on purpose: if a record were handled twice, there would be two rows, and the demo would report them.
TABLE = "create table orders (id integer, sku text, quantity integer, partition integer, consumer text, at real)"

app = App(
    os.environ.get("KCONSUME_DEMO_BROKERS", "embedded://demo"),
    group="demo",
    offsets=f"sqlite:///{FILE}",  # the rows and the offsets: one file, one transaction
)


class Order(msgspec.Struct):
    id: int
    sku: str
    quantity: int


@app.consume("orders")
def keep(order: Order, record: Record, tx: sqlite3.Connection) -> None:
    tx.execute(
        "insert into orders values (?, ?, ?, ?, ?, ?)",
        (order.id, order.sku, order.quantity, record.partition, ME, time.time()),
    )
