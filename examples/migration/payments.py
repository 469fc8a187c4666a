"""The code that both programs use to book a payment. The programs differ only in how they consume."""

from __future__ import annotations

import os
import sqlite3
import time

TOPIC = os.environ.get("PAYMENTS", "payments")
BOOKS = os.environ.get("BOOKS", "payments.db")


def looks_right(account: str, cents: int) -> bool:
    """Check for fraud. The sleep stands for a call that takes a millisecond."""
    time.sleep(0.001)
    return bool(account) and cents > 0


def open_books() -> sqlite3.Connection:
    """Open the file and create the table, without a primary key: a key would hide a payment that is booked twice."""
    books = sqlite3.connect(BOOKS, timeout=30)
    books.execute("pragma journal_mode = wal")
    books.execute("create table if not exists booked (number integer, account text, cents integer)")
    books.commit()
    return books
