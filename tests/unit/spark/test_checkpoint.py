"""Checkpoints: Spark's logs as text, and which folder a stream may go on with."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kconsume.errors import CheckpointMismatch, OffsetError
from kconsume.records import Partition
from kconsume.spark._batch.ranges import Offsets, Plan, offsets_json
from kconsume.spark._stream.checkpoint import CheckpointGuard, OffsetLog
from kconsume.spark._stream.folders import LocalFolder
from kconsume.spark._stream.offset_log import OffsetLogEntry, first_offsets, kafka_offsets, read_entry

A, B = Partition("a", 0), Partition("a", 1)
WHO = {"group": "shop", "topics": "a"}


def test_an_entry_of_version_one() -> None:
    entry = read_entry('v1\n{"batchWatermarkMs":0}\n{"a":{"0":7,"1":3}}')
    assert entry == OffsetLogEntry('{"batchWatermarkMs":0}', ('{"a":{"0":7,"1":3}}',))
    assert kafka_offsets(entry) == (0, {A: 7, B: 3})


def test_an_entry_of_version_two_names_its_sources() -> None:
    entry = read_entry('v2\n{}\norders:{"a":{"0":7}}')
    assert kafka_offsets(entry) == (0, {A: 7})


def test_a_source_without_an_offset_is_none() -> None:
    assert read_entry("v1\n{}\n-").sources == (None,)
    assert read_entry("v2\n{}\norders:-").sources == (None,)


def test_another_version_is_refused() -> None:
    with pytest.raises(OffsetError, match="begins with 'v3', and kconsume reads v1 and v2"):
        read_entry("v3\n{}\n{}")


@pytest.mark.parametrize("sources", [("-",), ('{"a":{"0":1}}', '{"b":{"0":1}}'), ("42",), ('{"a":{"0":1}}', "42")])
def test_a_query_with_other_sources_is_refused(sources: tuple[str, ...]) -> None:
    with pytest.raises(OffsetError, match="read one Kafka source in the query"):
        kafka_offsets(read_entry("\n".join(["v1", "{}", *sources])))


@pytest.mark.parametrize("text", ['\0v1\n{"a":{"0":7}}', 'v1\n{"a":{"0":7}}\n'])
def test_where_batch_zero_begins(text: str) -> None:
    assert first_offsets(text) == {A: 7}


# A folder


def planned(folder: Path, *batches: Offsets, done: int, start: Offsets | None = None) -> None:
    """What Spark leaves: the ends of batches, of which so many are committed."""
    for kind in ("offsets", "commits", "sources/0"):
        (folder / kind).mkdir(parents=True)
    first = dict.fromkeys(batches[0], 0) if start is None else start
    (folder / "sources/0/0").write_text(f"\0v1\n{offsets_json(first)}")
    for number, ends in enumerate(batches):
        (folder / f"offsets/{number}").write_text(f"v1\n{{}}\n{offsets_json(ends)}")
        (folder / f"offsets/.{number}.crc").write_text("")
    for number in range(done):
        (folder / f"commits/{number}").write_text("v1\n{}")


def guard(base: Path, who: dict[str, str] = WHO) -> CheckpointGuard:
    return CheckpointGuard(LocalFolder(str(base)), str(base), who)


def test_a_batch_lies_between_two_entries(tmp_path: Path) -> None:
    planned(tmp_path, {A: 5, B: 5}, {A: 8, B: 5}, done=1, start={A: 2, B: 0})
    log = OffsetLog(LocalFolder(str(tmp_path)))
    assert str(log.plan(0)) == "a/0@2..5,a/1@0..5"
    assert str(log.plan(1)) == "a/0@5..8"
    assert str(OffsetLog(LocalFolder(str(tmp_path))).plan(1)) == "a/0@5..8"
    assert log.last() == (1, False)


def test_a_batch_that_is_not_in_the_log_is_an_error(tmp_path: Path) -> None:
    planned(tmp_path, {A: 5}, done=1)
    with pytest.raises(OffsetError, match="no offsets of batch 4"):
        OffsetLog(LocalFolder(str(tmp_path))).plan(4)


def test_an_empty_folder_begins_a_first_generation(tmp_path: Path) -> None:
    location = guard(tmp_path / "new").resolve({A: 3})
    assert (location.folder, location.is_new) == ("gen-0001", True)


@pytest.mark.parametrize(
    ("done", "stored"),
    [
        (2, {A: 8, B: 5}),  # Spark and the store are both behind batch 1
        (1, {A: 5, B: 5}),  # batch 1 was planned, and not applied
        (1, {A: 8, B: 5}),  # it was applied, and Spark does not know
    ],
)
def test_a_folder_that_agrees_with_the_store_is_used_again(tmp_path: Path, done: int, stored: Offsets) -> None:
    guard(tmp_path).resolve({})
    planned(tmp_path / "gen-0001", {A: 5, B: 5}, {A: 8, B: 5}, done=done)
    location = guard(tmp_path).resolve(stored)
    assert (location.folder, location.is_new) == ("gen-0001", False)


def test_tasks_that_were_done_in_part_agree_range_by_range(tmp_path: Path) -> None:
    guard(tmp_path).resolve({})
    planned(tmp_path / "gen-0001", {A: 5, B: 5}, {A: 8, B: 9}, done=1)
    location = guard(tmp_path).resolve({A: 8, B: 5})
    assert not location.is_new
    assert location.pending == Plan.between({A: 5, B: 5}, {A: 8, B: 9})


@pytest.mark.parametrize(
    ("done", "stored"),
    [
        (2, {A: 9, B: 5}),  # an embedded app went on
        (2, {A: 5, B: 5}),  # the store was set back
        (1, {A: 6, B: 5}),  # in the middle of the batch
        (2, {A: 8, B: 5, Partition("a", 2): 4}),  # a partition that Spark would begin at 0
        (2, {A: 8}),  # the row of one is gone
    ],
)
def test_where_they_disagree_the_store_wins_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, done: int, stored: Offsets
) -> None:
    guard(tmp_path).resolve({})
    planned(tmp_path / "gen-0001", {A: 5, B: 5}, {A: 8, B: 5}, done=done)
    with caplog.at_level(logging.WARNING):
        location = guard(tmp_path).resolve(stored)
    assert (location.folder, location.is_new) == ("gen-0002", True)
    assert "checkpoint disagrees with store" in caplog.text
    assert "new_generation=gen-0002" in caplog.text


def test_a_generation_in_which_nothing_was_planned_is_used(tmp_path: Path) -> None:
    guard(tmp_path).resolve({})
    (tmp_path / "gen-0001").mkdir()
    assert guard(tmp_path).resolve({A: 7}).folder == "gen-0001"


def test_the_checkpoint_of_a_query_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    planned(tmp_path, {A: 5}, done=1)
    with pytest.raises(CheckpointMismatch, match="a query that is not kconsume's"):
        guard(tmp_path).resolve({A: 5})


@pytest.mark.parametrize("what", list(WHO))
def test_the_checkpoint_of_another_query_of_ours_is_refused(tmp_path: Path, what: str) -> None:
    guard(tmp_path).resolve({})
    with pytest.raises(CheckpointMismatch, match=f"its {what} is '{WHO[what]}', and here it is 'other'"):
        guard(tmp_path, {**WHO, what: "other"}).resolve({})
