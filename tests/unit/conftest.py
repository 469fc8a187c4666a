"""What several of these tests ask for: time that stands still."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the course of a chunk: how many records are run at once, and how long letters wait for each other, follows
    from how long records took; and on a busy machine any of them may take long."""
    monkeypatch.setattr("kconsume.runtime.course._clock", lambda: 0.0)
    monkeypatch.setattr("kconsume.runtime.owing._clock", lambda: 0.0)
