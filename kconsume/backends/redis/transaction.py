"""The handler's transaction in Redis: a queue of commands, and the move of the offset that is applied with the
queue."""

from __future__ import annotations

from typing import NamedTuple

from redis.client import Pipeline

from kconsume.backends.redis.pipeline import QueuedPipeline
from kconsume.errors import StoreError, StoreUnavailable, TransactionMisused


class OffsetStep(NamedTuple):
    """The old and the new value of an offset."""

    old: int
    new: int
    leader_epoch: int | None


class RedisTx:
    """The commands that a handler queued, and the move of the offset that is applied with these commands.

    Attributes:
        step: the old and the new offset; None until `advance` is called.
    """

    __slots__ = ("connection", "step")

    def __init__(self, connection: QueuedPipeline) -> None:
        self.connection = connection
        self.step: OffsetStep | None = None

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """Remember the old and the new offset. When the transaction ends, one script checks the old offset, applies the
        queued commands and stores the new offset."""
        if self.connection.ended:
            raise TransactionMisused(
                "the transaction has ended, so its offset can no longer move: advance inside the transaction"
            )
        self.step = OffsetStep(old, new, leader_epoch)

    def sever(self) -> None:
        """Refuse later commands. None of the queued commands has been sent, and none will be sent."""
        self.connection.end()

    def fault(self, error: BaseException) -> StoreError | None:
        """Return the error if it is `StoreUnavailable`, else None. A handler only queues commands; it reaches the
        server only to ask for the keys of some commands."""
        return error if isinstance(error, StoreUnavailable) else None


class RedisDryRun(NamedTuple):
    """A transaction that is always dropped."""

    connection: Pipeline
