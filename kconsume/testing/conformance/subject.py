"""The store that a suite examines: how to open it, how to write through it, and how to look at it from outside.

`Subject` is a value that the author of the store fills in. Nothing here opens or checks anything.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from kconsume.backends.base import OffsetStore


def _unique(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex[:12]}"


@dataclass(frozen=True)
class Subject:
    """A place where a store keeps its rows. It may hold rows of other groups, which the suite does not touch."""

    open: Callable[[], OffsetStore]
    """Returns a new store object on this place at each call, because two owners are two objects. If the place is an
    object in memory, each call may return the same one. The suite closes the objects."""

    write: Callable[..., object] | None = None
    """`write(connection, number)` writes one effect, the number, through the `connection` of a transaction, as a
    handler would. It must be possible to write a number twice, and to see it twice: no unique key."""

    effects: Callable[[], Iterable[int]] | None = None
    """Returns all committed numbers, in any order, read outside of all transactions."""

    own: Callable[[], AbstractContextManager[Callable[[str, Any], object]]] | None = None
    """`with own() as execute:` is a transaction of the user's own in this place. It commits at a normal exit, else it
    rolls back. `execute(statement, parameters)` writes in the transaction. Only for a store with an outbox."""

    away: Callable[[], AbstractContextManager[object]] | None = None
    """A context manager: during its block no store object can reach the place. None skips the tests of outages."""

    round_trips: Callable[[], int] | None = None
    """Returns the number of round trips to the place so far, by all clients, if the place can count them. The suite
    then counts the round trips of a claim of 1,000 partitions. Otherwise the suite times the claim, and with a server
    nearby, extra round trips may not show."""

    group: str = field(default_factory=lambda: _unique("shop"))
    """A group without rows. The suite makes rows for it."""

    topic: str = field(default_factory=lambda: _unique("orders"))
    """A topic for whose partitions 0 to 3 the store accepts rows."""
