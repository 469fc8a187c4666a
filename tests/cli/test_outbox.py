"""`kconsume outbox`: what waits in the outbox and what blocks it, and rows that are dropped or written elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result

from kconsume import App, DeadLetter, Outgoing
from kconsume._kafka.producer import Producer
from kconsume._runtime.output import outbox_relay, partition_outbox
from kconsume.backends.outbox import reader
from kconsume.cli import commands
from kconsume.cli.outbox import rows as outbox_rows
from kconsume.records import Headers
from kconsume.testing.services import KafkaService
from tests.cli.conftest import Shop as Folder
from tests.contract.test_failures import MARKS, marks
from tests.contract.test_failures_stores import Shop
from tests.contract.test_outbox import numbers, rows, values
from tests.contract.test_outbox_blocked import SOON, blocked, stripped
from tests.contract.test_output import everything
from tests.fix_arena import Arena
from tests.fix_kafka import MakeTopic, unique
from tests.waiting import eventually

LARGE = 7


@pytest.fixture
def real(kafka: KafkaService) -> Iterator[Arena]:
    arena = Arena("real", kafka.bootstrap, None)
    yield arena
    arena.clean_up()


@pytest.fixture(params=["sqlite", "postgres"])
def database_of(request: pytest.FixtureRequest) -> Shop:
    return Shop(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was refused is tried again soon."""
    monkeypatch.setattr(partition_outbox, "_LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(outbox_relay, "_POLL_EVERY", 0.1)
    monkeypatch.delenv("KCONSUME_APP", raising=False)


class Blocked:
    """An outbox with a row that is too large for its topic, rows behind it, and dead letters to a missing topic."""

    def __init__(self, real: Arena, topic: MakeTopic, group: str, shop: Shop) -> None:
        self.real, self.group, self.shop = real, group, shop
        self.source, self.out, self.missing = (
            numbers(real, 20),
            topic(1, config={"max.message.bytes": "2000"}),
            unique("missing"),
        )
        self.dlq = real.topic(1)
        self.app = self.made()

    def made(self) -> App:
        app = self.real.app(self.group, self.shop.url, kafka=SOON)

        @app.consume(self.source, to=self.out, on_error=DeadLetter(self.missing))
        def handle(value: str) -> Outgoing:
            if value == "3":
                raise LookupError(value)
            return Outgoing(value.ljust(5000 if value == str(LARGE) else 20), key=f"k{value}", headers={"h": "1"})

        return app

    def wait(self) -> None:
        eventually(lambda: len(blocked(self.app)) == 2 and rows(self.shop) == 14, within=40, what="blocked")

    def run(self, *words: str, code: int = 0) -> Result:
        where = ("--offsets", self.shop.url, "--group", self.group, "--brokers", self.real.bootstrap)
        done = CliRunner().invoke(commands, ["outbox", *words, *where])
        assert done.exit_code == code, (done.output, done.exception)
        return done

    def listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.run("list", "--json").output)["rows"]
        return found

    def heads(self) -> dict[str, int]:
        """The first row of each topic."""
        first: dict[str, int] = {}
        for row in self.listed():
            first.setdefault(row["topic"], row["row"])
        return first


@pytest.fixture
def stuck(real: Arena, topic: MakeTopic, group: str, database_of: Shop) -> Blocked:
    return Blocked(real, topic, group, database_of)


@pytest.mark.dense
def test_what_waits_is_listed_with_what_blocks_it(stuck: Blocked) -> None:
    with stuck.app.running():
        stuck.wait()
    listed = stuck.listed()
    assert len(listed) == 14
    first, letter = (
        next(r for r in listed if r["topic"] == stuck.out),
        next(r for r in listed if r["topic"] == stuck.missing),
    )
    assert (first["partition"], first["group"], first["bytes"] > 5000) == (f"{stuck.source}/0", stuck.group, True)
    assert first["origin"].endswith(f":0:{LARGE}#0")
    assert "max.message.bytes" in first["blocked"]
    assert "does not exist" in letter["blocked"]
    assert [r["blocked"] for r in listed if r["topic"] == stuck.out][1:] == [None] * 12
    assert all(0 <= r["age"] < 3600 for r in listed)
    said = stuck.run("list").output
    assert f"{stuck.source}/0  group {stuck.group} → {stuck.out}  13 rows" in said
    assert f"  {first['row']}  " in said
    assert "… 8 more, with --all" in said
    assert "kconsume outbox drop ROW --yes" in said
    alone = CliRunner().invoke(commands, ["outbox", "list", "--offsets", stuck.shop.url, "--json"])
    assert json.loads(alone.output)["unknown"] == "give --brokers ADDRESS to learn what blocks"
    assert len(json.loads(alone.output)["rows"]) == 14


@pytest.mark.parametrize("running", [True, False], ids=["while it runs", "while it is stopped"])
def test_a_row_that_is_dropped_is_never_sent_and_those_behind_it_are(stuck: Blocked, running: bool) -> None:
    with stuck.app.running():
        stuck.wait()
        number = str(stuck.heads()[stuck.out])
        if running:
            assert "would drop row" in stuck.run("drop", number).output
            assert rows(stuck.shop) == 14, "a dry run changes nothing"
            assert f"dropped row {number} of {stuck.source}/0" in stuck.run("drop", number, "--yes").output
            eventually(lambda: rows(stuck.shop) == 1, within=40, what="those behind it are sent")
    if not running:
        stuck.run("drop", number, "--yes")
        assert rows(stuck.shop) == 13
        stuck.made().catch_up(idle=0.5)
        assert rows(stuck.shop) == 1
    assert stripped(stuck.real, stuck.out) == [str(n) for n in range(20) if n not in (3, LARGE)]
    assert "has no row" in stuck.run("drop", number, "--yes", code=2).output


@pytest.mark.dense
@pytest.mark.parametrize("running", [True, False], ids=["while it runs", "while it is stopped"])
def test_a_row_that_is_written_to_a_dead_letter_topic_is_there_with_all_of_it(stuck: Blocked, running: bool) -> None:
    with stuck.app.running():
        stuck.wait()
        number = str(stuck.heads()[stuck.out])
        if running:
            assert "would write row" in stuck.run("dead-letter", number, "--to", stuck.dlq).output
            assert values(stuck.real, stuck.dlq) == []
            said = stuck.run("dead-letter", number, "--to", stuck.dlq, "--yes").output
            assert f"to {stuck.dlq}/0@0" in said
            eventually(lambda: rows(stuck.shop) == 1, within=40, what="those behind it are sent")
    if not running:
        stuck.run("dead-letter", number, "--to", stuck.dlq, "--yes")
        stuck.made().catch_up(idle=0.5)
        assert rows(stuck.shop) == 1
    assert stripped(stuck.real, stuck.out) == [str(n) for n in range(20) if n not in (3, LARGE)]
    (letter,) = everything(stuck.real.bootstrap, stuck.dlq)
    assert (letter.key(), (letter.value() or b"").strip(), len(letter.value() or b"")) == (b"k7", b"7", 5000)
    said_of_it = marks(letter)
    assert said_of_it.keys() == MARKS
    assert (said_of_it["kconsume-topic"], said_of_it["kconsume-group"]) == (stuck.out, stuck.group)
    assert said_of_it["kconsume-origin"].endswith(f":0:{LARGE}#0")
    assert "max.message.bytes" in said_of_it["kconsume-message"]
    assert ("h", b"1") in cast(Headers, letter.headers())
    assert json.loads(_dlq_list(stuck))["total"] == 1, "`kconsume dlq` knows it"


def _dlq_list(stuck: Blocked) -> str:
    where = ("--brokers", stuck.real.bootstrap, "--topic", stuck.dlq, "--json")
    return CliRunner().invoke(commands, ["dlq", "list", *where]).output


@pytest.mark.dense
def test_a_dead_letter_that_waits_stays_the_letter_that_it_is(stuck: Blocked) -> None:
    with stuck.app.running():
        stuck.wait()
        stuck.run("dead-letter", str(stuck.heads()[stuck.missing]), "--to", stuck.dlq, "--yes")
        eventually(lambda: not [b for b in blocked(stuck.app) if b.topic == stuck.missing], what="nothing is held")
    (letter,) = everything(stuck.real.bootstrap, stuck.dlq)
    said = marks(letter)
    assert (said["kconsume-topic"], said["kconsume-offset"]) == (stuck.source, "3")
    assert said["kconsume-exception"] == "builtins.LookupError"
    assert letter.value() == b"3"


def test_a_row_stays_if_its_dead_letter_is_not_confirmed(
    stuck: Blocked, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stuck.app.running():
        stuck.wait()
    number, small = str(stuck.heads()[stuck.out]), topic(1, config={"max.message.bytes": "2000"})
    assert "too large for it" in stuck.run("dead-letter", number, "--to", small, "--yes", code=1).output
    assert rows(stuck.shop) == 14
    assert "is not on the cluster" in stuck.run("dead-letter", number, "--to", unique("none"), "--yes", code=2).output
    assert rows(stuck.shop) == 14
    write = Producer.write

    def lost(self: Producer, *arguments: Any) -> Any:
        write(self, *arguments).result()
        raise ConnectionError("the command is killed before it hears of it")

    monkeypatch.setattr(Producer, "write", lost)
    with pytest.raises(ConnectionError):
        CliRunner().invoke(
            commands,
            ["outbox", "dead-letter", number, "--to", stuck.dlq, "--yes", "--offsets", stuck.shop.url, "--brokers",
             stuck.real.bootstrap], catch_exceptions=False,
        )  # fmt: skip
    assert rows(stuck.shop) == 14, "it is still there, and written again the next time"


def test_control_rows_that_are_taken_out_before_they_are_confirmed_are_lost(
    stuck: Blocked, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = outbox_rows.letter_about

    def too_soon(row: reader.WaitingRow, *others: Any) -> Any:
        stuck.shop.look(f"delete from kconsume_outbox where id = {row.number}")
        return value(row, *others)

    monkeypatch.setattr(outbox_rows, "letter_about", too_soon)
    with pytest.raises(AssertionError):
        test_a_row_stays_if_its_dead_letter_is_not_confirmed(stuck, topic, monkeypatch)


def test_the_app_says_where_to_look(shop: Folder, real: Arena, sqlite_url: str) -> None:
    source, missing = numbers(real, 3), unique("missing")
    shop.write("shop", APP.format(brokers=real.bootstrap, url=sqlite_url, source=source, missing=missing))
    running = shop.start("run", "shop:app")
    looked = _Looked(sqlite_url)
    eventually(lambda: rows(looked) == 3, what="three rows wait")
    listed = shop.run("outbox", "list", "--json", KCONSUME_APP="shop:app")
    found: Mapping[str, Any] = json.loads(listed.stdout)
    assert [(r["group"], r["topic"]) for r in found["rows"]] == [("shop", missing)] * 3
    assert "does not exist" in found["rows"][0]["blocked"]
    numbers_of = [str(r["row"]) for r in found["rows"]]
    dropped = shop.run("outbox", "drop", "shop:app", *numbers_of, "--yes")
    assert (dropped.returncode, dropped.stdout.count("dropped row")) == (0, 3), dropped.stderr
    assert rows(looked) == 0
    assert "total 0 rows" in shop.run("outbox", "list", "shop:app").stdout
    running.process.terminate()
    assert running.process.wait(40) == 0


APP = """
    from kconsume import App

    app = App("{brokers}", group="shop", offsets="{url}")

    @app.consume("{source}", to="{missing}")
    def handle(value: str) -> str:
        return value
"""


class _Looked(Shop):
    def __init__(self, url: str) -> None:
        self.url, self.is_sqlite = url, True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list"], "no outbox was named: write MODULE:APP"),
        (["list", "--offsets", "redis://localhost:1"], "has no outbox, because it is not a database"),
        (["drop", "--offsets", "sqlite:///shop.db"], "no rows were named"),
        (["drop", "a", "b", "1", "--offsets", "sqlite:///shop.db"], "no rows were named"),
        (["drop", "1", "--offsets", "sqlite:///nowhere.db"], "has no row 1 in its outbox"),
        (
            ["dead-letter", "1", "--offsets", "sqlite:///nowhere.db"],
            "no topic was named for the dead letters: add --to",
        ),
        (["dead-letter", "1", "--to", "dlq", "--offsets", "sqlite:///nowhere.db"], "no cluster was named"),
    ],
)
def test_what_cannot_be_done_is_refused(words: list[str], said: str) -> None:
    done = CliRunner().invoke(commands, ["outbox", *words])
    assert (done.exit_code, said in done.output) == (2, True), done.output
