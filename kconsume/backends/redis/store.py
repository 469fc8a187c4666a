"""`redis://host:port/0?tag=shop`: offsets in the user's own Redis, applied together with what the handler queued.

The handler gets a pipeline that only queues commands. When the handler has returned, one script checks that this
process still owns the partition and that the stored offset is the one from which it read. The script then runs the
queued commands record by record, and moves the offset. No other client sees a state between two commands of the script.
If this process is killed, either the whole script is applied or nothing.

Redis cannot undo. When a command fails inside the script (a list where a set was expected), the commands before it are
already applied. So the record is kept as failed, the offset stays at this record, and every claim of the partition is
refused with `Undecided`, also after a restart, until a user decides `retry` or `skip`.

Each partition has one hash, without an expiry. The names of all keys begin with `kconsume:`; see `docs/redis.md`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias, cast

from kconsume.backends import claim as claiming
from kconsume.backends.base import ClaimTerms, Position, Positions, Refused, Start
from kconsume.backends.capabilities import ALWAYS, Capabilities
from kconsume.backends.claim import ClaimResults, fenced
from kconsume.errors import (
    ConfigurationError,
    MissingExtra,
    StoreError,
    TransactionMisused,
)
from kconsume.records import Partition

try:
    from redis.client import Pipeline
except ImportError as missing:
    raise MissingExtra("redis:// needs the package redis, which is not installed: pip install 'kconsume[redis]'") from (
        missing
    )

from kconsume.backends.redis import scripts
from kconsume.backends.redis.address import address_of_client, address_of_url
from kconsume.backends.redis.connection import RedisConnection
from kconsume.backends.redis.pipeline import QueuedPipeline
from kconsume.backends.redis.rows import (
    FailedRecord,
    Fields,
    Names,
    RedisRow,
    member_of,
    partition_of,
    row_of,
    undecided,
)
from kconsume.backends.redis.server_checks import Argument, RedisServerFacts, Reply
from kconsume.backends.redis.transaction import OffsetStep, RedisDryRun, RedisTx

if TYPE_CHECKING:
    from redis import Redis

Decision: TypeAlias = Literal["skip", "retry"]


class RedisStore:
    """Offsets in a Redis: `RedisStore("redis://localhost:6379/0")`. Connects at the first use."""

    guarantee: ClassVar[str] = (
        "exactly once for what the handler queues in this Redis: one script applies the commands and the offset"
    )
    connection_types: ClassVar[tuple[type, ...]] = (Pipeline,)
    parallel: ClassVar[int | None] = None
    by_record: ClassVar[bool] = True

    def __init__(self, url: str | None = None, *, client: Redis | None = None, tag: str | None = None) -> None:
        """
        Args:
            url: `redis://user:password@host:port/0?tag=shop`; `rediss://` for TLS.
            client: the user's own `redis.Redis`, instead of an address. It must have a `socket_timeout`.
            tag: the hash tag on a cluster, and a name for these offsets; the address may contain it too.
        """
        if (url is None) == (client is None):
            raise ConfigurationError("RedisStore takes an address or a client: RedisStore('redis://localhost:6379/0')")
        found = address_of_url(url, tag) if url is not None else address_of_client(cast("Redis", client), tag)
        self.address = found.address
        self._connection = RedisConnection(found)
        self._names = Names(found.tag)
        self._ready = False

    @classmethod
    def from_url(cls, url: str) -> RedisStore:
        """Return a store for `redis://user:password@host:port/0?tag=shop`, or `rediss://` for TLS."""
        return cls(url)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self, named=self, dry_run=self, deciding=self, severs=True)

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        return {p: row.position for p, row in self._rows(group, list(partitions)).items()}

    def save(self, group: str, positions: Positions) -> None:
        if not positions:
            return
        wanted = list(positions)
        rows = [
            (str(p.epoch), str(p.next_offset), p.topic_id or "", _number(p.leader_epoch), _number(p.previous))
            for p in positions.values()
        ]
        reply = self._run(scripts.SAVE, self._keys(group, wanted), _now(), *(each for row in rows for each in row))
        self._must_be_done(reply, group, positions)

    def claim(
        self,
        group: str,
        partitions: Sequence[Partition],
        owner: str,
        start: Start,
        terms: ClaimTerms | None = None,
    ) -> dict[Partition, Position | Refused]:
        if not partitions:
            return {}

        def claim(wanted: Sequence[Partition], pinned: Positions) -> ClaimResults | Sequence[Partition]:
            rows = ((*_pin(p, pinned.get(p)), _expected(p, terms)) for p in wanted)
            keys = [*self._names.of_group(group), *self._keys(group, wanted)]
            generation = _number(None if terms is None else terms.generation)
            begin = (group, owner, _now(), scripts.SCHEMA_VERSION, generation)
            reply = self._run(scripts.CLAIM, keys, *begin, *(each for row in rows for each in row))
            if reply.word == "missing":
                return [wanted[i - 1] for i in cast("Sequence[int]", reply.rest[0])]
            self._must_be_done(reply, group, dict.fromkeys(wanted, Position(0)))
            return self._claim_results(group, wanted, reply, terms)

        return claiming.claim_pinned(partitions, start, self.load(group, partitions), claim, terms)

    def reclaim(self, group: str, epochs: Mapping[Partition, int], owner: str) -> dict[Partition, Position]:
        if not epochs:
            return {}
        wanted = sorted(epochs)
        reply = self._run(scripts.RECLAIM, self._keys(group, wanted), owner, _now(), *(str(epochs[p]) for p in wanted))
        self._must_be_done(reply, group, {p: Position(-1, epochs[p]) for p in wanted})
        return _positions(wanted, reply)

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[RedisTx]:
        self._must_be_ours(group, partition, epoch)
        with self._lent() as pipeline:
            tx = RedisTx(pipeline)
            yield tx
        if tx.step is not None:
            self._apply(group, partition, epoch, pipeline, tx.step)
        elif len(pipeline):
            raise TransactionMisused(
                f"{len(pipeline)} commands were queued for {partition}, but its offset was not advanced, so nothing "
                f"was written: call advance() last"
            )

    @contextmanager
    def dry_run(self) -> Iterator[RedisDryRun]:
        with self._lent() as pipeline:
            yield RedisDryRun(pipeline)

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        if not offsets:
            return
        keys = [*self._names.of_group(group), *self._keys(group, offsets)]
        rows = ((member_of(partition), str(offset)) for partition, offset in offsets.items())
        begin = (group, _now(), scripts.SCHEMA_VERSION)
        self._run(scripts.RESET, keys, *begin, *(each for row in rows for each in row))

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        chosen = self._partitions(group) if partitions is None else list(partitions)
        if partitions is None:
            self._connection.call("HSET", self._names.meta, _deletion(group), str(ALWAYS))
        while chosen:
            keys = [*self._names.of_group(group), *self._keys(group, chosen)]
            self._checked()
            self._connection.run(scripts.DELETE, keys, group, *map(member_of, chosen))
            # Delete also rows of the group that were created meanwhile.
            chosen = self._partitions(group) if partitions is None else []

    def identity(self) -> str:
        self._checked()
        if (name := self._connection.call("HGET", self._names.meta, "store_id")) is None:
            self._connection.call("HSETNX", self._names.meta, "store_id", uuid.uuid4().hex)
            name = self._connection.call("HGET", self._names.meta, "store_id")
        return cast(bytes, name).decode()

    def deleted(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        self._checked()
        wanted = list(partitions)
        fields = [_deletion(group), *(_deletion(group, p) for p in wanted)]
        of_all, *each = cast("Sequence[bytes | None]", self._connection.call("HMGET", self._names.meta, *fields))
        known = {p: own or of_all for p, own in zip(wanted, each, strict=True)}
        return {p: int(epoch) for p, epoch in known.items() if epoch is not None}

    def groups(self) -> list[str]:
        self._checked()
        return sorted(
            name.decode() for name in cast("Sequence[bytes]", self._connection.call("SMEMBERS", self._names.groups))
        )

    def close(self) -> None:
        self._connection.close()

    def failures(self, group: str) -> dict[Partition, FailedRecord]:
        """The records of the group that were applied in part and wait for a decision."""
        rows = self._rows(group, self._partitions(group))
        return {p: row.failed for p, row in sorted(rows.items()) if row.failed is not None}

    def decide(self, group: str, partition: Partition, what: Decision, *, offset: int | None = None) -> None:
        """Carry out the user's decision about a failed record, so that the partition can be consumed again. Raises the
        epoch, as `reset` does.

        Args:
            what: `"retry"` to handle the failed record again, `"skip"` to continue with the next record.
            offset: the offset of the failed record that the user has seen; None if any failed record is meant. If
                another record has failed since, `StoreError` is raised.
        """
        if what not in ("skip", "retry"):
            raise ConfigurationError(f"decide(..., {what!r}) is not a decision: write 'retry' or 'skip'")
        reply = self._run(scripts.DECIDE, self._keys(group, [partition]), what, _number(offset), _now())
        if reply.word == "none":
            raise StoreError(f"{partition} of group {group!r} has no failed record: there is nothing to decide")
        if reply.word == "other":
            failed = cast(bytes, reply.rest[0]).decode()
            raise StoreError(
                f"{partition}@{offset} of group {group!r} is no longer the failed record: the failed record is "
                f"{partition}@{failed}, look at it before you decide"
            )

    def facts(self) -> RedisServerFacts:
        """What the server reports about itself, for `kconsume check`. Works also for a server that the store would
        refuse."""
        return self._connection.facts()

    def examine(self) -> None:
        """Check that this server can keep offsets. Raises the errors that the first use of the store would raise."""
        self._checked()

    def try_rights(self) -> None:
        """Run all commands that the store needs, on a key that is removed again. Raises the errors of these
        commands."""
        self._run(scripts.TRY_RIGHTS, [self._names.nothing])
        self.groups()

    @contextmanager
    def _lent(self) -> Iterator[QueuedPipeline]:
        pipeline = QueuedPipeline(self._connection.pool, self._connection.rules)
        try:
            yield pipeline
        except Exception as error:
            if pipeline.refused is not None and error is not pipeline.refused:
                raise pipeline.refused from error
            raise
        finally:
            pipeline.end()
        if pipeline.refused is not None:
            raise pipeline.refused

    def _apply(self, group: str, partition: Partition, epoch: int, pipeline: QueuedPipeline, step: OffsetStep) -> None:
        packed = pipeline.packed(step.old, step.new)
        keys: list[str | bytes] = [self._names.row(group, partition)]
        if self._connection.rules.slot is not None:
            # While the slot is being moved to another node, a command on a key that is not on this node fails, even in
            # the middle of the script. Redis checks the declared keys before the script starts, and then refuses the
            # script if one of them is not on this node. The key `nothing` never exists, so Redis refuses every script
            # while the slot is being moved. Otherwise a script could start, and remove one of its keys before using it.
            keys += [self._names.nothing, *pipeline.touched]
        where = (str(epoch), str(step.old), str(step.new), _number(step.leader_epoch), _now())
        reply = self._run(scripts.APPLY, keys, *where, packed)
        self._must_be_done(reply, group, {partition: Position(step.old, epoch)})

    def _must_be_ours(self, group: str, partition: Partition, epoch: int) -> None:
        """Raise `Fenced` if the row has another epoch, and `Undecided` if it has a failed record. Reads the whole row
        only for an error."""
        self._checked()
        held = self._connection.call("HMGET", self._names.row(group, partition), "epoch", "failed_offset")
        if held == [str(epoch).encode(), None]:
            return
        row = self._rows(group, [partition]).get(partition)
        if row is None or row.position.epoch != epoch:
            raise fenced(group, partition, epoch, row.position if row else None)
        if row.failed is not None:
            raise undecided(group, [row.failed])

    def _rows(self, group: str, partitions: Sequence[Partition]) -> dict[Partition, RedisRow]:
        if not partitions:
            return {}
        self._checked()
        found = self._connection.run(scripts.LOAD, self._keys(group, partitions))
        rows = zip(partitions, cast("Sequence[Fields]", found), strict=True)
        return {p: row_of(p, fields) for p, fields in rows if fields[0] is not None}

    def _partitions(self, group: str) -> list[Partition]:
        self._checked()
        members = self._connection.call("SMEMBERS", self._names.of_group(group)[2])
        return [partition_of(member) for member in cast("Sequence[bytes]", members)]

    def _keys(self, group: str, partitions: Iterable[Partition]) -> list[str]:
        return [self._names.row(group, partition) for partition in partitions]

    def _run(self, script: scripts.Script, keys: Sequence[str | bytes], *arguments: Argument) -> _ScriptReply:
        self._checked()
        word, *rest = cast("Sequence[Reply]", self._connection.run(script, keys, *arguments))
        return _ScriptReply(cast(bytes, word).decode(), rest)

    def _claim_results(
        self, group: str, wanted: Sequence[Partition], reply: _ScriptReply, terms: ClaimTerms | None
    ) -> dict[Partition, Position | Refused]:
        rows = cast("Sequence[Fields]", reply.rest[0])
        stored = {
            p: row_of(p, fields).position for p, fields in zip(wanted, rows, strict=True) if fields[0] is not None
        }
        late = {wanted[i - 1] for i in cast("Sequence[int]", reply.rest[1])}
        return {p: claiming.refused(group, p, terms, stored.get(p)) if p in late else stored[p] for p in wanted}

    def _must_be_done(self, reply: _ScriptReply, group: str, ours: Positions) -> None:
        """Raise the error for a reply other than `done`.

        Args:
            ours: the positions that this process expects, in the order of the script's keys.
        """
        if reply.word == "done":
            return
        indices, rows = cast("tuple[Sequence[int], Sequence[Fields]]", reply.rest)
        partitions = list(ours)
        found = {
            p: None if fields[0] is None else row_of(p, fields)
            for p, fields in zip((partitions[i - 1] for i in indices), rows, strict=True)
        }
        if reply.word == "failed":
            raise undecided(group, [row.failed for row in found.values() if row is not None and row.failed is not None])
        ((partition, row),) = found.items()
        mine = ours[partition]
        at = mine.next_offset if mine.next_offset >= 0 else None
        raise fenced(group, partition, mine.epoch, row.position if row else None, at)

    def _checked(self) -> None:
        """Check once that the stored schema version is the one of this kconsume."""
        if self._ready:
            return
        found = self._connection.call("HGET", self._names.meta, "version")
        if found is not None and found != scripts.SCHEMA_VERSION.encode():
            raise StoreError(
                f"{self.address} has schema version {cast(bytes, found).decode()}, and this kconsume writes version "
                f"{scripts.SCHEMA_VERSION}: run the kconsume that wrote it, or upgrade this one"
            )
        self._ready = True


class _ScriptReply(NamedTuple):
    """The reply of a script: a word, and the values that belong to it."""

    word: str
    rest: Sequence[Reply]


def _positions(partitions: Sequence[Partition], reply: _ScriptReply) -> dict[Partition, Position]:
    rows = zip(partitions, cast("Sequence[Fields]", reply.rest[0]), strict=True)
    return {p: row_of(p, fields).position for p, fields in rows}


def _pin(partition: Partition, start: Position | None) -> tuple[str, str, str, str]:
    """The arguments of `CLAIM` for a row: the values to store if the row does not exist."""
    if start is None:
        return member_of(partition), "", "", ""
    return member_of(partition), str(start.next_offset), start.topic_id or "", _number(start.leader_epoch)


def _expected(partition: Partition, terms: ClaimTerms | None) -> str:
    return "" if terms is None or terms.epochs is None else str(terms.epochs[partition])


def _deletion(group: str, partition: Partition | None = None) -> str:
    """The field of `meta` that records a deletion; without a partition, the field for partitions that had no row."""
    return f"deleted:{group}:{'' if partition is None else member_of(partition)}"


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _now() -> str:
    return datetime.now(UTC).isoformat()
