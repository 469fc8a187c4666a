"""A store in Redis with a partition that is claimed, a look from outside, and what switches a guard of a script off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from kconsume.backends import Position, RedisStore
from kconsume.backends.claim import granted
from kconsume.backends.redis import scripts
from kconsume.errors import (
    Undecided,
)
from kconsume.records import Partition
from kconsume.testing.services import LocalRedis

ROOT = Path(__file__).parents[2]
GROUP = "shop"
ORDERS = Partition("orders", 3)
OTHERS = Partition("orders", 4)


@dataclass(frozen=True)
class Shop:
    """A store, a client that looks from outside, and a partition that is claimed at offset 10."""

    store: RedisStore
    client: redis.Redis
    epoch: int

    def handle(self, *records: tuple[int, list[tuple[object, ...]]], old: int = 10, epoch: int | None = None) -> None:
        """Handle these records, each by its offset with its commands, in one transaction."""
        with self.store.transaction(GROUP, ORDERS, self.epoch if epoch is None else epoch) as tx:
            for offset, commands in records:
                tx.connection.next_record(offset)
                for command in commands:
                    tx.connection.execute_command(*command)
            tx.advance(old, records[-1][0] + 1)

    def effects(self) -> list[int]:
        return [int(number) for number in self.client.lrange("effects", 0, -1)]

    def offset(self) -> int:
        return self.store.load(GROUP, [ORDERS])[ORDERS].next_offset

    def break_at_12(self) -> None:
        """The third of the records 10 to 13 fails at its second command."""
        with pytest.raises(Undecided, match="orders/3@12"):
            self.handle((10, [push(0)]), (11, [push(1)]), (12, [push(2), wrong(), push(20)]), (13, [push(3)]))


def push(number: int) -> tuple[object, ...]:
    return ("RPUSH", "effects", number)


def wrong() -> tuple[object, ...]:
    return ("SADD", "effects", "not a set")


def claim(store: RedisStore, *partitions: Partition, owner: str = "me") -> dict[Partition, Position]:
    return granted(
        store.claim(GROUP, partitions or (ORDERS,), owner, lambda missing: dict.fromkeys(missing, Position(10)))
    )


@contextmanager
def shop_at(url: str) -> Iterator[Shop]:
    store = RedisStore(url)
    with redis.Redis.from_url(url) as client:
        yield Shop(store, client, claim(store)[ORDERS].epoch)
    store.close()


def emptied(server: LocalRedis) -> str:
    """The address of a server on which nothing is, not even scripts."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        client.script_flush()
    return server.url


def fails(promise: Callable[..., None], *arguments: object) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        promise(*arguments)


def switch_off(monkeypatch: pytest.MonkeyPatch, script: str, guard: str, instead: str = "") -> None:
    """Take a guard out of a script; one that is not in it would control nothing."""
    text = getattr(scripts, script).text
    assert guard in text
    monkeypatch.setattr(scripts, script, scripts.Script(text.replace(guard, instead)))
