"""A client that does what it is told: stands in the place of `confluent_kafka.Consumer`.

It behaves as `librdkafka` was measured to: callbacks run inside `poll` and `consume` alone, a pause outlives a revoke,
a commit is answered later, and under the generation of that moment. When the group rebalances and what is answered is
up to the state machine.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, Message, TopicPartition

from kconsume._kafka.cluster import Committed
from kconsume.records import Partition
from tests.machine.stage import Stage
from tests.machine.world import World


class Commit(NamedTuple):
    """An offset commit that is on its way."""

    elements: list[TopicPartition]
    moves: Mapping[Partition, int]
    """How often each partition had come and gone when it was sent."""


class FakeClient:
    """One member of the group: us."""

    def __init__(self, stage: Stage, world: World, config: Mapping[str, Any]) -> None:
        self.stage = stage
        self.world = world
        self.generation = -1
        self.positions: dict[Partition, int] = {}
        """Where each assigned partition is read on."""
        self.paused: set[Partition] = set()
        self.events: deque[Callable[[], None]] = deque()
        """Callbacks that are due, in order."""
        self.commits: list[Commit] = []
        self.moves: dict[Partition, int] = {}
        """How often each partition has come or gone."""
        self.eager = "cooperative" not in str(config["partition.assignment.strategy"])
        self._on_commit = config["on_commit"]
        self._ends: dict[Partition, int] = {}
        """The end of each partition that was told."""
        self._callbacks: dict[str, Callable[[Any, list[TopicPartition]], None]] = {}
        self._closed = False

    # As the state machine uses it

    def will_assign(self, partitions: Sequence[Partition]) -> None:
        """The join ends: we are a member of this generation, and these are new to us."""
        generation = self.world.generation

        def assign() -> None:
            self.generation = generation
            self._call("on_assign", partitions)

        self.events.append(assign)

    def will_revoke(self, partitions: Sequence[Partition], then: Callable[[], None]) -> None:
        def revoke() -> None:
            self._call("on_revoke", partitions)
            then()

        self.events.append(revoke)

    def will_lose_all(self) -> None:
        def lose() -> None:
            self.generation = -1
            if lost := list(self.positions):
                self._call("on_lost", lost)

        self.events.append(lose)

    def answer(self, commit: Commit, *, delivered: bool) -> None:
        """The broker has answered a commit, or it never got there."""
        self.commits.remove(commit)
        error = None if delivered else KafkaError(KafkaError._TRANSPORT)
        if delivered and not (self.world.is_member and self.generation == self.world.generation):
            error = KafkaError(KafkaError.ILLEGAL_GENERATION)
        if error is None:
            for element in commit.elements:
                partition = Partition(element.topic, element.partition)
                self.stage.accepts(partition, Committed(element.offset, None, element.metadata or ""))
        self.events.append(lambda: self._on_commit(error, commit.elements))

    def _call(self, name: str, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            self.moves[partition] = self.moves.get(partition, 0) + 1
        self._callbacks[name](self, [TopicPartition(*p) for p in partitions])

    # As kconsume uses it

    def subscribe(self, topics: list[str], **callbacks: Callable[[Any, list[TopicPartition]], None]) -> None:
        self._callbacks = callbacks

    def consume(self, num_messages: int, timeout: float) -> list[Message]:
        self.stage.pause("poll")
        self._serve()
        return self._fetched(num_messages)

    def poll(self, timeout: float) -> Message | None:
        if timeout == 0:  # else nothing has happened since `consume`
            self.stage.pause("poll")
            self._serve()
        return next(iter(self._fetched(1)), None)

    def _serve(self) -> None:
        if self.events:
            self.events.popleft()()

    def _fetched(self, most: int) -> list[Message]:
        fetched: list[Message] = []
        for partition in sorted(self.positions):
            if partition in self.paused:
                continue
            log = self.world.logs[partition]
            for offset in [o for o in log.offsets if o >= self.positions[partition]][: most - len(fetched)]:
                fetched.append(Message(topic=partition.topic, partition=partition.number, offset=offset, value=b"x"))
                self.positions[partition] = offset + 1
            is_read = not [o for o in log.offsets if o >= self.positions[partition]]
            if is_read and self._ends.get(partition) != log.end:
                self._ends[partition] = log.end
                eof = KafkaError(KafkaError._PARTITION_EOF)
                fetched.append(Message(topic=partition.topic, partition=partition.number, offset=log.end, error=eof))
        return fetched

    def _read_from(self, elements: list[TopicPartition]) -> None:
        for element in elements:
            partition = Partition(element.topic, element.partition)
            self.positions[partition] = element.offset
            self._ends.pop(partition, None)

    def assign(self, elements: list[TopicPartition]) -> None:
        assert self.eager, "the client refuses assign() under a cooperative protocol"
        self.positions.clear()
        self._read_from(elements)

    def unassign(self) -> None:
        self.positions.clear()

    def incremental_assign(self, elements: list[TopicPartition]) -> None:
        assert not self.eager, "the client refuses incremental_assign() under an eager protocol"
        self._read_from(elements)

    def incremental_unassign(self, elements: list[TopicPartition]) -> None:
        for element in elements:
            del self.positions[Partition(element.topic, element.partition)]

    def assignment(self) -> list[TopicPartition]:
        return [TopicPartition(*p) for p in self.positions]

    def pause(self, elements: list[TopicPartition]) -> None:
        self.paused.update(Partition(e.topic, e.partition) for e in elements)

    def resume(self, elements: list[TopicPartition]) -> None:
        self.paused.difference_update(Partition(e.topic, e.partition) for e in elements)

    def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> None:
        assert asynchronous, "a synchronous commit may wait for ever"
        partitions = [Partition(e.topic, e.partition) for e in offsets]
        if strangers := [p for p in partitions if p not in self.positions]:
            raise AssertionError(f"a commit of partitions that are not assigned: {strangers}")
        self.commits.append(Commit(offsets, {p: self.moves[p] for p in partitions}))

    def consumer_group_metadata(self) -> bytes:
        return b"CGMDv2:" + self.generation.to_bytes(4, sys.byteorder, signed=True)

    def offsets_for_times(self, elements: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        return elements

    def memberid(self) -> str | None:
        return "us" if self.generation > 0 else None

    def unsubscribe(self) -> None:
        """At the end of a run: nobody waits for what follows."""
        self.generation = -1

    def close(self) -> None:
        self._closed = True
