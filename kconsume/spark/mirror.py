"""Offsets of a stream written to its Kafka group, so that lag tools see it. A copy: the store is the truth.

In a thread of its own and best effort: a batch never waits for it. A group with live members refuses it, which is how
an embedded app and a stream of one group at once are noticed here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from kconsume.backends.commit_note import StoreName, note_of
from kconsume.cluster import Cluster
from kconsume.errors import KconsumeError
from kconsume.records import Partition

_log = logging.getLogger("kconsume.spark")
_SAID_EVERY = 30.0


class GroupMirror:
    """Of one group."""

    def __init__(
        self, cluster: Cluster, group: str, name: StoreName | None = None, look: Callable[[], None] = lambda: None
    ) -> None:
        """`name`: which store keeps the offsets, for others of the group to see. `look` is called after each writing,
        in the mirror's thread."""
        self._cluster = cluster
        self._group = group
        self._note = note_of(None, name)
        self._look = look
        self._guard = threading.Condition()
        self._offsets: dict[Partition, int] = {}
        self._over = self._busy = False
        self._said_at = -_SAID_EVERY
        self._thread: threading.Thread | None = None

    def offer(self, offsets: Mapping[Partition, int]) -> None:
        """Have these written; what is not written yet is overtaken."""
        with self._guard:
            self._offsets.update(offsets)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"kconsume-mirror-{self._group}", daemon=True)
                self._thread.start()
            self._guard.notify_all()

    def close(self, seconds: float = 10.0) -> None:
        """Write what is left, if that goes in time."""
        with self._guard:
            self._guard.wait_for(lambda: not self._offsets and not self._busy, seconds)
            self._over = True
            self._guard.notify_all()

    def _run(self) -> None:
        while True:
            with self._guard:
                self._busy = False
                self._guard.notify_all()
                self._guard.wait_for(lambda: self._offsets or self._over)
                if self._over:
                    return
                offsets, self._offsets, self._busy = self._offsets, {}, True
            try:
                places = {p: (offset, self._note) for p, offset in offsets.items()}
                self._cluster.set_committed(self._group, places, known=True)  # they are claimed
                self._look()
            except KconsumeError as error:
                if time.monotonic() - self._said_at > _SAID_EVERY:
                    self._said_at = time.monotonic()
                    _log.warning("offsets not mirrored group=%s cause=%s", self._group, error)
