"""Parses what Spark writes into a checkpoint: the offset log of a query, and the first offsets of a source.

Pure: texts in, values out. `kconsume.spark._stream.checkpoint` reads the files.

    offsets/N            v1 · metadata in JSON · one line of offsets for each source, "-" if it has none
                         v2 · the same, each line beginning with the name of its source
    sources/0/0          a NUL in old versions · v1 · the offsets at which batch 0 begins
"""

from __future__ import annotations

from dataclasses import dataclass

from kconsume.errors import OffsetError
from kconsume.records import Partition
from kconsume.spark._batch.ranges import parse_offsets

_VERSIONS = ("v1", "v2")
_NONE = "-"


@dataclass(frozen=True, slots=True)
class OffsetLogEntry:
    """One batch of an offset log."""

    metadata: str
    sources: tuple[str | None, ...]
    """The offsets of each source at the end of the batch; None for a source without offsets."""


def read_entry(text: str) -> OffsetLogEntry:
    version, _, rest = text.partition("\n")
    if version.strip() not in _VERSIONS:
        raise OffsetError(
            f"the checkpoint's offset log begins with {version[:20]!r}, and kconsume reads {' and '.join(_VERSIONS)}: "
            f"another version of Spark wrote it. Name a new checkpoint folder: no records are lost, because the "
            f"offsets are in the store"
        )
    metadata, *lines = rest.splitlines()
    return OffsetLogEntry(metadata, tuple(_source(line, named=version.strip() == "v2") for line in lines))


def _source(line: str, *, named: bool) -> str | None:
    if named:
        # The name ends at the first colon. A colon inside the offsets comes after a brace.
        name, colon, rest = line.partition(":")
        if colon and "{" not in name:
            line = rest
    return None if line.strip() == _NONE else line.strip()


def kafka_offsets(entry: OffsetLogEntry) -> tuple[int, dict[Partition, int]]:
    """The number of the Kafka source among the sources, and its offsets."""
    found = [(number, offsets) for number, text in enumerate(entry.sources) if (offsets := _kafka(text)) is not None]
    if len(found) == 1 and len(entry.sources) == 1:
        return found[0]
    raise OffsetError(
        f"the query reads {len(entry.sources)} sources, {len(found)} of them Kafka, and the offsets of one source do "
        f"not identify a batch: read one Kafka source in the query, and join with tables"
    )


def _kafka(text: str | None) -> dict[Partition, int] | None:
    try:
        return None if text is None else parse_offsets(text)
    except OffsetError:
        return None


def first_offsets(text: str) -> dict[Partition, int]:
    """The offsets at which batch 0 begins, from the source's own file."""
    version, _, offsets = text.lstrip("\0").partition("\n")
    if version.strip() != "v1":
        raise OffsetError(f"the checkpoint's sources/0/0 begins with {version[:20]!r}, and kconsume reads v1")
    return parse_offsets(offsets.strip())
