"""The preflight of `kconsume dlq redrive`: today's handler on dead letters, each in a transaction that is rolled back.

The call is that of `kconsume try`. What cannot be undone is refused, unless a person says that it may happen. Nothing
is sent, and no offset moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta

import msgspec

from kconsume.app import App
from kconsume.cli.redrive_choice import Chosen, Route
from kconsume.cli.rehearse import _scope
from kconsume.errors import ConfigurationError
from kconsume.failures.policy import Policy
from kconsume.records import Message
from kconsume.runtime.furnishing import Furnishing
from kconsume.runtime.home import OwnLoop
from kconsume.trial import Furniture, Trial, rehearsal

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Cause(msgspec.Struct):
    """Letters that still fail, by the class of the error."""

    cause: str
    count: int
    message: str
    """Of the first."""
    example: str
    """Where it is, as `dlq show` takes it."""


class Preflight(msgspec.Struct):
    """What today's handlers do with the letters."""

    would_pass: int = 0
    still_fail: list[Cause] = []

    def note(self, place: str, error: BaseException | None) -> None:
        if error is None:
            self.would_pass += 1
            return
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        for cause in self.still_fail:
            if cause.cause == name:
                cause.count += 1
                return
        self.still_fail.append(Cause(name, 1, str(error), place))


def tried(app: App, chosen: Iterable[Chosen], *, with_effects: bool) -> Iterator[Preflight]:
    """What is known after each letter; always the same object."""
    preflight = Preflight()
    with ExitStack() as opened:
        trials: dict[str, Trial] = {}
        for each in chosen:
            if each.route.topic not in trials:
                _must_be_undone(each.route, with_effects)
                trials[each.route.topic] = opened.enter_context(_trial(app, each.route))
            error = trials[each.route.topic].run([_message(each)]).error
            preflight.note(each.found.place, error)
            yield preflight


def _must_be_undone(route: Route, with_effects: bool) -> None:
    binding = route.part.handler.binding
    if binding.transaction is None and not with_effects:
        raise ConfigurationError(
            f"{binding.name} takes no transaction of its store, so what it does with a dead letter cannot be undone: "
            f"say --with-effects to run it all the same, or --yes to send the letters back untried"
        )


@contextmanager
def _trial(app: App, route: Route) -> Iterator[Trial]:
    """With resources that are built once; for an `async def` for each letter, because they belong to its event loop."""
    handler = dataclasses.replace(route.part.handler, policy=Policy("stop"))
    home = OwnLoop("kconsume-redrive")
    furnishing = Furnishing(app._resources, app._given, home)
    try:
        wanted = [] if handler.binding.is_async else handler.binding.resources.values()
        built = furnishing.build([hint for hint in wanted if hint not in app._given])
        furniture = Furniture(app._resources, {**app._given, **built}, app.shutdown)
        scope = _scope(route.part.consumer, route.source)
        yield Trial(handler, scope, furniture, rehearsal(route.part.consumer.store, handler.binding), app._most_bytes)
    finally:
        trouble = furnishing.close(app.shutdown)
        home.close(app.shutdown)
    if trouble is not None:
        raise trouble


def _message(each: Chosen) -> Message:
    """As the handler would get it."""
    from kconsume.testing.feeding import FedMessage

    letter, outgoing = each.found.letter, each.outgoing
    moment = letter.timestamp or datetime.now(UTC)
    return FedMessage(outgoing, each.route.topic, max(0, letter.offset), (moment - _EPOCH) // timedelta(milliseconds=1))
