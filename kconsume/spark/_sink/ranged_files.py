"""Files named by the range of offsets they hold, in a folder that never shows a range twice or in part.

This module does not use Spark: the caller makes a file in a staging folder, and this module moves the file to its
place.

Each partition of a topic has a chain of notes in `_kconsume/` (readers ignore names that begin with an underscore). A
note is a small file that records one range. Its name is the end of the range before. The note is made by a hard link,
which fails if the name exists. So if two writers publish at once, for example a frozen writer and its successor, only
one of them makes the note, even if their ranges differ. The note decides which data file is valid. Then the data file
is moved to its place. Any writer may move it, and moving it twice does no harm. After a kill there is one of three
states: a file that no reader sees; a note whose file is moved to its place when a writer next opens the partition; or
the file in its place.

A chain belongs to one sink: a group, and the sink's name if it has one. The first sink that writes a partition uses
the chain in `notes/`, and is recorded in `owners/`. Earlier versions had only the chain in `notes/`. Any other sink
has a chain of its own in `others/`, so that it does not skip a range that the first sink has written.

A data file begins in `aside/`, where the next owner of the partition may remove it. Before its note is made the file
moves to `kept/`, where no writer may remove it. So a file that a note names always exists.

Files and folders are synced to the disk before the offset is committed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kconsume._event_log import EventLog
from kconsume.errors import ConfigurationError

_log = EventLog("spark")

NOTES = "_kconsume"
_LONGEST_TOPIC = 120
_TO_FILE_NAMES = str.maketrans("+/", "-_")
"""The URL-safe alphabet of base64, for the ids of topics."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class RangeSource(msgspec.Struct, frozen=True):
    """One partition of one topic. A recreated topic has another id, and so another chain."""

    topic: str
    partition: int
    topic_id: str

    @property
    def name(self) -> str:
        """The name for files and folders. The topic's name is shortened, because a file name may have 255 bytes and a
        topic name up to 249. The name has no slash, although topic ids may have one."""
        topic = self.topic
        if len(topic) > _LONGEST_TOPIC:
            topic = f"{topic[:_LONGEST_TOPIC]}-{hashlib.sha256(topic.encode()).hexdigest()[:8]}"
        return f"{topic}-{self.partition}-{self.topic_id.translate(_TO_FILE_NAMES)}"


class SinkId(msgspec.Struct, frozen=True):
    """Identifies a sink: the group whose records it writes, and the sink's name."""

    group: str
    name: str = ""
    """Empty if the user gave no name."""

    def __str__(self) -> str:
        return msgspec.json.encode([self.group, self.name] if self.name else [self.group]).decode()


class RangeNote(msgspec.Struct, frozen=True):
    """The content of a note: all offsets below `end` are in the folder, or were skipped."""

    end: int
    kept: str
    """The name of the file in `kept/`."""
    name: str
    """The name of the file in its place."""


class RangedFiles:
    """Writes files into the folder, for one process. Several processes may write into one folder at once."""

    def __init__(self, folder: Path, suffix: str, sink: SinkId, writer: str | None = None) -> None:
        """Make the object, without I/O.

        Args:
            folder: the folder that users read.
            suffix: the ending of the files' names.
            sink: the sink that writes.
            writer: the common name of writers of which only one at a time writes a partition; by default the group.
                Each of these writers removes the files that an earlier one left in `aside/`.
        """
        self.folder = folder
        self._notes = folder / NOTES
        self._suffix = suffix
        self._sink = str(sink)
        self._writer = writer or _short(sink.group)
        self._owns_first_chain: dict[RangeSource, bool] = {}
        self._ends: dict[RangeSource, int] = {}

    def next_offset(self, source: RangeSource) -> int:
        """The first offset that is not in the folder yet."""
        known = self._ends.get(source)
        if known is None or self._note_path(source, known).exists():  # another writer has continued the chain
            known = self._ends[source] = self._open_chain(source)
        return known

    @contextmanager
    def staging(self, source: RangeSource) -> Iterator[Path]:
        """The path of a folder that the caller creates, with the data file in it. It is removed after the block."""
        folder = self._aside_folder(source) / uuid.uuid4().hex
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, source: RangeSource, file: Path, at: int, first: int, last: int) -> bool:
        """Move the file to its place, as the file with the offsets from `first` to `last`.

        Args:
            at: where the chain ended when the caller chose the range.

        Returns False if another writer was faster and has moved the chain's end. The file then stays where it was.
        """
        name = f"offsets-{source.name}-{first:020}-{last:020}"
        if not self._has_first_chain(source):
            name += f"-{_short(self._sink)}"  # another sink may have a file of the same range
        note = RangeNote(last + 1, uuid.uuid4().hex, name + self._suffix)
        kept = self._kept_path(note)
        kept.parent.mkdir(parents=True, exist_ok=True)
        _sync(file)
        os.rename(file, kept)
        _sync(kept.parent)
        if not self._make_note(source, at, note):
            os.rename(kept, file)  # back to its staging folder, for another attempt
            self._ends.pop(source, None)
            return False
        self._move_to_place(note)
        self._ends[source] = note.end
        return True

    def _make_note(self, source: RangeSource, at: int, note: RangeNote) -> bool:
        return self._make_file(self._note_path(source, at), msgspec.json.encode(note))

    def _make_file(self, path: Path, content: bytes) -> bool:
        """Make a file with its whole content. Returns False if it exists."""
        temporary = self._notes / f"{uuid.uuid4().hex}.note"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        _sync(temporary)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise ConfigurationError(
                f"{self.folder} is on a file system without hard links ({error}), so a range could be written twice: "
                f"write to another file system, or take the DataFrame in a handler of your own, with the guarantee at "
                f"least once"
            ) from error
        finally:
            temporary.unlink()
        _sync(path.parent)
        return True

    def _move_to_place(self, note: RangeNote) -> None:
        try:
            os.rename(self._kept_path(note), self.folder / note.name)
        except FileNotFoundError:
            if self._kept_path(note).exists():
                raise
            # If it does not exist, another writer has moved it.
        _sync(self.folder)

    def _open_chain(self, source: RangeSource) -> int:
        """The end of the chain. Moves its last file to its place, and removes files that this writer left before."""
        chain = self._chain(source)
        ends = [int(entry.name) for entry in os.scandir(chain)] if chain.is_dir() else []
        if not ends:
            self._remove_aside(source)
            return 0
        note = msgspec.json.decode(self._note_path(source, max(ends)).read_bytes(), type=RangeNote)
        self._move_to_place(note)
        self._remove_aside(source)
        return note.end

    def _remove_aside(self, source: RangeSource) -> None:
        shutil.rmtree(self._aside_folder(source), ignore_errors=True)

    # Which chain is this sink's

    def _chain(self, source: RangeSource) -> Path:
        if self._has_first_chain(source):
            return self._notes / "notes" / source.name
        return self._notes / "others" / _short(self._sink) / source.name

    def _has_first_chain(self, source: RangeSource) -> bool:
        known = self._owns_first_chain.get(source)
        if known is None:
            known = self._owns_first_chain[source] = self._take_first_chain(source)
        return known

    def _take_first_chain(self, source: RangeSource) -> bool:
        path = self._notes / "owners" / source.name
        if not path.exists() and not self._has_files_of_other_groups(source):
            self._make_file(path, self._sink.encode())
        owner = path.read_text() if path.exists() else "an earlier version of kconsume"
        if owner != self._sink:
            _log.warning(
                "folder has files of another sink",
                folder=self.folder,
                source=source.name,
                sink=self._sink,
                other=owner,
                hint="each sink writes all of its rows; the files of both are kept",
            )
        return owner == self._sink

    def _has_files_of_other_groups(self, source: RangeSource) -> bool:
        """True if groups have written the chain, and this group is not one of them. Earlier versions did not record the
        owner of a chain, but each group that writes has a folder in `aside/`."""
        writers = {path.parent.name for path in (self._notes / "aside").glob(f"*/{source.name}")}
        return bool(writers) and self._writer not in writers

    # Paths

    def _kept_path(self, note: RangeNote) -> Path:
        return self._notes / "kept" / note.kept

    def _note_path(self, source: RangeSource, at: int) -> Path:
        return self._chain(source) / f"{at:020}"

    def _aside_folder(self, source: RangeSource) -> Path:
        return self._notes / "aside" / self._writer / source.name


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
