"""The program before the migration: a poll loop with the client's automatic commits. It writes 500 rows at a time.

python -m examples.migration.loop
"""

from __future__ import annotations

import json
import os
import sqlite3

from confluent_kafka import Consumer

from .payments import TOPIC, looks_right, open_books


def main() -> None:
    books = open_books()
    waiting: list[tuple[int, str, int]] = []
    consumer = Consumer(
        {
            "bootstrap.servers": os.environ.get("BROKERS", "localhost:9092"),
            "group.id": "loop",
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": 1000,
            "session.timeout.ms": int(os.environ.get("SESSION_MS", "45000")),
        }
    )
    consumer.subscribe([TOPIC])
    while True:
        message = consumer.poll(0.5)
        if message is None:
            write(books, waiting)
            continue
        if message.error():
            print(message.error())
            continue
        payment = json.loads(message.value() or b"{}")
        if looks_right(payment["account"], payment["cents"]):
            waiting.append((payment["number"], payment["account"], payment["cents"]))
        if len(waiting) >= 500:
            write(books, waiting)


def write(books: sqlite3.Connection, waiting: list[tuple[int, str, int]]) -> None:
    with books:
        books.executemany("insert into booked values (?, ?, ?)", waiting)
    waiting.clear()


if __name__ == "__main__":
    main()
