"""The program after the migration: the same service on kconsume. The rows and the offset commit in one transaction.

python -m examples.migration.service
"""

from __future__ import annotations

import sqlite3

import msgspec

from kconsume import App

from .payments import BOOKS, TOPIC, looks_right, open_books

app = App("localhost:9092", group="service", offsets=f"sqlite:///{BOOKS}")


class Payment(msgspec.Struct):
    number: int
    account: str
    cents: int


@app.consume(TOPIC)
def book(payment: Payment, tx: sqlite3.Connection) -> None:
    if looks_right(payment.account, payment.cents):
        tx.execute("insert into booked values (?, ?, ?)", (payment.number, payment.account, payment.cents))


if __name__ == "__main__":
    open_books().close()
    app.run()
