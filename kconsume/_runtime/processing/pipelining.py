"""Decides whether a handler's statements are sent in a pipeline: to the database, without waiting for each result.

Some statements do not work in a pipeline (COPY, named cursors, strings of several statements). Records that fail in a
pipeline are run again without one. If they pass then, the pipeline is probably the cause. One such failure may be
chance, because the second run is later.
"""

from __future__ import annotations

from kconsume._event_log import EventLog
from kconsume.backends.base import TransactionalStore
from kconsume.backends.capabilities import PipeliningStore, capabilities_of

_log = EventLog("stores")

_CHANCES = 3
"""Number of failures that occur only in a pipeline. After that many, the handler gets no pipeline any more."""


class Pipelining:
    """Whether one handler works in pipelines, as far as known.

    `is_off` and `_failures` are written and read by the workers of the handler without a lock, because a lost count
    delays the decision by only one failure.
    """

    def __init__(self, store: PipeliningStore) -> None:
        self.store = store
        self.is_off = False
        self._failures = 0

    @classmethod
    def of(cls, store: TransactionalStore, unsuited: bool) -> Pipelining | None:
        """The pipelining of a handler. None if the store has no pipelines, or the handler is not suited to
        pipelines."""
        pipelining = capabilities_of(store).pipelining
        return None if pipelining is None or unsuited else cls(pipelining)

    def failed_alone(self, error: BaseException) -> None:
        """Note that records failed in a pipeline with `error`, and passed without one."""
        self._failures += 1
        if self._failures >= _CHANCES and not self.is_off:
            self.is_off = True
            _log.warning(
                "pipeline off",
                cause=error,
                hint="the handler fails in a pipeline and not without one, so kconsume waits for each statement",
            )
