"""What becomes of a record whose handler failed: a decision, made from values only.

Carrying it out is the runtime's; writing anything anywhere is not done here.
"""

from __future__ import annotations

import enum
from typing import Literal, get_args

from kconsume.errors import ConfigurationError

OnError = Literal["stop", "skip"]


class Verdict(enum.Enum):
    """The terminal action for a record."""

    STOP = "stop"
    SKIP = "skip"


class Policy:
    """The person's choice for one handler: `on_error="stop"` or `on_error="skip"`."""

    def __init__(self, on_error: OnError = "stop") -> None:
        if on_error not in get_args(OnError):
            raise ConfigurationError(f"on_error={on_error!r} is unknown: choose 'stop' or 'skip'")
        self._terminal = Verdict(on_error)

    def __str__(self) -> str:
        if self._terminal is Verdict.STOP:
            return "a record that fails stops the process; its offset is not passed"
        return "a record that fails is logged, counted and skipped"

    def verdict(self, error: BaseException) -> Verdict:
        """What to do with a record whose handler raised `error`. `sys.exit()` asks to stop, whatever the policy."""
        return self._terminal if isinstance(error, Exception) else Verdict.STOP
