"""A consumer process for the chaos tests: `python -m tests.chaos.worker --brokers … --topic … …`.

Each record has one effect: a row or a list's item, in the offset's transaction, or with `kafka://` a line in a file. A
little work for each, so that faults hit it. With `--dead-topic` or `--dead-table`, handlers fail on some of them, and
hang on others; with `--delays` as well, some pass later, on a retry topic, and none hang. With `--to`, each record is
sent on. Where it is at each moment, it says on its board (`phases.py`). The flags that take a guard away are controls.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
from redis.client import Pipeline

from kconsume import App, DeadLetter, Outgoing, Partition, Record, Retry, RetryTopics
from kconsume._config.client_settings import ClientValue
from kconsume.errors import HandlerTimeout
from kconsume.failures.letter_headers import read_added_headers
from tests.chaos import sabotage
from tests.chaos.form import form
from tests.chaos.phases import Board, Phase
from tests.liveness import publish
from tests.waiting import eventually

NEVER = 2**40
"""Records of a window that is never full."""
QUICK: dict[str, ClientValue] = {"session.timeout.ms": 2000, "heartbeat.interval.ms": 250}


LIMIT = form(short=4.0, long=2.0)
"""Seconds for a call, if handlers are to fail: only what hangs takes so long. The short form has the other tests beside
it; in the long one two hundred calls hang, with SQLite one after the other."""


def is_poison(value: str) -> bool:
    """Where handlers fail, if they are to: on one numbered record of a hundred."""
    return value.isdecimal() and int(value) % 100 == 7


def is_hanging(value: str) -> bool:
    """Where they never return, if they are to fail: on one of a thousand."""
    return value.isdecimal() and int(value) % 1000 == 750


def failures_of(value: str) -> int:
    """How often handlers fail on a record, if it is tried again later: one of eight fails, some for ever."""
    return {1: 1, 9: 2, 20: 1_000}.get(int(value) % 24, 0) if value.isdecimal() else 0


def first_place(record: Record) -> tuple[int, int]:
    """Where it stood before it failed."""
    marks = read_added_headers(record.headers)
    return (int(marks["partition"]), int(marks["offset"])) if "rung" in marks else (record.partition, record.offset)


def main() -> None:
    asked = _asked()
    board = Board(Path(asked.board))
    _sabotage(asked, board)
    kafka = {"group.protocol": "consumer"} if asked.kip_848 else QUICK
    if asked.eager:
        kafka = {**QUICK, "partition.assignment.strategy": "range"}
    app = App(asked.brokers, group=asked.group, offsets=asked.offsets, kafka=kafka, shutdown=asked.shutdown)
    dead_letter = _dead_letter(asked)
    if asked.to is not None:
        app.consume(asked.topic, chunk=asked.chunk, to=asked.to)(_sending(asked, _handler(asked, board)))
    elif asked.window is not None:
        app.consume(asked.topic, chunk=asked.chunk)(_not_ahead(app, asked, _handler(asked, board)))
    elif dead_letter is None:
        app.consume(asked.topic, chunk=asked.chunk)(_handler(asked, board))
    else:
        retry = RetryTopics(asked.delays) if asked.delays else Retry(2, wait=0.02, give_up_on=HandlerTimeout)
        handler = _handler(asked, board)
        app.consume(asked.topic, chunk=asked.chunk, retry=retry, on_error=dead_letter, timeout=_limit(asked))(handler)
    threading.Thread(target=_publish_causes, args=(app, Path(asked.board).with_suffix(".causes")), daemon=True).start()
    app.run()


def _publish_causes(app: App, file: Path) -> None:
    """For the test, when a partition stands still."""
    while True:
        publish([app], file)
        time.sleep(0.5)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("brokers", "topic", "group", "offsets", "name", "board"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--out", help="the file to append to, with kafka://")
    parser.add_argument("--work", type=float, default=0.0005, help="seconds for each record")
    parser.add_argument("--shutdown", type=float, default=25.0)
    parser.add_argument("--chunk", type=int, default=None)
    parser.add_argument("--dead-topic", help="some records fail, and go there")
    parser.add_argument("--dead-table", help="or there")
    parser.add_argument("--to", help="each record is sent on to this topic, by the outbox")
    parser.add_argument("--delays", help="some pass later: seconds, as in 0.2,0.5", type=_numbers)
    parser.add_argument("--die-once", help="the first whose outbox has sent something dies; the file that says so")
    parser.add_argument(
        "--window", type=int, help="with kafka://: records after which offsets are committed, and only so"
    )
    parser.add_argument("--notice-when", help="no loss of partitions is noticed until this file is there")
    parser.add_argument("--gate", help="the first claim waits until this file is there")
    for flag in ("hot-row", "slow-to-notice", "no-fence", "retry-unknown", "kip-848", "no-intake", "delete-first"):
        parser.add_argument(f"--{flag}", action="store_true")
    for flag in ("eager", "no-order", "no-window"):
        parser.add_argument(f"--{flag}", action="store_true")
    for flag in ("effects-apart", "letters-apart"):
        parser.add_argument(f"--{flag}", action="store_true", help="they are not a part of the offset's transaction")
    return parser.parse_args()


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def _dead_letter(asked: argparse.Namespace) -> DeadLetter | None:
    if asked.dead_table is not None:
        return DeadLetter(table=asked.dead_table)
    return None if asked.dead_topic is None else DeadLetter(asked.dead_topic)


def _limit(asked: argparse.Namespace) -> float | None:
    """Seconds for a call, where some hang."""
    return None if asked.delays or _dead_letter(asked) is None else LIMIT


def _sabotage(asked: argparse.Namespace, board: Board) -> None:
    if asked.no_fence:
        sabotage.take_the_fence_away()
    sabotage.watch_transactions(board)
    if asked.delete_first:
        sabotage.delete_what_is_not_confirmed(board)
    elif asked.to is not None or asked.dead_topic is not None:
        sabotage.watch_the_relay(board)
    if asked.letters_apart:
        sabotage.part_letters_from_their_offsets(board, asked.brokers, asked.offsets)
    if asked.no_order:
        sabotage.accept_every_claim()
    if asked.gate is not None:
        sabotage.hold_the_first_claim(Path(asked.gate))
    if asked.slow_to_notice:
        sabotage.notice_slowly()
    if asked.notice_when is not None:
        sabotage.notice_when_told(Path(asked.notice_when))
    if asked.retry_unknown:
        sabotage.retry_what_may_be_done()
    if asked.no_intake:
        sabotage.take_everything_in()
    if asked.window is not None:
        sabotage.commit_by_windows_alone(NEVER if asked.no_window else asked.window)
    if asked.die_once is not None:
        sabotage.die_before_the_outbox_is_told(Path(asked.die_once))


def _sending(asked: argparse.Namespace, handle: Callable[..., None]) -> Callable[..., Outgoing]:
    """The same, and the record is sent on: its place, with the key of its partition."""

    def write(value: str, record: Record, tx: sqlite3.Connection) -> Outgoing:
        handle(value, record, tx)
        return sent_on(record)

    def insert(value: str, record: Record, tx: psycopg.Connection) -> Outgoing:
        handle(value, record, tx)
        return sent_on(record)

    def sent_on(record: Record) -> Outgoing:
        return Outgoing(f"{record.partition}:{record.offset}", key=str(record.partition))

    return write if asked.offsets.startswith("sqlite") else insert


def _not_ahead(app: App, asked: argparse.Namespace, handle: Callable[..., None]) -> Callable[..., None]:
    """The same, and no record is begun that is more than two windows ahead of what the broker has accepted: so a commit
    must come by itself when more than one window is not committed, however fast or slow either side is."""
    begun: dict[int, int] = {}
    patience = 3 if asked.no_window else 60

    def is_near(record: Record) -> bool:
        supervisor, partition = app._supervisor, Partition(record.topic, record.partition)
        owned = None if supervisor is None else supervisor.consumers[0].assignment.partitions.get(partition)
        if owned is None:
            return True  # it is being given up
        committed = owned.stored
        if committed is None:
            committed = begun.setdefault(record.partition, record.offset)
        else:
            begun.pop(record.partition, None)
        return record.offset - committed <= 2 * int(asked.window)

    def restrained(value: str, record: Record) -> None:
        eventually(lambda: is_near(record), within=patience, what="a commit, with a window finished")
        handle(value, record)

    return restrained


def _handler(asked: argparse.Namespace, board: Board) -> Callable[..., None]:
    """The handler for the store, which names its transaction by an annotation."""
    scheme, name, seconds = asked.offsets.partition(":")[0], asked.name, asked.work
    some_fail = _dead_letter(asked) is not None
    # With a limit, a call has a thread of its own, and the lane's is the one that is in the transaction.
    after = Phase.TRANSACTION if _limit(asked) is None else Phase.IDLE

    def fail_on_some(value: str, record: Record) -> None:
        if asked.delays:
            if int(read_added_headers(record.headers).get("rung", "0")) < failures_of(value):
                raise LookupError("not yet")
        elif some_fail and is_poison(value):
            raise LookupError(f"poison at {record.offset}")
        elif some_fail and is_hanging(value):
            board.set(Phase.IDLE)  # of this thread, for good: it is given up, and nothing is done by it any more
            threading.Event().wait()

    def write(value: str, record: Record, tx: sqlite3.Connection) -> None:
        with board.during(Phase.HANDLER, after):
            tx.execute("insert into seen values (?, ?, ?)", (record.partition, record.offset, name))
            time.sleep(seconds)
            fail_on_some(value, record)

    def insert(value: str, record: Record, tx: psycopg.Connection) -> None:
        with board.during(Phase.HANDLER, after):
            if asked.hot_row:
                tx.execute("update counter set n = n + 1 where id = 1")
            place = apart or tx
            place.execute("insert into seen values (%s, %s, %s)", (*first_place(record), name))
            time.sleep(seconds)
            fail_on_some(value, record)

    def push(value: str, record: Record, tx: Pipeline) -> None:
        with board.during(Phase.HANDLER, after):
            tx.rpush(f"seen:{record.partition}", f"{record.offset} {name}")
            time.sleep(seconds)
            fail_on_some(value, record)

    def append(value: str, record: Record) -> None:
        with board.during(Phase.HANDLER, Phase.IDLE):
            time.sleep(seconds)
            fail_on_some(value, record)
            os.write(file, b"%d %d\n" % (record.partition, record.offset))

    apart = psycopg.connect(asked.offsets, autocommit=True) if asked.effects_apart else None
    if scheme == "kafka":
        file = os.open(asked.out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    handlers: dict[str, Callable[..., None]] = {
        "sqlite": write, "postgresql": insert, "redis": push, "kafka": append,
    }  # fmt: skip
    return handlers[scheme]


if __name__ == "__main__":
    main()
