"""Files named by their offsets: whatever dies, and whoever writes at the same time, no offset is there twice."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconsume.errors import ConfigurationError
from kconsume.spark._sink.ranged_files import NOTES, RangedFiles, RangeNote, RangeSource, SinkId

CLICKS = RangeSource("clicks", 3, "Xb3k")
ETL = SinkId("etl")


class Killed(BaseException):
    """The process is gone: nothing after it is run, not even what cleans up."""


def write(files: RangedFiles, first: int, last: int, source: RangeSource = CLICKS) -> None:
    """What a sink does with a batch."""
    while first <= last:
        end = files.next_offset(source)
        first = max(first, end)
        if first > last:
            return
        with files.staging(source) as aside:
            aside.mkdir()
            made = aside / "part-0"
            made.write_text(" ".join(map(str, range(first, last + 1))))
            if files.publish(source, made, end, first, last):
                return


def visible(folder: Path) -> list[int]:
    return sorted(int(word) for file in folder.glob("offsets-*") for word in file.read_text().split())


def files_in(folder: Path) -> RangedFiles:
    return RangedFiles(folder, ".txt", ETL)


def test_a_file_has_the_name_of_its_range_and_readers_see_nothing_else(tmp_path: Path) -> None:
    write(files_in(tmp_path), 5, 7)
    (data,) = (path for path in tmp_path.iterdir() if not path.name.startswith("_"))
    assert data.name == "offsets-clicks-3-Xb3k-00000000000000000005-00000000000000000007.txt"
    assert visible(tmp_path) == [5, 6, 7]
    assert not list((tmp_path / NOTES / "aside").rglob("part-*"))


def test_a_range_that_was_written_is_not_repeated_in_ranges_of_another_size(tmp_path: Path) -> None:
    write(files_in(tmp_path), 0, 99)
    again = files_in(tmp_path)
    for first in range(0, 150, 40):
        write(again, first, min(first + 39, 149))
    assert visible(tmp_path) == list(range(150))


def test_partitions_topics_and_a_topic_made_again_do_not_meet(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    for source in (
        CLICKS,
        RangeSource("clicks", 4, "Xb3k"),
        RangeSource("clicks", 3, "Yc4m"),
        RangeSource("views", 3, "Xb3k"),
    ):
        write(files, 0, 1, source)
    assert visible(tmp_path) == [0] * 4 + [1] * 4


def test_the_id_of_a_topic_may_have_a_slash(tmp_path: Path) -> None:
    write(files_in(tmp_path), 0, 1, RangeSource("clicks", 0, "tgBv0Y/oS3Cjy5t+QHtN2w"))
    assert visible(tmp_path) == [0, 1]
    assert [path.name[:36] for path in tmp_path.glob("offsets-*")] == ["offsets-clicks-0-tgBv0Y_oS3Cjy5t-QHt"]


def test_a_file_that_cannot_be_put_in_its_place_is_an_error_and_stays(tmp_path: Path) -> None:
    class Elsewhere(RangedFiles):
        def _make_note(self, source: RangeSource, at: int, note: RangeNote) -> bool:
            self.folder = self.folder / "gone"
            return super()._make_note(source, at, note)

    with pytest.raises(FileNotFoundError):
        write(Elsewhere(tmp_path, ".txt", ETL), 0, 1)
    assert visible(tmp_path) == []
    assert files_in(tmp_path).next_offset(CLICKS) == 2
    assert visible(tmp_path) == [0, 1]


def test_names_of_topics_may_be_as_long_as_kafka_has_them(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    for last in "ab":
        write(files, 0, 1, RangeSource("t" * 248 + last, 2**31 - 1, "k" * 22))
    assert visible(tmp_path) == [0, 0, 1, 1]


STEPS = ("rename", "link", "unlink", "fsync")


def killed_at(step: int, work: Callable[[], None]) -> bool:
    """Does it, and dies before its nth change of the disk; whether it came to its end before."""
    count = itertools.count()
    patch = pytest.MonkeyPatch()

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            if next(count) >= step:
                raise Killed
            return real(*arguments, **named)

        return call

    for name in STEPS:
        patch.setattr(os, name, counted(getattr(os, name)))
    patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
    try:
        work()
    except Killed:
        return False
    finally:
        patch.undo()
    return True


batches = st.lists(st.tuples(st.integers(1, 30), st.none() | st.integers(0, 20)), min_size=1, max_size=12)


@given(batches)
def test_a_kill_at_any_step_leaves_no_offset_twice_and_loses_none(plan: list[tuple[int, int | None]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert after_kills(Path(folder), plan, RangedFiles) == []


class Blind(RangedFiles):
    """Without the guard: it does not look at what is there."""

    def next_offset(self, source: RangeSource) -> int:
        super().next_offset(source)
        return 0

    def _make_note(self, source: RangeSource, at: int, note: RangeNote) -> bool:
        super()._make_note(source, note.end, note)
        return True


def test_control_without_the_chain_a_range_of_another_size_is_there_twice(tmp_path: Path) -> None:
    assert after_kills(tmp_path, [(10, 13), (4, None), (6, None)], Blind) != []


def after_kills(folder: Path, plan: list[tuple[int, int | None]], kind: type[RangedFiles]) -> list[str]:
    """A consumer that is killed and starts again where its last batch began: what is wrong with the folder."""
    offset, wrong = 0, []
    files = kind(folder, ".txt", ETL)
    for size, step in plan:
        last = offset + size - 1
        survived = killed_at(100_000 if step is None else step, partial(write, files, offset, last))
        seen = visible(folder)
        if len(seen) != len(set(seen)):
            wrong.append(f"twice after {offset}-{last}: {seen}")
        if survived:
            offset = last + 1
        else:
            files = kind(folder, ".txt", ETL)
    write(files, offset, offset)
    seen = visible(folder)
    if seen[: offset + 1] != list(range(offset + 1)) or len(seen) != len(set(seen)):
        wrong.append(f"at the end: {seen}")
    return wrong


def at_once(folder: Path, kind: type[RangedFiles], writers: int = 4, most: int = 60) -> list[int]:
    """Several owners of one partition at the same time, each with batches of its own size."""
    together = threading.Barrier(writers)

    def consume(size: int) -> None:
        files = kind(folder, ".txt", ETL, f"writer-{size}")
        together.wait(20)
        for first in range(0, most, size):
            write(files, first, min(first + size, most) - 1)

    threads = [threading.Thread(target=consume, args=(size,)) for size in range(3, 3 + writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return visible(folder)


def test_of_two_owners_only_one_writes_each_offset(tmp_path: Path) -> None:
    assert at_once(tmp_path, RangedFiles) == list(range(60))


def test_control_without_the_chain_two_owners_write_the_same_offsets(tmp_path: Path) -> None:
    assert len(at_once(tmp_path, Blind)) > 60


def test_a_file_system_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ConfigurationError, match="without hard links"):
        write(files_in(tmp_path), 0, 1)
    assert visible(tmp_path) == []


# Several sinks in one folder


OTHER = SinkId("other")


def in_folder(folder: Path, sink: SinkId) -> RangedFiles:
    return RangedFiles(folder, ".txt", sink)


class Before(RangedFiles):
    """As the version before wrote: one chain, whoever writes, and no note of whose it is."""

    def _take_first_chain(self, source: RangeSource) -> bool:
        return True


@pytest.mark.parametrize("other", [OTHER, SinkId("etl", "odd")], ids=["another group", "another name"])
def test_two_sinks_write_all_of_their_rows_into_one_folder(tmp_path: Path, other: SinkId) -> None:
    for start in range(0, 10, 5):
        for sink in (ETL, other):
            write(in_folder(tmp_path, sink), start, start + 4)
    assert visible(tmp_path) == sorted([*range(10), *range(10)])
    for sink in (ETL, other):  # each knows what it has written
        write(in_folder(tmp_path, sink), 0, 9)
    assert visible(tmp_path) == sorted([*range(10), *range(10)])


def test_control_with_one_chain_for_all_the_second_sink_loses_its_rows(tmp_path: Path) -> None:
    for sink in (ETL, OTHER):
        write(Before(tmp_path, ".txt", sink), 0, 4)
    assert visible(tmp_path) == [0, 1, 2, 3, 4]


def test_two_sinks_that_begin_at_the_same_time_share_no_chain(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def begin(sink: SinkId) -> None:
        files = in_folder(tmp_path, sink)
        together.wait(20)
        write(files, 0, 4)

    threads = [threading.Thread(target=begin, args=(SinkId(f"group-{n}"),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert visible(tmp_path) == sorted([0, 1, 2, 3, 4] * 4)
    assert len(list((tmp_path / NOTES / "owners").iterdir())) == 1


@given(batches)
def test_a_kill_at_any_step_of_the_second_sink_leaves_no_offset_twice_and_loses_none(
    plan: list[tuple[int, int | None]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first = in_folder(Path(folder), OTHER)
        end = first.next_offset(CLICKS)
        with first.staging(CLICKS) as aside:
            aside.mkdir()
            empty = aside / "part-0"
            empty.write_text("")  # so that what is visible is the second sink's
            assert first.publish(CLICKS, empty, end, 0, 0)
        assert after_kills(Path(folder), plan, RangedFiles) == []


def test_a_folder_of_the_version_before_is_gone_on_with_by_old_and_new_processes_side_by_side(tmp_path: Path) -> None:
    old = Before(tmp_path, ".txt", ETL)
    write(old, 0, 4)
    new = in_folder(tmp_path, ETL)
    write(new, 0, 6)  # of a partition that came over before its offset had passed
    write(old, 5, 9)  # and went back
    write(new, 8, 11)
    assert visible(tmp_path) == list(range(12))


def test_a_second_sink_does_not_take_the_chain_that_an_earlier_version_of_the_first_goes_on_with(
    tmp_path: Path,
) -> None:
    write(Before(tmp_path, ".txt", ETL), 0, 4)
    write(in_folder(tmp_path, OTHER), 0, 4)
    write(in_folder(tmp_path, ETL), 0, 6)
    assert visible(tmp_path) == sorted([*range(5), *range(7)])


def test_a_kill_between_the_note_and_its_file_is_made_good_by_the_version_after(tmp_path: Path) -> None:
    class Killing(Before):
        def _move_to_place(self, note: RangeNote) -> None:
            raise Killed

    with pytest.raises(Killed):
        write(Killing(tmp_path, ".txt", ETL), 0, 4)
    assert visible(tmp_path) == []
    write(in_folder(tmp_path, ETL), 0, 6)
    assert visible(tmp_path) == list(range(7))
