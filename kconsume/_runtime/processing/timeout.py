"""Limits the time of one handler call: `timeout=`.

An `async def` is cancelled. A thread cannot be cancelled. So a plain function is called on another thread
(`_runtime/thread_pool.py`). If a call takes too long, that thread is abandoned, and the lane continues without it. The
abandoned thread makes no further call, its records are not sent, and its transaction loses its connection
(`_runtime/processing/transactional.py`). But other effects of the call continue until it returns.

This module does not decide what happens to the record: a call past its limit is a failure like any other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextvars import Context
from functools import partial

from kconsume import _log_context
from kconsume._handlers.compiled import Halt, Passes, Runner
from kconsume._kafka.outgoing import Outgoing
from kconsume._runtime.thread_pool import ThreadPool, end
from kconsume.errors import HandlerTimeout, TooManyFailures
from kconsume.records import Message

_clock = time.monotonic

MAX_ABANDONED = 100
"""Limit of abandoned threads of one handler that still run. Each keeps the memory and the connections of its call."""
_CHECK_EVERY = 0.1
"""Most seconds between two checks. A call is abandoned at most this long after its limit."""


class TimedCalls:
    """A `Runner` that abandons a call which takes longer than `seconds`.

    `_abandoned` is written and read by the lanes of the handler without a lock, so the number of abandoned calls
    may exceed its limit by the number of lanes.
    """

    def __init__(self, run: Runner, name: str, seconds: float, batched: bool, thread_pool: ThreadPool) -> None:
        self._run = run
        self._name = name
        self._seconds = seconds
        self._batched = batched
        self._thread_pool = thread_pool
        self._abandoned: list[Future[Halt | None]] = []

    def __call__(
        self,
        messages: Sequence[Message],
        stop: Sequence[object],
        tx: object,
        scope: str,
        sent: list[Outgoing],
        attempt: int = 1,
        passes: Passes | None = None,  # noqa: ARG002  (it belongs to the lane's own thread; an abandoned call must not reach it)
        /,
    ) -> Halt | None:
        self._abandoned = [running for running in self._abandoned if not running.done()]
        if len(self._abandoned) >= MAX_ABANDONED:
            raise self._too_many_abandoned()
        context, stopping, own = Context(), _Stop(stop), list[Outgoing]()
        thread = self._thread_pool.take()
        running = thread.send(partial(context.run, self._run, messages, stopping, tx, scope, own, attempt))
        overdue = self._await_end(running, context, stopping)
        if overdue is None:
            self._thread_pool.give_back(thread)
            sent.extend(own)
            return running.result()
        self._abandoned.append(running)
        end(thread)
        certain = not self._batched or len(messages) == 1
        return Halt(messages[overdue], self._timeout_error(), certain, abandoned=True, sends_lost=bool(own))

    def _await_end(self, running: Future[Halt | None], context: Context, stopping: _Stop) -> int | None:
        """Wait for the end of the calls. Returns None, or the index of the message whose call is overdue."""
        at, since = None, _clock()
        while not _ended(running, min(_CHECK_EVERY, self._seconds / 10)):
            now, here = _clock(), _log_context.walked(context)
            if here is None or here != at:
                at, since, stopping.abandoned = here, now, False
            elif stopping.abandoned:
                return at
            elif now - since >= self._seconds:
                # From now on the thread begins no other call. The next check shows whether it has just begun one.
                stopping.abandoned = True
        return None

    def _timeout_error(self) -> HandlerTimeout:
        return HandlerTimeout(
            f"{self._name} took longer than timeout={self._seconds:g} s and was given up. Its thread runs until the "
            f"call returns: set a deadline on the client that the handler waits for, or raise the timeout"
        )

    def _too_many_abandoned(self) -> TooManyFailures:
        return TooManyFailures(
            f"{len(self._abandoned)} calls of {self._name} took longer than timeout={self._seconds:g} s and still "
            f"hang, each in its own thread, so no other call is started: set a deadline on the client that the "
            f"handler waits for"
        )


class _Stop(list[object]):
    """The stop reasons of the lane. Also true once the thread of the call was abandoned."""

    def __init__(self, lane: Sequence[object]) -> None:
        super().__init__()
        self.abandoned = False
        self._lane = lane

    def __bool__(self) -> bool:
        return self.abandoned or bool(self._lane)


def _ended(running: Future[Halt | None], within: float) -> bool:
    try:
        running.exception(within)
    except TimeoutError:
        return False
    return True


def cancelled_after(
    seconds: float, name: str, function: Callable[..., Awaitable[object]]
) -> Callable[..., Awaitable[object]]:
    """An `async def` whose calls are cancelled when they take longer than `seconds`. If a call refuses to be
    cancelled, its end is awaited, because a call on the event loop cannot be abandoned."""

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
