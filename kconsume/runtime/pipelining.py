"""Whether a handler's statements are sent without waiting for each, and when that is given up.

Not everything works in a pipeline (COPY, named cursors, strings of several statements). Records that fail in one are
run again without; if they pass then, it was the pipeline. One failure may be chance, for time has passed meanwhile.
"""

from __future__ import annotations

import logging

from kconsume.backends.abc import PipeliningStore, TransactionalStore

_log = logging.getLogger("kconsume.stores")

_CHANCES = 3


class Pipelining:
    """What is known of one handler in pipelines."""

    def __init__(self, store: PipeliningStore) -> None:
        self.store = store
        self.is_off = False
        self._failures = 0

    @classmethod
    def of(cls, store: TransactionalStore, unsuited: bool) -> Pipelining | None:
        return cls(store) if isinstance(store, PipeliningStore) and store.pipelines and not unsuited else None

    def failed_alone(self, error: BaseException) -> None:
        """Records failed in a pipeline, and not without."""
        self._failures += 1
        if self._failures >= _CHANCES and not self.is_off:
            self.is_off = True
            _log.warning(
                "pipeline off: the handler fails in one and not without, so each statement is waited for cause=%s: %s",
                type(error).__name__,
                " ".join(str(error).split()),
            )
