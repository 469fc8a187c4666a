"""What a person reads when an app has stopped."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kconsume import _console
from kconsume._runtime.supervisor import Report
from kconsume.errors import HandlerFailed, OffsetOutOfRange
from kconsume.records import Partition

CLEAN = Report(handled=7, skipped=1, committed={Partition("orders", 0): 8}, abandoned=[], hung=[], seconds=0.24)


def test_a_clean_end_is_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    _console.farewell(CLEAN)
    assert capsys.readouterr().err.splitlines() == [
        "kconsume stopped in 0.2 s  handled 7  skipped 1",
        "  committed orders/0@8",
    ]


@pytest.mark.parametrize(
    ("left", "line"),
    [
        ({"unsent": 3}, "  left 3 records in the outbox: the next owners of their partitions send them"),
        ({"abandoned": [Partition("orders", 0)]}, "  abandoned orders/0: its handler had not ended at the deadline"),
        ({"held": {Partition("orders", 3): OffsetOutOfRange("it is gone")}}, "  held orders/3: it is gone"),
        ({"hung": ["shop"]}, "  left group shop without closing: the client did not close in time"),
    ],
)
def test_what_was_left_is_said(capsys: pytest.CaptureFixture[str], left: dict[str, object], line: str) -> None:
    _console.farewell(replace(CLEAN, **left))  # type: ignore[arg-type]
    assert capsys.readouterr().err.splitlines()[2].startswith(line)


def test_a_record_that_holds_its_partition_is_named_with_the_command_that_shows_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCONSUME_APP", "shop:app")
    failed = HandlerFailed("reserve", "orders/3@7", ValueError("no such sku"))
    _console.farewell(replace(CLEAN, held={Partition("orders", 3): failed}))
    assert capsys.readouterr().err.splitlines()[2:] == [
        "  held orders/3: reserve failed on orders/3@7: ValueError: no such sku",
        "  see it again: kconsume try shop:app orders/3@7",
    ]


def test_as_json_the_end_is_an_event_with_fields(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_console, "_in_json", lambda: True)
    caplog.set_level("INFO")
    failed = HandlerFailed("reserve", "orders/3@7", ValueError("no such sku"))
    _console.farewell(replace(CLEAN, failure=failed, hung=["shop"], unsent=3))
    stopped, failure = [json.loads(_console.JsonLines().format(record)) for record in caplog.records]
    assert (stopped["message"], stopped["handled"], stopped["skipped"]) == ("consumer stopped", 7, 1)
    assert stopped["committed"] == {"orders/0": 8}
    assert (stopped["unclosed_groups"], stopped["outbox_records"]) == (["shop"], 3)
    assert (failure["message"], failure["record"]) == ("consumer failed", "orders/3@7")
    assert failure["error"] == "reserve failed on orders/3@7: ValueError: no such sku"
    assert failure["exception"].endswith("ValueError: no such sku")
