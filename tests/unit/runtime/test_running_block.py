"""The block in which an app runs: ended from outside, left by itself, cancelled by its owner; and work off the loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

import pytest

from kconsume._runtime.running_block import AsyncBlock, Running, in_thread

LONG = 60.0

word: ContextVar[str] = ContextVar("word", default="nothing")


def from_a_thread(act: Callable[[], None]) -> None:
    """And back on the loop when it is done: what it asked for has been heard by then."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


class TestAnAsyncBlock:
    def test_one_that_waits_is_ended_from_another_thread(self) -> None:
        async def main() -> str:
            body = AsyncBlock()
            asyncio.get_running_loop().call_later(0.05, from_a_thread, body.interrupt)
            with body:
                await asyncio.sleep(LONG)
                pytest.fail("the block went on")
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0, "as if nothing had happened"
            return await asyncio.sleep(0, "goes on")

        assert asyncio.run(main()) == "goes on"

    def test_an_interrupt_before_it_begins_is_not_lost(self) -> None:
        async def main() -> None:
            body = AsyncBlock()
            body.interrupt()
            with body:
                await asyncio.sleep(LONG)
                pytest.fail("the block went on, though the app had failed")

        asyncio.run(main())

    def test_an_interrupt_of_a_block_that_never_waits_harms_nobody_afterwards(self) -> None:
        async def main() -> None:
            body = AsyncBlock()
            body.interrupt()
            with body:
                pass
            await asyncio.sleep(0.01)

        asyncio.run(main())

    def test_an_interrupt_after_the_block_harms_nobody(self) -> None:
        async def main() -> None:
            body = AsyncBlock()
            with body:
                await asyncio.sleep(0)
            from_a_thread(body.interrupt)
            await asyncio.sleep(0.01)

        asyncio.run(main())

    def test_cleaning_up_in_the_block_is_done_when_it_is_ended(self) -> None:
        cleaned: list[str] = []

        async def main() -> None:
            body = AsyncBlock()
            body.interrupt()
            with body:
                try:
                    await asyncio.sleep(LONG)
                finally:
                    await asyncio.sleep(0.01)
                    cleaned.append("done")

        asyncio.run(main())
        assert cleaned == ["done"]

    def test_an_error_of_the_block_leaves_it_also_when_it_was_interrupted(self) -> None:
        async def main(interrupted: bool) -> None:
            body = AsyncBlock()
            if interrupted:
                body.interrupt()
            with body:
                try:
                    await asyncio.sleep(LONG if interrupted else 0)
                finally:
                    raise LookupError("mine")

        for interrupted in (False, True):
            with pytest.raises(LookupError, match="mine"):
                asyncio.run(main(interrupted))

    def test_a_block_that_will_not_be_ended_ends_by_itself(self) -> None:
        async def main() -> None:
            body = AsyncBlock()
            body.interrupt()
            with body:
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.sleep(LONG)
                await asyncio.sleep(0)
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0

        asyncio.run(main())

    @pytest.mark.parametrize("interrupted", [False, True])
    def test_the_cancellation_of_others_leaves_the_block(self, interrupted: bool) -> None:
        """Taken for ours, it would be lost, and a server would never end."""
        left: list[str] = []

        async def block() -> None:
            body = AsyncBlock()
            if interrupted:
                body.interrupt()
            with body:
                await asyncio.sleep(LONG)
            left.append("as if it had not been cancelled")

        async def main() -> None:
            task = asyncio.create_task(block())
            await asyncio.sleep(0)  # it has begun, and is to be cancelled by us in this very turn, if it is
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        assert left == []

    def test_a_timeout_around_it_is_a_timeout(self) -> None:
        async def main() -> None:
            async with asyncio.timeout(0.02):
                with AsyncBlock():
                    await asyncio.sleep(LONG)

        with pytest.raises(TimeoutError):
            asyncio.run(main())

    def test_a_block_within_a_block_is_ended_alone(self) -> None:
        async def main() -> None:
            outer, inner = AsyncBlock(), AsyncBlock()
            inner.interrupt()
            with outer:
                with inner:
                    await asyncio.sleep(LONG)
                    pytest.fail("the inner block went on")
                await asyncio.sleep(0.01)

        asyncio.run(main())

    def test_thousands_of_blocks_that_end_while_they_are_interrupted(self) -> None:
        current, done = [AsyncBlock()], threading.Event()

        def interrupt() -> None:
            while not done.is_set():
                current[0].interrupt()

        async def main() -> None:
            task = asyncio.current_task()
            assert task is not None
            for _ in range(3000):
                body = current[0] = AsyncBlock()
                with body:
                    await asyncio.sleep(0)
                await asyncio.sleep(0)  # a cancellation that came too late would be raised here
                assert task.cancelling() == 0

        patience = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            asyncio.run(main())
        finally:
            done.set()
            thread.join()
            sys.setswitchinterval(patience)


class TestInThread:
    def test_the_loop_runs_on_meanwhile(self) -> None:
        go = threading.Event()

        async def release() -> None:
            go.set()

        async def main() -> None:
            task = asyncio.create_task(release())
            result, cancelled = await in_thread(lambda: go.wait(LONG))
            assert (result, cancelled) == (True, None)
            await task

        asyncio.run(main())

    def test_its_error_is_raised_here(self) -> None:
        def fail() -> None:
            raise LookupError("mine")

        async def main() -> None:
            await in_thread(fail)

        with pytest.raises(LookupError, match="mine"):
            asyncio.run(main())

    def test_a_cancellation_waits_for_the_end_and_is_handed_over_then(self) -> None:
        """However often: what was started has to be stopped again, and what was stopped has to be over."""
        go, ended = threading.Event(), list[str]()

        def work() -> str:
            assert go.wait(LONG)
            ended.append("work")
            return "result"

        async def main() -> None:
            waiting = asyncio.create_task(in_thread(work))
            for _ in range(3):
                await asyncio.sleep(0.01)
                waiting.cancel("enough")
            await asyncio.sleep(0.01)
            assert not waiting.done()
            go.set()
            result, cancelled = await waiting
            assert result == "result"
            assert isinstance(cancelled, asyncio.CancelledError)
            assert ended == ["work"]

        asyncio.run(main())

    def test_a_cancellation_asks_it_to_hurry(self) -> None:
        go, hurried = threading.Event(), list[str]()

        def hurry() -> None:
            hurried.append("hurry")
            go.set()

        async def main() -> None:
            waiting = asyncio.create_task(in_thread(lambda: go.wait(LONG), hurry))
            await asyncio.sleep(0.01)
            assert hurried == []
            waiting.cancel()
            result, cancelled = await waiting
            assert result is True
            assert cancelled is not None

        asyncio.run(main())
        assert hurried == ["hurry"]

    def test_it_is_in_the_caller_s_context(self) -> None:
        async def main() -> None:
            word.set("the caller's")
            assert await in_thread(word.get) == ("the caller's", None)
            await in_thread(lambda: word.set("changed in the thread"))
            assert word.get() == "the caller's"

        asyncio.run(main())

    def test_the_threads_of_the_loop_stay_the_person_s(self) -> None:
        async def main() -> None:
            go, loop = threading.Event(), asyncio.get_running_loop()
            taken = [loop.run_in_executor(None, go.wait, LONG) for _ in range(64)]
            result, _ = await in_thread(lambda: "done")  # with all of them taken
            assert result == "done"
            go.set()
            await asyncio.gather(*taken)

        asyncio.run(main())


def test_with_and_async_with_are_the_same_block_elsewhere() -> None:
    entered: list[str] = []

    @contextmanager
    def here() -> Iterator[str]:
        entered.append("here")
        yield "app"
        entered.append("left")

    @asynccontextmanager
    async def on_loop() -> AsyncIterator[str]:
        entered.append("on the loop")
        yield "app"
        entered.append("left")

    async def main() -> None:
        async with Running(here, on_loop) as app:
            assert app == "app"

    with Running(here, on_loop) as app:
        assert app == "app"
    asyncio.run(main())
    assert entered == ["here", "left", "on the loop", "left"]
