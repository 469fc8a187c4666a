"""How events are written: a name, then fields; as text for people, as values for JSON."""

from __future__ import annotations

import json
import logging

import pytest

from kconsume._console import JsonLines
from kconsume._event_log import EventLog
from kconsume.records import Partition

LOG = EventLog("rebalance")


def test_an_event_is_a_line_with_its_name_first(caplog: pytest.LogCaptureFixture) -> None:
    LOG.warning("partition lost", partition=Partition("orders", 3), seconds=0.12345, cause=LookupError("no such sku"))
    assert caplog.messages == ['partition lost partition=orders/3 seconds=0.1235 cause="LookupError: no such sku"']
    assert caplog.records[0].name == "kconsume.rebalance"
    assert caplog.records[0].filename == "test_event_log.py"


def test_lists_and_mappings_are_joined_by_commas(caplog: pytest.LogCaptureFixture) -> None:
    orders = [Partition("orders", number) for number in range(2)]
    LOG.warning("offsets saved", partitions=orders, offsets=dict.fromkeys(orders, 7), none=[])
    assert caplog.messages == ["offsets saved partitions=orders/0,orders/1 offsets=orders/0@7,orders/1@7 none=-"]


def test_json_carries_the_fields_and_not_the_line(caplog: pytest.LogCaptureFixture) -> None:
    LOG.error("partition held", partition=Partition("orders", 3), offset=1042, members=["a", "b"], cause=None)
    line = json.loads(JsonLines().format(caplog.records[0]))
    del line["time"]
    assert line == {
        "level": "error",
        "logger": "kconsume.rebalance",
        "message": "partition held",
        "partition": "orders/3",
        "offset": 1042,
        "members": ["a", "b"],
        "cause": None,
    }


def test_a_field_cannot_take_the_place_of_what_every_line_has(caplog: pytest.LogCaptureFixture) -> None:
    LOG.error("member refused", level="strict")
    line = json.loads(JsonLines().format(caplog.records[0]))
    assert line["level"] == "error"
    assert line["fields"] == {"level": "strict"}


class Unprintable:
    def __str__(self) -> str:
        raise AssertionError("formatted")


def test_nothing_is_formatted_below_the_level() -> None:
    logging.getLogger("kconsume.rebalance").setLevel(logging.ERROR)
    try:
        LOG.warning("partition lost", partition=Unprintable())
    finally:
        logging.getLogger("kconsume.rebalance").setLevel(logging.NOTSET)
    with pytest.raises(AssertionError, match="formatted"):
        LOG.error("partition lost", partition=Unprintable())
