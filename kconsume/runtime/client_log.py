"""The Kafka client's own log, thinned out.

A broker that is away makes the client say so about twenty times a second. The first of each kind is passed on, then
one every ten seconds; nothing is lost that way, because the loop reports the trouble itself.
"""

from __future__ import annotations

import logging
import time

EVERY = 10.0


class Thinned(logging.Filter):
    """Lets one line of each kind (`FAIL`, `SESSTMOUT`, ...) through in a while."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.getMessage().partition(" ")[0]
        now = time.monotonic()
        if now - self._said.get(kind, -EVERY) < EVERY:
            return False
        self._said[kind] = now
        return True


def client_log() -> logging.Logger:
    """The logger to hand to a client."""
    log = logging.getLogger("kconsume.client")
    if not any(isinstance(f, Thinned) for f in log.filters):
        log.addFilter(Thinned())
    return log
