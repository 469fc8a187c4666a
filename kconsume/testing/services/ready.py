"""Wait until a service answers, with one error text for all services."""

from __future__ import annotations

import time
from collections.abc import Callable

from kconsume.errors import ServiceUnavailable

_CHECK_INTERVAL = 0.05

Answers = Callable[[str], str | None]
"""Sends a small request to the service at a URL. Returns None if it answers, else the reason why it does not."""


def wait_for_answer(
    answers: Answers, url: str, *, within: float, check_running: Callable[[], None] | None = None
) -> None:
    """Return when the service answers. Raises ServiceUnavailable after the deadline.

    Args:
        answers: asks the service.
        url: the address of the service.
        within: seconds until the deadline.
        check_running: called between two requests. It may raise, to end the wait early.
    """
    deadline = time.monotonic() + within
    while (refusal := answers(url)) is not None:
        if check_running is not None:
            check_running()
        if time.monotonic() > deadline:
            raise ServiceUnavailable(
                f"No answer from {url} within {within:g} s ({refusal}); check the address and the service's log."
            )
        time.sleep(_CHECK_INTERVAL)
