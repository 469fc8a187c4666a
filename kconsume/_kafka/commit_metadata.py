"""Commit metadata: the topic id and the store of an offset that is committed to the Kafka group.

    kconsume/1 topic=rIcHkFgCTJyRFNxDBHqwMA at=pX3d_9-Qa.1z     copied from a PostgreSQL store, at epoch 71
    kconsume/1 topic=rIcHkFgCTJyRFNxDBHqwMA at=k                Kafka's own offset: `kafka://`
    kconsume/1 topic=rIcHkFgCTJyRFNxDBHqwMA store=0123456789ab  of an earlier version: a digest of the store's address

Kafka itself keeps only the name of the topic. The part about the store is its kind, a digest of its id and the epoch of
the row; it is only compared. The text is shorter than 64 bytes, because a broker may allow no more
(`offset.metadata.max.bytes`). Earlier versions read the topic and ignore fields that they do not know.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass

from kconsume.backends.base import OffsetStore
from kconsume.backends.capabilities import capabilities_of

_TOPIC = re.compile(r"kconsume/1 (?:\S+ )*?topic=(\S+)")
_PLACE = re.compile(r"kconsume/1 (?:\S+ )*?store=(\S+)")
_AT = re.compile(r"kconsume/1 (?:\S+ )*?at=([a-z])(?:([A-Za-z0-9_-]{8})(?:\.([0-9a-z]{1,13}))?)?(?= |$)")
_NUMBER = re.compile(r"kconsume/1 (?:\S+ )*?n=([0-9a-z]+)(?= |$)")
_EPOCH = re.compile(r"(?<= at=[a-z].{8})\.[0-9a-z]+")
_MOST_BYTES = 64
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"

KINDS = {"kafka": "k", "postgresql": "p", "postgres": "p", "sqlite": "s", "redis": "r", "rediss": "r"}
"""The kind of a store by the scheme of its address; all other schemes are `x`."""


@dataclass(frozen=True, slots=True)
class StoreName:
    """What identifies a store in commit metadata."""

    kind: str
    """A letter of `KINDS`."""
    id: str = ""
    """A digest of the store's id, or of its address if it has no id; empty for `kafka://`."""
    place: str = ""
    """A digest of the store's address, which earlier versions wrote."""


KAFKA = StoreName("k")
"""The name of `kafka://`, where the committed offset is the stored offset."""


@dataclass(frozen=True, slots=True)
class MirrorSource:
    """The store from which an offset was copied to the group, as the commit metadata names it."""

    kind: str | None
    """None in the metadata of an earlier version, which has only the place."""
    id: str = ""
    epoch: int | None = None
    """The epoch of the copied row; None if the metadata has none."""
    place: str = ""

    def is_of(self, name: StoreName) -> bool:
        """Return whether the offset was copied from this store."""
        if self.kind is None:
            return self.place == name.place
        return (self.kind, self.id) == (name.kind, name.id)


def note_of(topic_id: str | None, name: StoreName | None = None, epoch: int | None = None) -> str:
    """Return the metadata of an offset.

    Args:
        topic_id: the id of the topic, if it is known.
        name: the store of the offset.
        epoch: the epoch of its row.
    """
    fields = [f"topic={topic_id}" if topic_id else "", "" if name is None else f"at={_written(name, epoch)}"]
    return " ".join(["kconsume/1", *filter(None, fields)]) if any(fields) else ""


def numbered(note: str, number: int) -> str:
    """Return the metadata with the number of a commit. The number tells answers to commits of the same offset apart.

    If the text would be too long, an epoch of more than six digits is left out.

    Args:
        note: the metadata.
        number: the number of the commit; 0 is not written.
    """
    if not number:
        return note
    text = f"{note or 'kconsume/1'} n={_base_36(number)}"
    return text if len(text) <= _MOST_BYTES else _EPOCH.sub("", text)


def number_in(note: str) -> int:
    """Return the number of a commit in its metadata; 0 if there is none."""
    match = _NUMBER.match(note)
    return 0 if match is None else int(match.group(1), 36)


def topic_id_in(note: str) -> str | None:
    """Return the topic id in commit metadata; None in the metadata of other tools."""
    match = _TOPIC.match(note)
    return match.group(1) if match else None


def source_in(note: str) -> MirrorSource | None:
    """Return the store in commit metadata.

    Returns None for the metadata of other tools, of `memory://`, and of `kafka://` in earlier versions.
    """
    if match := _AT.match(note):
        kind, name, epoch = match.groups()
        return MirrorSource(kind, name or "", None if epoch is None else int(epoch, 36))
    match = _PLACE.match(note)
    return MirrorSource(None, place=match.group(1)) if match else None


def name_of(store: OffsetStore) -> StoreName | None:
    """Return the name of a store; None if the store ends with the process. May block: the store is asked for its id."""
    offers = capabilities_of(store)
    if not offers.durable:
        return None
    address = offers.location or store.address
    kind = KINDS.get(store.address.partition(":")[0], "x")
    if kind == KAFKA.kind:
        return KAFKA
    place = hashlib.sha256(address.encode()).hexdigest()[:12]
    identity = address if offers.named is None else offers.named.identity()
    return StoreName(kind, _digest(identity), place)


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
