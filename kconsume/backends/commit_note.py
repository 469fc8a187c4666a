"""The word beside an offset in the Kafka group: which topic it belongs to, and which store it was copied from.

    kconsume/1 topic=rIcHkFgCTJyRFNxDBHqwMA at=pX3d_9-Qa.1z     mirrored from a PostgreSQL, at epoch 71
    kconsume/1 topic=rIcHkFgCTJyRFNxDBHqwMA at=k                Kafka's own offset: `kafka://`
    kconsume/1 topic=rIcHkFgCTJyRFNxDBHqwMA store=0123456789ab  by an earlier version: a digest of the store's address

Kafka itself keeps only the topic's name. What is said of the store is the kind of it, a digest of its id, and the epoch
of the row: it is only ever compared. Below 64 bytes, for a broker may allow no more (`offset.metadata.max.bytes`).
Earlier versions read the topic, and do not look at what they do not know.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass

from kconsume.backends.abc import NamedStore, OffsetStore

_TOPIC = re.compile(r"kconsume/1 (?:\S+ )*?topic=(\S+)")
_PLACE = re.compile(r"kconsume/1 (?:\S+ )*?store=(\S+)")
_AT = re.compile(r"kconsume/1 (?:\S+ )*?at=([a-z])(?:([A-Za-z0-9_-]{8})(?:\.([0-9a-z]{1,13}))?)?(?= |$)")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"

KINDS = {"kafka": "k", "postgresql": "p", "postgres": "p", "sqlite": "s", "redis": "r", "rediss": "r"}
"""By the scheme of an address; `x` for all others."""


@dataclass(frozen=True, slots=True)
class StoreName:
    """How a store is told from others."""

    kind: str
    """One letter of `KINDS`."""
    id: str = ""
    """A digest of its id, or of its address if it has none; empty for `kafka://`, which is in the cluster."""
    place: str = ""
    """A digest of its address: what earlier versions wrote."""


KAFKA = StoreName("k")
"""`kafka://`: the offset is its own."""


@dataclass(frozen=True, slots=True)
class Source:
    """The store that an offset was copied from, as its note says."""

    kind: str | None
    """None in a note of an earlier version, which says only the place."""
    id: str = ""
    epoch: int | None = None
    """Of the row that was copied; None where the note does not say it."""
    place: str = ""

    def is_of(self, name: StoreName) -> bool:
        if self.kind is None:
            return self.place == name.place
        return (self.kind, self.id) == (name.kind, name.id)


def note_of(topic_id: str | None, name: StoreName | None = None, epoch: int | None = None) -> str:
    fields = [f"topic={topic_id}" if topic_id else "", "" if name is None else f"at={_written(name, epoch)}"]
    return " ".join(["kconsume/1", *filter(None, fields)]) if any(fields) else ""


def topic_id_in(note: str) -> str | None:
    """None in that of other tools."""
    match = _TOPIC.match(note)
    return match.group(1) if match else None


def source_in(note: str) -> Source | None:
    """None where nobody has said it: other tools, `memory://`, and `kafka://` of an earlier version."""
    if match := _AT.match(note):
        kind, name, epoch = match.groups()
        return Source(kind, name or "", None if epoch is None else int(epoch, 36))
    match = _PLACE.match(note)
    return Source(None, place=match.group(1)) if match else None


def name_of(store: OffsetStore) -> StoreName | None:
    """None for a store that is forgotten with the process. Asks the store for its id, and so may block."""
    address = getattr(store, "place", store.address)
    if address is None:
        return None
    kind = KINDS.get(store.address.partition(":")[0], "x")
    if kind == KAFKA.kind:
        return KAFKA
    place = hashlib.sha256(address.encode()).hexdigest()[:12]
    said = store.identity() if isinstance(store, NamedStore) else address
    return StoreName(kind, _digest(said), place)


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()[:6]).decode()


def _written(name: StoreName, epoch: int | None) -> str:
    return f"{name.kind}{name.id}" + (f".{_base_36(epoch)}" if epoch and name.id else "")


def _base_36(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits
