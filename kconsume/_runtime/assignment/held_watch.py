"""Watches held partitions and decides what to do with each. It only reads rows and never claims.

`Holds` carries out the decisions. All methods are called on the owner thread; rows are read on the background
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from kconsume._runtime.assignment.claims import Claims, HeldRows
from kconsume._runtime.assignment.partition import OwnedPartition
from kconsume._runtime.assignment.partition_trouble import PartitionTrouble
from kconsume._runtime.background import BackgroundThread
from kconsume._runtime.deadlines import Deadline
from kconsume._runtime.observation.events import Events, PartitionHeld
from kconsume.errors import BrokerUnavailable, Fenced, HandlerFailed, StoreUnavailable, TopicNotFound

LOOK_EVERY = 2.0
"""Seconds between two reads of the rows of held partitions."""
SAY_EVERY = 60.0
"""Seconds after which a partition that is still held is logged again."""
READ_AGAIN_EVERY = 60.0
"""Seconds after which a held partition is read again, because its trouble may be over."""


class HeldDecisions(NamedTuple):
    """What to do with held partitions."""

    claim_again: Sequence[tuple[OwnedPartition, str]] = ()
    """Partitions to claim again, each with the reason."""
    fenced: Sequence[tuple[OwnedPartition, Fenced]] = ()
    """Partitions that another owner has claimed while they were held."""
    read_again: Sequence[OwnedPartition] = ()


class HeldWatch:
    """The held partitions of one consumer."""

    def __init__(self, claims: Claims, background: BackgroundThread, events: Events) -> None:
        self._claims = claims
        self._events = events
        self._background = background
        self._active = False
        self._reading: Future[HeldRows] | None = None
        self._asked_for: dict[OwnedPartition, PartitionTrouble | None] = {}
        """The troubles for which the rows are being read. The answer says nothing about other troubles."""
        self._look_due = self._say_due = self._read_due = Deadline(0.0)

    def begin(self, owned: OwnedPartition, trouble: PartitionTrouble) -> None:
        """Hold a partition because of this trouble, publish that, and watch it."""
        owned.trouble = trouble
        error = trouble.error
        hint = f"see it again: {error.try_command}" if isinstance(error, HandlerFailed) else ""
        self._events.publish(PartitionHeld(owned.partition, trouble.code, error, hint))
        if not self._active:
            self._active = True
            self._look_due, self._say_due = Deadline(LOOK_EVERY), Deadline(SAY_EVERY)
            self._read_due = Deadline(READ_AGAIN_EVERY)

    @property
    def active(self) -> bool:
        """Whether a partition may be held."""
        return self._active

    def step(self, held: Sequence[OwnedPartition]) -> HeldDecisions:
        """held: the partitions that are held now."""
        self._active = bool(held)
        if self._say_due.passed:
            self._say_due = Deadline(SAY_EVERY)
            for owned in held:
                trouble = owned.trouble
                assert trouble is not None
                self._events.publish(PartitionHeld(owned.partition, trouble.code, trouble.error, "", trouble.seconds))
        decisions = self._look(held)
        if self._read_due.passed:
            self._read_due = Deadline(READ_AGAIN_EVERY)
            decisions = decisions._replace(read_again=held)
        return decisions

    def _look(self, held: Sequence[OwnedPartition]) -> HeldDecisions:
        if self._reading is None and self._look_due.passed and held:
            missing = {o.partition.topic for o in held if o.trouble and isinstance(o.trouble.error, TopicNotFound)}
            partitions = sorted(owned.partition for owned in held)
            self._asked_for = {owned: owned.trouble for owned in held}
            self._reading = self._background.send(partial(self._claims.read_held, partitions, sorted(missing)))
        elif self._reading is not None and self._reading.done():
            reading, self._reading, self._look_due = self._reading, None, Deadline(LOOK_EVERY)
            if reading.exception() is None:
                return _decide([o for o in held if self._asked_for.get(o) is o.trouble], reading.result())
            if not isinstance(reading.exception(), StoreUnavailable | BrokerUnavailable):
                reading.result()  # raises
        return HeldDecisions()


def _decide(held: Sequence[OwnedPartition], found: HeldRows) -> HeldDecisions:
    claim_again, fenced = list[tuple[OwnedPartition, str]](), list[tuple[OwnedPartition, Fenced]]()
    for owned in held:
        trouble, row = owned.trouble, found.rows.get(owned.partition)
        if trouble is None:
            continue
        if isinstance(trouble.error, TopicNotFound):
            if owned.partition.topic in found.topics_there:
                claim_again.append((owned, "the topic exists now"))
        elif not trouble.row_changed(row):
            continue
        elif row is None or row.owner is None:
            claim_again.append((owned, "its row was changed"))
        else:
            fenced.append((owned, Fenced(f"{row.owner} has claimed it while it was held")))
    return HeldDecisions(claim_again, fenced)
