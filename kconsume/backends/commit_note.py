"""The word beside an offset in the Kafka group: which topic it belongs to, and where the group's offsets are kept.

Kafka itself keeps only the topic's name. The place stands there as a few letters that say nothing to others: it is only
ever compared. With the topic it stays below 64 bytes, for a broker may allow no more.
"""

from __future__ import annotations

import hashlib
import re

from kconsume.backends.abc import OffsetStore

_TOPIC = re.compile(r"kconsume/1 (?:\S+ )*?topic=(\S+)")
_PLACE = re.compile(r"kconsume/1 (?:\S+ )*?store=(\S+)")


def note_of(topic_id: str | None, place: str | None = None) -> str:
    fields = [f"topic={topic_id}" if topic_id else "", f"store={place}" if place else ""]
    return " ".join(["kconsume/1", *filter(None, fields)]) if any(fields) else ""


def topic_id_in(note: str) -> str | None:
    """None in that of other tools."""
    match = _TOPIC.match(note)
    return match.group(1) if match else None


def place_in(note: str) -> str | None:
    """None where nobody has said it: by other tools, or where the offsets of the group are Kafka's own."""
    match = _PLACE.match(note)
    return match.group(1) if match else None


def place_of(store: OffsetStore) -> str | None:
    """Where this store keeps its rows: `store.place` if it has one, else its address. None for what is forgotten with
    the process."""
    place = getattr(store, "place", store.address)
    return None if place is None else hashlib.sha256(place.encode()).hexdigest()[:12]
