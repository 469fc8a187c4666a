"""A consumer in a web server: the server does not answer before the consumer works, and does not outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kconsume.testing.services import KafkaService
from kconsume.testing.services.ports import free_port
from tests.fix_kafka import MakeTopic, produce
from tests.integration.postgres_roles import a_server_with_passwords
from tests.waiting import eventually

SERVICE = """
import asyncio, os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fastapi import FastAPI
from kconsume import App

app = App(offsets="memory://", kafka={"session.timeout.ms": 6000, "heartbeat.interval.ms": 500})
seen = []

@app.consume(os.environ["TOPIC"])
def handle(value: bytes) -> None:
    if value == b"poison":
        raise LookupError("a poison record")
    seen.append(value)

def tell(error):
    print(f"TOLD {error!r}", flush=True)

@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    try:
        async with app.running(on_failure=tell if "TELL" in os.environ else None):
            (consumer,) = app._supervisor.consumers
            print("ENTERED", sum(h.state.value == "open" for h in consumer.assignment.partitions.values()), flush=True)
            yield
    finally:
        print("LEFT", flush=True)

web = FastAPI(lifespan=lifespan)

@web.get("/")
async def count() -> int:
    return len(seen)

@web.get("/slow")
async def slow() -> str:
    print("SLOW", flush=True)
    await asyncio.sleep(2)
    return "answered"
"""

UVICORN = ("uvicorn", "service:web", "--port")
WORKERS = ("uvicorn", "service:web", "--workers", "2", "--port")
HYPERCORN = ("hypercorn", "service:web", "--bind")
HYPERCORN_ALONE = ("hypercorn", "service:web", "--workers", "0", "--bind")


class Server:
    """A web server with a consumer in it, in a process of its own."""

    def __init__(self, command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
        self.log_file = folder / f"{command[0]}.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        address = str(port) if "uvicorn" in command else f"127.0.0.1:{port}"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "KCONSUME_SHUTDOWN": "8", **variables}
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command, address],
                cwd=folder, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            return httpx.get(self.url, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def exit_code(self) -> int:
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the server goes on:\n{self.log}")


Start = Callable[..., Server]


@pytest.fixture
def orders(topic: MakeTopic) -> str:
    return topic(2)


@pytest.fixture
def start(kafka: KafkaService, orders: str, group: str, tmp_path: Path) -> Iterator[Start]:
    started: list[Server] = []
    (tmp_path / "service.py").write_text(SERVICE)

    def start(command: Sequence[str], **variables: str) -> Server:
        base = {"KCONSUME_BROKERS": kafka.bootstrap, "KCONSUME_GROUP": group, "TOPIC": orders}
        started.append(Server(command, tmp_path, {**base, **variables}))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)  # with its workers
            server.process.wait(20)


@contextmanager
def answer_to(url: str) -> Iterator[list[str]]:
    """The answer to a request that is under way while the block runs."""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(httpx.get(url, timeout=60).text))
    thread.start()
    yield answers
    thread.join()


@pytest.mark.parametrize(
    "command", [UVICORN, HYPERCORN, HYPERCORN_ALONE], ids=["uvicorn", "hypercorn", "hypercorn without workers"]
)
def test_a_server_whose_consumer_has_failed_ends_with_the_cause(
    kafka: KafkaService, orders: str, start: Start, command: Sequence[str]
) -> None:
    server = start(command)
    eventually(server.answers, what="the server answers")
    assert "ENTERED 2" in server.log, "with its partitions claimed"
    produce(kafka.bootstrap, orders, [b"good", b"poison"], partition=0)
    # hypercorn 0.18 forgets the exit code of its only worker, and ends with 0.
    assert server.exit_code() == (0 if command is HYPERCORN else 1), server.log
    assert "exit_code=1" in server.log
    assert "consumer failed process_ends_within_seconds=" in server.log
    assert "LookupError: a poison record" in server.log


@pytest.mark.parametrize("command", [UVICORN, HYPERCORN_ALONE], ids=["uvicorn", "hypercorn"])
def test_requests_that_are_under_way_are_answered_before_the_server_ends(
    kafka: KafkaService, orders: str, start: Start, command: Sequence[str]
) -> None:
    server = start(command)
    eventually(server.answers, what="the server answers")
    with answer_to(f"{server.url}/slow") as answers:
        eventually(lambda: "SLOW" in server.log, what="the request is under way")
        produce(kafka.bootstrap, orders, [b"poison"], partition=0)
        assert server.exit_code() == 1, server.log
    assert answers == ['"answered"']


def test_a_worker_whose_consumer_has_failed_is_replaced(kafka: KafkaService, orders: str, start: Start) -> None:
    server = start(WORKERS)
    eventually(lambda: server.log.count("ENTERED") == 2, what="both workers consume")
    produce(kafka.bootstrap, orders, [b"poison"], partition=0)
    eventually(lambda: server.log.count("ENTERED") > 2, what="another one takes its place")
    assert "LookupError: a poison record" in server.log


@pytest.mark.parametrize("command", [UVICORN, HYPERCORN], ids=["uvicorn", "hypercorn"])
def test_a_callback_takes_the_place_of_the_end(
    kafka: KafkaService, orders: str, start: Start, command: Sequence[str]
) -> None:
    server = start(command, TELL="yes", KCONSUME_SHUTDOWN="2")
    eventually(server.answers, what="the server answers")
    produce(kafka.bootstrap, orders, [b"poison"], partition=0)
    eventually(lambda: "TOLD LookupError('a poison record')" in server.log, what="it is told")
    eventually(lambda: "LEFT" in server.log, what="the block ends")
    assert server.answers()
    assert "the process ends" not in server.log


def test_a_wrong_password_ends_the_start(start: Start) -> None:
    with a_server_with_passwords() as address:
        for command in (UVICORN, HYPERCORN_ALONE):
            server = start(command, KCONSUME_OFFSETS=address("wrong"))
            assert server.exit_code() != 0
            assert server.log.count("password authentication failed") > 0, server.log
            assert "ENTERED" not in server.log


@pytest.mark.parametrize("command", [UVICORN, HYPERCORN_ALONE], ids=["uvicorn", "hypercorn"])
def test_a_store_that_is_away_ends_the_start_in_time(start: Start, command: Sequence[str]) -> None:
    nobody = f"postgresql://shop@127.0.0.1:{free_port()}/shop"
    server = start(command, KCONSUME_OFFSETS=nobody, KCONSUME_STARTUP="6")
    assert server.exit_code() != 0
    assert "was not ready 6 s after its start" in server.log
    assert "cannot be reached" in server.log
    assert "ENTERED" not in server.log
