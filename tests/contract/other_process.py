"""An SQLite store that lives in another process: `python -m tests.contract.other_process SOCKET` serves such stores.

The same suite then says what several processes do to one file. One connection for each call or transaction, and a
thread for it over there; here is only what passes on questions and answers.
"""

from __future__ import annotations

import itertools
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, ClassVar

from kconsume.backends import Position, SqliteStore
from kconsume.backends.base import ClaimTerms, Positions, Refused, Start
from kconsume.errors import StoreError
from kconsume.records import Partition
from tests.waiting import eventually

_ROOT = Path(__file__).parents[2]
_numbers = itertools.count()


class OtherProcess:
    """`with OtherProcess(socket) as process:`; `process.open(path)` is a store over there."""

    def __init__(self, socket: Path) -> None:
        self._socket = str(socket)

    def __enter__(self) -> OtherProcess:
        command = [sys.executable, "-m", "tests.contract.other_process", self._socket]
        self._process = subprocess.Popen(command, cwd=_ROOT)
        eventually(lambda: Path(self._socket).exists(), what="the other process listens")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)

    def open(self, path: Path) -> RemoteStore:
        return RemoteStore(self._socket, path)


class RemoteStore:
    guarantee: ClassVar[str] = SqliteStore.guarantee
    parallel: ClassVar[int | None] = SqliteStore.parallel
    by_record: ClassVar[bool] = SqliteStore.by_record

    def __init__(self, socket: str, path: Path) -> None:
        self.address = f"sqlite:///{path}"
        self._socket = socket
        self._which = (next(_numbers), str(path))

    @property
    def connection_types(self) -> tuple[type, ...]:
        return (RemoteTx,)

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        return self._call("load", group, list(partitions))  # type: ignore[no-any-return]

    def save(self, group: str, positions: Positions) -> None:
        self._call("save", group, positions)

    def claim(
        self, group: str, partitions: Sequence[Partition], owner: str, start: Start, terms: ClaimTerms | None = None
    ) -> dict[Partition, Position | Refused]:
        return self._call("claim", group, list(partitions), owner, terms, start=start)  # type: ignore[no-any-return]

    def reclaim(self, group: str, epochs: Mapping[Partition, int], owner: str) -> dict[Partition, Position]:
        return self._call("reclaim", group, dict(epochs), owner)  # type: ignore[no-any-return]

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        self._call("reset", group, dict(offsets))

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        self._call("delete", group, None if partitions is None else list(partitions))

    def groups(self) -> list[str]:
        return self._call("groups")  # type: ignore[no-any-return]

    def close(self) -> None:
        self._call("close")

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[RemoteTx]:
        line = Client(self._socket, "AF_UNIX")
        line.send((self._which, "transaction", (group, partition, epoch)))
        _answer(line)
        tx = RemoteTx(line)
        try:
            yield tx
        except BaseException as error:
            tx.ask("leave", error)  # raises what the store made of it, if that is another
            raise
        tx.ask("leave", None)

    def _call(self, method: str, *arguments: object, start: Start | None = None) -> Any:
        with Client(self._socket, "AF_UNIX") as line:
            line.send((self._which, method, arguments))
            return _answer(line, start)


class RemoteTx:
    """The transaction, and what a handler gets of it."""

    def __init__(self, line: Connection) -> None:
        self._line = line

    @property
    def connection(self) -> RemoteTx:
        return self

    def write(self, number: int) -> None:
        self.ask("write", number)

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        self.ask("advance", old, new, leader_epoch)

    def fault(self, error: BaseException) -> StoreError | None:
        return self.ask("fault", error)  # type: ignore[no-any-return]

    def ask(self, *step: object) -> Any:
        self._line.send(step)
        return _answer(self._line)


def _answer(line: Connection, start: Start | None = None) -> Any:
    """What it answers; on the way it may ask where to start, and an error of that is the caller's own."""
    while True:
        word, value = line.recv()
        if word == "start":
            assert start is not None
            line.send(start(value))
        elif word == "raised":
            raise value
        else:
            return value


# Over there


def serve(socket: str) -> None:
    stores: dict[tuple[int, str], SqliteStore] = {}
    with Listener(socket, "AF_UNIX", backlog=64) as listener:
        while True:
            threading.Thread(target=_attend, args=(listener.accept(), stores), daemon=True).start()


def _attend(line: Connection, stores: dict[tuple[int, str], SqliteStore]) -> None:
    try:
        which, method, arguments = line.recv()
        store = stores.setdefault(which, SqliteStore(which[1]))
        if method == "transaction":
            _lend(line, store, *arguments)
        elif method == "claim":
            group, partitions, owner, terms = arguments
            start = lambda missing: _asked_to_start(line, missing)  # noqa: E731
            _reply(line, lambda: store.claim(group, partitions, owner, start, terms))
        else:
            _reply(line, lambda: getattr(store, method)(*arguments))
    except (EOFError, OSError):
        return  # the caller has gone


def _asked_to_start(line: Connection, missing: Sequence[Partition]) -> Positions:
    line.send(("start", list(missing)))
    return line.recv()  # type: ignore[no-any-return]


def _lend(line: Connection, store: SqliteStore, group: str, partition: Partition, epoch: int) -> None:
    lent: list[Any] = []
    leaving: BaseException | None = None
    try:
        with store.transaction(group, partition, epoch) as tx:
            lent.append(tx)
            line.send(("done", None))
            leaving = _steps(line, tx)
            if leaving is not None:
                raise leaving
    except BaseException as error:  # noqa: BLE001  (told to the caller)
        line.send(("done", None) if error is leaving else ("raised", error))
    else:
        line.send(("done", None))
    for kept in lent:  # by a handler that has returned
        _steps(line, kept)


def _steps(line: Connection, tx: Any) -> BaseException | None:
    while True:
        name, *values = line.recv()
        if name == "leave":
            return values[0]  # type: ignore[no-any-return]
        if name == "write":
            _reply(line, lambda values=values: _write(tx.connection, *values))  # type: ignore[misc]
        else:
            _reply(line, lambda name=name, values=values: getattr(tx, name)(*values))  # type: ignore[misc]


def _write(connection: sqlite3.Connection, number: int) -> None:
    connection.execute("insert into effects values (?)", (number,))


def _reply(line: Connection, act: Callable[[], object]) -> None:
    try:
        answer = ("done", act())
    except Exception as error:  # noqa: BLE001  (told to the caller)
        answer = ("raised", error)
    line.send(answer)


if __name__ == "__main__":
    serve(sys.argv[1])
