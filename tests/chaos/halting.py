"""Makes a `kconsume dlq redrive` stand still at a chosen moment: a kill that comes then hits, however fast it is."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kconsume._kafka.transactional_producer import TransactionalProducer
from kconsume._runtime.output.outbox_relay import OutboxRelay
from kconsume.cli.redrive import command as redrive
from kconsume.cli.redrive import send_table

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

    delete = OutboxRelay._delete

    def delete_confirmed(relay: OutboxRelay, outboxes: Any) -> None:
        if any(outbox.confirmed for outbox in outboxes.values()):
            Path(told).touch()
            threading.Event().wait()
        delete(relay, outboxes)

    if where == "in transaction":
        TransactionalProducer._commit = before(TransactionalProducer._commit)  # type: ignore[method-assign]
    elif where == "committed":
        TransactionalProducer._commit = after(TransactionalProducer._commit)  # type: ignore[method-assign]
    else:
        send_table.TableSender.send = after(send_table.TableSender.send)  # type: ignore[method-assign]
    if where == "relayed":
        OutboxRelay._delete = delete_confirmed  # type: ignore[method-assign, assignment]
