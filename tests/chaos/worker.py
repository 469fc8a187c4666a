"""A consumer process for the chaos tests: `python worker.py BOOTSTRAP TOPIC GROUP OFFSETS OUT NAME [FLAG ...]`.

With an SQLite store each record is a row, written in the offset's transaction; with `kafka://` each is a line
appended to a file. A little work for each record, so that faults hit it.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time

from kconsume import App, Partition, Record
from kconsume.backends import sqlite as sqlite_store
from kconsume.runtime.tenancy import Tenancy


def main() -> None:
    bootstrap, topic, group, offsets, out, name, *flags = sys.argv[1:]
    if "--slow-to-notice" in flags:
        notice_slowly()
    if "--no-fence" in flags:
        take_the_fence_away()
    app = App(bootstrap, group=group, offsets=offsets, kafka={"session.timeout.ms": 2000, "heartbeat.interval.ms": 250})
    if offsets.startswith("sqlite:"):

        @app.consume(topic)
        def write(record: Record, tx: sqlite3.Connection) -> None:
            time.sleep(0.0005)
            tx.execute("insert into seen values (?, ?, ?)", (record.partition, record.offset, name))

    else:
        file = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

        @app.consume(topic)
        def append(record: Record) -> None:
            time.sleep(0.0005)
            os.write(file, b"%d %d\n" % (record.partition, record.offset))

    app.run()


def notice_slowly() -> None:
    """Between waking and learning of the loss, handlers run on. Classic groups learn soon, KIP-848 ones late: make
    that time long enough to be met by every run."""
    lost = Tenancy.lost

    def late(self: Tenancy, partitions: list[Partition]) -> None:
        time.sleep(1.0)
        lost(self, partitions)

    Tenancy.lost = late  # type: ignore[method-assign]


def take_the_fence_away() -> None:
    """The same store with neither epoch nor offset compared: what the fence is good for shows without it."""
    sqlite_store._ADVANCE = "update kconsume_offsets set next_offset = ?1, leader_epoch = ?2, updated_at = ?3 \
        where group_id = ?4 and topic = ?5 and partition = ?6 and ?7 >= 0 and ?8 >= 0"

    class NoFence(sqlite_store.SqliteStore):
        def transaction(self, group, partition, epoch):  # type: ignore[no-untyped-def]
            (current,) = self.load(group, [partition]).values()
            return super().transaction(group, partition, current.epoch)

    sqlite_store.SqliteStore = NoFence  # type: ignore[misc]


if __name__ == "__main__":
    main()
