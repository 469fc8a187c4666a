"""The effects that workers left, one for each record they handled, counted where they are: in each kind of store.

`rows` counts them all, `distinct` the records among them. Rows = distinct = produced is the whole proof.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Protocol, Self, TypeAlias, cast

import psycopg
import redis

MOST_PARTITIONS = 12
"""Of a topic in these tests."""


class Effects(Protocol):
    offsets: str
    """The store's address, for the workers."""

    @property
    def rows(self) -> int: ...

    @property
    def distinct(self) -> int: ...

    def by(self, worker: str) -> int:
        """How many rows are this worker's."""
        ...

    def positions(self, partition: int) -> list[int]:
        """Offsets of a partition, in the order in which their records were handled."""
        ...


EffectsOf: TypeAlias = Callable[[str], Effects]
"""Of the store with this name."""


class SqliteEffects:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.offsets = f"sqlite:///{path}"
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("pragma journal_mode = wal")
            connection.execute("create table seen (partition integer, position integer, worker text)")

    @property
    def rows(self) -> int:
        return self.ask("select count(*) from seen")

    @property
    def distinct(self) -> int:
        return self.ask("select count(*) from (select distinct partition, position from seen)")

    def by(self, worker: str) -> int:
        return self.ask("select count(*) from seen where worker = ?", worker)

    def positions(self, partition: int) -> list[int]:
        with closing(sqlite3.connect(self.path, timeout=30)) as connection:
            rows = connection.execute("select position from seen where partition = ? order by rowid", (partition,))
            return [position for (position,) in rows]

    def ask(self, query: str, *values: str) -> int:
        with closing(sqlite3.connect(self.path, timeout=30)) as connection:
            (number,) = connection.execute(query, values).fetchone()
        return int(number)


class PostgresEffects:
    """`looked_at` is the database itself, also when the workers reach it by another way (`offsets`)."""

    def __init__(self, looked_at: str, offsets: str | None = None) -> None:
        self.looked_at = looked_at
        self.offsets = offsets or looked_at
        with psycopg.connect(looked_at, autocommit=True) as connection:
            connection.execute("create table seen (partition integer, position bigint, worker text, number bigserial)")
            connection.execute(
                "create table counter (id integer primary key, n bigint not null) with (fillfactor = 10)"
            )
            connection.execute("insert into counter values (1, 0)")

    @classmethod
    def there(cls, looked_at: str) -> Self:
        """Those of a database that has the tables already."""
        effects = cls.__new__(cls)
        effects.looked_at = effects.offsets = looked_at
        return effects

    @property
    def rows(self) -> int:
        return self.ask("select count(*) from seen")

    @property
    def distinct(self) -> int:
        return self.ask("select count(*) from (select distinct partition, position from seen) as records")

    @property
    def counted(self) -> int:
        """What `--hot-row` counts."""
        return self.ask("select n from counter")

    def by(self, worker: str) -> int:
        return self.ask("select count(*) from seen where worker = %s", worker)

    def positions(self, partition: int) -> list[int]:
        with psycopg.connect(self.looked_at, autocommit=True) as connection:
            rows = connection.execute("select position from seen where partition = %s order by number", (partition,))
            return [position for (position,) in rows]

    def do(self, statement: str) -> None:
        with psycopg.connect(self.looked_at, autocommit=True) as connection:
            connection.execute(statement)

    def ask(self, query: str, *values: str) -> int:
        with psycopg.connect(self.looked_at, autocommit=True) as connection:
            row = connection.execute(query, values).fetchone()
        assert row is not None
        return int(row[0])


class RedisEffects:
    """`looked_at` is the server itself, also when the workers reach it by another way (`offsets`)."""

    def __init__(self, looked_at: str, offsets: str | None = None) -> None:
        self.looked_at = looked_at
        self.offsets = offsets or looked_at
        self._keys = [f"seen:{number}" for number in range(MOST_PARTITIONS)]

    @property
    def rows(self) -> int:
        with redis.Redis.from_url(self.looked_at) as client:
            return sum(cast(int, client.llen(key)) for key in self._keys)

    @property
    def distinct(self) -> int:
        return len({(key, item.split()[0]) for key, item in self._items()})

    def by(self, worker: str) -> int:
        return sum(item.split()[1] == worker.encode() for _, item in self._items())

    def positions(self, partition: int) -> list[int]:
        return [int(item.split()[0]) for key, item in self._items() if key == self._keys[partition]]

    def _items(self) -> list[tuple[str, bytes]]:
        with redis.Redis.from_url(self.looked_at) as client:
            return [(key, item) for key in self._keys for item in cast("list[bytes]", client.lrange(key, 0, -1))]


class FileEffects:
    offsets = "kafka://"

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    @property
    def rows(self) -> int:
        return self.path.read_bytes().count(b"\n")

    @property
    def distinct(self) -> int:
        return len(set(self.path.read_bytes().splitlines()))

    @property
    def repeats(self) -> list[int]:
        """Of each time that a partition was begun again, how many records came once more."""
        seen, last, found = defaultdict[bytes, set[int]](set), dict[bytes, int](), list[int]()
        for partition, position in (line.split() for line in self.path.read_bytes().splitlines()):
            offset = int(position)
            if offset <= last.get(partition, -1):
                found.append(sum(offset <= each <= last[partition] for each in seen[partition]))
            last[partition] = offset
            seen[partition].add(offset)
        return found

    def by(self, worker: str) -> int:
        raise NotImplementedError

    def positions(self, partition: int) -> list[int]:
        places = [tuple(map(int, line.split())) for line in self.path.read_bytes().splitlines()]
        return [position for number, position in places if number == partition]
