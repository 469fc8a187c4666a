"""What a person reads when an app has stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kconsume import console
from kconsume.records import Partition
from kconsume.runtime.supervisor import Report

CLEAN = Report(handled=7, skipped=1, committed={Partition("orders", 0): 8}, abandoned=[], hung=[], seconds=0.24)


def test_a_clean_end_is_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console.farewell(CLEAN)
    assert capsys.readouterr().err.splitlines() == [
        "kconsume stopped in 0.2 s  handled 7  skipped 1",
        "  committed orders/0@8",
    ]


@pytest.mark.parametrize(
    ("left", "line"),
    [
        ({"unsent": 3}, "  left 3 records in the outbox: whoever has their partitions next sends them"),
        ({"abandoned": [Partition("orders", 0)]}, "  abandoned orders/0: its handler had not ended at the deadline"),
        ({"hung": ["shop"]}, "  left group shop without closing: the client did not come back in time"),
    ],
)
def test_what_was_left_is_said(capsys: pytest.CaptureFixture[str], left: dict[str, object], line: str) -> None:
    console.farewell(replace(CLEAN, **left))  # type: ignore[arg-type]
    assert capsys.readouterr().err.splitlines()[2].startswith(line)
