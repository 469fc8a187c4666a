"""The preflight of `kconsume dlq redrive`: runs today's handler on dead letters, in transactions that are rolled back.

Makes the same call as `kconsume try`. Refuses a handler whose effects cannot be rolled back, unless the user allows
them. Sends nothing, and moves no offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec

from kconsume._runtime.dry_run import DryRun
from kconsume._runtime.handler_loop import EventLoopThread
from kconsume._runtime.resource_scope import ResourceScope
from kconsume.app import App
from kconsume.cli.app_parts import dry_run, record_scope
from kconsume.cli.redrive.selection import Chosen, Route
from kconsume.errors import ConfigurationError
from kconsume.records import Message

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class PreflightCause(msgspec.Struct):
    """Letters that still fail with one class of error."""

    cause: str
    count: int
    message: str
    """The error message of the first letter."""
    example: str
    """The place of the first letter, for `dlq show`."""


class Preflight(msgspec.Struct):
    """What today's handlers do with the letters."""

    would_pass: int = 0
    still_fail: list[PreflightCause] = []

    @property
    def failing(self) -> int:
        """How many letters still fail."""
        return sum(cause.count for cause in self.still_fail)

    def note(self, tried: Tried) -> None:
        """Count one letter."""
        error = tried.error
        if error is None:
            self.would_pass += 1
            return
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        for cause in self.still_fail:
            if cause.cause == name:
                cause.count += 1
                return
        self.still_fail.append(PreflightCause(name, 1, str(error), tried.chosen.found.place))


class Tried(NamedTuple):
    """One letter, and what today's handler does with it."""

    chosen: Chosen
    error: BaseException | None
    """None if the handler passes."""


def tried(app: App, chosen: Iterable[Chosen], *, with_effects: bool) -> Iterator[Tried]:
    """Run the handler of each letter.

    Args:
        with_effects: allow handlers whose effects cannot be rolled back.
    """
    with ExitStack() as opened:
        runs: dict[str, DryRun] = {}
        for each in chosen:
            topic = each.route.topic
            if topic not in runs:
                _check_rolled_back(each.route, with_effects)
                runs[topic] = opened.enter_context(_run(app, each.route))
            yield Tried(each, runs[topic].run([_message(each)]).error)


def _check_rolled_back(route: Route, with_effects: bool) -> None:
    binding = route.part.handler.binding
    if binding.transaction is None and not with_effects:
        raise ConfigurationError(
            f"{binding.name} does not take the transaction of its store, so what it does with a dead letter cannot be "
            f"rolled back: add --with-effects to run it all the same, or --yes to send the letters back untried"
        )


@contextmanager
def _run(app: App, route: Route) -> Iterator[DryRun]:
    """A dry run whose resources are built once for all letters. Resources of an `async def` are built for each letter,
    because they belong to the event loop of one call."""
    declared, handler = app.declared, route.part.handler
    loop = EventLoopThread("kconsume-redrive")
    scope = ResourceScope(declared.resources, declared.ready_resources, loop)
    try:
        wanted = [] if handler.binding.is_async else handler.binding.resources.values()
        built = scope.build([hint for hint in wanted if hint not in declared.ready_resources])
        yield dry_run(app, route.part, record_scope(route.part.consumer, route.source), built)
    finally:
        trouble = scope.close(app.shutdown)
        loop.close(app.shutdown)
    if trouble is not None:
        raise trouble


def _message(chosen: Chosen) -> Message:
    """The letter's record as the handler would get it."""
    from kconsume.testing._feed import FedMessage

    letter, outgoing = chosen.found.letter, chosen.outgoing
    moment = letter.timestamp or datetime.now(UTC)
    timestamp = (moment - _EPOCH) // timedelta(milliseconds=1)
    return FedMessage(outgoing, chosen.route.topic, max(0, letter.offset), timestamp)
