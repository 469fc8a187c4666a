"""A `with` block on the main thread that another thread can end.

The user must notice a failed consumer even if the block around it sleeps or serves. A signal handler raises an
exception that ends the block. The signal is SIGURG, because a SIGURG that arrives after the block is ignored by
default. The signal is sent again until it arrives in the body of the block. If the exception was raised in the code
that enters or leaves the block, it would escape from the block.
"""

from __future__ import annotations

import contextlib
import dis
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType

_AGAIN = 0.01
"""Seconds until the signal is sent again."""
_ENTERS_AND_LEAVES = {
    contextlib.__name__,
    "kconsume.app",
    "kconsume._runtime.exit_guard",
    "kconsume._runtime.running_block",
}


class Interrupted(BaseException):
    """Ends the block. `InterruptibleBlock.__exit__` swallows it."""


class InterruptibleBlock:
    """A block that `interrupt` ends early if it was entered on the main thread. On another thread it runs to its end.

    Implements `exit_guard.Block`. Fields: `_previous` and `_active` are written on the thread that enters the block
    (`_active` also by the signal handler, which runs on the main thread) and read by any; `_wanted` and `_over` are
    events. The order of the writes replaces a lock: `_active` is set before `_wanted` is read, and `_wanted` is set
    before `_active` is read.
    """

    def __init__(self) -> None:
        self._wanted = threading.Event()
        self._over = threading.Event()
        self._active = False
        self._previous: object = None

    @property
    def is_main(self) -> bool:
        return self._previous is not None

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @property
    def heard(self) -> bool:
        return self.over

    @property
    def unheard(self) -> bool:
        return False  # the exception is raised on the thread that entered the block

    def call(self, function: Callable[[], object]) -> None:
        function()

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGURG, self._raise)
            self._active = True
            if self._wanted.is_set():
                self._send_until_over()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._active = False
        self._over.set()
        if self._previous is not None:
            signal.signal(signal.SIGURG, self._previous)  # type: ignore[arg-type]  # what signal() gave us
        return isinstance(error, Interrupted)

    def interrupt(self) -> None:
        """End the block, now or as soon as it begins. May be called on any thread."""
        if not self._wanted.is_set():
            self._wanted.set()
            if self._active:
                self._send_until_over()

    def _send_until_over(self) -> None:
        threading.Thread(target=self._send, name="kconsume-interrupt", daemon=True).start()

    def _send(self) -> None:
        while self._active:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
            self._over.wait(_AGAIN)

    def _raise(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if not self._active:
            return
        self._active = False  # set first: another signal may arrive during the next lines and must change nothing
        if frame is None or _is_entering_or_leaving(frame):
            self._active = not self._over.is_set()
        elif _skips_handlers(frame):
            _raise_at_next_instruction(frame)
        else:
            raise Interrupted


def _is_entering_or_leaving(frame: FrameType) -> bool:
    if frame.f_globals.get("__name__") in _ENTERS_AND_LEAVES:
        return True
    caller: FrameType | None = frame
    while caller is not None:
        if caller.f_code in (InterruptibleBlock.__enter__.__code__, InterruptibleBlock.__exit__.__code__):
            return True
        caller = caller.f_back
    return False


def _skips_handlers(frame: FrameType) -> bool:
    """True if an exception raised now would skip the `with` and `try` blocks around the loop that `frame` runs.

    The exception tables of CPython 3.12 and 3.13 omit the jump at the end of a `while` loop (python/cpython#130279). A
    busy loop handles signals at that jump.
    """
    if sys.version_info >= (3, 14):
        return False
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti and instruction.opcode in dis.hasjrel:
            return _handler(frame.f_code, instruction.offset) != _handler(frame.f_code, instruction.argval)
    return False


def _handler(code: CodeType, offset: int) -> int | None:
    """Return where `code` handles an exception of the instruction at `offset`, or None if it does not."""
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]  # typeshed does not have it
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)


def _raise_at_next_instruction(frame: FrameType) -> None:
    """Raise `Interrupted` in `frame` at the next instruction that keeps its handlers. Replaces a debugger's tracer."""

    def trace(traced: FrameType, event: str, argument: object) -> None:  # noqa: ARG001
        if traced is frame and not _skips_handlers(frame):
            sys.settrace(None)
            raise Interrupted

    frame.f_trace_opcodes = True
    frame.f_trace = trace
    sys.settrace(trace)
