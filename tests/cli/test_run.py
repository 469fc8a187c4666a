"""`kconsume run`, as a deployment runs it: signals, exit codes, reports, logs."""

from __future__ import annotations

import json
import shlex
import signal

import pytest

from tests.cli.conftest import APP, Shop
from tests.waiting import eventually

FAILING = APP.replace("tx.execute(", 'if order.id == 3: raise ValueError("no more of it")\n        tx.execute(')

SLOW = """
    import pathlib
    import time
    from kconsume import App

    app = App("embedded://shop", group="shop", shutdown={shutdown})

    @app.consume("orders")
    def reserve(order: bytes) -> None:
        pathlib.Path("entered").touch()
        time.sleep(600)
"""


@pytest.fixture
def stocked(shop: Shop) -> Shop:
    """The shop with its table, and five orders in one partition."""
    shop.broker(orders=1)
    shop.order(*(b'{"id": %d}' % number for number in range(1, 6)))
    shop.make_table()
    return shop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_0_and_a_report(stocked: Shop, number: signal.Signals) -> None:
    stocked.write("shop")
    running = stocked.start("run", "shop:app")
    eventually(lambda: len(stocked.reserved()) == 5, what="a row for each order")
    running.send(number)

    assert running.end() == 0
    assert "reserve ← orders → sqlite:///shop.db" in running.err
    assert "exactly once" in running.err
    assert "handled 5  skipped 0" in running.err
    assert "committed orders/0@5" in running.err
    assert running.out == ""


def test_a_failing_handler_ends_with_1_and_a_line_that_shows_it_again(stocked: Shop) -> None:
    stocked.write("shop", FAILING)
    failed = stocked.run("run", "shop")
    *_, repeat = failed.stderr.splitlines()
    words = shlex.split(repeat.partition("see it again: ")[2])

    assert failed.returncode == 1
    assert "reserve failed on orders/0@2: ValueError: no more of it" in failed.stderr
    assert words == ["kconsume", "try", "shop:app", "orders/0@2"]

    again = stocked.run(*words[1:])
    assert again.returncode == 1
    assert "ValueError: no more of it" in again.stdout
    for told in (failed.stderr, again.stdout):
        frames = [line for line in told.splitlines() if line.startswith("  File ")]
        assert [frame for frame in frames if "shop.py" not in frame] == []

    stocked.write("shop", APP)
    assert stocked.run(*words[1:]).returncode == 0
    assert stocked.reserved() == [1, 2]


def test_a_record_that_cannot_be_decoded_ends_with_1_and_no_traceback(stocked: Shop) -> None:
    stocked.order(b"{")
    stocked.write("shop")
    failed = stocked.run("run", "shop")

    assert failed.returncode == 1
    assert "reserve failed on orders/0@5: DecodeError: the value is not Order" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert stocked.reserved() == [1, 2, 3, 4, 5]


def test_a_second_signal_leaves_at_once(stocked: Shop) -> None:
    stocked.write("shop", SLOW.format(shutdown=60))
    running = stocked.start("run", "shop")
    eventually((stocked.folder / "entered").exists, what="a handler that runs")
    running.send(signal.SIGTERM)
    running.await_err("drain started")
    running.send(signal.SIGTERM)

    assert running.end() == 128 + signal.SIGTERM


def test_work_that_is_not_done_in_time_is_abandoned_and_ends_with_3(stocked: Shop) -> None:
    stocked.write("shop", SLOW.format(shutdown=1))
    running = stocked.start("run", "shop")
    eventually((stocked.folder / "entered").exists, what="a handler that runs")
    running.send(signal.SIGTERM)

    assert running.end() == 3
    assert "abandoned orders/0" in running.err


def test_a_configuration_that_the_client_refuses_ends_with_2(shop: Shop) -> None:
    shop.write("shop", APP.replace('group="shop"', 'group="shop", kafka={"fetch.wait.max.msec": 1}'))
    shop.broker(orders=1)
    refused = shop.run("run", "shop")

    assert refused.returncode == 2
    assert 'No such configuration property: "fetch.wait.max.msec"' in refused.stderr
    assert "Traceback" not in refused.stderr


def test_an_app_without_a_handler_ends_with_2(shop: Shop) -> None:
    shop.write("shop", APP.partition("@app.consume")[0])

    assert shop.run("run", "shop").stderr.startswith("error: the app has no handler")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (APP.partition("@app.consume")[0], "the app has no handler: decorate a function with @app.consume('topic')"),
        (
            APP.replace('group="shop"', 'group="shop", kafka={"fetch.wait.max.msec": 1}'),
            'No such configuration property: "fetch.wait.max.msec"',
        ),
    ],
)
def test_a_plain_program_that_is_not_configured_ends_with_2_and_a_sentence(shop: Shop, source: str, words: str) -> None:
    shop.broker(orders=1)
    shop.write("shop", f'{source}\n    if __name__ == "__main__":\n        app.run()\n')
    refused = shop.python("shop.py")
    by_command = shop.run("run", "shop")

    for ended in (refused, by_command):
        assert (ended.returncode, ended.stdout) == (2, "")
        (line,) = (line for line in ended.stderr.splitlines() if line.startswith("error: "))
        assert words in line
        assert "Traceback" not in ended.stderr


def test_a_program_may_see_why_it_is_not_configured(shop: Shop) -> None:
    watching = """
    try:
        app.run()
    except SystemExit as end:
        print(type(end.__cause__).__name__, end.code)
    """
    shop.write("shop", APP.partition("@app.consume")[0] + watching)

    assert shop.python("shop.py").stdout == "ConfigurationError 2\n"


def test_as_json_every_line_is_one_object(stocked: Shop) -> None:
    stocked.write("shop", FAILING)
    failed = stocked.run("run", "shop", "--log-format", "json")
    events = [json.loads(line) for line in failed.stderr.splitlines()]

    assert failed.returncode == 1
    for event in events:
        assert {"time", "level", "logger", "message"} <= event.keys()
    assert (events[-1]["level"], events[-1]["message"]) == ("error", "consumer failed")
    assert events[-1]["error"] == "reserve failed on orders/0@2: ValueError: no more of it"
    assert (events[-1]["record"], events[-1]["hint"]) == ("orders/0@2", "kconsume try shop:app orders/0@2")
    assert events[-1]["exception"].startswith("Traceback")
    starting, registered, stopped = (
        next(event for event in events if event["message"] == name)
        for name in ("consumer starting", "handler registered", "consumer stopped")
    )
    assert (starting["group"], starting["brokers"]) == ("shop", "embedded://shop")
    assert (registered["handler"], registered["topics"]) == ("reserve", ["orders"])
    assert "exactly once" in registered["guarantee"]
    assert stopped["committed"] == {"orders/0": 2}


def test_as_json_a_handlers_own_log_is_an_object_with_its_extra_fields(stocked: Shop) -> None:
    lines = 'import logging\n        logging.getLogger("shop").info("kept", extra={"order": order.id, "by": object})\n'
    stocked.write("shop", FAILING.replace("tx.execute(", f"{lines}        tx.execute("))
    failed = stocked.run("run", "shop", KCONSUME_LOG_FORMAT="json")
    kept = [event for line in failed.stderr.splitlines() if (event := json.loads(line))["logger"] == "shop"]

    assert {event["order"] for event in kept} == {1, 2}
    assert {event["by"] for event in kept} == {"<class 'object'>"}


def test_the_log_level_can_be_chosen(stocked: Shop) -> None:
    stocked.write("shop", FAILING)
    quiet, chatty = (stocked.run("run", "shop", "--log-level", level) for level in ("error", "info"))

    assert "kconsume.rebalance" not in quiet.stderr
    assert "kconsume.rebalance" in chatty.stderr
    assert "see it again" in quiet.stderr


def test_the_programs_own_logging_stays_unless_a_format_is_asked_for(stocked: Shop) -> None:
    own = 'import logging\n    logging.basicConfig(level="INFO", format="MINE %(message)s")\n'
    stocked.write("shop", f"\n    {own}{FAILING}")
    kept, replaced = stocked.run("run", "shop"), stocked.run("run", "shop", "--log-format", "text")

    assert "MINE partitions assigned partitions=1" in kept.stderr
    assert "MINE" not in replaced.stderr
    assert "INFO    kconsume.rebalance partitions assigned partitions=1" in replaced.stderr
