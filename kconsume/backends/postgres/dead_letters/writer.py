"""The statements about a table of dead letters on PostgreSQL, in the handler's transaction.

Returns the statements with their values. Executes none of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from kconsume.backends.dead_letters import tables
from kconsume.failures.letter_headers import Letter

Statement: TypeAlias = tuple[str, dict[str, Any] | None]


def table_exists(table: str) -> Statement:
    """The query returns one row, with a boolean."""
    return "select to_regclass(%(table)s) is not null", {"table": tables.quoted(table)}


def has_sent_back_column(table: str) -> Statement:
    """The query returns a row if the table has the column `sent_back`."""
    return (
        "select 1 from pg_attribute where attrelid = to_regclass(%(table)s) and attname = 'sent_back' "
        "and not attisdropped",
        {"table": tables.quoted(table)},
    )


def create_table(table: str) -> Iterator[Statement]:
    """Takes a lock first, because two transactions that create the same table at once would fail."""
    lock = int.from_bytes(hashlib.blake2b(table.encode(), digest_size=8, person=b"letters").digest(), signed=True)
    yield "select pg_advisory_xact_lock(%(lock)s)", {"lock": lock}
    yield tables.create(table, "postgres"), None


def insert_letters(table: str, letters: Sequence[Letter]) -> Iterator[Statement]:
    for letter in letters:
        yield tables.insert(table, "postgres"), tables.row_of(letter, "postgres")
