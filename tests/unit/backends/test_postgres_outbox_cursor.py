"""From where on the rows of an outbox are read: `backends/postgres/outbox_cursor.py`."""

from __future__ import annotations

from kconsume.backends.postgres.outbox_cursor import FROM_THE_BEGINNING_EVERY, OutboxCursor
from kconsume.records import Partition

GROUP, HERE, THERE = "shop", Partition("orders", 0), Partition("orders", 1)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_was_read_and_deleted_is_not_read_again() -> None:
    cursor = OutboxCursor(Clock())
    assert cursor.read_above(GROUP, HERE, 1) == 0
    cursor.read(GROUP, HERE, [5, 6, 9])
    cursor.deleted(GROUP, HERE, [5, 6, 9])
    assert cursor.read_above(GROUP, HERE, 1) == 9


def test_what_was_read_and_not_deleted_is_read_again() -> None:
    cursor = OutboxCursor(Clock())
    cursor.read_above(GROUP, HERE, 1)
    cursor.read(GROUP, HERE, [5, 6, 9])
    cursor.deleted(GROUP, HERE, [5, 9])
    assert cursor.read_above(GROUP, HERE, 1) == 5


def test_what_was_deleted_in_several_steps_counts() -> None:
    cursor = OutboxCursor(Clock())
    cursor.read_above(GROUP, HERE, 1)
    cursor.read(GROUP, HERE, [5, 6, 9])
    cursor.deleted(GROUP, HERE, [9])
    assert cursor.read_above(GROUP, HERE, 1) == 4
    cursor.deleted(GROUP, HERE, [5, 6])
    assert cursor.read_above(GROUP, HERE, 1) == 6, "9 is known to be gone, and is above it: only a look more"


def test_another_epoch_begins_at_the_beginning() -> None:
    cursor = OutboxCursor(Clock())
    cursor.read_above(GROUP, HERE, 1)
    cursor.read(GROUP, HERE, [5])
    cursor.deleted(GROUP, HERE, [5])
    assert cursor.read_above(GROUP, HERE, 2) == 0


def test_the_beginning_is_looked_at_now_and_then() -> None:
    clock = Clock()
    cursor = OutboxCursor(clock)
    cursor.read_above(GROUP, HERE, 1)
    cursor.read(GROUP, HERE, [5])
    cursor.deleted(GROUP, HERE, [5])
    clock.now += FROM_THE_BEGINNING_EVERY
    assert cursor.read_above(GROUP, HERE, 1) == 0


def test_partitions_and_groups_have_floors_of_their_own() -> None:
    cursor = OutboxCursor(Clock())
    cursor.read_above(GROUP, HERE, 1)
    cursor.read(GROUP, HERE, [5])
    cursor.deleted(GROUP, HERE, [5])
    assert cursor.read_above(GROUP, THERE, 1) == 0
    assert cursor.read_above("another", HERE, 1) == 0


def test_what_is_deleted_and_was_never_read_says_nothing() -> None:
    cursor = OutboxCursor(Clock())
    cursor.deleted(GROUP, HERE, [5])
    cursor.read_above(GROUP, HERE, 1)
    cursor.deleted(GROUP, HERE, [5])
    assert cursor.read_above(GROUP, HERE, 1) == 0
