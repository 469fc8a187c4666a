"""Wait until a service can be worked with, and say so in the same words whichever service it is."""

from __future__ import annotations

import time
from collections.abc import Callable

from kconsume.errors import ServiceUnavailable

_LOOK_EVERY_SECONDS = 0.05

Answers = Callable[[str], str | None]
"""Ask the service at a URL something small: None when it answers, else why it does not."""


def wait_for_answer(
    answers: Answers, url: str, *, within: float, still_there: Callable[[], None] | None = None
) -> None:
    """Return when the service answers. `still_there` may raise to end the waiting early."""
    deadline = time.monotonic() + within
    while (refusal := answers(url)) is not None:
        if still_there is not None:
            still_there()
        if time.monotonic() > deadline:
            raise ServiceUnavailable(
                f"No answer from {url} within {within:g} s ({refusal}); check the address and the service's log."
            )
        time.sleep(_LOOK_EVERY_SECONDS)
