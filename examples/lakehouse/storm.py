"""Clicks come in, and the sides that keep them are killed as they get on.

The clicks are never further ahead of the slower side than from one kill to the next, and the last of them wait for the
last kill. So each kill comes while clicks are still to be sent, and others were sent and are not kept yet.
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
"""Up to so many seconds after its place, a kill comes: at any moment of a side's work, and not just after a write."""
_BURST = 200
_LOOK_EVERY = 0.1


class Feed:
    """Sends the clicks in their order."""

    def __init__(self, brokers: str, topic: str, clicks: Sequence[Click]) -> None:
        self.clicks = clicks
        self.sent = 0
        self._topic = topic
        # Silent: it is still there when the brokers go.
        self._producer = Producer({"bootstrap.servers": brokers, "enable.idempotence": True, "log_level": 0})

    def send_until(self, number: int) -> None:
        """So that so many are sent, if there are so many."""
        for click in self.clicks[self.sent : number]:
            self._producer.produce(self._topic, msgspec.json.encode(click), key=click.visitor)
            self.sent += 1
        if self._producer.flush(30):
            raise TimeoutError("the brokers do not take the clicks")


class Storm:
    """`kills` of each side: at even places, and at a moment after it that the seed gives."""

    def __init__(self, feed: Feed, sides: Sequence[tuple[Side, Ship]], kills: int, seed: int) -> None:
        self.killed: Counter[str] = Counter()
        self._feed = feed
        self._sides = sides
        self._kills = kills
        self._stride = len(feed.clicks) // (kills + 2)
        self._dice = {side.name: random.Random(f"{seed} {side.name}") for side, _ in sides}
        self._moments: dict[str, float] = {}

    def run(self, deadline: float, console: Console) -> None:
        """Until all has been sent and kept, and each side has had its kills."""
        while not self._is_over():
            for side, ship in self._sides:
                ship.must_run()
                if self._is_due(side):
                    self._kill(side, ship, console)
            self._feed.send_until(min(self._feed.sent + _BURST, self._so_far()))
            if time.monotonic() > deadline:
                raise TimeoutError("not everything came through in time")
            time.sleep(_LOOK_EVERY)

    def _so_far(self) -> int:
        """How many clicks may be sent by now: some ahead of the slower side, and the last ones after the last kill."""
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
        # Not while it rests: it gets more, and a little time.
        self._feed.send_until(self._feed.sent + _BURST)
        self._moments[side.name] = self._soon(side)
        return False

    def _soon(self, side: Side) -> float:
        return time.monotonic() + self._dice[side.name].uniform(0, _LINGER)

    def _kill(self, side: Side, ship: Ship, console: Console) -> None:
        ship.kill()
        console.print(f"kill -9 {side.name:<10}{self._feed.sent:7,} clicks sent, {side.kept():6,} kept")
        ship.start()
        self.killed[side.name] += 1
        del self._moments[side.name]

    def _are_all_killed(self) -> bool:
        return all(self.killed[side.name] == self._kills for side, _ in self._sides)

    def _is_over(self) -> bool:
        return self._are_all_killed() and all(side.kept() >= len(self._feed.clicks) for side, _ in self._sides)
