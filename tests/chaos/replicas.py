"""A database with a replica that follows it asynchronously, by a wire of its own: what a failover loses is up to the
test, which cuts that wire first."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psycopg
import redis

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services import LocalPostgres, LocalRedis
from kconsume.testing.services.postgres.local import USER
from kconsume.testing.services.server_account import Account
from tests.chaos.wire import Wire
from tests.waiting import eventually


class Pair(Protocol):
    """Clients come by `line`, whose address stays the same over a failover."""

    line: Wire
    replication: Wire

    @property
    def url(self) -> str:
        """By the line."""
        ...

    @property
    def first(self) -> str:
        """The address of the one that clients are on at the beginning."""
        ...

    @property
    def second(self) -> str: ...

    def fail_over(self) -> None:
        """The first is gone, the second is promoted with what it has, and clients find it at the same address."""
        ...


class Standby(LocalPostgres):
    """Begins as a copy of another server, and follows it until it is promoted."""

    def __init__(self, port_of_primary: int) -> None:
        super().__init__(overrides={"wal_receiver_status_interval": "100ms"})
        self._primary = f"host=127.0.0.1 port={port_of_primary} user={USER}"

    def _make_data(self, programs: Path, account: Account | None) -> None:
        self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        if account is not None:
            account.own(self.data)
        copy = [str(programs / "pg_basebackup"), "-D", str(self.data), "-d", self._primary]
        command = [*copy, "--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
        done = subprocess.run(
            command if account is None else account.command(command),
            cwd="/",  # this process's folder may be closed to the account
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ServiceUnavailable(f"pg_basebackup made no copy: {done.stderr.strip()}")


@dataclass
class PostgresPair:
    line: Wire
    replication: Wire
    primary: LocalPostgres
    standby: Standby

    @property
    def url(self) -> str:
        return self.line.by_it(self.primary.url)

    @property
    def first(self) -> str:
        return self.primary.url

    @property
    def second(self) -> str:
        return self.standby.url

    def fail_over(self) -> None:
        self.primary.kill()
        with psycopg.connect(self.standby.url, autocommit=True) as connection:
            connection.execute("select pg_promote(true, 60)")
        self.line.target = self.standby.port


@dataclass
class RedisPair:
    line: Wire
    replication: Wire
    master: LocalRedis
    replica: LocalRedis

    @property
    def url(self) -> str:
        return self.line.by_it(self.master.url)

    @property
    def first(self) -> str:
        return self.master.url

    @property
    def second(self) -> str:
        return self.replica.url

    def fail_over(self) -> None:
        self.master.kill()
        with redis.Redis.from_url(self.replica.url) as client:
            client.replicaof("NO", "ONE")
        self.line.target = self.replica.port


@contextmanager
def postgres_pair() -> Iterator[PostgresPair]:
    with LocalPostgres() as primary, Wire(primary.port) as line, Wire(primary.port) as replication:
        with Standby(replication.port) as standby:
            yield PostgresPair(line, replication, primary, standby)


@contextmanager
def redis_pair() -> Iterator[RedisPair]:
    with LocalRedis() as master, Wire(master.port) as line, Wire(master.port) as replication, LocalRedis() as replica:
        with redis.Redis.from_url(replica.url) as client:
            client.replicaof("127.0.0.1", str(replication.port))

            def follows() -> bool:
                state: Mapping[str, object] = client.info("replication")
                return state["master_link_status"] == "up"

            eventually(follows, what="the replica follows")
        yield RedisPair(line, replication, master, replica)


PAIRS: dict[str, Callable[[], AbstractContextManager[Pair]]] = {"postgres": postgres_pair, "redis": redis_pair}
