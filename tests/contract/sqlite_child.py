"""What a second process does to an SQLite store, for the tests that need one: `python -m tests.contract.sqlite_child`.

claim FILE OWNER TIMES      claim orders/0 so many times, pinning it at a number of its own; prints epoch and offset
hold FILE WHERE             write a row in a transaction and wait in it, to be killed; WHERE: 'inside' or 'outside'
busy FILE TURNSTILE         transactions without a pause, each holding the file for 20 ms, until killed; 'on' or 'off'
"""

from __future__ import annotations

import itertools
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from kconsume.backends import Position, SqliteStore
from kconsume.backends.claim import granted
from kconsume.backends.sqlite import connection as sqlite_connection
from kconsume.records import Partition

GROUP = "shop"
ORDERS = Partition("orders", 0)
OTHERS = Partition("orders", 1)


def claim(path: str, owner: str, times: str) -> None:
    store = SqliteStore(path)
    say("ready")
    sys.stdin.readline()
    mine = int(owner)
    for _ in range(int(times)):
        position = granted(store.claim(GROUP, [ORDERS], owner, lambda ps: dict.fromkeys(ps, Position(mine))))[ORDERS]
        say(f"{position.epoch} {position.next_offset}")


def hold(path: str, where: str) -> None:
    store = SqliteStore(path)
    epoch = granted(store.claim(GROUP, [ORDERS], "doomed", lambda ps: dict.fromkeys(ps, Position(0))))[ORDERS].epoch
    if where == "outside":  # the control: what a handler without the store's transaction does
        sqlite3.connect(path, isolation_level=None).execute("insert into effects values (1)")
        say("holding")
        time.sleep(600)
    with store.transaction(GROUP, ORDERS, epoch) as tx:
        tx.connection.execute("insert into effects values (1)")
        tx.advance(0, 1)
        say("holding")
        time.sleep(600)


def busy(path: str, turnstile: str) -> None:
    if turnstile == "off":
        switch_turnstile_off()
    store = SqliteStore(path)
    epoch = granted(store.claim(GROUP, [OTHERS], "busy", lambda ps: dict.fromkeys(ps, Position(0))))[OTHERS].epoch
    for at in itertools.count():
        with store.transaction(GROUP, OTHERS, epoch) as tx:
            if at == 0:
                say("busy")
            time.sleep(0.02)  # the handler's work
            tx.advance(at, at + 1)


def switch_turnstile_off() -> None:
    @contextmanager
    def no_turnstile(self: object) -> Iterator[None]:
        yield

    sqlite_connection.SqliteConnection.turnstile = no_turnstile  # type: ignore[method-assign]


def say(text: str, out: TextIO = sys.stdout) -> None:
    out.write(text + "\n")
    out.flush()


if __name__ == "__main__":
    {"claim": claim, "hold": hold, "busy": busy}[sys.argv[1]](*sys.argv[2:])  # type: ignore[operator]
