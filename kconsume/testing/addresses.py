"""From `embedded://` and `embedded://NAME` to a broker that runs, with the topics that are wanted."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kconsume.testing.embedded import EmbeddedKafka, KafkaControls

SCHEME = "embedded://"

_lock = threading.Lock()
_in_process: EmbeddedKafka | None = None


def resolve(address: str, topics: Iterable[str] = ()) -> str:
    """The bootstrap address behind an embedded one. Starts the broker and makes the topics, if they are not there:
    nobody else could."""
    broker = _broker(address.removeprefix(SCHEME))
    missing = set(topics) - broker.topics().keys()
    for topic in sorted(missing):
        broker.create_topic(topic, exist_ok=True)
    return broker.bootstrap


def _broker(name: str) -> KafkaControls:
    global _in_process
    if name:
        from kconsume.testing.broker import attach

        return attach(name)
    with _lock:
        if _in_process is None:
            broker = EmbeddedKafka()
            broker.start()
            _in_process = broker
        return _in_process
