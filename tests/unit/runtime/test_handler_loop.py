"""The event loop of handlers: one in a thread of its own, or the caller's; what runs there, and what is left of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

from kconsume._runtime.handler_loop import CallersLoop, EventLoopThread
from kconsume._runtime.thread_pool import ThreadPool
from tests.waiting import eventually

NAME = "kconsume-loop-test"
LONG = 60.0

word: ContextVar[str] = ContextVar("word", default="nothing")


def threads(name: str = NAME) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def start(handler_loop: EventLoopThread, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """As lanes start their tasks: on the loop."""

    async def begin() -> asyncio.Task[None]:
        return handler_loop.start(work, "kconsume-task")

    return asyncio.run_coroutine_threadsafe(begin(), handler_loop.loop).result(10)


class TestAThreadOfItsOwn:
    def test_it_is_not_started_before_it_is_asked_for(self) -> None:
        handler_loop = EventLoopThread(NAME)
        handler_loop.rest(0.1)
        handler_loop.close(0.1)
        assert threads() == []

    def test_all_who_ask_get_the_one_loop(self) -> None:
        handler_loop, loops, go = EventLoopThread(NAME), set[asyncio.AbstractEventLoop](), threading.Barrier(8)

        def ask() -> None:
            go.wait(10)
            loops.add(handler_loop.loop)

        asking = [threading.Thread(target=ask) for _ in range(8)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert len(loops) == 1
        assert len(threads()) == 1
        assert threads()[0].daemon, "a handler that blocks the loop must not keep the process from ending"
        handler_loop.close(5)

    def test_closing_ends_the_thread_and_the_loop(self) -> None:
        handler_loop = EventLoopThread(NAME)
        loop = handler_loop.loop
        handler_loop.close(5)
        assert threads() == []
        assert loop.is_closed()
        handler_loop.close(5)  # a second time is no error

    def test_what_still_runs_is_cancelled_and_may_clean_up(self) -> None:
        handler_loop, cleaned = EventLoopThread(NAME), list[str]()
        begun = threading.Event()

        async def work() -> None:
            begun.set()
            try:
                await asyncio.sleep(LONG)
            finally:
                await asyncio.sleep(0.01)
                cleaned.append("task")

        start(handler_loop, work())
        assert begun.wait(10)
        handler_loop.close(5)
        assert cleaned == ["task"]
        assert threads() == []

    def test_async_generators_are_closed_with_it(self) -> None:
        handler_loop, closed = EventLoopThread(NAME), list[str]()
        kept: list[AsyncIterator[int]] = []

        async def numbers() -> AsyncIterator[int]:
            try:
                yield 1
            finally:
                closed.append("generator")

        async def begin() -> None:
            kept.append(numbers())
            await anext(kept[0])

        asyncio.run_coroutine_threadsafe(begin(), handler_loop.loop).result(10)
        handler_loop.close(5)
        assert closed == ["generator"]

    def test_a_task_that_refuses_to_be_cancelled_is_left_behind(self) -> None:
        handler_loop, refused, end = EventLoopThread(NAME), threading.Event(), threading.Event()

        async def stubborn() -> None:
            while not end.is_set():
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    refused.set()

        task = start(handler_loop, stubborn())
        handler_loop.close(0.1)  # comes back
        assert refused.wait(20)
        assert not task.done()
        end.set()
        eventually(lambda: not threads(), what="the loop's thread is gone")
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is pending for ever, which is the point

    def test_a_loop_that_is_blocked_does_not_hold_up_closing(self) -> None:
        handler_loop, go, blocking = EventLoopThread(NAME), threading.Event(), threading.Event()

        def block() -> None:
            blocking.set()
            go.wait(LONG)

        handler_loop.loop.call_soon_threadsafe(block)
        assert blocking.wait(10)
        handler_loop.rest(0.1)
        handler_loop.close(0.1)
        assert len(threads()) == 1, "control: it was still blocked"
        go.set()
        eventually(lambda: not threads(), what="the loop's thread is gone")

    @pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
    def test_a_task_that_wants_the_process_to_end_does_not_end_the_loop(
        self, error: BaseException, caplog: pytest.LogCaptureFixture
    ) -> None:
        """asyncio raises it out of the loop. The loop's thread would end without a word, and with it the handling of
        all records."""
        handler_loop = EventLoopThread(NAME)

        async def leave() -> None:
            raise error

        with caplog.at_level(logging.ERROR, "kconsume"):
            with pytest.raises(type(error)):
                asyncio.run_coroutine_threadsafe(leave(), handler_loop.loop).result(10)
            going = asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "it goes on"), handler_loop.loop)
            assert going.result(10) == "it goes on"
        assert repr(error) in caplog.text
        handler_loop.close(5)
        assert threads() == []

    def test_tasks_begin_with_nothing_of_the_thread_that_started_it(self) -> None:
        handler_loop, seen = EventLoopThread(NAME), list[str]()

        async def look() -> None:
            seen.append(word.get())
            word.set("changed by a task")

        token = word.set("the main thread's")
        for _ in range(2):
            start(handler_loop, look())
        word.reset(token)
        handler_loop.rest(5)
        handler_loop.close(5)
        assert seen == ["nothing", "nothing"]


class TestTheCallersLoop:
    def test_tasks_run_on_it_in_the_caller_s_context_which_they_do_not_change(self) -> None:
        seen: list[tuple[asyncio.AbstractEventLoop, str]] = []

        async def look() -> None:
            seen.append((asyncio.get_running_loop(), word.get()))
            word.set("changed by a task")

        async def main() -> None:
            word.set("the caller's")
            handler_loop = CallersLoop(asyncio.get_running_loop())
            for _ in range(2):
                await handler_loop.start(look(), "kconsume-task")
            assert seen == [(asyncio.get_running_loop(), "the caller's")] * 2
            assert word.get() == "the caller's"

        asyncio.run(main())

    def test_closing_cancels_our_tasks_and_leaves_the_loop_and_the_caller_s(self) -> None:
        async def main() -> None:
            loop = asyncio.get_running_loop()
            handler_loop = CallersLoop(loop)
            ours = handler_loop.start(asyncio.sleep(LONG), "kconsume-task")
            theirs = asyncio.create_task(asyncio.sleep(0.05, "done"))
            await asyncio.to_thread(handler_loop.close, 1.0)
            await asyncio.wait([ours])
            assert ours.cancelled()
            assert await theirs == "done"
            assert loop.is_running()

        asyncio.run(main())

    def test_one_that_the_caller_has_closed_is_no_error(self) -> None:
        loop = asyncio.new_event_loop()
        handler_loop = CallersLoop(loop)
        loop.close()
        handler_loop.rest(0.1)
        handler_loop.close(0.1)


class TestRest:
    def test_it_waits_until_our_tasks_have_ended(self) -> None:
        handler_loop, done, go = EventLoopThread(NAME), list[str](), threading.Event()

        async def work() -> None:
            while not go.is_set():
                await asyncio.sleep(0.005)
            done.append("work")

        start(handler_loop, work())
        handler_loop.rest(0.05)
        assert done == [], "control: it has not ended yet"
        go.set()
        handler_loop.rest(10)
        assert done == ["work"]
        handler_loop.close(5)


class TestHands:
    def test_a_thread_does_one_thing_after_the_other_and_is_kept_for_the_next(self) -> None:
        thread_pool = ThreadPool("kconsume-hand")
        first = thread_pool.take()
        thread = first.send(threading.current_thread).result(10)
        thread_pool.give_back(first)
        second = thread_pool.take()
        assert second is first
        assert second.send(threading.current_thread).result(10) is thread
        assert len(threads("kconsume-hand")) == 1
        thread_pool.give_back(second)
        thread_pool.close()
        eventually(lambda: not threads("kconsume-hand"), what="the thread is gone")

    def test_there_are_as_many_as_are_out_at_once(self) -> None:
        """With fewer, those who wait for a lock would keep the one who holds it from letting go."""
        thread_pool, go = ThreadPool("kconsume-hand"), threading.Barrier(41)
        out = [thread_pool.take() for _ in range(40)]
        for thread in out:
            thread.send(lambda: go.wait(10))
        go.wait(10)  # all of them wait at the same time
        for thread in out:
            thread_pool.give_back(thread)
        thread_pool.close()
        eventually(lambda: not threads("kconsume-hand"), what="the threads are gone")

    def test_one_that_comes_back_after_the_end_is_ended(self) -> None:
        thread_pool = ThreadPool("kconsume-hand")
        thread = thread_pool.take()
        thread_pool.close()
        assert len(threads("kconsume-hand")) == 1, "it is out"
        thread_pool.give_back(thread)
        eventually(lambda: not threads("kconsume-hand"), what="the thread is gone")
