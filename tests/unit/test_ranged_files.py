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
from kconsume.spark.ranged_files import NOTES, Note, RangedFiles, Source

CLICKS = Source("clicks", 3, "Xb3k")


class Killed(BaseException):
    """The process is gone: nothing after it is run, not even what cleans up."""


def write(files: RangedFiles, first: int, last: int, source: Source = CLICKS) -> None:
    """What a sink does with a batch."""
    while first <= last:
        end = files.end(source)
        first = max(first, end)
        if first > last:
            return
        with files.aside(source) as aside:
            aside.mkdir()
            made = aside / "part-0"
            made.write_text(" ".join(map(str, range(first, last + 1))))
            if files.put(source, made, end, first, last):
                return


def visible(folder: Path) -> list[int]:
    return sorted(int(word) for file in folder.glob("offsets-*") for word in file.read_text().split())


def files_in(folder: Path) -> RangedFiles:
    return RangedFiles(folder, ".txt", "group")


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
    for source in (CLICKS, Source("clicks", 4, "Xb3k"), Source("clicks", 3, "Yc4m"), Source("views", 3, "Xb3k")):
        write(files, 0, 1, source)
    assert visible(tmp_path) == [0] * 4 + [1] * 4


def test_the_id_of_a_topic_may_have_a_slash(tmp_path: Path) -> None:
    write(files_in(tmp_path), 0, 1, Source("clicks", 0, "tgBv0Y/oS3Cjy5t+QHtN2w"))
    assert visible(tmp_path) == [0, 1]
    assert [path.name[:36] for path in tmp_path.glob("offsets-*")] == ["offsets-clicks-0-tgBv0Y_oS3Cjy5t-QHt"]


def test_a_file_that_cannot_be_put_in_its_place_is_an_error_and_stays(tmp_path: Path) -> None:
    class Elsewhere(RangedFiles):
        def _noted(self, source: Source, at: int, note: Note) -> bool:
            self.folder = self.folder / "gone"
            return super()._noted(source, at, note)

    with pytest.raises(FileNotFoundError):
        write(Elsewhere(tmp_path, ".txt", "group"), 0, 1)
    assert visible(tmp_path) == []
    assert files_in(tmp_path).end(CLICKS) == 2
    assert visible(tmp_path) == [0, 1]


def test_names_of_topics_may_be_as_long_as_kafka_has_them(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    for last in "ab":
        write(files, 0, 1, Source("t" * 248 + last, 2**31 - 1, "k" * 22))
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


batches = st.lists(st.tuples(st.integers(1, 30), st.none() | st.integers(0, 16)), min_size=1, max_size=12)


@given(batches)
def test_a_kill_at_any_step_leaves_no_offset_twice_and_loses_none(plan: list[tuple[int, int | None]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert after_kills(Path(folder), plan, RangedFiles) == []


class Blind(RangedFiles):
    """Without the guard: it does not look at what is there."""

    def end(self, source: Source) -> int:
        super().end(source)
        return 0

    def _noted(self, source: Source, at: int, note: Note) -> bool:
        super()._noted(source, note.end, note)
        return True


def test_control_without_the_chain_a_range_of_another_size_is_there_twice(tmp_path: Path) -> None:
    assert after_kills(tmp_path, [(10, 9), (4, None), (6, None)], Blind) != []


def after_kills(folder: Path, plan: list[tuple[int, int | None]], kind: type[RangedFiles]) -> list[str]:
    """A consumer that is killed and starts again where its last batch began: what is wrong with the folder."""
    offset, wrong = 0, []
    files = kind(folder, ".txt", "group")
    for size, step in plan:
        last = offset + size - 1
        survived = killed_at(100_000 if step is None else step, partial(write, files, offset, last))
        seen = visible(folder)
        if len(seen) != len(set(seen)):
            wrong.append(f"twice after {offset}-{last}: {seen}")
        if survived:
            offset = last + 1
        else:
            files = kind(folder, ".txt", "group")
    write(files, offset, offset)
    seen = visible(folder)
    if seen[: offset + 1] != list(range(offset + 1)) or len(seen) != len(set(seen)):
        wrong.append(f"at the end: {seen}")
    return wrong


def at_once(folder: Path, kind: type[RangedFiles], writers: int = 4, most: int = 60) -> list[int]:
    """Several owners of one partition at the same time, each with batches of its own size."""
    together = threading.Barrier(writers)

    def consume(size: int) -> None:
        files = kind(folder, ".txt", f"writer-{size}")
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
