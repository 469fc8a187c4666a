"""Named embedded brokers as several processes see them, and the command that shows them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Consumer, KafkaError, Producer
from confluent_kafka.admin import AdminClient

from kconsume._embedded import broker_files, named_broker
from kconsume._embedded.named_broker import attach, find, names
from kconsume.cli.broker import broker as command
from kconsume.errors import ConfigurationError, EmbeddedBrokerError
from tests.waiting import eventually

DEADLINE = 60.0
ATTACH = "from kconsume._embedded.named_broker import attach; broker = attach('shop'); print(broker.about.pid)"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder for this test only; what still runs in it at the end is killed."""
    with tempfile.TemporaryDirectory() as runtime:  # pytest's tmp_path is too long a path for a socket
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        folder = Path(runtime, "kconsume")
        yield folder
        for pid in [] if folder.is_symlink() else folder.glob("*.pid"):  # not those of the folder that it points to
            os.kill(int(pid.read_text()), signal.SIGKILL)


def another_process(code: str) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": root},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    # Reads to the end of both pipes: a broker that had inherited one would keep this waiting.
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    return out.strip()


def listens(bootstrap: str) -> bool:
    host, _, port = bootstrap.rpartition(":")
    with socket.socket() as line:
        return line.connect_ex((host, int(port))) == 0


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def test_two_processes_share_a_broker_by_its_name() -> None:
    attach("shop").create_topic("orders", 2)
    output_of(
        another_process(
            f"{ATTACH}\n"
            "from confluent_kafka import Producer\n"
            "producer = Producer({'bootstrap.servers': broker.bootstrap})\n"
            "producer.produce('orders', b'from afar')\n"
            "assert producer.flush(20) == 0"
        )
    )
    consumer = Consumer(
        {"bootstrap.servers": attach("shop").bootstrap, "group.id": "g", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe(["orders"])
    message = eventually(lambda: consumer.poll(0.1), what="the other process's record")
    consumer.close()

    assert message is not None
    assert message.value() == b"from afar"


def test_a_broker_outlives_its_starter_and_holds_none_of_its_output() -> None:
    pid = int(output_of(another_process(ATTACH)))
    found = find("shop")

    assert found is not None
    assert found.about.pid == pid
    assert found.topics() == {}


def pids_of_four_attachers(preparation: str = "") -> set[str]:
    """The broker each of four processes got; "" where one got an error. The brokers end with the four."""
    code = (
        f"{preparation}\nimport sys\nfrom kconsume._embedded.named_broker import attach\n"
        "print(attach('shop', until_exit=True).about.pid, flush=True)\n"
        "sys.stdin.read()"
    )
    attachers = [another_process(code) for _ in range(4)]
    pids = {attacher.stdout.readline().strip() for attacher in attachers if attacher.stdout}
    for attacher in attachers:
        attacher.communicate(timeout=DEADLINE)
    eventually(lambda: find("shop") is None, what="the end of the brokers")
    return pids


def test_four_processes_that_attach_at_once_get_one_broker() -> None:
    for _ in range(3):
        pids = pids_of_four_attachers()
        assert len(pids) == 1
        assert pids != {""}


def test_four_processes_that_attach_at_once_without_the_lock_do_not() -> None:
    """The negative control of the test above."""
    no_lock = "import kconsume._embedded.broker_files as b; b._locked = lambda lock: True"

    eventually(lambda: len(pids_of_four_attachers(no_lock)) > 1, within=60, what="attachers that do not agree")


def test_a_killed_broker_is_replaced_and_its_files_are_cleaned(folder: Path) -> None:
    first = attach("shop")
    first.create_topic("orders", 1)
    os.kill(first.about.pid, signal.SIGKILL)
    eventually(lambda: find("shop") is None, what="the end of the killed broker")
    assert "shop.sock" in files(folder)

    with pytest.raises(EmbeddedBrokerError, match="is gone"):
        first.create_topic("more", 1)
    second = attach("shop")

    assert second.about.pid != first.about.pid
    assert second.topics() == {}
    assert (folder / "shop.pid").read_text() == str(second.about.pid)


def test_a_handle_to_a_replaced_broker_does_not_touch_the_new_one() -> None:
    first = attach("shop")
    first.stop()
    second = attach("shop")

    with pytest.raises(EmbeddedBrokerError, match="is gone"):
        first.create_topic("orders", 1)
    first.stop()

    assert attach("shop").about == second.about
    assert second.topics() == {}


def test_an_error_injected_from_another_process_reaches_the_client() -> None:
    broker = attach("shop")
    broker.create_topic("orders", 1)
    broker.fail_next("Produce", KafkaError.MSG_SIZE_TOO_LARGE)
    codes: list[int] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce("orders", b"x", on_delivery=lambda error, _: codes.append(error.code() if error else 0))
    assert producer.flush(DEADLINE) == 0
    producer.produce("orders", b"x", on_delivery=lambda error, _: codes.append(error.code() if error else 0))
    assert producer.flush(DEADLINE) == 0

    assert codes == [KafkaError.MSG_SIZE_TOO_LARGE, 0]


def test_what_the_mock_refuses_is_refused_from_afar_in_the_same_words() -> None:
    broker = attach("shop", brokers=2)
    broker.move_leader("orders", 0, 2)
    with pytest.raises(EmbeddedBrokerError, match="broker 3 cannot be taken down: BROKER_NOT_AVAILABLE"):
        broker.broker_down(3)
    with pytest.raises(EmbeddedBrokerError, match="is not a function of the embedded broker"):
        broker.control("cluster_destroy")
    with pytest.raises(EmbeddedBrokerError, match="could not be read"):
        broker.control("topic_delete", 7)


def test_stop_ends_the_process_and_removes_its_files(folder: Path) -> None:
    broker = attach("shop")
    assert files(folder) == ["shop.log", "shop.pid", "shop.sock"]
    broker.stop()
    broker.stop()

    assert files(folder) == []
    assert not listens(broker.bootstrap)
    assert find("shop") is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_as_stop_does(folder: Path, number: signal.Signals) -> None:
    broker = attach("shop")
    os.kill(broker.about.pid, number)

    eventually(lambda: not listens(broker.bootstrap), what="the end of the broker")
    assert files(folder) == []


def test_a_broker_that_nobody_uses_ends_by_itself(folder: Path) -> None:
    broker = attach("shop", idle=2.0)

    eventually(lambda: not listens(broker.bootstrap), what="the end of the broker")
    assert files(folder) == []


def test_kafka_requests_keep_a_broker_alive() -> None:
    broker = attach("shop", idle=2.0)
    client = AdminClient({"bootstrap.servers": broker.bootstrap})
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
        client.list_topics(timeout=DEADLINE)

    assert attach("shop").about == broker.about


def test_a_broker_tied_to_its_starter_ends_when_that_is_killed(folder: Path) -> None:
    starter = another_process(
        "from kconsume._embedded.named_broker import attach\n"
        "print(attach('shop', until_exit=True).bootstrap, flush=True)\n"
        "import signal; signal.pause()"
    )
    assert starter.stdout is not None
    bootstrap = starter.stdout.readline().strip()
    assert listens(bootstrap)
    starter.kill()
    starter.communicate(timeout=DEADLINE)

    eventually(lambda: not listens(bootstrap), what="the end of the broker")
    assert files(folder) == []


def test_a_frozen_broker_is_reported_and_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = attach("shop")
    os.kill(broker.about.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(named_broker, "_REPLY_DEADLINE", 0.3)
        with pytest.raises(EmbeddedBrokerError, match=f"kill -9 {broker.about.pid}"):
            attach("shop")
        listing = run("--json")
    os.kill(broker.about.pid, signal.SIGCONT)

    assert "frozen" in json.loads(listing.output)["brokers"][0]["trouble"]
    assert attach("shop").about == broker.about


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(EmbeddedBrokerError, match="needs at least one broker, not 0"):
        attach("shop", brokers=0)
    assert find("shop") is None


@pytest.mark.parametrize("name", ["", "Shop", "a b", "../etc", "x" * 41])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot name an embedded broker"):
        attach(name)


def test_a_folder_that_others_can_use_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with pytest.raises(EmbeddedBrokerError, match="only user"):
        attach("shop")
    folder.rmdir()
    folder.symlink_to(tempfile.gettempdir())
    with pytest.raises(EmbeddedBrokerError, match="only user"):
        attach("shop")


def test_a_folder_too_deep_for_a_socket_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(ConfigurationError, match="shorter"):
        attach("shop")


def test_without_a_runtime_folder_the_temporary_one_is_used(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(folder.parent))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "not-there"))

    assert broker_files.folder() == folder.parent / f"kconsume-{os.getuid()}"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


def test_the_command_starts_a_broker_and_shows_how_to_use_it() -> None:
    shown = run("shop", "--topic", "orders:6", "--topic", "payments")
    running = find("shop")

    assert shown.exit_code == 0
    assert running is not None
    for expected in (running.bootstrap, str(running.about.pid), "orders:6, payments:4", 'App("embedded://shop"'):
        assert expected in shown.output
    assert "\x1b" not in shown.output


def test_the_command_prints_one_json_document() -> None:
    first, second = (json.loads(run("shop", "--topic", "orders:6", "--json").output) for _ in range(2))

    assert first["topics"] == second["topics"] == {"orders": 6}
    assert first["pid"] == second["pid"]
    assert (first["started_now"], second["started_now"]) == (True, False)


def test_the_command_lists_what_runs_and_stops_what_is_named() -> None:
    assert "No embedded broker is running" in run().output
    for name in ("shop", "yard"):
        assert run(name).exit_code == 0
    assert [seen["name"] for seen in json.loads(run("--json").output)["brokers"]] == ["shop", "yard"]
    assert "Stopped shop" in run("shop", "--stop").output
    assert "was not running" in run("shop", "--stop").output
    listing = run().output

    assert "yard" in listing
    assert "shop" not in listing
    assert json.loads(run("yard", "--stop", "--json").output) == {"name": "yard", "stopped": True}


def test_the_command_shows_a_broker_whose_kafka_is_down() -> None:
    attach("shop").broker_down()
    shown = run("shop", "--json")

    assert shown.exit_code == 0
    assert "broker_up()" in json.loads(shown.output)["trouble"]


@pytest.mark.parametrize(
    "arguments",
    [("--stop",), ("--topic", "orders"), ("shop", "--stop", "--topic", "orders"), ("shop", "--topic", "orders:x")],
)
def test_the_command_refuses_what_makes_no_sense(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2
    assert names() == []
