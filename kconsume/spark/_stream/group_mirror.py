"""Writes a stream's offsets to its Kafka group, so that lag tools see them. The offsets in the store still decide.

The mirror is best effort and has a thread of its own: a batch never waits for it. A group with live members refuses the
offsets, which shows that an embedded app and a stream of one group run at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from kconsume._event_log import EventLog
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.commit_metadata import StoreName, note_of
from kconsume.errors import KconsumeError
from kconsume.records import Partition

_log = EventLog("spark")
_LOG_EVERY = 30.0


class GroupMirror:
    """Writes the offsets of one group.

    `_guard` guards `_offsets`, `_closed`, `_writing` and `_thread`. Only the mirror's thread uses `_logged_at`.
    """

    def __init__(self, cluster: Cluster, group: str, name: StoreName | None = None) -> None:
        """name: the store that keeps the offsets; other consumers of the group read it from the commit metadata."""
        self._cluster = cluster
        self._group = group
        self._note = note_of(None, name)
        self._guard = threading.Condition()
        self._offsets: dict[Partition, int] = {}
        self._closed = self._writing = False
        self._logged_at = -_LOG_EVERY
        self._thread: threading.Thread | None = None

    def offer(self, offsets: Mapping[Partition, int]) -> None:
        """Queue these offsets. They replace earlier offsets that are not written yet."""
        with self._guard:
            self._offsets.update(offsets)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"kconsume-mirror-{self._group}", daemon=True)
                self._thread.start()
            self._guard.notify_all()

    def close(self, seconds: float = 10.0) -> None:
        """Wait until the queued offsets are written, at most this number of seconds, and end the thread."""
        with self._guard:
            self._guard.wait_for(lambda: not self._offsets and not self._writing, seconds)
            self._closed = True
            self._guard.notify_all()

    def _run(self) -> None:
        while True:
            with self._guard:
                self._writing = False
                self._guard.notify_all()
                self._guard.wait_for(lambda: self._offsets or self._closed)
                if self._closed:
                    return
                offsets, self._offsets, self._writing = self._offsets, {}, True
            try:
                commits = {p: (offset, self._note) for p, offset in offsets.items()}
                self._cluster.set_committed(self._group, commits, known=True)  # claimed partitions exist
            except KconsumeError as error:
                if time.monotonic() - self._logged_at > _LOG_EVERY:
                    self._logged_at = time.monotonic()
                    _log.warning("offsets not mirrored", group=self._group, cause=error)
