"""Starts the processes of the shop, kills them with kill -9, starts them again, and stops them at the end.

A process that ends by itself is an error. The message shows the end of its log.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from examples.ship import Ship
from kconsume.testing.services.ports import free_port


class Fleet:
    """All processes of the run. The letter office belongs to another company, so it is never killed."""

    def __init__(self, environment: Mapping[str, str], folder: Path, seed: int) -> None:
        self.killed: Counter[str] = Counter()
        self._dice = random.Random(seed)
        web, office = free_port(), free_port()
        self.web = f"http://127.0.0.1:{web}"
        variables = {**environment, "OFFICE": f"http://127.0.0.1:{office}", "PYTHONUNBUFFERED": "1"}

        def ship(name: str, *command: str) -> Ship:
            return Ship(name, list(command), variables, folder / f"{name.replace(' ', '-')}.log")

        def server(name: str, module: str, port: int) -> Ship:
            return ship(name, "uvicorn", f"examples.orders.{module}:web", "--port", str(port), "--log-level", "warning")

        self._office = server("office", "office", office)
        self._ships = [
            server("web", "web", web),
            *(ship(f"inventory {n}", "kconsume", "run", "examples.orders.inventory:app") for n in (1, 2)),
            *(ship(f"notifications {n}", "kconsume", "run", "examples.orders.notifications:app") for n in (1, 2)),
        ]
        self._next: list[Ship] = []

    def must_run(self) -> None:
        for ship in (self._office, *self._ships):
            ship.must_run()

    def kill_one(self) -> str:
        """Kill the next process and start it again. Returns its name. The order of processes follows from the seed."""
        if not self._next:
            self._next = self._dice.sample(self._ships, len(self._ships))
        victim = self._next.pop()
        victim.must_run()
        victim.kill()
        self.killed[victim.name.split()[0]] += 1
        victim.start()
        return victim.name

    def stop(self) -> None:
        for ship in (*self._ships, self._office):
            ship.stop()

    def end(self) -> None:
        for ship in (*self._ships, self._office):
            ship.kill()
