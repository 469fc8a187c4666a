"""`redis://host:port/0?tag=shop`: offsets in the person's own Redis, applied together with what the handler queued.

The handler gets a pipeline that only queues. When it has returned, one script checks that the partition is still ours
and at the offset from which we read, runs what was queued record by record, and moves the offset behind each record.
Nobody sees a state between two of its lines, and a kill of this process leaves all of it or nothing.

What Redis cannot do is undo. A command that fails inside the script (a list where a set was expected) has its
neighbours applied already. So that record is written down as failed, the offset stays at it, and every claim of the
partition is refused with `Undecided`, also after a restart, until a person says `retry` or `skip`.

One hash a partition, without an expiry, under names that begin with `kconsume:`; see `docs/redis.md`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias, cast

from kconsume.backends import claiming
from kconsume.backends.abc import ALWAYS, ClaimTerms, Position, Positions, Refused, Start
from kconsume.backends.claiming import Answers, fenced
from kconsume.errors import (
    ConfigurationError,
    MissingExtra,
    StoreError,
    StoreUnavailable,
    TransactionMisused,
)
from kconsume.records import Partition

try:
    from redis.client import Pipeline
except ImportError as missing:
    raise MissingExtra("redis:// needs the package redis, which is not installed: pip install 'kconsume[redis]'") from (
        missing
    )

from kconsume.backends import redis_script as scripts
from kconsume.backends.redis_address import place_of_client, place_of_url
from kconsume.backends.redis_line import Line
from kconsume.backends.redis_pipeline import QueuedPipeline
from kconsume.backends.redis_rows import (
    FailedRecord,
    Fields,
    Names,
    Row,
    member_of,
    partition_of,
    row_of,
    undecided,
)
from kconsume.backends.redis_server import Argument, Facts, Reply

if TYPE_CHECKING:
    from redis import Redis

Decision: TypeAlias = Literal["skip", "retry"]


class RedisStore:
    """Offsets in a Redis: `RedisStore("redis://localhost:6379/0")`. Opens nothing until it is used."""

    guarantee: ClassVar[str] = "exactly once for what the handler queues in this Redis: it and the offset are one step"
    connection_types: ClassVar[tuple[type, ...]] = (Pipeline,)
    parallel: ClassVar[int | None] = None
    severs: ClassVar[bool] = True
    by_record: ClassVar[bool] = True

    def __init__(self, url: str | None = None, *, client: Redis | None = None, tag: str | None = None) -> None:
        """`tag` is the hash tag of a cluster, and a name of its own for these offsets; the address may hold it too."""
        if (url is None) == (client is None):
            raise ConfigurationError("RedisStore takes an address or a client: RedisStore('redis://localhost:6379/0')")
        place = place_of_url(url, tag) if url is not None else place_of_client(cast("Redis", client), tag)
        self.address = place.address
        self._line = Line(place)
        self._names = Names(place.tag)
        self._ready = False

    @classmethod
    def from_url(cls, url: str) -> RedisStore:
        """`redis://user:password@host:port/0?tag=shop`, or `rediss://` for TLS."""
        return cls(url)

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
        answer = self._run(scripts.SAVE, self._keys(group, wanted), _now(), *(each for row in rows for each in row))
        self._must_be_done(answer, group, positions)

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

        def claim(wanted: Sequence[Partition], pinned: Positions) -> Answers | Sequence[Partition]:
            rows = ((*_pin(p, pinned.get(p)), _expected(p, terms)) for p in wanted)
            keys = [*self._names.of_group(group), *self._keys(group, wanted)]
            generation = _number(None if terms is None else terms.generation)
            begin = (group, owner, _now(), scripts.SCHEMA_VERSION, generation)
            answer = self._run(scripts.CLAIM, keys, *begin, *(each for row in rows for each in row))
            if answer.word == "missing":
                return [wanted[i - 1] for i in cast("Sequence[int]", answer.rest[0])]
            self._must_be_done(answer, group, dict.fromkeys(wanted, Position(0)))
            return self._answers(group, wanted, answer, terms)

        return claiming.claim_pinned(partitions, start, self.load(group, partitions), claim, terms)

    def reclaim(self, group: str, epochs: Mapping[Partition, int], owner: str) -> dict[Partition, Position]:
        if not epochs:
            return {}
        wanted = sorted(epochs)
        answer = self._run(scripts.RECLAIM, self._keys(group, wanted), owner, _now(), *(str(epochs[p]) for p in wanted))
        self._must_be_done(answer, group, {p: Position(-1, epochs[p]) for p in wanted})
        return _positions(wanted, answer)

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
                f"{len(pipeline)} commands were queued for {partition} and its offset was not advanced, so nothing was "
                f"written: call advance() last"
            )

    @contextmanager
    def rehearsal(self) -> Iterator[Rehearsal]:
        """A transaction as a handler gets it, of which nothing stays: for `kconsume try`."""
        with self._lent() as pipeline:
            yield Rehearsal(pipeline)

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
            self._line.call("HSET", self._names.meta, _deletion(group), str(ALWAYS))
        while chosen:
            keys = [*self._names.of_group(group), *self._keys(group, chosen)]
            self._checked()
            self._line.run(scripts.DELETE, keys, group, *map(member_of, chosen))
            # A row that was made meanwhile is the group's too.
            chosen = self._partitions(group) if partitions is None else []

    def identity(self) -> str:
        self._checked()
        if (name := self._line.call("HGET", self._names.meta, "store_id")) is None:
            self._line.call("HSETNX", self._names.meta, "store_id", uuid.uuid4().hex)
            name = self._line.call("HGET", self._names.meta, "store_id")
        return cast(bytes, name).decode()

    def deleted(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        self._checked()
        wanted = list(partitions)
        fields = [_deletion(group), *(_deletion(group, p) for p in wanted)]
        of_all, *each = cast("Sequence[bytes | None]", self._line.call("HMGET", self._names.meta, *fields))
        known = {p: own or of_all for p, own in zip(wanted, each, strict=True)}
        return {p: int(epoch) for p, epoch in known.items() if epoch is not None}

    def groups(self) -> list[str]:
        self._checked()
        return sorted(
            name.decode() for name in cast("Sequence[bytes]", self._line.call("SMEMBERS", self._names.groups))
        )

    def close(self) -> None:
        self._line.close()

    def failures(self, group: str) -> dict[Partition, FailedRecord]:
        """The records of the group that were applied in part, and wait for a decision."""
        rows = self._rows(group, self._partitions(group))
        return {p: row.failed for p, row in sorted(rows.items()) if row.failed is not None}

    def decide(self, group: str, partition: Partition, what: Decision, *, offset: int | None = None) -> None:
        """Let the partition go on: at its failed record again, or behind it. A new epoch, as with `reset`.

        With `offset`, only if it is still that record which failed.
        """
        if what not in ("skip", "retry"):
            raise ConfigurationError(f"decide(..., {what!r}) is neither: say 'retry' or 'skip'")
        answer = self._run(scripts.DECIDE, self._keys(group, [partition]), what, _number(offset), _now())
        if answer.word == "none":
            raise StoreError(f"{partition} of group {group!r} has no failed record: there is nothing to decide")
        if answer.word == "other":
            failed = cast(bytes, answer.rest[0]).decode()
            raise StoreError(
                f"{partition}@{offset} of group {group!r} is no longer the record that failed, {partition}@{failed} "
                f"is: look at that one first"
            )

    def facts(self) -> Facts:
        """What the server says of itself, for `kconsume check`; also of one that would be refused."""
        return self._line.facts()

    def examine(self) -> None:
        """Ask whether this server can keep offsets; raises what the first use would."""
        self._checked()

    def try_rights(self) -> None:
        """Run all commands that the store needs, on a key that is gone again afterwards; raises what they would."""
        self._run(scripts.TRY_RIGHTS, [self._names.nothing])
        self.groups()

    @contextmanager
    def _lent(self) -> Iterator[QueuedPipeline]:
        pipeline = QueuedPipeline(self._line.pool, self._line.rules)
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

    def _apply(self, group: str, partition: Partition, epoch: int, pipeline: QueuedPipeline, step: Step) -> None:
        packed = pipeline.packed(step.old, step.new)
        keys: list[str | bytes] = [self._names.row(group, partition)]
        if self._line.rules.slot is not None:
            # While the slot is being moved to another node, a command on a key that is not here fails, also in the
            # middle of the script. For keys that are named Redis looks before it begins; and one that is never there
            # has it refuse also when all others are here still, and a command of the script might take one away.
            keys += [self._names.nothing, *pipeline.touched]
        where = (str(epoch), str(step.old), str(step.new), _number(step.leader_epoch), _now())
        answer = self._run(scripts.APPLY, keys, *where, packed)
        self._must_be_done(answer, group, {partition: Position(step.old, epoch)})

    def _must_be_ours(self, group: str, partition: Partition, epoch: int) -> None:
        """Asks for two fields, as each transaction does; for the whole row when they are not as they should be."""
        self._checked()
        held = self._line.call("HMGET", self._names.row(group, partition), "epoch", "failed_offset")
        if held == [str(epoch).encode(), None]:
            return
        row = self._rows(group, [partition]).get(partition)
        if row is None or row.position.epoch != epoch:
            raise fenced(group, partition, epoch, row.position if row else None)
        if row.failed is not None:
            raise undecided(group, [row.failed])

    def _rows(self, group: str, partitions: Sequence[Partition]) -> dict[Partition, Row]:
        if not partitions:
            return {}
        self._checked()
        found = self._line.run(scripts.LOAD, self._keys(group, partitions))
        rows = zip(partitions, cast("Sequence[Fields]", found), strict=True)
        return {p: row_of(p, fields) for p, fields in rows if fields[0] is not None}

    def _partitions(self, group: str) -> list[Partition]:
        self._checked()
        members = self._line.call("SMEMBERS", self._names.of_group(group)[2])
        return [partition_of(member) for member in cast("Sequence[bytes]", members)]

    def _keys(self, group: str, partitions: Iterable[Partition]) -> list[str]:
        return [self._names.row(group, partition) for partition in partitions]

    def _run(self, script: scripts.Script, keys: Sequence[str | bytes], *arguments: Argument) -> _Answer:
        self._checked()
        word, *rest = cast("Sequence[Reply]", self._line.run(script, keys, *arguments))
        return _Answer(cast(bytes, word).decode(), rest)

    def _answers(
        self, group: str, wanted: Sequence[Partition], answer: _Answer, terms: ClaimTerms | None
    ) -> dict[Partition, Position | Refused]:
        rows = cast("Sequence[Fields]", answer.rest[0])
        stored = {
            p: row_of(p, fields).position for p, fields in zip(wanted, rows, strict=True) if fields[0] is not None
        }
        late = {wanted[i - 1] for i in cast("Sequence[int]", answer.rest[1])}
        return {p: claiming.refused(group, p, terms, stored.get(p)) if p in late else stored[p] for p in wanted}

    def _must_be_done(self, answer: _Answer, group: str, ours: Positions) -> None:
        """Raise what an answer other than `done` says of one of our partitions; `ours` is in the order of the keys."""
        if answer.word == "done":
            return
        indices, rows = cast("tuple[Sequence[int], Sequence[Fields]]", answer.rest)
        partitions = list(ours)
        found = {
            p: None if fields[0] is None else row_of(p, fields)
            for p, fields in zip((partitions[i - 1] for i in indices), rows, strict=True)
        }
        if answer.word == "failed":
            raise undecided(group, [row.failed for row in found.values() if row is not None and row.failed is not None])
        ((partition, row),) = found.items()
        mine = ours[partition]
        at = mine.next_offset if mine.next_offset >= 0 else None
        raise fenced(group, partition, mine.epoch, row.position if row else None, at)

    def _checked(self) -> None:
        """Looks once whether what is there was written by a kconsume that this one understands."""
        if self._ready:
            return
        found = self._line.call("HGET", self._names.meta, "version")
        if found is not None and found != scripts.SCHEMA_VERSION.encode():
            raise StoreError(
                f"{self.address} has schema version {cast(bytes, found).decode()}, and this kconsume writes version "
                f"{scripts.SCHEMA_VERSION}: run the kconsume that wrote it, or upgrade this one"
            )
        self._ready = True


class Step(NamedTuple):
    """From where to where an offset is to move."""

    old: int
    new: int
    leader_epoch: int | None


class RedisTx:
    """What a handler queued, and the step of the offset that is taken with it."""

    __slots__ = ("connection", "step")

    def __init__(self, connection: QueuedPipeline) -> None:
        self.connection = connection
        self.step: Step | None = None

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """Only noted: checked and done in one step with the rest, when the transaction ends."""
        if self.connection.ended:
            raise TransactionMisused("the transaction has ended, and its offset moves no more: advance inside of it")
        self.step = Step(old, new, leader_epoch)

    def sever(self) -> None:
        """Nothing has left yet, and nothing will."""
        self.connection.end()

    def fault(self, error: BaseException) -> StoreError | None:
        """A handler that only queues has nothing to do with the server (but for keys on a cluster)."""
        return error if isinstance(error, StoreUnavailable) else None


class Rehearsal(NamedTuple):
    """A transaction that is only tried out."""

    connection: Pipeline


class _Answer(NamedTuple):
    """What a script answers: a word, and what belongs to it."""

    word: str
    rest: Sequence[Reply]


def _positions(partitions: Sequence[Partition], answer: _Answer) -> dict[Partition, Position]:
    rows = zip(partitions, cast("Sequence[Fields]", answer.rest[0]), strict=True)
    return {p: row_of(p, fields).position for p, fields in rows}


def _pin(partition: Partition, start: Position | None) -> tuple[str, str, str, str]:
    """A row for `CLAIM`: what to pin where none is there, or nothing."""
    if start is None:
        return member_of(partition), "", "", ""
    return member_of(partition), str(start.next_offset), start.topic_id or "", _number(start.leader_epoch)


def _expected(partition: Partition, terms: ClaimTerms | None) -> str:
    return "" if terms is None or terms.epochs is None else str(terms.epochs[partition])


def _deletion(group: str, partition: Partition | None = None) -> str:
    """The field of `meta`; without a partition, that of those that had no row."""
    return f"deleted:{group}:{'' if partition is None else member_of(partition)}"


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _now() -> str:
    return datetime.now(UTC).isoformat()
