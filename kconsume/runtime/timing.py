"""A limit to how long one call of a handler may take: `timeout=`.

An `async def` is cancelled. A thread cannot be: its calls are made by another thread (`hands.py`), which is given up
when one of them takes too long, and the lane goes on without it. Given up, it calls the handler no more, what it sends
goes nowhere, and its transaction is cut off (`work.py`); but what the call does outside goes on until it returns.

What becomes of the record is not decided here: a call past its limit is a failure like others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextvars import Context
from functools import partial

from kconsume import logs
from kconsume.errors import HandlerTimeout, TooManyFailures
from kconsume.output import Outgoing
from kconsume.records import Message
from kconsume.runner import Halt, Passes, Runner
from kconsume.runtime.hands import Hands, end

_clock = time.monotonic

MOST_FORSAKEN = 100
"""Threads of one handler that were given up and still run: each keeps what its call holds."""
_LOOK_EVERY = 0.1
"""Seconds, at the most: a call is given up so much after its limit."""


class Timed:
    """A runner that gives up a call which takes longer than `seconds`."""

    def __init__(self, run: Runner, name: str, seconds: float, batched: bool, hands: Hands) -> None:
        self._run = run
        self._name = name
        self._seconds = seconds
        self._batched = batched
        self._hands = hands
        self._forsaken: list[Future[Halt | None]] = []

    def __call__(
        self,
        messages: Sequence[Message],
        stop: Sequence[object],
        tx: object,
        scope: str,
        sent: list[Outgoing],
        attempt: int = 1,
        passes: Passes | None = None,  # noqa: ARG002  (of the lane's own thread; what is given up must not reach it)
        /,
    ) -> Halt | None:
        self._forsaken = [running for running in self._forsaken if not running.done()]
        if len(self._forsaken) >= MOST_FORSAKEN:
            raise self._hanging()
        context, stopping, own = Context(), _Stop(stop), list[Outgoing]()
        hand = self._hands.take()
        running = hand.send(partial(context.run, self._run, messages, stopping, tx, scope, own, attempt))
        overdue = self._watched(running, context, stopping)
        if overdue is None:
            self._hands.give_back(hand)
            sent.extend(own)
            return running.result()
        self._forsaken.append(running)
        end(hand)
        certain = not self._batched or len(messages) == 1
        return Halt(messages[overdue], self._late(), certain, forsaken=True, void=bool(own))

    def _watched(self, running: Future[Halt | None], context: Context, stopping: _Stop) -> int | None:
        """Wait for the end; or answer which message its call was overdue with."""
        at, since = None, _clock()
        while not _ended(running, min(_LOOK_EVERY, self._seconds / 10)):
            now, here = _clock(), logs.walked(context)
            if here is None or here != at:
                at, since, stopping.forsaken = here, now, False
            elif stopping.forsaken:
                return at
            elif now - since >= self._seconds:
                # It begins no other call from here on. Whether it has just begun one, the next look will tell.
                stopping.forsaken = True
        return None

    def _late(self) -> HandlerTimeout:
        return HandlerTimeout(
            f"{self._name} took longer than timeout={self._seconds:g} s and was given up, in a thread that goes on "
            f"until it returns: give what it waits for a deadline of its own, or raise the timeout"
        )

    def _hanging(self) -> TooManyFailures:
        return TooManyFailures(
            f"{len(self._forsaken)} calls of {self._name} took longer than timeout={self._seconds:g} s and still hang, "
            f"each in a thread of its own, so no other is begun: give what it waits for a deadline of its own"
        )


class _Stop(list[object]):
    """Not empty once the lane must stop, or its runner was given up."""

    def __init__(self, lane: Sequence[object]) -> None:
        super().__init__()
        self.forsaken = False
        self._lane = lane

    def __bool__(self) -> bool:
        return self.forsaken or bool(self._lane)


def _ended(running: Future[Halt | None], within: float) -> bool:
    try:
        running.exception(within)
    except TimeoutError:
        return False
    return True


def cancelled_after(
    seconds: float, name: str, function: Callable[..., Awaitable[object]]
) -> Callable[..., Awaitable[object]]:
    """An `async def` whose calls are cancelled when they take longer. One that does not let itself be cancelled is
    waited for: it has the loop, and nobody can take that away from it."""

    async def limited(*args: object, **kwargs: object) -> object:
        try:
            async with asyncio.timeout(seconds) as limit:
                return await function(*args, **kwargs)
        except TimeoutError as error:
            if not limit.expired() or isinstance(error, HandlerTimeout):
                raise
            raise HandlerTimeout(
                f"{name} took longer than timeout={seconds:g} s and was cancelled: give what it waits for a deadline "
                f"of its own, or raise the timeout"
            ) from error

    return limited
