"""What Spark writes into a checkpoint, as text: the offset log of a query, and the first offsets of a source.

Pure: texts in, values out. Where the files are and how they are read is `checkpoint.py`'s.

    offsets/N            v1 · metadata in JSON · one line of offsets for each source, "-" where it has none
                         v2 · the same, each line beginning with the name of its source
    sources/0/0          a NUL in old versions · v1 · the offsets at which batch 0 begins
"""

from __future__ import annotations

from dataclasses import dataclass

from kconsume.errors import OffsetError
from kconsume.records import Partition
from kconsume.spark.ranges import offsets_of

_VERSIONS = ("v1", "v2")
_NONE = "-"


@dataclass(frozen=True, slots=True)
class Entry:
    """One batch of an offset log: where each source stands at its end, None where that is not said."""

    metadata: str
    sources: tuple[str | None, ...]


def read_entry(text: str) -> Entry:
    version, _, rest = text.partition("\n")
    if version.strip() not in _VERSIONS:
        raise OffsetError(
            f"the checkpoint's offset log begins with {version[:20]!r}, and kconsume reads {' and '.join(_VERSIONS)}: "
            f"it was written by another Spark; name a new checkpoint folder, nothing is lost by that"
        )
    metadata, *lines = rest.splitlines()
    return Entry(metadata, tuple(_source(line, named=version.strip() == "v2") for line in lines))


def _source(line: str, *, named: bool) -> str | None:
    if named:
        # The name stands before the first colon; one inside the offsets stands behind a brace.
        name, colon, rest = line.partition(":")
        if colon and "{" not in name:
            line = rest
    return None if line.strip() == _NONE else line.strip()


def kafka_offsets(entry: Entry) -> tuple[int, dict[Partition, int]]:
    """The number of the Kafka source among the sources, and where it stands."""
    found = [(number, offsets) for number, text in enumerate(entry.sources) if (offsets := _kafka(text)) is not None]
    if len(found) == 1 and len(entry.sources) == 1:
        return found[0]
    raise OffsetError(
        f"the query reads {len(entry.sources)} sources, {len(found)} of them Kafka, and its batches cannot be told "
        f"apart by the offsets of one: read one Kafka source in the query, and join with tables"
    )


def _kafka(text: str | None) -> dict[Partition, int] | None:
    try:
        return None if text is None else offsets_of(text)
    except OffsetError:
        return None


def first_offsets(text: str) -> dict[Partition, int]:
    """Where batch 0 begins, from what the source has written for itself."""
    version, _, offsets = text.lstrip("\0").partition("\n")
    if version.strip() != "v1":
        raise OffsetError(f"the checkpoint's sources/0/0 begins with {version[:20]!r}, and kconsume reads v1")
    return offsets_of(offsets.strip())
