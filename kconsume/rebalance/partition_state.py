"""State that handlers keep in memory for each partition: loaded when it is assigned, saved when it is revoked.

`PartitionState` is an ordinary listener for `app.listen`, and does not affect offsets. The values are not locked
against handlers, because the records of a partition are handled one after the other.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from kconsume.errors import InvalidHandler, NotHeld
from kconsume.rebalance.events import Rebalance
from kconsume.rebalance.listeners import RebalanceListener
from kconsume.records import Partition

T = TypeVar("T")


class _PartitionValues(RebalanceListener, Generic[T]):
    """The values by partition, for handlers on any thread.

    Needs no lock: each partition has a slot, a list that is empty until the value is loaded. Each step is one operation
    on the dict or on the list. A late load or an abandoned handler may still write into a slot that was removed; such a
    slot is not read any more.
    """

    def __init__(self) -> None:
        self._slots: dict[Partition, list[T]] = {}

    def __getitem__(self, partition: Partition) -> T:
        return self._loaded(partition)[0]

    def __setitem__(self, partition: Partition, value: T) -> None:
        # A value that was not loaded cannot be set: a later save would replace the state that could not be read.
        self._loaded(partition)[0] = value

    def __contains__(self, partition: Partition) -> bool:
        return bool(self._slots.get(partition))

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The partitions whose value is loaded, sorted."""
        return tuple(sorted(partition for partition, slot in self._slots.copy().items() if slot))

    def on_lost(self, partitions: Sequence[Partition], rebalance: Rebalance) -> None:  # noqa: ARG002
        """Forget the values without saving: the next owner has already loaded them, and may have saved new values."""
        self._take(partitions)

    def _renew(self, partitions: Iterable[Partition]) -> dict[Partition, list[T]]:
        """Empty slots for these partitions. A value from before this assignment may be stale."""
        slots: dict[Partition, list[T]] = {partition: [] for partition in partitions}
        self._slots.update(slots)
        return slots

    def _take(self, partitions: Iterable[Partition]) -> dict[Partition, T]:
        """Remove and return the values of these partitions. A partition that was never loaded has none."""
        slots = {partition: self._slots.pop(partition, []) for partition in partitions}
        return {partition: slot[0] for partition, slot in slots.items() if slot}

    def _loaded(self, partition: Partition) -> list[T]:
        slot = self._slots.get(partition)
        if slot is None:
            raise NotHeld(
                f"the state of {partition} is not here, because this process does not own the partition: pass this "
                f"object to app.listen, and ask for Partition(record.topic, record.partition) of the current record"
            )
        if not slot:
            raise NotHeld(
                f"the state of {partition} is not here, because it could not be loaded: see in the log what load "
                f"raised, correct it, and restart"
            )
        return slot


class PartitionState(_PartitionValues[T]):
    """A value for each partition: loaded when it is assigned, saved when it is revoked, dropped when it is lost.

    Handlers use this object as a mapping: `counts[partition] += 1`. If load or save fails for a partition, the other
    partitions are still tried, and the errors are raised together as an `ExceptionGroup`.
    """

    def __init__(self, load: Callable[[Partition], T], save: Callable[[Partition, T], object]) -> None:
        """
        Args:
            load: returns the value of a partition.
            save: stores the value of a partition.
        """
        super().__init__()
        for name, function in (("load", load), ("save", save)):
            _check(name, function)
            if inspect.iscoroutinefunction(function):
                raise InvalidHandler(_ASYNC.format(name))
        self._load = load
        self._save = save

    def on_assigned(self, partitions: Sequence[Partition], rebalance: Rebalance) -> None:  # noqa: ARG002
        failures = _StateFailures("loaded")
        for partition, slot in self._renew(partitions).items():
            with failures.gathered(partition):
                slot.append(_ended("load", self._load(partition)))
        failures.raise_together()

    def on_revoked(self, partitions: Sequence[Partition], rebalance: Rebalance) -> None:  # noqa: ARG002
        failures = _StateFailures("saved")
        for partition, value in self._take(partitions).items():
            with failures.gathered(partition):
                _ended("save", self._save(partition, value))
        failures.raise_together()


class AsyncPartitionState(_PartitionValues[T]):
    """A `PartitionState` with `async def` `load` and `save`. The calls for several partitions run at the same time."""

    def __init__(
        self, load: Callable[[Partition], Awaitable[T]], save: Callable[[Partition, T], Awaitable[object]]
    ) -> None:
        """
        Args:
            load: returns the value of a partition.
            save: stores the value of a partition.
        """
        super().__init__()
        _check("load", load)
        _check("save", save)
        self._load = load
        self._save = save

    async def on_assigned(self, partitions: Sequence[Partition], rebalance: Rebalance) -> None:  # noqa: ARG002
        failures = _StateFailures("loaded")

        async def load(partition: Partition, slot: list[T]) -> None:
            with failures.gathered(partition):
                slot.append(await self._load(partition))

        await asyncio.gather(*(load(*each) for each in self._renew(partitions).items()))
        failures.raise_together()

    async def on_revoked(self, partitions: Sequence[Partition], rebalance: Rebalance) -> None:  # noqa: ARG002
        failures = _StateFailures("saved")

        async def save(partition: Partition, value: T) -> None:
            with failures.gathered(partition):
                await self._save(partition, value)

        await asyncio.gather(*(save(*each) for each in self._take(partitions).items()))
        failures.raise_together()


class _StateFailures:
    """Collects the errors of single partitions, so that the other partitions are still tried."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._errors: dict[Partition, Exception] = {}

    @contextmanager
    def gathered(self, partition: Partition) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  (raised with the others)
            error.add_note(f"the state of {partition} was not {self._what}")
            self._errors[partition] = error

    def raise_together(self) -> None:
        if not self._errors:
            return
        names = ", ".join(map(str, sorted(self._errors)))
        raise ExceptionGroup(f"state could not be {self._what} partitions={names}", list(self._errors.values()))


_ASYNC = "{} of a PartitionState is async, so it would not be awaited: use AsyncPartitionState"


def _check(name: str, function: object) -> None:
    if not callable(function):
        raise InvalidHandler(
            f"{name}= needs a function, and got {function!r}: write load=lambda partition: ..., "
            f"save=lambda partition, value: ..."
        )


def _ended(name: str, result: T) -> T:
    """The result of load or save. A coroutine, from a lambda around an async function, has not run yet."""
    if inspect.iscoroutine(result):
        result.close()
        raise InvalidHandler(_ASYNC.format(name))
    return result
