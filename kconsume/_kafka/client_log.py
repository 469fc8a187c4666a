"""The Kafka client's own log, with fewer lines.

While a broker is away, the client logs about twenty lines a second. The first line of each kind is passed on, then one
every ten seconds. The dropped lines are not needed: the loop logs connection errors itself.
"""

from __future__ import annotations

import logging
import time

INTERVAL = 10.0
"""Seconds between two lines of one kind."""


class ThinnedLog(logging.Filter):
    """Passes one line of each kind (`FAIL`, `SESSTMOUT`, ...) every `INTERVAL` seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.getMessage().partition(" ")[0]
        now = time.monotonic()
        if now - self._passed.get(kind, -INTERVAL) < INTERVAL:
            return False
        self._passed[kind] = now
        return True


def client_log() -> logging.Logger:
    """Return the logger for a consumer or a producer, with the filter."""
    log = logging.getLogger("kconsume.client")
    if not any(isinstance(f, ThinnedLog) for f in log.filters):
        log.addFilter(ThinnedLog())
    return log
