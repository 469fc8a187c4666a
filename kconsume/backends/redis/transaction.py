"""The handler's transaction in Redis: a queue of commands, and the step of the offset that is applied with them."""

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
    """The commands that a handler queued, and the step of the offset that is applied with them.

    step: None until `advance` is called.
    """

    __slots__ = ("connection", "step")

    def __init__(self, connection: QueuedPipeline) -> None:
        self.connection = connection
        self.step: OffsetStep | None = None

    def advance(self, old: int, new: int, leader_epoch: int | None = None) -> None:
        """Record the step. The script checks and applies it with the queue when the transaction ends."""
        if self.connection.ended:
            raise TransactionMisused(
                "the transaction has ended, so its offset can no longer move: advance inside the transaction"
            )
        self.step = OffsetStep(old, new, leader_epoch)

    def sever(self) -> None:
        """Refuse later commands. Nothing was sent yet, and nothing will be."""
        self.connection.end()

    def fault(self, error: BaseException) -> StoreError | None:
        """The store's error. A handler only queues, so it does not reach the server (except for keys on a cluster)."""
        return error if isinstance(error, StoreUnavailable) else None


class RedisDryRun(NamedTuple):
    """A transaction that is always dropped."""

    connection: Pipeline
