"""The store that a suite examines: how to open it, how to write through it, how to look at it from outside.

A value that the store's author fills in; nothing here opens or checks anything.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from kconsume.backends.abc import OffsetStore


def _unique(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex[:12]}"


@dataclass(frozen=True)
class Subject:
    """A place where a store keeps its rows. It may hold rows of other groups; those are left alone."""

    open: Callable[[], OffsetStore]
    """A store object on this place, a new one each time: two owners are two objects. A place that is itself an object
    in memory may give the same one again. The suite closes them."""

    write: Callable[..., object] | None = None
    """`write(connection, number)` leaves one effect, the number, through the `connection` of a transaction, as a
    handler would. To write a number twice must be possible, and must be seen: no unique key."""

    effects: Callable[[], Iterable[int]] | None = None
    """All numbers that were written and committed, read from outside every transaction, in any order."""

    own: Callable[[], AbstractContextManager[Callable[[str, Any], object]]] | None = None
    """`with own() as execute:` is a transaction of a person's own in this place, that commits at a normal exit and else
    rolls back; `execute(statement, parameters)` writes in it. For a store with an outbox only."""

    away: Callable[[], AbstractContextManager[object]] | None = None
    """While it is open, the place cannot be reached, by no store object. Without it those tests are skipped."""

    round_trips: Callable[[], int] | None = None
    """How often the place has been asked so far, by whomever, where it can tell. A claim of 1,000 partitions is then
    counted; without it, it is timed, and a place next door hides much."""

    group: str = field(default_factory=lambda: _unique("shop"))
    """A group without rows, of which the suite may make rows."""

    topic: str = field(default_factory=lambda: _unique("orders"))
    """A topic whose partitions 0 to 3 the store takes rows for."""
