"""A storm of rebalances: members of one group that join and leave all the time, in one process.

`python -m tests.chaos.storm --brokers … --topic … --group … --offsets … --protocol … --seconds …` produces all the
while, lets the last members finish, and says what it saw in one line of JSON. Effects are the store's; counting them is
the test's.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import psycopg

from kconsume import App, Partition, Record
from kconsume._kafka.consumer import KafkaConsumer
from tests.chaos import sabotage
from tests.fix_arena import PROTOCOLS, QUICK
from tests.fix_kafka import LASTING, produce
from tests.liveness import assert_app_lives
from tests.waiting import eventually

MOST_MEMBERS = 6
AGAIN = 20
"""Records that the control has handled again when it may end."""
LONGEST_CONTROL = 60.0
PARTITIONS = 12
LITTLE_MEMORY = 300_000
"""Bytes in flight: so few that lanes are crowded and paused all the time."""


def main() -> None:
    asked = _asked()
    LASTING.add(asked.brokers)
    if asked.no_fence:
        sabotage.take_the_fence_away()
        sabotage.stop_for_nobody()
    chance = random.Random(asked.seed)
    pauses = _count_pauses()
    storm = Storm(asked, chance)
    try:
        with storm.producing() as produced:
            storm.rage(asked.seconds)
        storm.finish(produced)
    finally:
        storm.disperse()
    print(json.dumps({**storm.told(), "produced": sum(produced.values()), "pauses": pauses["pause"]}))  # noqa: T201


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("brokers", "topic", "group", "offsets", "protocol"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--no-fence", action="store_true", help="nor does anybody stop: the negative control")
    return parser.parse_args()


class Member:
    """One app, which lives on a thread of its own."""

    life: Future[None]

    def __init__(self, app: App) -> None:
        self.app = app
        self.joined = threading.Event()
        self.leave = threading.Event()

    def live(self) -> None:
        with self.app.running():
            self.joined.set()
            self.leave.wait()


class Storm:
    def __init__(self, asked: argparse.Namespace, chance: random.Random) -> None:
        self._asked = asked
        self._chance = chance
        self._members: list[Member] = []
        self._threads = ThreadPoolExecutor(8 * MOST_MEMBERS)
        self._leaving: list[Future[None]] = []
        self._one_writer = asked.offsets.startswith("sqlite")
        # So long that there is something in hand when a partition moves; in the control, always.
        self._seconds_each = 0.001 if self._one_writer else 0.02 if asked.no_fence else 0.005
        self._joins = self._leaves = 0
        self._rebalances: Counter[str] = Counter()
        self._handled: Counter[int] = Counter()
        self._places: set[tuple[int, int]] = set()
        self._again = 0

    @contextmanager
    def producing(self) -> Iterator[Counter[int]]:
        """Write to every partition until the block ends; answers with how many each has got."""
        done, written = threading.Event(), Counter[int]()

        def write() -> None:
            while not done.wait(1.0):
                for partition in range(PARTITIONS):
                    produce(self._asked.brokers, self._asked.topic, [b"x" * 400] * 80, partition=partition, gaps=True)
                    written[partition] += 80

        writer = threading.Thread(target=write)
        writer.start()
        try:
            yield written
        finally:
            done.set()
            writer.join()

    def rage(self, seconds: float) -> None:
        """For so long; the control until records are handled again, since how soon that is, is the machine's to say."""
        begun = time.monotonic()
        self._join()
        while (passed := time.monotonic() - begun) < seconds or (self._asked.no_fence and self._calm(passed)):
            joins = len(self._members) == 1 or (len(self._members) < MOST_MEMBERS and self._chance.random() < 0.55)
            self._join() if joins else self._leave(self._chance.randrange(len(self._members)))
            time.sleep(self._chance.uniform(0.5, 2.0))  # the storm's own timing

    def _calm(self, passed: float) -> bool:
        return self._again < AGAIN and passed < LONGEST_CONTROL

    def finish(self, produced: Counter[int]) -> None:
        """Who is left handles the rest, and one record more of each partition, which must be open, with nobody's pause
        left on it."""
        eventually(lambda: len(self._handled) == PARTITIONS, within=60, what="every partition has moved on")
        eventually(lambda: self._handled.total() >= produced.total(), within=90, what=f"{produced.total()} are handled")
        if not self._asked.no_fence:  # where nobody stops, lanes of partitions that have moved go on for ever
            eventually(lambda: self._held() == {}, within=30, what="no partition is left paused")
            apps, asked = [member.app for member in self._members], self._asked
            assert_app_lives(
                *apps, bootstrap=asked.brokers, topic=asked.topic, group=asked.group, offsets=asked.offsets,
                partitions=PARTITIONS,
            )  # fmt: skip
            produced.update(range(PARTITIONS))
        self.disperse()
        for leaving in self._leaving:
            leaving.result(60)

    def disperse(self) -> None:
        while self._members:
            self._leave(0)

    def told(self) -> dict[str, object]:
        counts = {"joins": self._joins, "leaves": self._leaves, "again": self._again}
        return {**counts, "rebalances": dict(self._rebalances)}

    def _held(self) -> dict[str, list[str]]:
        """Why partitions of members do not flow, where they do not. All twelve must be somebody's."""
        owned_partitions = [
            owned
            for member in self._members
            if (supervisor := member.app._supervisor) is not None
            for owned in list(supervisor.consumers[0].assignment.partitions.values())
        ]
        held = {
            str(h.partition): sorted(h.pause_reasons) or [h.state.value]
            for h in owned_partitions
            if h.pause_reasons or h.lane is None
        }
        return held or ({} if len(owned_partitions) == PARTITIONS else {"owned": [str(len(owned_partitions))]})

    def _join(self) -> None:
        asked = self._asked
        chosen = PROTOCOLS[asked.protocol]
        kafka = dict(chosen) if "group.protocol" in chosen else {**QUICK, **chosen}
        app = App(asked.brokers, group=asked.group, offsets=asked.offsets, kafka=kafka, memory=LITTLE_MEMORY)
        app.consume(asked.topic)(self._handler())
        member = Member(app)
        member.life = self._threads.submit(member.live)
        assert member.joined.wait(60), "it does not start"
        self._members.append(member)
        self._joins += 1

    def _leave(self, number: int) -> None:
        """Nobody waits for it: under eager a leave may take as long as the whole group, and the storm goes on."""
        member = self._members.pop(number)
        self._rebalances.update(f"{r.reason}" for r in member.app.rebalances())
        member.leave.set()
        self._leaving.append(member.life)
        self._leaves += 1

    def _handler(self) -> Callable[..., None]:
        def write(record: Record, tx: sqlite3.Connection) -> None:
            tx.execute("insert into seen values (?, ?, 'storm')", (record.partition, record.offset))
            self._work(record)

        def insert(record: Record, tx: psycopg.Connection) -> None:
            tx.execute("insert into seen values (%s, %s, 'storm')", (record.partition, record.offset))
            self._work(record)

        return write if self._one_writer else insert

    def _work(self, record: Record) -> None:
        self._handled[record.partition] += 1
        place = (record.partition, record.offset)
        self._again += place in self._places
        self._places.add(place)
        time.sleep(self._seconds_each)


def _count_pauses() -> Counter[str]:
    """That there was back-pressure, is a part of what is proven."""
    counts: Counter[str] = Counter()
    pause = KafkaConsumer.pause

    def counted(self: KafkaConsumer, partitions: Iterable[Partition]) -> None:
        chosen = list(partitions)
        counts["pause"] += len(chosen)
        pause(self, chosen)

    KafkaConsumer.pause = counted  # type: ignore[method-assign]
    return counts


if __name__ == "__main__":
    main()
