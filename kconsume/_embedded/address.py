"""Turns `embedded://` or `embedded://NAME` into the address of a running broker that has the wanted topics."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kconsume._embedded.controls import KafkaControls
from kconsume._embedded.mock_cluster import EmbeddedKafka

SCHEME = "embedded://"

_lock = threading.Lock()
_in_process: EmbeddedKafka | None = None


def resolve(address: str, topics: Iterable[str] = ()) -> str:
    """Return the bootstrap address of an embedded broker. Starts the broker, and creates missing topics.

    Args:
        address: `embedded://` or `embedded://NAME`.
        topics: the topics that must exist. The embedded broker has no admin requests to create topics.
    """
    broker = _broker(address.removeprefix(SCHEME))
    missing = set(topics) - broker.topics().keys()
    for topic in sorted(missing):
        broker.create_topic(topic, exist_ok=True)
    return broker.bootstrap


def _broker(name: str) -> KafkaControls:
    global _in_process
    if name:
        from kconsume._embedded.named_broker import attach

        return attach(name)
    with _lock:
        if _in_process is None:
            broker = EmbeddedKafka()
            broker.start()
            _in_process = broker
        return _in_process
