"""The statements about a table of dead letters on PostgreSQL, in the handler's transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from kconsume.backends import letter_table
from kconsume.failures.letters import Letter

Statement: TypeAlias = tuple[str, dict[str, Any] | None]


def looked_for(table: str) -> Statement:
    return "select to_regclass(%(table)s) is not null", {"table": letter_table.quoted(table)}


def has_sent_back(table: str) -> Statement:
    """Answers with a row if the table has the column."""
    return (
        "select 1 from pg_attribute where attrelid = to_regclass(%(table)s) and attname = 'sent_back' "
        "and not attisdropped",
        {"table": letter_table.quoted(table)},
    )


def made(table: str) -> Iterator[Statement]:
    """One after the other: two transactions that make the same table at once get in each other's way."""
    lock = int.from_bytes(hashlib.blake2b(table.encode(), digest_size=8, person=b"letters").digest(), signed=True)
    yield "select pg_advisory_xact_lock(%(lock)s)", {"lock": lock}
    yield letter_table.create(table, "postgres"), None


def kept(table: str, letters: Sequence[Letter]) -> Iterator[Statement]:
    for letter in letters:
        yield letter_table.insert(table, "postgres"), letter_table.row_of(letter, "postgres")
