"""What several of these tests ask for: time that stands still, and stores that are closed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kconsume.backends.sqlite.store import SqliteStore
from kconsume.failures.retry_topics import Moment


@pytest.fixture
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the course of a chunk: how many records are run at once, and how long letters wait for each other, follows
    from how long records took; and on a busy machine any of them may take long."""
    monkeypatch.setattr(Moment, "now", lambda: Moment(0.0, 0.0))


@pytest.fixture
def sqlite_stores_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close what the test opens. Since Python 3.13 an open database warns when it is collected, in some later test."""
    opened: list[SqliteStore] = []
    make = SqliteStore.__init__

    def make_and_note(store: SqliteStore, path: str | Path) -> None:
        make(store, path)
        opened.append(store)

    monkeypatch.setattr(SqliteStore, "__init__", make_and_note)
    yield
    for store in opened:
        store.close()
