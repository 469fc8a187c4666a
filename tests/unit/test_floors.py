"""From where on the rows of an outbox are read: `backends/postgres_floors.py`."""

from __future__ import annotations

from kconsume.backends.postgres_floors import FROM_THE_BEGINNING_EVERY, Floors
from kconsume.records import Partition

GROUP, HERE, THERE = "shop", Partition("orders", 0), Partition("orders", 1)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_was_read_and_deleted_is_not_read_again() -> None:
    floors = Floors(Clock())
    assert floors.above(GROUP, HERE, 1) == 0
    floors.read(GROUP, HERE, [5, 6, 9])
    floors.deleted(GROUP, HERE, [5, 6, 9])
    assert floors.above(GROUP, HERE, 1) == 9


def test_what_was_read_and_not_deleted_is_read_again() -> None:
    floors = Floors(Clock())
    floors.above(GROUP, HERE, 1)
    floors.read(GROUP, HERE, [5, 6, 9])
    floors.deleted(GROUP, HERE, [5, 9])
    assert floors.above(GROUP, HERE, 1) == 5


def test_what_was_deleted_in_several_steps_counts() -> None:
    floors = Floors(Clock())
    floors.above(GROUP, HERE, 1)
    floors.read(GROUP, HERE, [5, 6, 9])
    floors.deleted(GROUP, HERE, [9])
    assert floors.above(GROUP, HERE, 1) == 4
    floors.deleted(GROUP, HERE, [5, 6])
    assert floors.above(GROUP, HERE, 1) == 6, "9 is known to be gone, and is above it: only a look more"


def test_another_epoch_begins_at_the_beginning() -> None:
    floors = Floors(Clock())
    floors.above(GROUP, HERE, 1)
    floors.read(GROUP, HERE, [5])
    floors.deleted(GROUP, HERE, [5])
    assert floors.above(GROUP, HERE, 2) == 0


def test_the_beginning_is_looked_at_now_and_then() -> None:
    clock = Clock()
    floors = Floors(clock)
    floors.above(GROUP, HERE, 1)
    floors.read(GROUP, HERE, [5])
    floors.deleted(GROUP, HERE, [5])
    clock.now += FROM_THE_BEGINNING_EVERY
    assert floors.above(GROUP, HERE, 1) == 0


def test_partitions_and_groups_have_floors_of_their_own() -> None:
    floors = Floors(Clock())
    floors.above(GROUP, HERE, 1)
    floors.read(GROUP, HERE, [5])
    floors.deleted(GROUP, HERE, [5])
    assert floors.above(GROUP, THERE, 1) == 0
    assert floors.above("another", HERE, 1) == 0


def test_what_is_deleted_and_was_never_read_says_nothing() -> None:
    floors = Floors(Clock())
    floors.deleted(GROUP, HERE, [5])
    floors.above(GROUP, HERE, 1)
    floors.deleted(GROUP, HERE, [5])
    assert floors.above(GROUP, HERE, 1) == 0
