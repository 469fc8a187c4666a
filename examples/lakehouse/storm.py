"""Sends the clicks, and meanwhile kills the two processes that store them.

Between two kills of a process the same number of clicks is stored. At most this number of clicks is sent before the
slower process has stored them, and the last clicks are sent after the last kill. So at each kill, some clicks are not
sent yet, and some are sent and not stored yet.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
from confluent_kafka import Producer
from rich.console import Console

from examples.ship import Ship

from .clicks import Click
from .sides import Side

_LINGER = 1.5
"""The longest delay of a kill, in seconds. A random delay avoids that each kill comes right after a write."""
_BURST = 200
_LOOK_EVERY = 0.1


class Feed:
    """Sends the clicks in order."""

    def __init__(self, brokers: str, topic: str, clicks: Sequence[Click]) -> None:
        self.clicks = clicks
        self.sent = 0
        self._topic = topic
        # No log, because the producer still exists when the brokers stop.
        self._producer = Producer({"bootstrap.servers": brokers, "enable.idempotence": True, "log_level": 0})

    def send_until(self, number: int) -> None:
        """Send clicks until `number` clicks, or all, are sent."""
        for click in self.clicks[self.sent : number]:
            self._producer.produce(self._topic, msgspec.json.encode(click), key=click.visitor)
            self.sent += 1
        if self._producer.flush(30):
            raise TimeoutError("the brokers did not confirm the clicks within 30 s")


class Storm:
    """Kills each side `kills` times: after equal numbers of stored clicks, with a delay that follows from the seed."""

    def __init__(self, feed: Feed, sides: Sequence[tuple[Side, Ship]], kills: int, seed: int) -> None:
        self.killed: Counter[str] = Counter()
        self._feed = feed
        self._sides = sides
        self._kills = kills
        self._stride = len(feed.clicks) // (kills + 2)
        self._dice = {side.name: random.Random(f"{seed} {side.name}") for side, _ in sides}
        self._moments: dict[str, float] = {}

    def run(self, deadline: float, console: Console) -> None:
        """Run until all clicks are sent and stored, and each side was killed as often as planned."""
        while not self._is_over():
            for side, ship in self._sides:
                ship.must_run()
                if self._is_due(side):
                    self._kill(side, ship, console)
            self._feed.send_until(min(self._feed.sent + _BURST, self._so_far()))
            if time.monotonic() > deadline:
                raise TimeoutError("not every click was stored in time")
            time.sleep(_LOOK_EVERY)

    def _so_far(self) -> int:
        """Return how many clicks may be sent now: few more than the slower side has stored."""
        slower = min(side.kept() for side, _ in self._sides)
        last = len(self._feed.clicks) - (0 if self._are_all_killed() else self._stride)
        return min(slower + self._stride, last)

    def _is_due(self, side: Side) -> bool:
        if self.killed[side.name] == self._kills or side.kept() < self._stride * (self.killed[side.name] + 0.5):
            return False
        moment = self._moments.setdefault(side.name, self._soon(side))
        if time.monotonic() < moment:
            return False
        if side.kept() < self._feed.sent or self._feed.sent == len(self._feed.clicks):
            return True
        # A kill of an idle process would prove nothing: send more clicks, and delay the kill.
        self._feed.send_until(self._feed.sent + _BURST)
        self._moments[side.name] = self._soon(side)
        return False

    def _soon(self, side: Side) -> float:
        return time.monotonic() + self._dice[side.name].uniform(0, _LINGER)

    def _kill(self, side: Side, ship: Ship, console: Console) -> None:
        ship.kill()
        console.print(f"kill -9 {side.name:<10}{self._feed.sent:7,} clicks sent, {side.kept():6,} stored")
        ship.start()
        self.killed[side.name] += 1
        del self._moments[side.name]
        if self._are_all_killed():
            console.print("waiting until every click is stored …")

    def _are_all_killed(self) -> bool:
        return all(self.killed[side.name] == self._kills for side, _ in self._sides)

    def _is_over(self) -> bool:
        return self._are_all_killed() and all(side.kept() >= len(self._feed.clicks) for side, _ in self._sides)
