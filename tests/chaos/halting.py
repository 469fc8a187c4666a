"""Makes a `kconsume dlq redrive` stand still at a chosen moment: a kill that comes then hits, however fast it is."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kconsume.cli import redrive, redrive_table, redrive_topic
from kconsume.runtime.relay import Relay

CHUNK = 50
"""Letters that it sends at once: so few that there are many moments."""


def stand_still(where: str, number: int, told: str) -> None:
    """For good, at the step with this number; the file says that it has come there.

    `in transaction`: letters of a topic are sent, and not committed. `committed`: they are, and the command does not
    know it. `in outbox`: those of a table are in the outbox, and may be sent meanwhile. `relayed`: the first of them
    are confirmed, and still in the outbox, and no more are put there than by the step with this number.
    """
    redrive._CHUNK = CHUNK
    numbers = itertools.count(1)

    def halt() -> None:
        if next(numbers) == number:
            if where != "relayed":
                Path(told).touch()
            threading.Event().wait()

    def before(step: Callable[..., Any]) -> Callable[..., Any]:
        def halting(*arguments: Any) -> Any:
            halt()
            return step(*arguments)

        return halting

    def after(step: Callable[..., Any]) -> Callable[..., Any]:
        def halting(*arguments: Any) -> Any:
            done = step(*arguments)
            halt()
            return done

        return halting

    delete = Relay._delete

    def delete_confirmed(relay: Relay, strands: Any) -> None:
        if any(strand.confirmed for strand in strands.values()):
            Path(told).touch()
            threading.Event().wait()
        delete(relay, strands)

    if where == "in transaction":
        redrive_topic.Sending._commit = before(redrive_topic.Sending._commit)  # type: ignore[method-assign]
    elif where == "committed":
        redrive_topic.Sending._commit = after(redrive_topic.Sending._commit)  # type: ignore[method-assign]
    else:
        redrive_table.Posting.send = after(redrive_table.Posting.send)  # type: ignore[method-assign]
    if where == "relayed":
        Relay._delete = delete_confirmed  # type: ignore[method-assign, assignment]
