"""Stores whose answers are released one by one, and that know the truth: what must not happen raises `Violation`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import ClassVar, NamedTuple, TypeVar

from kconsume.backends import MemoryStore, Position
from kconsume.backends.base import ClaimTerms, Positions, Refused, Start
from kconsume.errors import Fenced, StoreError, StoreUnavailable
from kconsume.records import Partition
from tests.machine.stage import Question, Stage
from tests.machine.world import GROUP, Violation, World

T = TypeVar("T")


class State(NamedTuple):
    """What a standby has."""

    rows: dict[tuple[str, Partition], Position]
    effects: dict[Partition, Counter[int]]


class HeldStore(MemoryStore):
    """Fenced. Each question waits twice: before it is done, and with its answer."""

    def __init__(self, stage: Stage, world: World, moves: Mapping[Partition, int]) -> None:
        super().__init__()
        self.violation: Violation | None = None
        """The first. Raised where it is seen too, but there it may be taken for the store's trouble."""
        self._stage = stage
        self._world = world
        self._moves = moves

    # Asked by us

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        wanted = list(partitions)
        return self._ask("load", wanted, lambda: super(HeldStore, self).load(group, wanted))

    def save(self, group: str, positions: Positions) -> None:
        def save() -> None:
            for partition, position in positions.items():
                self._check_save(group, partition, position)
            super(HeldStore, self).save(group, positions)
            for partition, position in positions.items():
                self._moved(partition, position.next_offset)

        self._ask("save", list(positions), save)

    def claim(
        self,
        group: str,
        partitions: Sequence[Partition],
        owner: str,
        start: Start,
        terms: ClaimTerms | None = None,
    ) -> dict[Partition, Position | Refused]:
        def claim() -> dict[Partition, Position | Refused]:
            answers = super(HeldStore, self).claim(group, partitions, owner, start, terms)
            self._claimed([p for p, answer in answers.items() if isinstance(answer, Position)])
            return answers

        return self._ask("claim", list(partitions), claim)

    def reclaim(self, group: str, epochs: Mapping[Partition, int], owner: str) -> dict[Partition, Position]:
        def reclaim() -> dict[Partition, Position]:
            answers = super(HeldStore, self).reclaim(group, epochs, owner)
            self._claimed(answers)
            return answers

        return self._ask("reclaim", list(epochs), reclaim)

    def close(self) -> None:
        """Kept: the state machine still looks at it."""

    # Done by others, at once

    def row(self, partition: Partition) -> Position | None:
        return self._rows.get((GROUP, partition))

    def rival_claims(self, partition: Partition) -> Position | None:
        """Under the group's generation of now. None if it was refused."""
        start = {partition: Position(0)}
        terms = ClaimTerms(self._world.generation)
        answer = super().claim(GROUP, [partition], "rival", lambda _: start, terms)[partition]
        if isinstance(answer, Refused):
            return None
        self._world.rival_claimed.add(partition)
        self._world.failed_over.discard(partition)
        return answer

    def rival_handles(self, partition: Partition, epoch: int) -> None:
        """The next record, if the rival still has the row."""
        row = self.row(partition)
        if row is None or row.epoch != epoch:
            return
        above = [o for o in self._world.logs[partition].offsets if o >= row.next_offset]
        if above:
            self._world.handles(partition, above[0])
            super().save(GROUP, {partition: Position(above[0] + 1, epoch, previous=row.next_offset)})

    def reset_by_user(self, partition: Partition, offset: int) -> None:
        super().reset(GROUP, {partition: offset})
        self._world.goes_back(partition, offset)

    def state(self) -> State:
        effects = self._world.handled if self._world.effects_are_stored else {}
        return State(dict(self._rows), deepcopy(effects))

    def fail_over_to(self, state: State) -> None:
        """A standby is promoted that lacked what came after this state: claims of the rival too."""
        changed = {p for (_, p), row in self._rows.items() if state.rows.get((GROUP, p)) != row}
        self._world.failed_over |= changed
        self._world.rival_claimed -= changed
        self._rows = dict(state.rows)
        self._world.handled.update(deepcopy(state.effects))

    # What must hold

    def _ask(self, name: str, partitions: list[Partition], do: Callable[[], T]) -> T:
        question = Question(name, frozenset(partitions), moves={p: self._moves.get(p, 0) for p in partitions})
        if self._stage.pause(question) == "away":
            raise StoreUnavailable("the store is away")
        try:
            answer: T | Exception = do()
        except (Fenced, StoreError) as error:
            answer = error
        except Violation as violation:
            self.violation = self.violation or violation
            raise
        if self._stage.pause(question._replace(answered=True)) == "away":
            raise StoreUnavailable("the answer was lost")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _check_save(self, group: str, partition: Partition, position: Position) -> None:
        row = self._rows.get((group, partition))
        if row is None or row.epoch != position.epoch:
            return  # fenced, rightly
        if position.previous is None and position.next_offset != row.next_offset:
            raise Violation(f"{partition} is saved at {position.next_offset} without a compare")
        if row.next_offset not in (position.previous, position.next_offset):
            self._fences_its_owner(partition, row)

    def _fences_its_owner(self, partition: Partition, row: Position) -> None:
        # Where a failover has lost our claim, the rival gets the very epoch that we have.
        if partition not in self._world.failed_over and row.owner != "rival":
            raise Violation(f"{partition} is fenced under its own epoch, at {row.next_offset}: its row has two writers")

    def _moved(self, partition: Partition, new: int) -> None:
        self._world.moves(partition, new)

    def _claimed(self, partitions: Iterable[Partition]) -> None:
        world = self._world
        for partition in partitions:
            world.failed_over.discard(partition)
            if world.owner[partition] == "rival" and partition in world.rival_claimed:
                raise Violation(f"a claim of {partition} came late, and fences the member that has it")


class Effects:
    """What a handler gets of a `HeldTransactions`."""

    def __init__(self) -> None:
        self.offsets: list[int] = []


class HeldTx:
    def __init__(self) -> None:
        self.connection = Effects()
        self.move: tuple[int, int] | None = None

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        self.move = (old, new)

    def fault(self, error: BaseException) -> StoreError | None:
        return None


class HeldTransactions(HeldStore):
    """Transactional: what a handler writes is there when the offset is."""

    guarantee: ClassVar[str] = "exactly once, on stage"
    connection_types: ClassVar[tuple[type, ...]] = (Effects,)
    parallel: ClassVar[int | None] = None
    by_record: ClassVar[bool] = False

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[HeldTx]:
        self._ask("begin", [partition], lambda: self._check_epoch(group, partition, epoch))
        tx = HeldTx()
        yield tx
        self._ask("commit", [partition], lambda: self._commit(group, partition, epoch, tx))

    def _commit(self, group: str, partition: Partition, epoch: int, tx: HeldTx) -> None:
        self._check_epoch(group, partition, epoch)
        row = self._rows[group, partition]
        if tx.move is None:
            return
        old, new = tx.move
        if row.next_offset != old:
            self._fences_its_owner(partition, row)
            raise Fenced(f"{partition} is at {row.next_offset}, not at {old}")
        for offset in tx.connection.offsets:
            self._world.handles(partition, offset)
        self._rows[group, partition] = Position(
            new, row.epoch, row.topic_id, row.owner, generation=row.generation, reset_epoch=row.reset_epoch
        )
        self._moved(partition, new)
