"""Which offsets a micro-batch covers, and what is to be done with each range, given where the store stands.

Pure: no Spark, no store, no clock. A range comes from the plan that Spark has written before the batch ran, never from
the records that were seen: compaction, transaction markers and empty ranges have no record at their end.

    stored == first              APPLY    nobody has done it
    stored >= end                SKIP     it was done, by an earlier run of the same batch, or by a twin
    stored <  first              GAP      what lies between would be lost
    first < stored < end         FENCED   somebody else is at work in the middle of it
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
    """Offsets of one partition, from `first` up to `end`, which is not in it; written `orders/3@100..200`."""

    partition: Partition
    first: int
    end: int

    def __str__(self) -> str:
        return f"{self.partition}@{self.first}..{self.end}"

    def __len__(self) -> int:
        """How many offsets; the records may be fewer."""
        return self.end - self.first

    def decide(self, stored: int) -> Decision:
        """What to do with it where the store stands at `stored`."""
        if stored == self.first and self.first < self.end:
            return Decision.APPLY
        if stored >= self.end:
            return Decision.SKIP
        return Decision.GAP if stored < self.first else Decision.FENCED

    def since(self, stored: int) -> OffsetRange:
        """The part of it that begins where the store stands."""
        return OffsetRange(self.partition, min(max(self.first, stored), self.end), self.end)

    def halves(self) -> tuple[OffsetRange, OffsetRange]:
        middle = (self.first + self.end) // 2
        return OffsetRange(self.partition, self.first, middle), OffsetRange(self.partition, middle, self.end)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one micro-batch covers: one range a partition, in the order of their names. Some may be empty."""

    ranges: tuple[OffsetRange, ...]

    @classmethod
    def between(cls, start: Offsets, end: Offsets) -> Plan:
        """From the ends of two batches that follow each other. A partition that the earlier one does not know was
        added: Spark begins it at 0, and refuses to if 0 is gone."""
        ranges = tuple(sorted(OffsetRange(p, start.get(p, 0), offset) for p, offset in end.items()))
        for each in ranges:
            if each.end < each.first:
                raise TopicRecreated(
                    f"{each.partition} ends at offset {each.end}, and was read up to {each.first}: its topic was "
                    f"deleted and made again, or its log was cut. Nothing was skipped. Choose: store.delete(group) to "
                    f"begin where start= says, or consume under a new group"
                )
        return cls(ranges)

    def __str__(self) -> str:
        return ",".join(str(each) for each in self.ranges if len(each)) or "(empty)"

    @property
    def filled(self) -> tuple[OffsetRange, ...]:
        """Those that can have records."""
        return tuple(each for each in self.ranges if each.first < each.end)

    @property
    def offsets(self) -> int:
        """How many offsets it covers: as many records, or more than there are."""
        return sum(map(len, self.ranges))

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
        """For each range that is not empty; every partition must have a stored offset."""
        return {each: each.decide(stored[each.partition]) for each in self.filled}

    def finished(self, stored: Offsets) -> bool:
        """Whether the store shows the end of all of it."""
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
    """As Spark's `startingOffsets` and `endingOffsets` want them."""
    topics: dict[str, dict[str, int]] = {}
    for partition, offset in sorted(offsets.items()):
        topics.setdefault(partition.topic, {})[str(partition.number)] = offset
    return msgspec.json.encode(topics).decode()


def offsets_of(text: str) -> dict[Partition, int]:
    """The same read back, as Spark writes it into its logs."""
    try:
        topics = msgspec.json.decode(text, type=dict[str, dict[str, int]])
        return {Partition(topic, int(n)): offset for topic, each in topics.items() for n, offset in each.items()}
    except (msgspec.DecodeError, ValueError) as error:
        raise OffsetError(f"{text[:200]!r} are no offsets of a Kafka source ({error})") from error
