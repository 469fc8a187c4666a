"""What an offset store is, in three levels. A store implements one of these protocols and nothing else.

    OffsetStore          keeps offsets                              at least once
    FencedStore          … and knows who owns a partition           at least once, a zombie cannot commit
    TransactionalStore   … and shares a transaction with handlers   exactly once

All methods may block and may be called from several threads at once; none is called on the thread that
polls Kafka. A store that cannot be reached raises `StoreUnavailable`: the caller tries again. A store that
finds a newer epoch raises `Fenced`: the caller gives the partition up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from kconsume.backends.outbox_table import NO_TARGETS, Posted, Targets
from kconsume.errors import KconsumeError, StoreError
from kconsume.failures.letters import Letter
from kconsume.output import Outgoing
from kconsume.records import Partition


@dataclass(frozen=True, slots=True)
class Position:
    """Where a group stands in a partition: the row that a store keeps for it.

    `topic_id` is None where it is unknown; an unknown id never overwrites a known one. `previous` is for `save` alone:
    the offset that the row must have.
    """

    next_offset: int
    epoch: int = 0
    topic_id: str | None = None
    owner: str | None = None
    leader_epoch: int | None = None
    metadata: str = ""
    updated_at: datetime | None = None
    previous: int | None = None
    generation: int | None = None
    """Of the Kafka group, under which the row was last claimed; None if no claim has named one."""
    reset_epoch: int = 0
    """The epoch at which the offset was last set by `reset`, or the row made anew after a `delete`; 0 if never. Records
    that are handled again after that are not repeats of those from before it."""


@dataclass(frozen=True, slots=True)
class ClaimTerms:
    """What a claim compares with a row, so that a claim that comes late takes nothing from the rightful owner."""

    generation: int
    """Of the Kafka group (the member epoch under KIP-848), read together with the assignment; above 0. Where rows are
    only pinned, for whichever member comes to claim them, it is 0."""
    epochs: Mapping[Partition, int] | None = None
    """The epochs of rows that were read before the broker confirmed our membership. The claim then depends on these
    alone: a group that was deleted, or is another cluster's, counts its generations from the beginning."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer for a partition that was not claimed: its row is as it was."""

    cause: KconsumeError


Positions: TypeAlias = Mapping[Partition, Position]
Start: TypeAlias = Callable[[Sequence[Partition]], Positions]
"""Called by `claim` with the partitions that have no row; answers with the rows to pin."""


@runtime_checkable
class OffsetStore(Protocol):
    """Keeps one row a partition, by group, topic and partition number.

    A store whose address is not enough to tell its rows from another's (a relative path) has a `place: str` besides,
    or None if they are forgotten with the process.
    """

    address: str
    """How a person writes this store, with no password in it."""

    guarantee: ClassVar[str]
    """What the store promises a handler, in one sentence, for the start banner and `check`."""

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        """The rows that are there; a partition without one is left out."""
        ...

    def save(self, group: str, positions: Positions) -> None:
        """Move offsets forward, all or none.

        On a fenced store each position carries its epoch and, in `previous`, the offset last seen: a row that is under
        another epoch, or neither at `previous` nor at the new offset already (a save whose answer was lost), is
        `Fenced`. A database that failed over to an earlier state keeps the epoch; only this compare protects its tail.
        """
        ...

    def reset(self, group: str, offsets: Mapping[Partition, int]) -> None:
        """Set offsets anywhere, for users. Raises the epoch, so that whoever runs now is fenced, and keeps it as
        `reset_epoch`; a store that knows no epochs refuses while somebody runs. Forgets the topic id: the offset
        is meant for the topic that is there."""
        ...

    def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
        """Forget rows, if they are there; all of the group's when no partitions are named. A store that cannot
        forget some of them raises `StoreError`."""
        ...

    def groups(self) -> list[str]:
        """The groups that have rows here, sorted."""
        ...

    def close(self) -> None:
        """Let go of connections. Called once, after the last use."""
        ...


@runtime_checkable
class FencedStore(OffsetStore, Protocol):
    """Knows the owner of each partition by an epoch that only grows."""

    def claim(
        self,
        group: str,
        partitions: Sequence[Partition],
        owner: str,
        start: Start,
        terms: ClaimTerms | None = None,
    ) -> dict[Partition, Position | Refused]:
        """Raise the epoch of every partition and read its position, in one step for all; each has its own answer.

        With terms, a row is compared first (`claiming.accepts`): one that is newer than the terms is left as it is, and
        its partition is `Refused`, with `Fenced` as the cause. Rows that are claimed keep the generation of the terms.
        Without terms nothing is refused, and each row keeps the generation that it has.

        Rows that are missing are pinned at what `start` answers; where the terms name epochs, they are refused instead.
        From the moment this returns, no `save` and no transaction under an earlier epoch of what was claimed succeeds.
        """
        ...

    def reclaim(self, group: str, epochs: Mapping[Partition, int], owner: str) -> dict[Partition, Position]:
        """Raise the epochs of partitions that we hold under these epochs, and read their positions: after an outcome
        that we do not know. `Fenced`, with nothing raised, if one of them is under another epoch or has no row.

        Whatever was under way under the old epochs has ended, or can no longer commit, when this returns.
        """
        ...


@runtime_checkable
class NotingStore(FencedStore, Protocol):
    """Can keep a word beside a position, for whoever claims it next: it comes back as `Position.metadata`."""

    def note(self, group: str, partition: Partition, epoch: int, text: str) -> None:
        """Keep it, unless the partition is under another epoch."""
        ...


ALWAYS = 2**63 - 1
"""Of rows that were deleted when they were not there: at any epoch."""


@runtime_checkable
class NamedStore(OffsetStore, Protocol):
    """Knows its own name, and which of its rows were deleted. So one that has lost its rows is noticed, and one at the
    same address that is another store."""

    def identity(self) -> str:
        """A random id that is kept beside the rows, and copied, restored and replicated with them. Made when it is
        asked for first."""
        ...

    def deleted(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The epochs up to which rows were deleted by `delete`, of those partitions for which that is known: that of
        the row, or `ALWAYS` where there was none. A row that is made anew is not deleted at its own epochs."""
        ...


class Tx(Protocol):
    """An open transaction of the store."""

    @property
    def connection(self) -> object:
        """What the handler gets."""
        ...

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """Move the partition's offset from `old` to `new`; `Fenced` if it is not at `old` under our epoch.

        Called once, as the last thing before the transaction ends.
        """
        ...

    def fault(self, error: BaseException) -> StoreError | None:
        """Whose fault it is that a handler ended with `error`: `StoreUnavailable` if the store is behind it (its
        connection broke), `Conflict` if it was undone because of another transaction, None if it is the handler's own.
        Called inside the transaction.
        """
        ...


@runtime_checkable
class TransactionalStore(FencedStore, Protocol):
    """Hands its own transaction to handlers, and advances the offset in it."""

    @property
    def connection_types(self) -> tuple[type, ...]:
        """The annotations by which a handler asks for the transaction."""
        ...

    @property
    def parallel(self) -> int | None:
        """How many transactions can run side by side; None for any number. More workers would only wait."""
        ...

    by_record: ClassVar[bool]
    """Whether `tx.connection.next_record(offset)` is to be called before each record of a handler that gets one at a
    time: for stores that apply a transaction record by record."""

    def transaction(self, group: str, partition: Partition, epoch: int) -> AbstractContextManager[Tx]:
        """Begin under `epoch` (`Fenced` if it is stale); commit at a normal exit, else roll back.

        What the store cannot do is a `StoreError`. Anything else that is raised at the exit is taken for the doing of
        what the handler wrote, such as a constraint that is checked at COMMIT.
        """
        ...


@runtime_checkable
class FinishingTx(Tx, Protocol):
    """A transaction that can move its offset on the way out."""

    def finish(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """As `advance`, where nothing follows in the transaction: that it was refused may show at the end."""
        ...


@runtime_checkable
class SeverableTx(Tx, Protocol):
    """A transaction that can be taken away from a handler that does not come back: `timeout=` on threads. A store that
    has these says so with `severs = True`."""

    def sever(self) -> None:
        """Undo it now, with every lock that it has, whatever the handler is doing with it on its thread; what that
        tries afterwards is refused. Its connection is nobody's any more. Called instead of `advance`; the block is then
        left with an error."""
        ...


@runtime_checkable
class LetterTx(Tx, Protocol):
    """A transaction in which dead letters can be kept: `DeadLetter(table=...)`."""

    def keep(self, table: str, letters: Sequence[Letter]) -> None:
        """Write them, each once for its group and origin; the table is made if it is not there. Before `advance`."""
        ...


@runtime_checkable
class OutboxTx(Tx, Protocol):
    """A transaction of an `OutboxStore`."""

    def post(self, outgoing: Sequence[Outgoing]) -> None:
        """Leave encoded records to be sent once the transaction has committed, in this order. Before `advance`."""
        ...

    def take_in(self, origins: Sequence[str]) -> set[str]:
        """Note that the group has taken these in; answers with those that it had not before."""
        ...


@runtime_checkable
class NumberedTx(Protocol):
    """An `OutboxTx`, or an awaited one, that knows its rows afterwards: they need not be read back to be sent."""

    def numbers(self) -> Sequence[int]:
        """Those of all that was posted, in its order. Asked once the transaction has committed, from any thread."""
        ...


@runtime_checkable
class OutboxStore(TransactionalStore, Protocol):
    """Keeps what handlers send until it is confirmed: its transactions are `OutboxTx`.

    Rows belong to the partition whose records they came from. Their numbers grow in the order in which their
    transactions commit, since of one partition there is only one at a time.
    """

    def posted(
        self,
        group: str,
        epochs: Mapping[Partition, int],
        most: int,
        targets: Mapping[Partition, Targets] = NO_TARGETS,
    ) -> dict[Partition, list[Posted]]:
        """The first rows of each partition that is still under this epoch, in order, at most so many each; of a
        partition that `targets` has, only rows to those topics."""
        ...

    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        """These rows are confirmed: delete them, those that are still there."""
        ...

    def strays(self, owner: str, most: int, targets: Targets | None = None) -> list[Posted]:
        """The first rows that are nobody's, of the empty group (`outbox_table.NOBODYS`), to all topics or those of
        `targets`; none while another owner sends them."""
        ...

    def posting(self, outgoing: Outgoing) -> tuple[str, Any]:
        """The statement that leaves a record as nobody's, and its parameters: for a transaction of a person's own. The
        tables are there when this returns."""
        ...

    def forget_origins(self) -> bool | None:
        """Forget what was taken in long ago, as much as is done soon; whether there may be more."""
        ...


@runtime_checkable
class PipeliningStore(TransactionalStore, Protocol):
    """Can send a handler's statements without waiting for each."""

    @property
    def pipelines(self) -> bool:
        """Whether it does, as it is set up."""
        ...

    def pipelined(self, group: str, partition: Partition, epoch: int) -> AbstractContextManager[Tx]:
        """As `transaction`, but a statement that fails, or a fence, may show only at the end. The caller runs the
        records again in a `transaction` to learn which one it was."""
        ...


class AsyncTx(Protocol):
    """An open transaction on an event loop; `Tx` says what each means."""

    @property
    def connection(self) -> object: ...

    async def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None: ...

    def fault(self, error: BaseException) -> StoreError | None: ...


@runtime_checkable
class AsyncLetterTx(AsyncTx, Protocol):
    """As `LetterTx`, awaited."""

    async def keep(self, table: str, letters: Sequence[Letter]) -> None: ...


@runtime_checkable
class AsyncOutboxTx(AsyncTx, Protocol):
    """As `OutboxTx`, awaited."""

    async def post(self, outgoing: Sequence[Outgoing]) -> None: ...

    async def take_in(self, origins: Sequence[str]) -> set[str]: ...


@runtime_checkable
class AsyncTransactionalStore(TransactionalStore, Protocol):
    """Has transactions that are awaited. Without them, an `async def` gets that of other threads."""

    @property
    def async_connection_types(self) -> tuple[type, ...]:
        """Those of `connection_types` that are for `async def`; the others are then not."""
        ...

    def async_transaction(self, group: str, partition: Partition, epoch: int) -> AbstractAsyncContextManager[AsyncTx]:
        """As `transaction`, on the event loop that runs."""
        ...
