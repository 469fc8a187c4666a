"""What handlers keep in memory for each partition: loaded when it comes, saved when it goes.

A listener like any other, for `app.listen`. It decides nothing about offsets, and guards no value against its own
handlers: one partition's records are handled one after the other.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from kconsume.errors import InvalidHandler, NotHeld
from kconsume.rebalance.listeners import RebalanceListener
from kconsume.rebalance.record import Rebalance
from kconsume.records import Partition

T = TypeVar("T")


class _Slots(RebalanceListener, Generic[T]):
    """The values by partition, for handlers on any thread.

    No lock: each partition has a slot, a list that is empty until the value is loaded, and each step is one operation
    on the dict or on the list. A load that comes late and a handler that was abandoned may still write into a slot
    that was taken away: nobody looks there any more.
    """

    def __init__(self) -> None:
        self._slots: dict[Partition, list[T]] = {}

    def __getitem__(self, partition: Partition) -> T:
        return self._loaded(partition)[0]

    def __setitem__(self, partition: Partition, value: T) -> None:
        # What was not loaded cannot be set: saved later, it would replace what could not be read.
        self._loaded(partition)[0] = value

    def __contains__(self, partition: Partition) -> bool:
        return bool(self._slots.get(partition))

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """Those whose value is here, sorted."""
        return tuple(sorted(partition for partition, slot in self._slots.copy().items() if slot))

    def on_lost(self, partitions: Sequence[Partition], rebalance: Rebalance) -> None:  # noqa: ARG002
        """Forget without saving: the next owner has loaded already, and may have saved."""
        self._take(partitions)

    def _renew(self, partitions: Iterable[Partition]) -> dict[Partition, list[T]]:
        """Empty slots for these. A value from before this assignment is not to be trusted."""
        slots: dict[Partition, list[T]] = {partition: [] for partition in partitions}
        self._slots.update(slots)
        return slots

    def _take(self, partitions: Iterable[Partition]) -> dict[Partition, T]:
        """The values of these, which are forgotten. What was never loaded has none."""
        slots = {partition: self._slots.pop(partition, []) for partition in partitions}
        return {partition: slot[0] for partition, slot in slots.items() if slot}

    def _loaded(self, partition: Partition) -> list[T]:
        slot = self._slots.get(partition)
        if slot is None:
            raise NotHeld(
                f"the state of {partition} is not here, because the partition is not ours: give this object to "
                f"app.listen, and ask for Partition(record.topic, record.partition) of the record in hand"
            )
        if not slot:
            raise NotHeld(
                f"the state of {partition} is not here, because it could not be loaded: see what load raised, in the "
                f"log, and restart when that is mended"
            )
        return slot


class PartitionState(_Slots[T]):
    """A value for each partition: `load` when it is assigned, `save` when it is revoked, neither when it is lost.

    Handlers use it as a mapping: `counts[partition] += 1`. With several partitions all are tried, and what failed is
    raised together.
    """

    def __init__(self, load: Callable[[Partition], T], save: Callable[[Partition, T], object]) -> None:
        super().__init__()
        for name, function in (("load", load), ("save", save)):
            _check(name, function)
            if inspect.iscoroutinefunction(function):
                raise InvalidHandler(_ASYNC.format(name))
        self._load = load
        self._save = save

    def on_assigned(self, partitions: Sequence[Partition], rebalance: Rebalance) -> None:  # noqa: ARG002
        failures = _Failures("loaded")
        for partition, slot in self._renew(partitions).items():
            with failures.gathered(partition):
                slot.append(_ended("load", self._load(partition)))
        failures.raise_together()

    def on_revoked(self, partitions: Sequence[Partition], rebalance: Rebalance) -> None:  # noqa: ARG002
        failures = _Failures("saved")
        for partition, value in self._take(partitions).items():
            with failures.gathered(partition):
                _ended("save", self._save(partition, value))
        failures.raise_together()


class AsyncPartitionState(_Slots[T]):
    """`PartitionState` whose `load` and `save` are `async def`. Those of several partitions run at the same time."""

    def __init__(
        self, load: Callable[[Partition], Awaitable[T]], save: Callable[[Partition, T], Awaitable[object]]
    ) -> None:
        super().__init__()
        _check("load", load)
        _check("save", save)
        self._load = load
        self._save = save

    async def on_assigned(self, partitions: Sequence[Partition], rebalance: Rebalance) -> None:  # noqa: ARG002
        failures = _Failures("loaded")

        async def load(partition: Partition, slot: list[T]) -> None:
            with failures.gathered(partition):
                slot.append(await self._load(partition))

        await asyncio.gather(*(load(*each) for each in self._renew(partitions).items()))
        failures.raise_together()

    async def on_revoked(self, partitions: Sequence[Partition], rebalance: Rebalance) -> None:  # noqa: ARG002
        failures = _Failures("saved")

        async def save(partition: Partition, value: T) -> None:
            with failures.gathered(partition):
                await self._save(partition, value)

        await asyncio.gather(*(save(*each) for each in self._take(partitions).items()))
        failures.raise_together()


class _Failures:
    """What failed for some partitions, while the others are tried all the same."""

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


_ASYNC = "{} of a PartitionState is async, and would not be awaited: use AsyncPartitionState"


def _check(name: str, function: object) -> None:
    if not callable(function):
        raise InvalidHandler(
            f"{name}= needs a function, and got {function!r}: write load=lambda partition: ..., "
            f"save=lambda partition, value: ..."
        )


def _ended(name: str, result: T) -> T:
    """What load or save returned. A coroutine, from a lambda around an async function, has done nothing yet."""
    if inspect.iscoroutine(result):
        result.close()
        raise InvalidHandler(_ASYNC.format(name))
    return result
