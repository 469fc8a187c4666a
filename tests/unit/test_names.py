"""What `import kconsume` gives, and what it does not do: no heavy imports, no I/O, not even for an `App`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import kconsume
import kconsume.backends

_ROOT = str(Path(__file__).parent.parent.parent)

EXPORTED = [
    "App",
    "Batch",
    "BatchError",
    "Batching",
    "ConfigurationError",
    "DeadLetter",
    "DecodeError",
    "Fenced",
    "HandlerFailed",
    "KconsumeError",
    "Outgoing",
    "Partition",
    "Rate",
    "Record",
    "Report",
    "Retry",
    "RetryTopics",
    "Router",
    "Sender",
    "__version__",
]

STORES = [
    "FencedStore",
    "KafkaStore",
    "MemoryStore",
    "OffsetStore",
    "Outbox",
    "Position",
    "PostgresStore",
    "RedisStore",
    "SqliteStore",
    "TransactionalStore",
    "Tx",
    "open_store",
]

HEAVY = [
    "click",
    "confluent_kafka.schema_registry",
    "psycopg",
    "pyarrow",
    "pydantic",
    "pyspark",
    "redis",
    "rich",
    "starlette",
]

# Ends the process at the first thing it does to the world; what it only reads, to import, is let pass.
_GUARD = """
import os, sys

def refuse(event, arguments):
    if event.startswith(("socket.connect", "socket.bind", "socket.getaddrinfo", "sqlite3.connect", "subprocess.",
                         "os.fork", "os.exec", "os.posix_spawn", "os.mkdir", "os.rename", "os.remove")):
        end(event, arguments)
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        end(event, arguments)

def end(*what):
    sys.stderr.write(f"I/O: {what}\\n")
    os._exit(70)

def done():
    # librdkafka's own sockets are out of the guard's sight; its threads are not.
    threads = len(os.listdir("/proc/self/task"))
    end("threads", threads) if threads > 1 else print("nothing happened")

sys.addaudithook(refuse)
"""


def watched(code: str) -> str:
    """What a process says that runs `code` under the guard: 'nothing happened', or the I/O that it did."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", f"{_GUARD}\n{textwrap.dedent(code)}\ndone()"],
        env={**os.environ, "PYTHONPATH": _ROOT},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return (done.stdout + done.stderr).strip()


def test_the_exported_names_are_these_and_few() -> None:
    assert kconsume.__all__ == EXPORTED
    assert all(hasattr(kconsume, name) for name in EXPORTED)
    assert len(EXPORTED) <= 25


def test_the_names_of_the_stores_are_these() -> None:
    assert kconsume.backends.__all__ == STORES
    assert all(hasattr(kconsume.backends, name) for name in STORES)


def test_importing_brings_in_nothing_that_is_optional_or_slow() -> None:
    code = f"import sys; from kconsume import App; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": _ROOT},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_importing_does_no_io() -> None:
    assert watched("from kconsume import App; import kconsume.backends") == "nothing happened"


@pytest.mark.parametrize(
    "arguments",
    [
        "'nowhere.invalid:1', group='g'",
        "'embedded://', group='g'",
        "'embedded://shared', group='g'",
        "'127.0.0.1:1', group='g', offsets='sqlite:///no/such/folder/shop.db'",
        "'127.0.0.1:1', group='g', offsets='memory://'",
    ],
)
def test_an_app_with_a_handler_does_no_io(arguments: str) -> None:
    code = f"""
        from kconsume import App
        app = App({arguments})
        @app.consume("orders")
        def handle(value: bytes) -> None: ...
    """
    assert watched(code) == "nothing happened"


def test_an_embedded_app_starts_no_broker_until_it_runs() -> None:
    code = """
        import sys
        from kconsume import App
        App("embedded://", group="g")
        assert "kconsume._embedded.mock_cluster" not in sys.modules
    """
    assert watched(code) == "nothing happened"


@pytest.mark.parametrize(
    "code",
    [
        "import sqlite3; sqlite3.connect(':memory:')",
        "open('/dev/null', 'w')",
        "import socket; socket.create_connection(('127.0.0.1', 1), 1)",
        "from confluent_kafka.admin import AdminClient; client = AdminClient({'bootstrap.servers': '127.0.0.1:1'})",
        "from kconsume.testing import EmbeddedKafka; kafka = EmbeddedKafka(); kafka.start()",
    ],
)
def test_control_io_is_noticed(code: str) -> None:
    assert "I/O:" in watched(code)
