"""The world around one consumer: logs with gaps, a group with a rival member, and what is true of them.

`World` is the truth. The client, the store and the cluster of a run ask it and tell it; the state machine compares what
the consumer believes with it. No threads, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kconsume._kafka.cluster import Committed, Group
from kconsume._kafka.topic_limits import TopicLimit
from kconsume.errors import BrokerUnavailable
from kconsume.records import Partition

TOPIC = "orders"
GROUP = "machine"
TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAQ"
PARTITIONS = tuple(Partition(TOPIC, number) for number in range(3))

Member = Literal["us", "rival"]


class Violation(AssertionError):
    """Something happened that must not, whatever came before."""


@dataclass
class Log:
    """The records of one partition. Between them, and behind the last, are transaction markers."""

    offsets: list[int] = field(default_factory=list)
    end: int = 0

    def append(self, gap: int) -> None:
        self.offsets.append(self.end)
        self.end += 1 + gap

    def below(self, offset: int) -> list[int]:
        return [each for each in self.offsets if each < offset]


class World:
    """The broker's side, and who has handled what."""

    def __init__(self, *, effects_are_stored: bool) -> None:
        """`effects_are_stored`: the store keeps a record's effect with its offset, so a record that was handled has its
        effect only there."""
        self.logs = {p: Log() for p in PARTITIONS}
        self.generation = 1
        self.is_member = False
        self.owner: dict[Partition, Member] = dict.fromkeys(PARTITIONS, "rival")
        self.rival_claimed: set[Partition] = set()
        """Those of the rival that it has claimed since it was given them."""
        self.committed: dict[Partition, Committed] = {}
        self.handled: dict[Partition, Counter[int]] = {p: Counter() for p in PARTITIONS}
        """Handler calls that returned, by offset; where effects are stored, those that the store has."""
        self.effects_are_stored = effects_are_stored
        self.brokers_away = False
        self.failed_over: set[Partition] = set()
        """Partitions whose row went back to an earlier state, and was not claimed since."""

    # The group

    def gives(self, partitions: Iterable[Partition], member: Member) -> None:
        for partition in partitions:
            self.owner[partition] = member
            self.rival_claimed.discard(partition)

    def ours(self) -> list[Partition]:
        return [p for p in PARTITIONS if self.owner[p] == "us"]

    # What must hold

    def moves(self, partition: Partition, new: int) -> None:
        """The offset that counts goes to `new`: every record below it must have been handled."""
        if missed := [o for o in self.logs[partition].below(new) if not self.handled[partition][o]]:
            raise Violation(f"{partition} moves to {new}, and {missed} were never handled")

    def handles(self, partition: Partition, offset: int) -> None:
        self.handled[partition][offset] += 1
        if self.effects_are_stored and self.handled[partition][offset] > 1:
            raise Violation(f"{partition}@{offset} has two effects")

    def goes_back(self, partition: Partition, offset: int) -> None:
        """A user has set the offset there: what lies above is to be handled again."""
        for each in [o for o in self.handled[partition] if o >= offset]:
            del self.handled[partition][each]

    def unhandled(self, partition: Partition) -> list[int]:
        return [o for o in self.logs[partition].offsets if not self.handled[partition][o]]


class FakeCluster:
    """What the admin client would answer."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _answers(self) -> None:
        if self._world.brokers_away:
            raise BrokerUnavailable("the brokers are away")

    def topics(self, wanted: Iterable[str]) -> dict[str, int]:
        self._answers()
        return {topic: len(PARTITIONS) for topic in wanted}

    def all_topics(self) -> list[str]:
        self._answers()
        return [TOPIC]

    def those_there(self, topics: Iterable[str]) -> list[str]:
        self._answers()
        return [topic for topic in topics if topic == TOPIC]

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str | None]:
        self._answers()
        return dict.fromkeys(topics, TOPIC_ID)

    def ask_limits(self, topics: Iterable[str]) -> Mapping[str, TopicLimit | None]:
        return {}

    def edges(self, partitions: Iterable[Partition], edge: str) -> dict[Partition, int]:
        self._answers()
        return {p: 0 if edge == "earliest" else self._world.logs[p].end for p in partitions}

    def committed(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Committed]:
        self._answers()
        return {p: self._world.committed[p] for p in partitions if p in self._world.committed}

    def group(self, name: str) -> Group | None:
        self._answers()
        return None
