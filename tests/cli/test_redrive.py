"""`kconsume dlq redrive`: which dead letters would pass today, and how they are sent back once, to their group."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType

from kconsume._embedded.named_broker import attach
from kconsume.backends import OffsetStore, PostgresStore, SqliteStore, TransactionalStore, open_store
from kconsume.backends.dead_letters.sender import sender_in
from kconsume.cli.redrive import command as redrive_module
from kconsume.cli.redrive.command import redrive
from kconsume.cli.redrive.selection import Chosen, FoundLetter, Left, Route, SelectedLetters, Selection, addressed
from kconsume.failures.letter_headers import Letter, read_added_headers
from kconsume.records import Partition
from kconsume.testing.services import KafkaService
from tests.cli.conftest import ROOT, Shop
from tests.cli.test_dlq import BAD, NOW, keep, post
from tests.fix_kafka import MakeTopic, delete_topics, unique
from tests.waiting import eventually

MENDED = """
    import sqlite3
    from kconsume import App, DeadLetter

    app = App("embedded://shop", group="shop", offsets="sqlite:///shop.db", kafka={"session.timeout.ms": 2000})

    @app.consume("orders", on_error=DeadLetter("orders.dlq"))
    def reserve(order: dict, tx: sqlite3.Connection) -> None:
        if order["id"] < 0:
            raise ValueError("no such order")
        tx.execute("insert into reserved values (?)", (order["id"],))
"""
"""The handler of today: it takes what has an id that is not negative."""
IN_TABLE = MENDED.replace('DeadLetter("orders.dlq")', 'DeadLetter(table="failed_orders")')
PLAIN = """
    from kconsume import App, DeadLetter

    app = App("embedded://shop", group="shop")

    @app.consume("orders", on_error=DeadLetter("orders.dlq"))
    def reserve(order: dict) -> None:
        with open("seen.txt", "a") as seen:
            print(order["id"], file=seen)
"""
BACK = "orders.shop.redrive"


def letter(number: int, **other: Any) -> Letter:
    """That the record with this id failed, which stood at this offset."""
    value = other.pop("value", b'{"id": %d}' % number)
    return replace(
        BAD, partition=Partition("orders", 0), offset=abs(number), origin=f"shop:T1:0:{abs(number)}",
        key=b"k%d" % number, value=value, **other,
    )  # fmt: skip


def with_topic(shop: Shop, *letters: Letter, source: str = MENDED) -> Shop:
    shop.broker(**{"orders": 1, "orders.dlq": 2})
    shop.write("shop", source)
    shop.make_table()
    post(*letters)
    return shop


def with_table(shop: Shop, *letters: Letter, source: str = IN_TABLE) -> Shop:
    shop.broker(orders=1)
    shop.write("shop", source)
    shop.make_table()
    keep(SqliteStore(shop.folder / "shop.db"), letters)
    return shop


def said(shop: Shop, *options: str, code: int = 0) -> str:
    done = shop.run("dlq", "redrive", "shop:app", *options)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code < 2 else done.stderr


def document(shop: Shop, *options: str, code: int = 0) -> dict[str, Any]:
    told = json.loads(said(shop, *options, "--json", code=code))
    (place,) = told["places"]
    return cast("dict[str, Any]", place)


def back(bootstrap: str, topic: str = BACK) -> list[Message]:
    """All that was sent back, and not undone: by key, because partitions are read in any order."""
    client = Consumer(
        {
            "bootstrap.servers": bootstrap, "group.id": unique("look"), "enable.partition.eof": True,
            "isolation.level": "read_committed", "log_level": 0,
        }
    )  # fmt: skip
    try:
        known = client.list_topics(timeout=20).topics.get(topic)
        if known is None:
            return []
        left, found = set(known.partitions), list[Message]()
        client.assign([TopicPartition(topic, number, 0) for number in left])
        while left:
            for message in client.consume(500, 0.2):
                if message.error() is None:
                    found.append(message)
                else:
                    left.discard(cast(int, message.partition()))
        return sorted(found, key=lambda message: (message.key() or b"", message.offset()))
    finally:
        client.close()


def sent_back() -> list[bytes | None]:
    """The keys."""
    return [message.key() for message in back(attach("shop").bootstrap)]


def reserved_in_the_end(shop: Shop, *numbers: int) -> None:
    """What the group makes of it, once it runs."""
    running = shop.start("run", "shop:app")
    eventually(lambda: shop.reserved() == sorted(numbers), what=f"{numbers} are reserved, and {running.err}")
    running.process.terminate()
    running.end()


class Clock:
    """Stands for `time` where letters are sent: a pause takes no time but its own. Sending one chunk of each `slow`
    takes three seconds."""

    def __init__(self, *, slow: int = 0) -> None:
        self.now, self.slow, self.sent = 1000.0, slow, list[tuple[float, int]]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds

    def send(self, chunk: Sequence[Chosen]) -> int:
        self.sent.append((self.now, len(chunk)))
        if self.slow and len(self.sent) % self.slow == 0:
            self.now += 3.0
        return len(chunk)


class TestThePace:
    """Of what is sent back with `--rate`, by a clock of the test's own."""

    LETTERS = 1_050

    def paced(self, clock: Clock, rate: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(redrive_module, "time", clock)
        told: list[int] = []

        def report(done: int) -> None:
            told.append(done)

        chosen = cast("list[Chosen]", range(self.LETTERS))
        assert redrive_module._in_chunks(chosen, clock.send, rate, report) == self.LETTERS == told[-1]

    def check(self, clock: Clock, rate: float) -> None:
        for first in range(len(clock.sent)):
            count = 0
            for last in range(first + 1, len(clock.sent)):
                count += clock.sent[last - 1][1]
                seconds = clock.sent[last][0] - clock.sent[first][0]
                assert count <= rate * seconds + 0.001, f"{count} in {seconds} s"

    @pytest.mark.parametrize("slow", [0, 3])
    @pytest.mark.parametrize("rate", [0.5, 1, 7.5, 20, 450])
    def test_no_more_are_sent_than_the_rate_also_after_a_chunk_that_took_long(
        self, rate: float, slow: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock(slow=slow)
        self.paced(clock, rate, monkeypatch)
        self.check(clock, rate)
        assert max(count for _, count in clock.sent) <= max(1, rate)

    @pytest.mark.parametrize("rate", [0.5, 20, 450])
    def test_nor_are_they_held_longer_than_it_asks(self, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock()
        self.paced(clock, rate, monkeypatch)
        (first, _), (last, count) = clock.sent[0], clock.sent[-1]
        assert first == 1000.0
        assert last == pytest.approx(first + (self.LETTERS - count) / rate)

    def test_without_one_all_are_sent_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock()
        self.paced(clock, None, monkeypatch)
        assert {moment for moment, _ in clock.sent} == {1000.0}

    def test_control_pauses_that_are_not_made_are_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock(slow=3)
        monkeypatch.setattr(clock, "sleep", lambda _: None)
        self.paced(clock, 20, monkeypatch)
        with pytest.raises(AssertionError, match="20 in 0"):
            self.check(clock, 20)


class TestTheChoice:
    """Pure: letters in, those that are chosen out."""

    MANY = (
        letter(1),
        letter(2),
        letter(3, exception="shop.Closed"),
        replace(letter(4, exception="shop.Closed"), partition=Partition("returns", 2)),
    )

    def chosen(
        self, wish: Selection, *letters: Letter, sources: Sequence[str] = ("orders", "returns")
    ) -> tuple[str, Left]:
        routes = [Route(cast(Any, None), source, f"{source}.shop.redrive") for source in sources]
        choice = SelectedLetters("shop", routes, wish)
        found = [FoundLetter(str(n), each, each.timestamp, each.added_headers) for n, each in enumerate(letters)]
        return " ".join((one.found.letter.key or b"").decode() for one in choice.of(found)), choice.left

    @pytest.mark.parametrize(
        ("wish", "keys"),
        [
            (Selection(), "k1 k2 k3 k4"),
            (Selection(cause="KeyError"), "k1 k2"),
            (Selection(cause="builtins.KeyError"), "k1 k2"),
            (Selection(cause="Error"), ""),
            (Selection(cause="Closed"), "k3 k4"),
            (Selection(key="k3"), "k3"),
            (Selection(origin="shop:T1:0:2"), "k2"),
            (Selection(origin="returns/2@4"), "k4"),
            (Selection(source="returns"), "k4"),
            (Selection(cause="Closed", source="orders"), "k3"),
            (Selection(since=NOW), "k1 k2 k3 k4"),
            (Selection(since=NOW + timedelta(seconds=1)), ""),
            (Selection(until=NOW), ""),
        ],
    )
    def test_only_what_is_asked_for_is_chosen(self, wish: Selection, keys: str) -> None:
        assert self.chosen(wish, *self.MANY) == (keys, Left())

    def test_what_is_left_is_counted_by_its_reason(self) -> None:
        letters = (letter(1), letter(1), letter(2, redriven=3), letter(3, group="audit"), letter(4, redriven=2))
        assert self.chosen(Selection(), *letters) == ("k1 k4", Left(sent=1, capped=1, others=1))
        assert self.chosen(Selection(cap=2), *letters) == ("k1", Left(sent=1, capped=2, others=1))

    def test_a_letter_of_a_topic_that_nobody_reads_any_more_goes_to_the_only_one(self) -> None:
        renamed = replace(letter(1), partition=Partition("old.orders", 0))
        assert self.chosen(Selection(), renamed, sources=["orders"]) == ("k1", Left())
        assert self.chosen(Selection(), renamed) == ("", Left(homeless=1))


class TestThePreflight:
    @pytest.mark.dense
    @pytest.mark.parametrize("with_letters", [with_topic, with_table])
    def test_says_what_would_pass_and_what_still_fails_and_changes_nothing(self, shop: Shop, with_letters: Any) -> None:
        with_letters(shop, letter(1), letter(2), letter(-3), letter(-4), letter(5, value=b"{"))
        told = said(shop, code=1)
        assert "tried with reserve as it is now, rolled back\n" in told
        assert "  would pass     2\n  still fails    3\n" in told
        first = "orders.dlq/0@2" if with_letters is with_topic else "3"
        assert f"         2  builtins.ValueError: no such order, for example {first}\n" in told
        assert "         1  kconsume.errors.DecodeError: " in told
        assert told.endswith("nothing was sent: add --yes to send back 5\n")
        assert shop.reserved() == []
        assert BACK not in attach("shop").topics()
        assert document(shop, code=1)["preflight"]["would_pass"] == 2, "as often as one likes"

    @pytest.mark.dense
    def test_of_letters_that_all_would_pass_ends_well(self, shop: Shop) -> None:
        place = document(with_topic(shop, letter(1), letter(2)))
        assert (place["selected"], place["sent"], place["tried"], place["rolled_back"]) == (2, None, ["reserve"], True)
        assert place["preflight"] == {"would_pass": 2, "still_fail": []}

    @pytest.mark.dense
    def test_refuses_a_handler_whose_effects_cannot_be_undone_unless_told(self, shop: Shop) -> None:
        with_topic(shop, letter(1), letter(2), source=PLAIN)
        refusal = said(shop, code=2)
        assert "reserve does not take the transaction of its store" in refusal
        assert "--with-effects" in refusal
        assert not (shop.folder / "seen.txt").exists()
        assert "with real effects (--with-effects)" in said(shop, "--with-effects")
        assert (shop.folder / "seen.txt").read_text() == "1\n2\n"

    @pytest.mark.dense
    def test_builds_a_resource_once_and_gives_the_handler_what_it_will_get(self, shop: Shop) -> None:
        source = """
            import sqlite3
            from collections.abc import Iterator
            from kconsume import App, DeadLetter, Record

            app = App("embedded://shop", group="shop", offsets="sqlite:///shop.db")

            class Bank: ...

            @app.resource
            def bank() -> Iterator[Bank]:
                print("opened")
                yield Bank()
                print("closed")

            @app.consume("orders", on_error=DeadLetter("orders.dlq"))
            def reserve(record: Record, tx: sqlite3.Connection, bank: Bank) -> None:
                print(record.topic, record.key, dict(record.headers)["kconsume-redriven"])
        """
        told = said(with_topic(shop, letter(1), letter(2), source=source))
        lines = [line for line in told.splitlines() if not line.startswith(" ")]
        assert lines[:4] == ["opened", f"{BACK} b'k1' b'1'", f"{BACK} b'k2' b'1'", "closed"]

    @pytest.mark.dense
    def test_runs_an_async_handler(self, shop: Shop) -> None:
        source = MENDED.replace("def reserve", "async def reserve")
        assert document(with_topic(shop, letter(1), letter(-2), source=source), code=1)["preflight"]["would_pass"] == 1


class TestOnlyPassing:
    """Letters are tried first, and those that today's handler fails on stay."""

    @pytest.mark.dense
    @pytest.mark.parametrize("with_letters", [with_topic, with_table])
    def test_only_letters_that_pass_are_sent_back(self, shop: Shop, with_letters: Any) -> None:
        with_letters(shop, letter(1), letter(-2), letter(3))
        place = document(shop, "--yes", "--only-passing", code=1)
        assert (place["selected"], place["sent"], place["left"]["failing"]) == (2, 2, 1)
        assert place["preflight"]["would_pass"] == 2
        if with_letters is with_topic:
            assert [message.key() for message in back(attach("shop").bootstrap)] == [b"k1", b"k3"]
        again = document(shop, "--yes", "--only-passing", code=1)
        assert (again["sent"], again["left"]["sent"], again["left"]["failing"]) == (0, 2, 1)
        assert "not sent       1  still fail with today's handler" in said(shop, "--yes", "--only-passing", code=1)

    @pytest.mark.dense
    def test_without_yes_it_says_how_many_would_be_sent(self, shop: Shop) -> None:
        with_topic(shop, letter(1), letter(-2))
        told = said(shop, "--only-passing", code=1)
        assert told.endswith("nothing was sent: add --yes to send back the 1 that would pass\n")
        assert BACK not in attach("shop").topics()

    @pytest.mark.dense
    def test_a_handler_that_cannot_be_rolled_back_is_not_tried(self, shop: Shop) -> None:
        with_topic(shop, letter(1), source=PLAIN)
        assert "--with-effects" in said(shop, "--yes", "--only-passing", code=2)
        assert not (shop.folder / "seen.txt").exists()
        assert BACK not in attach("shop").topics()


class TestSendingBack:
    @pytest.mark.dense
    def test_a_record_comes_to_its_group_as_it_was_with_its_marks(self, shop: Shop) -> None:
        with_topic(shop, letter(1))
        assert f"sent back 1, to {BACK}\n" in said(shop, "--yes")
        (message,) = back(attach("shop").bootstrap)
        assert (message.key(), message.value()) == (b"k1", b'{"id": 1}')
        assert message.timestamp()[1] == int(NOW.timestamp() * 1000)
        headers = cast("list[tuple[str, bytes]]", message.headers())
        assert headers == [*BAD.headers, *letter(1).added_headers, ("kconsume-redriven", b"1")]
        reserved_in_the_end(shop, 1)

    @pytest.mark.dense
    def test_from_a_table_too_with_no_app_running(self, shop: Shop) -> None:
        with_table(shop, letter(1), letter(2))
        assert f"sent back 2, to {BACK}\n" in said(shop, "--yes")
        first, _ = back(attach("shop").bootstrap)
        assert (first.key(), first.value()) == (b"k1", b'{"id": 1}')
        assert first.timestamp()[1] == int(NOW.timestamp() * 1000)
        headers = cast("list[tuple[str, bytes]]", first.headers())
        assert headers == [*BAD.headers, *letter(1).added_headers, ("kconsume-redriven", b"1")]
        reserved_in_the_end(shop, 1, 2)

    @pytest.mark.dense
    @pytest.mark.parametrize("with_letters", [with_topic, with_table])
    def test_what_was_sent_back_is_not_sent_again_whatever_is_selected(self, shop: Shop, with_letters: Any) -> None:
        with_letters(shop, letter(1), letter(2), letter(3, exception="shop.Closed"))
        assert document(shop, "--yes", "--cause", "Closed")["sent"] == 1
        place = document(shop, "--yes")
        assert (place["sent"], place["left"]["sent"]) == (2, 1)
        told = said(shop, "--yes")
        assert "not sent       3  sent back before, and not failed since\n" in told
        assert "none of its dead letters was selected to be sent back" in told
        assert "nothing to send back" in said(shop), "nor is it tried"
        assert sorted(cast("list[bytes]", sent_back())) == [b"k1", b"k2", b"k3"]

    @pytest.mark.dense
    def test_a_letter_that_is_there_twice_is_sent_once(self, shop: Shop) -> None:
        with_topic(shop, letter(1), letter(1), letter(2))
        place = document(shop, "--yes")
        assert (place["sent"], place["left"]["sent"]) == (2, 1)
        assert sent_back() == [b"k1", b"k2"]

    @pytest.mark.dense
    @pytest.mark.parametrize("with_letters", [with_topic, with_table])
    def test_one_that_fails_again_can_be_sent_again_up_to_the_cap(self, shop: Shop, with_letters: Any) -> None:
        with_letters(shop, letter(-1))
        assert document(shop, "--yes", "--cap", "1")["sent"] == 1
        running = shop.start("run", "shop:app")
        eventually(lambda: failed_again(shop) == 1, what=f"it failed again, and {running.err}")
        place = document(shop, "--yes", "--cap", "1")
        assert (place["sent"], place["left"]["capped"]) == (0, 1)
        assert "not sent       1  sent back 1 time or more" in said(shop, "--cap", "1")
        assert document(shop, "--yes")["sent"] == 1, "the cap is 3 if nobody says otherwise"
        marks = [read_added_headers(cast(Any, message.headers())) for message in back(attach("shop").bootstrap)]
        assert [(each["redriven"], each["origin"]) for each in marks] == [(n, "shop:T1:0:1") for n in ("1", "2")]

    @pytest.mark.dense
    @pytest.mark.parametrize("with_letters", [with_topic, with_table])
    def test_only_what_is_asked_for_is_sent(self, shop: Shop, with_letters: Any) -> None:
        with_letters(shop, letter(1), letter(2), letter(3, exception="shop.Closed"))
        options = ("--cause", "KeyError", "--key", "k2", "--from", "orders", "--origin", "orders/0@2")
        assert document(shop, "--yes", *options)["sent"] == 1
        assert sent_back() == [b"k2"]

    @pytest.mark.dense
    def test_by_time_it_goes_by_the_record_in_a_topic(self, shop: Shop) -> None:
        with_topic(shop, *(letter(hours, timestamp=NOW - timedelta(hours=hours)) for hours in (1, 3, 5)))
        assert document(shop, "--since", "4h", "--until", "2h")["selected"] == 1
        said(shop, "--yes", "--since", "4h", "--until", "2h")
        assert sent_back() == [b"k3"]

    @pytest.mark.dense
    def test_by_time_it_goes_by_the_failure_in_a_table(self, shop: Shop) -> None:
        with_table(shop, letter(1), letter(2))
        with closing(sqlite3.connect(shop.folder / "shop.db")) as database:
            database.execute("update failed_orders set failed_at = '2026-01-01T00:00:00+00:00' where id = 1")
            database.commit()
        assert document(shop, "--until", "2026-02-01")["selected"] == 1
        assert document(shop, "--since", "2026-02-01")["selected"] == 1
        assert document(shop, "--since", "2026-02-01", "--until", "2026-02-02")["selected"] == 0

    @pytest.mark.dense
    def test_a_rate_makes_small_chunks_and_progress_is_told_in_lines(self, shop: Shop) -> None:
        with_topic(shop, *map(letter, range(1, 8)))
        done = shop.run("dlq", "redrive", "shop:app", "--yes", "--rate", "20")
        assert (done.returncode, done.stderr) == (0, "sent 7 of 7\n")
        assert len(sent_back()) == 7

    @pytest.mark.dense
    def test_one_that_is_stopped_goes_on_with_the_rest(self, shop: Shop) -> None:
        with_topic(shop, *map(letter, range(1, 6)))
        slow = shop.start("dlq", "redrive", "shop:app", "--yes", "--rate", "1")
        eventually(sent_back, what=f"the first is sent, and {slow.err}")
        slow.send(signal.SIGINT)
        assert slow.end() == 130
        assert "stopped: nothing is sent twice; run the command again to send the rest\n" in slow.err
        assert document(shop, "--yes")["left"]["sent"] > 0
        assert sent_back() == [b"k%d" % number for number in range(1, 6)]

    @pytest.mark.parametrize("kind", ["sqlite", "postgres"])
    def test_two_that_send_rows_back_at_once_send_each_once(
        self, tmp_path: Path, kind: str, request: pytest.FixtureRequest
    ) -> None:
        address = f"sqlite:///{tmp_path}/shop.db" if kind == "sqlite" else request.getfixturevalue("postgres_url")
        stores = [open_store(address) for _ in range(3)]
        keep(cast(TransactionalStore, stores[2]), [letter(number) for number in range(1, 51)])

        def send(store: OffsetStore) -> int:
            return sender_in(store, "failed_orders").send_back(range(1, 51), lambda one: addressed(one, BACK))

        with ThreadPoolExecutor(2) as both:
            assert sum(both.map(send, stores[:2])) == 50
        assert sender_in(stores[0], "failed_orders").waiting([BACK]) == 50
        for store in stores:
            store.close()
        for store in stores[:2]:
            store.close()

    @pytest.mark.dense
    def test_on_a_terminal_there_is_a_bar(self, shop: Shop) -> None:
        with_topic(shop, letter(1), letter(2))
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "kconsume", "dlq", "redrive", "shop:app", "--yes"],
            cwd=shop.folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=theirs, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        assert process.wait(40) == 0
        os.close(theirs)
        shown = os.read(ours, 100_000).decode()
        os.close(ours)
        assert "sent" in shown
        assert "####" in shown
        assert "2/2" in shown

    @pytest.mark.dense
    def test_a_table_of_an_earlier_version_gets_the_column_that_it_needs(self, shop: Shop) -> None:
        with_table(shop, letter(1))
        with closing(sqlite3.connect(shop.folder / "shop.db")) as database:
            database.execute("alter table failed_orders drop column sent_back")
        assert document(shop)["selected"] == 1
        assert document(shop, "--yes")["sent"] == 1
        assert document(shop, "--yes")["left"]["sent"] == 1

    @pytest.mark.dense
    def test_what_an_earlier_run_left_in_the_outbox_is_sent(self, shop: Shop) -> None:
        with_table(shop, letter(1))
        store = SqliteStore(shop.folder / "shop.db")
        assert sender_in(store, "failed_orders").send_back([1], lambda one: addressed(one, BACK)) == 1
        store.close()
        attach("shop").create_topic(BACK, 1)
        assert "1 that an earlier run left in the outbox" in said(shop, "--yes")
        assert sent_back() == [b"k1"]


def failed_again(shop: Shop) -> int:
    """After how many times of sending it back there is a newer letter."""
    with closing(sqlite3.connect(shop.folder / "shop.db")) as database:
        if database.execute("select 1 from sqlite_master where name = 'failed_orders'").fetchone():
            asked = "select redriven from failed_orders where failed_at <> sent_back"
            return int((database.execute(asked).fetchone() or (0,))[0])
    found = [read_added_headers(cast(Any, each.headers())) for each in back(attach("shop").bootstrap, "orders.dlq")]
    return max(int(marks.get("redriven", "0")) for marks in found)


class TestThePage:
    """docs/failures.md."""

    SECTION = (
        (ROOT / "docs" / "failures.md").read_text().partition("## Sending dead letters back")[2].partition("\n## ")[0]
    )

    @pytest.mark.dense
    def test_its_samples_are_what_is_said(self, shop: Shop) -> None:
        shop.broker(**{"orders": 4, "orders.dlq": 4})
        shop.write("shop", MENDED.replace('order["id"] < 0', 'not order["sku"]'))
        shop.make_table()
        post(letter(1, value=b'{"id": 1, "sku": 1}'), letter(2), letter(3, value=b'{"id": 3, "sku": 3}'), partition=3)
        samples = re.findall(r"```\n\$ kconsume (.*?)\n(.*?)```", self.SECTION, re.DOTALL)
        assert len(samples) == 2
        for command, output in samples:
            assert shop.run(*command.split()).stdout == output

    def test_its_options_are_those_of_the_command(self) -> None:
        named = set(re.findall(r"--[a-z][a-z-]*", self.SECTION))
        assert named == {name for option in redrive.params for name in option.opts if name.startswith("-")}


class TestWhatIsRefused:
    def test_an_app_that_writes_no_dead_letters(self, shop: Shop) -> None:
        shop.broker(orders=1)
        shop.write("shop")
        assert "no handler of the app has on_error=DeadLetter(...)" in said(shop, code=2)
        shop.broker(**{"orders.dlq": 1})
        assert "none reads letters that are sent back" in said(shop, "--topic", "orders.dlq", code=2)

    def test_a_topic_that_is_not_there(self, shop: Shop) -> None:
        with_topic(shop)
        assert "topic 'orders.dlk' is not on the cluster" in said(shop, "--topic", "orders.dlk", code=2)

    def test_a_table_that_is_not_the_apps(self, shop: Shop) -> None:
        shop.write("shop", IN_TABLE)
        assert "correct --table" in said(shop, "--table", "failures", code=2)

    def test_places_that_are_not_there_yet_are_none(self, shop: Shop) -> None:
        shop.broker(orders=1)
        shop.write("shop", IN_TABLE)
        assert "the first dead letter creates it" in said(shop, "--yes")
        shop.write("shop", MENDED)
        told = said(shop, "--yes")
        assert "topic 'orders.dlq' is not on the cluster" in told or "none of its dead letters" in told

    def test_no_letters_are_no_error(self, shop: Shop) -> None:
        with_topic(shop)
        assert said(shop, "--yes").endswith("total 0 sent back; a running group begins to read them within a minute\n")
        assert BACK not in attach("shop").topics()

    @pytest.mark.dense
    def test_letters_of_another_group_are_left(self, shop: Shop) -> None:
        with_topic(shop, letter(1, group="audit"))
        told = said(shop, "--yes")
        assert "not sent       1  failed in another group" in told
        assert not sent_back()

    def test_a_group_that_the_app_has_not(self, shop: Shop) -> None:
        shop.write("shop", MENDED)
        assert "the app has no group 'audit'" in said(shop, "--group", "audit", code=2)

    @pytest.mark.dense
    def test_a_handler_that_cannot_take_them_back(self, shop: Shop) -> None:
        with_topic(shop, letter(1), source=MENDED.replace('"orders", on', 'pattern="ord.*s", on'))
        assert "no handler of group 'shop' can take letters back" in said(shop, code=2)

    @pytest.mark.parametrize("options", [("--rate", "0"), ("--cap", "0"), ("--since", "soon")])
    def test_numbers_and_times_that_are_none(self, shop: Shop, options: Sequence[str]) -> None:
        assert f"Invalid value for '{options[0]}'" in said(shop, *options, code=2)

    def test_a_broker_that_is_away(self, shop: Shop) -> None:
        shop.write("shop", MENDED)
        assert "the embedded broker 'shop' is not running" in said(shop, "--yes", code=2)


class TestOnARealBroker:
    def real(self, shop: Shop, kafka: KafkaService, topic: MakeTopic, source: str, *letters: Letter) -> tuple[str, str]:
        """The topic of the orders and that of its letters, which are in it if any are given."""
        orders, dead = topic(3), topic(1, config={"retention.ms": "-1"})
        told = source.replace("embedded://shop", kafka.bootstrap).replace('"orders"', f'"{orders}"')
        shop.write("shop", told.replace("orders.dlq", dead))
        shop.make_table()
        producer = Producer({"bootstrap.servers": kafka.bootstrap})
        for each in (replace(each, partition=Partition(orders, each.partition.number)) for each in letters):
            moment = int(cast(datetime, each.timestamp).timestamp() * 1000)
            headers: list[tuple[str, str | bytes | None]] = [*each.headers, *each.added_headers]
            producer.produce(dead, each.value, each.key, 0, headers=headers, timestamp=moment)
        assert producer.flush(20) == 0
        return orders, dead

    @pytest.mark.dense
    def test_the_topic_is_made_like_the_source_and_keeps_what_is_old(
        self, shop: Shop, kafka: KafkaService, topic: MakeTopic, kafka_admin: AdminClient
    ) -> None:
        old = replace(letter(1, timestamp=NOW - timedelta(days=400)), partition=Partition("orders", 2))
        orders, _ = self.real(shop, kafka, topic, MENDED, old)
        assert document(shop)["selected"] == 1
        assert f"{orders}.shop.redrive" not in kafka_admin.list_topics(timeout=20).topics, "a preflight makes nothing"
        (made,) = document(shop, "--yes")["to"]
        assert made == f"{orders}.shop.redrive"
        (message,) = back(kafka.bootstrap, made)
        assert (message.partition(), len(kafka_admin.list_topics(timeout=20).topics[made].partitions)) == (2, 3)
        asked = ConfigResource(ResourceType.TOPIC, made)
        assert kafka_admin.describe_configs([asked])[asked].result(20)["retention.ms"].value == "-1"
        delete_topics(kafka_admin, [made])

    @pytest.mark.dense
    def test_a_second_one_ends_the_first_and_nothing_is_sent_twice(
        self, shop: Shop, kafka: KafkaService, topic: MakeTopic, kafka_admin: AdminClient
    ) -> None:
        orders, _ = self.real(shop, kafka, topic, MENDED, *map(letter, range(1, 61)))
        made = f"{orders}.shop.redrive"
        slow = shop.start("dlq", "redrive", "shop:app", "--yes", "--rate", "1")  # a minute: the second comes in time
        eventually(lambda: back(kafka.bootstrap, made), what="some are sent")
        second = document(shop, "--yes")
        assert slow.end() == 1
        assert "has started, so this one ends" in slow.err
        assert 0 < second["sent"] < 60
        assert sorted(int(cast(bytes, each.key())[1:]) for each in back(kafka.bootstrap, made)) == list(range(1, 61))
        delete_topics(kafka_admin, [made])

    @pytest.mark.dense
    def test_letters_in_postgresql_and_an_async_handler(
        self, shop: Shop, kafka: KafkaService, topic: MakeTopic, kafka_admin: AdminClient, postgres_url: str
    ) -> None:
        source = """
            from psycopg import AsyncConnection
            from kconsume import App, DeadLetter

            app = App("embedded://shop", group="shop", offsets="POSTGRES")

            @app.consume("orders", on_error=DeadLetter(table="failed_orders"))
            async def reserve(order: dict, tx: AsyncConnection) -> None:
                await tx.execute("insert into reserved values (%s)", (order["id"],))
        """
        orders, _ = self.real(shop, kafka, topic, source.replace("POSTGRES", postgres_url))
        with psycopg.connect(postgres_url, autocommit=True) as database:
            database.execute("create table reserved (id integer check (id > 0))")
            mine = [replace(letter(n), partition=Partition(orders, 0)) for n in (1, 2, -3)]
            keep(PostgresStore(postgres_url), mine)
            database.execute("alter table failed_orders drop column sent_back")
            place = document(shop, code=1)
            assert place["preflight"]["would_pass"] == 2
            assert place["preflight"]["still_fail"][0]["cause"] == "psycopg.errors.CheckViolation"
            assert database.execute("select count(*) from reserved").fetchone() == (0,)
            assert document(shop, "--yes", "--cause", "KeyError", "--key", "k1")["sent"] == 1
            assert document(shop, "--yes")["left"]["sent"] == 1
            marked = database.execute("select redriven, failed_at = sent_back from failed_orders").fetchall()
            assert marked == [(1, True)] * 3
        assert len(back(kafka.bootstrap, f"{orders}.shop.redrive")) == 3
        delete_topics(kafka_admin, [f"{orders}.shop.redrive"])
