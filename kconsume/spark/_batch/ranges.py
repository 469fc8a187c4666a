"""Which offsets a micro-batch covers, and what to do with each range, given the offset in the store.

Pure: no Spark, no store, no clock. A range comes from the plan that Spark wrote before the batch ran, never from the
records that were seen: compaction, transaction markers and empty ranges leave no record at the end of a range.

    stored == first              APPLY    the range was not applied yet
    stored >= end                SKIP     it was applied, by an earlier run of the batch or by a task of the same range
    stored <  first              GAP      the offsets in between would be lost
    first < stored < end         FENCED   another consumer has moved the offset into the range
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from kconsume.errors import OffsetError, TopicRecreated
from kconsume.records import Partition

Offsets = Mapping[Partition, int]


class Decision(enum.Enum):
    APPLY = "apply"
    SKIP = "skip"
    GAP = "gap"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """Offsets of one partition, from `first` up to but not including `end`; written `orders/3@100..200`."""

    partition: Partition
    first: int
    end: int

    def __str__(self) -> str:
        return f"{self.partition}@{self.first}..{self.end}"

    def __len__(self) -> int:
        """The number of offsets. There may be fewer records."""
        return self.end - self.first

    def decide(self, stored: int) -> Decision:
        """What to do with the range if the store has the offset `stored`."""
        if stored == self.first and self.first < self.end:
            return Decision.APPLY
        if stored >= self.end:
            return Decision.SKIP
        return Decision.GAP if stored < self.first else Decision.FENCED

    def since(self, stored: int) -> OffsetRange:
        """The part of the range that begins at the offset `stored`."""
        return OffsetRange(self.partition, min(max(self.first, stored), self.end), self.end)

    def halves(self) -> tuple[OffsetRange, OffsetRange]:
        middle = (self.first + self.end) // 2
        return OffsetRange(self.partition, self.first, middle), OffsetRange(self.partition, middle, self.end)


@dataclass(frozen=True, slots=True)
class Plan:
    """The ranges of one micro-batch: one for each partition, sorted by partition. A range may be empty."""

    ranges: tuple[OffsetRange, ...]

    @classmethod
    def between(cls, start: Offsets, end: Offsets) -> Plan:
        """The plan of a batch.

        Args:
            start: the end offsets of the batch before. A partition that is missing here was added later. Spark begins
                it at offset 0, and fails if offset 0 is gone.
            end: the end offsets of the batch.
        """
        ranges = tuple(sorted(OffsetRange(p, start.get(p, 0), offset) for p, offset in end.items()))
        for each in ranges:
            if each.end < each.first:
                raise TopicRecreated(
                    f"{each.partition} ends at offset {each.end}, and was read up to {each.first}: its topic was "
                    f"deleted and made again, or its log was truncated. Nothing was skipped. Choose: "
                    f"store.delete(group) to begin where start= says, or consume under a new group"
                )
        return cls(ranges)

    def __str__(self) -> str:
        return ",".join(str(each) for each in self.ranges if len(each)) or "(empty)"

    @property
    def filled(self) -> tuple[OffsetRange, ...]:
        """The ranges that are not empty."""
        return tuple(each for each in self.ranges if each.first < each.end)

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return tuple(each.partition for each in self.ranges)

    @property
    def starts(self) -> dict[Partition, int]:
        return {each.partition: each.first for each in self.ranges}

    @property
    def ends(self) -> dict[Partition, int]:
        return {each.partition: each.end for each in self.ranges}

    def decisions(self, stored: Offsets) -> dict[OffsetRange, Decision]:
        """What to do with each range that is not empty. `stored` must have an offset for each partition."""
        return {each: each.decide(stored[each.partition]) for each in self.filled}

    def finished(self, stored: Offsets) -> bool:
        """True if the store has reached the end of each range."""
        return all(stored.get(each.partition, -1) >= each.end for each in self.filled)

    def to_json(self) -> str:
        return json_of_ranges(self.ranges)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        rows = msgspec.json.decode(text, type=list[tuple[str, int, int, int]])
        return cls(tuple(OffsetRange(Partition(topic, number), first, end) for topic, number, first, end in rows))


def json_of_ranges(ranges: Iterable[OffsetRange]) -> str:
    return msgspec.json.encode([(*each.partition, each.first, each.end) for each in ranges]).decode()


def offsets_json(offsets: Offsets) -> str:
    """The JSON of Spark's options `startingOffsets` and `endingOffsets`."""
    topics: dict[str, dict[str, int]] = {}
    for partition, offset in sorted(offsets.items()):
        topics.setdefault(partition.topic, {})[str(partition.number)] = offset
    return msgspec.json.encode(topics).decode()


def parse_offsets(text: str) -> dict[Partition, int]:
    """The offsets in a JSON that Spark wrote into its logs; the reverse of `offsets_json`."""
    try:
        topics = msgspec.json.decode(text, type=dict[str, dict[str, int]])
        return {Partition(topic, int(n)): offset for topic, each in topics.items() for n, offset in each.items()}
    except (msgspec.DecodeError, ValueError) as error:
        raise OffsetError(f"{text[:200]!r} are no offsets of a Kafka source ({error})") from error
