"""Files that are named by the range of offsets they hold, in a folder that never shows a range twice or in part.

No Spark here: a file has been made aside, by whoever, and is put in its place. For each partition of a topic there is a
chain of notes in `_kconsume/`, which readers pass over as they do everything with an underscore. A note is named by the
offset at which the chain ended before it, and made by a hard link, which fails if the name is there: of two writers,
one is frozen and one has taken over, or one was killed and started again, only one makes the note, whatever ranges each
had in mind. The note is the decision; putting the file in its place follows it, by whoever comes by, and can be done
twice. So a kill leaves one of three things: a file that nobody will ever see, a note whose file is put in its place
when the partition is opened next, or all of it.

A chain belongs to one sink: a group, and the sink's name if it was given one. The first sink that writes a partition
takes the chain in `notes/`, which is the only one that earlier versions know, and is noted in `owners/`. Any other sink
has a chain of its own in `others/`, so that neither leaves out what the other has written.

A file is first `aside`, where the next owner of the partition may remove it, and is `kept`, where nobody may, before
its note is made: what a note names is never removed.

What has to be on the disk before the offset passes is there: files and folders are synced.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kconsume.errors import ConfigurationError

_log = logging.getLogger("kconsume.spark")

NOTES = "_kconsume"
_LONG = 120
_TO_NAMES = str.maketrans("+/", "-_")
"""As base64 for addresses has it."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class Source(msgspec.Struct, frozen=True):
    """One partition of one topic; made again, a topic has another id and begins another chain."""

    topic: str
    partition: int
    topic_id: str

    @property
    def name(self) -> str:
        """For files and folders: their names may have 255 bytes, where those of topics have up to 249, and no slash,
        which the id of a topic may have."""
        topic = self.topic
        if len(topic) > _LONG:
            topic = f"{topic[:_LONG]}-{hashlib.sha256(topic.encode()).hexdigest()[:8]}"
        return f"{topic}-{self.partition}-{self.topic_id.translate(_TO_NAMES)}"


class Sink(msgspec.Struct, frozen=True):
    """Who writes: whose records these are, and what was made of them."""

    group: str
    name: str = ""
    """Empty if the user gave it none."""

    def __str__(self) -> str:
        return msgspec.json.encode([self.group, self.name] if self.name else [self.group]).decode()


class Note(msgspec.Struct, frozen=True):
    """A range that was decided on: everything below `end` is in the folder, or was passed over."""

    end: int
    kept: str
    """The name of the file until it is in its place."""
    name: str
    """And then."""


class RangedFiles:
    """The folder, as one process writes into it; several may."""

    def __init__(self, folder: Path, suffix: str, sink: Sink, writer: str | None = None) -> None:
        """`writer` names those of whom one at a time writes a partition: the group, if nothing else is said. What it
        left aside, it removes."""
        self.folder = folder
        self._notes = folder / NOTES
        self._suffix = suffix
        self._sink = str(sink)
        self._writer = writer or _short(sink.group)
        self._is_first: dict[Source, bool] = {}
        self._ends: dict[Source, int] = {}

    def end(self, source: Source) -> int:
        """The first offset that is not in the folder yet."""
        known = self._ends.get(source)
        if known is None or self._note(source, known).exists():  # another has written it since
            known = self._ends[source] = self._opened(source)
        return known

    @contextmanager
    def aside(self, source: Source) -> Iterator[Path]:
        """A folder that does not exist yet, to make a file in; gone afterwards with what was not put in its place."""
        made = self._asides(source) / uuid.uuid4().hex
        made.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def put(self, source: Source, made: Path, at: int, first: int, last: int) -> bool:
        """Put the file in its place as the one with these offsets, if the chain still ends where it did: `at`."""
        name = f"offsets-{source.name}-{first:020}-{last:020}"
        if not self._has_the_first_chain(source):
            name += f"-{_short(self._sink)}"  # the other sink may have a file of the same range
        note = Note(last + 1, uuid.uuid4().hex, name + self._suffix)
        kept = self._kept(note)
        kept.parent.mkdir(parents=True, exist_ok=True)
        _sync(made)
        os.rename(made, kept)
        _sync(kept.parent)
        if not self._noted(source, at, note):
            os.rename(kept, made)  # for another attempt
            self._ends.pop(source, None)
            return False
        self._place(note)
        self._ends[source] = note.end
        return True

    def _noted(self, source: Source, at: int, note: Note) -> bool:
        return self._made(self._note(source, at), msgspec.json.encode(note))

    def _made(self, named: Path, content: bytes) -> bool:
        """Make this file with all of its content; False if it is there already."""
        written = self._notes / f"{uuid.uuid4().hex}.note"
        named.parent.mkdir(parents=True, exist_ok=True)
        written.write_bytes(content)
        _sync(written)
        try:
            os.link(written, named)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise ConfigurationError(
                f"{self.folder} is on a file system without hard links ({error}), so a range could be written twice: "
                f"write to another, or take the DataFrame in a handler of your own, at least once"
            ) from error
        finally:
            written.unlink()
        _sync(named.parent)
        return True

    def _place(self, note: Note) -> None:
        try:
            os.rename(self._kept(note), self.folder / note.name)
        except FileNotFoundError:
            if self._kept(note).exists():
                raise
            # else another was here first
        _sync(self.folder)

    def _opened(self, source: Source) -> int:
        """The chain's end, read; its last file is put in its place, and what our group left aside before is removed."""
        ends = [int(entry.name) for entry in os.scandir(self._chain(source))] if self._chain(source).is_dir() else []
        if not ends:
            self._tidy(source)
            return 0
        note = msgspec.json.decode(self._note(source, max(ends)).read_bytes(), type=Note)
        self._place(note)
        self._tidy(source)
        return note.end

    def _tidy(self, source: Source) -> None:
        shutil.rmtree(self._asides(source), ignore_errors=True)

    def _kept(self, note: Note) -> Path:
        return self._notes / "kept" / note.kept

    def _chain(self, source: Source) -> Path:
        if self._has_the_first_chain(source):
            return self._notes / "notes" / source.name
        return self._notes / "others" / _short(self._sink) / source.name

    def _has_the_first_chain(self, source: Source) -> bool:
        known = self._is_first.get(source)
        if known is None:
            known = self._is_first[source] = self._take_the_first_chain(source)
        return known

    def _take_the_first_chain(self, source: Source) -> bool:
        owner = self._notes / "owners" / source.name
        if not owner.exists() and not self._was_written_by_others(source):
            self._made(owner, self._sink.encode())
        holder = owner.read_text() if owner.exists() else "an earlier version of kconsume"
        if holder != self._sink:
            _log.warning("folder has files of another sink, and the files of both are kept folder=%s source=%s sink=%s "
                         "other=%s", self.folder, source.name, self._sink, holder)  # fmt: skip
        return holder == self._sink

    def _was_written_by_others(self, source: Source) -> bool:
        """Whether the chain is that of another group. Earlier versions did not note whose it is, but each group that
        writes has a folder for what it leaves aside."""
        writers = {path.parent.name for path in (self._notes / "aside").glob(f"*/{source.name}")}
        return bool(writers) and self._writer not in writers

    def _note(self, source: Source, at: int) -> Path:
        return self._chain(source) / f"{at:020}"

    def _asides(self, source: Source) -> Path:
        return self._notes / "aside" / self._writer / source.name


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
