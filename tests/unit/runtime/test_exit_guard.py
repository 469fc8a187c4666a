"""How the failure of a consumer reaches a program whose block would not notice it."""

from __future__ import annotations

import asyncio
import atexit
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from kconsume import App
from kconsume._runtime import exit_guard as ending
from kconsume._runtime.exit_guard import Guard, exit_code, raised
from kconsume._runtime.interrupt import InterruptibleBlock
from kconsume._runtime.running_block import AsyncBlock
from kconsume.errors import ConfigurationError, HandlerFailed, StoreUnavailable
from tests.waiting import eventually

SOON, LONG = 0.2, 60.0
POISON = LookupError("poison")
FAILURE = HandlerFailed("handle", "orders/0@1", POISON)


class Block:
    """A block that says of itself what a test wants."""

    def __init__(
        self, *, is_main: bool = False, over: bool = False, heard: bool = False, unheard: bool = False
    ) -> None:
        self.is_main, self.over, self.heard, self.unheard = is_main, over, heard, unheard
        self.interrupts = 0

    def interrupt(self) -> None:
        self.interrupts += 1

    def call(self, function: Callable[[], object]) -> None:
        function()


class Process:
    """What would have become of it."""

    def __init__(self) -> None:
        self.exits: list[int] = []
        self.at_exit: list[tuple[object, ...]] = []
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1

    def guard(self, block: ending.Block, on_failure: ending.OnFailure | None = None, seconds: float = SOON) -> Guard:
        guard = Guard(block, seconds, self.stop, on_failure)
        guard.enter()
        return guard


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process()
    monkeypatch.setattr(ending, "_exit", process.exits.append)
    monkeypatch.setattr(atexit, "register", lambda *said: process.at_exit.append(said))
    return process


@pytest.fixture
def terms() -> Iterator[list[int]]:
    """What somebody who listens to SIGTERM has heard."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


def watching() -> bool:
    return any(thread.name == "kconsume-ending" for thread in threading.enumerate())


def nobody_watches() -> None:
    eventually(lambda: not watching(), what="the watch is over")


def test_whoever_listens_to_sigterm_is_asked_to_end(process: Process, terms: list[int]) -> None:
    block = Block()
    process.guard(block).failed(FAILURE)
    eventually(lambda: terms == [signal.SIGTERM], what="the signal")
    assert block.interrupts == 0, "the program leaves it by itself, when its requests are answered"
    assert process.stops == 1, "what else consumes is drained meanwhile"
    assert process.at_exit == [(ending._exit_last, 1)], "the end of the interpreter has the code of the failure"
    eventually(lambda: process.exits == [1], what="it did not end in time, so it is ended")


def test_where_nobody_listens_the_block_is_ended_and_later_the_process(process: Process) -> None:
    block = Block(over=True, unheard=True)
    process.guard(block).failed(FAILURE)
    assert block.interrupts == 1
    eventually(lambda: process.exits == [1], what="nobody has noticed")
    assert process.at_exit == []


def test_a_block_that_will_not_be_left_is_ended_with_its_process(process: Process) -> None:
    process.guard(Block(is_main=True)).failed(FAILURE)
    eventually(lambda: process.exits == [1], what="the end")


@pytest.mark.parametrize("block", [Block(over=True, heard=True), Block(over=True), Block(over=True, is_main=True)])
def test_a_failure_that_somebody_has_caught_is_theirs(process: Process, block: Block) -> None:
    process.guard(block).failed(FAILURE)
    assert block.interrupts == 1
    nobody_watches()
    assert process.exits == []


def test_a_block_on_the_main_thread_is_interrupted_and_no_more(process: Process, terms: list[int]) -> None:
    block = Block(is_main=True)
    guard = process.guard(block, seconds=LONG)
    guard.failed(FAILURE)
    assert block.interrupts == 1
    block.over = block.heard = True
    nobody_watches()
    assert (terms, process.stops, process.exits) == ([], 0, [])


def test_a_failure_before_the_block_begins_is_not_lost(process: Process) -> None:
    block = Block(is_main=True, over=True, heard=True)
    guard = Guard(block, SOON, process.stop, None)
    guard.failed(FAILURE)
    assert block.interrupts == 0
    guard.enter()
    assert block.interrupts == 1


def test_the_first_failure_counts(process: Process) -> None:
    told: list[BaseException] = []
    guard = process.guard(Block(), told.append)
    guard.failed(FAILURE)
    guard.failed(StoreUnavailable("away"))
    assert told == [POISON]


def test_a_callback_takes_the_place_of_the_end(process: Process, terms: list[int]) -> None:
    told: list[BaseException] = []
    block = Block()
    process.guard(block, told.append).failed(FAILURE)
    assert told == [POISON], "what the handler raised"
    assert block.interrupts == 1
    assert not watching()
    assert (terms, process.stops) == ([], 0)


def test_a_callback_that_fails_takes_the_place_of_nothing(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: BaseException) -> None:
        raise ValueError("the callback")

    process.guard(Block(unheard=True), fail).failed(FAILURE)
    eventually(lambda: process.exits == [1], what="the end")
    assert "on_failure failed" in caplog.text
    assert "ValueError: the callback" in caplog.text


def test_a_callback_that_would_have_to_be_awaited_is_refused() -> None:
    async def tell(_: BaseException) -> None: ...

    with pytest.raises(ConfigurationError, match="plain function"):
        App("127.0.0.1:1", group="shop").running(on_failure=tell)


def test_the_log_names_the_cause(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    process.guard(Block(over=True, heard=True)).failed(FAILURE)
    assert "consumer failed process_ends_within_seconds=" in caplog.text
    assert 'exit_code=1 cause="handle failed on orders/0@1: LookupError: poison"' in caplog.text


def test_the_code_is_that_of_the_failure() -> None:
    assert exit_code(FAILURE) == exit_code(LookupError()) == 1
    assert exit_code(ConfigurationError("no")) == 2


def test_what_is_raised_is_what_the_handler_raised_unless_it_would_look_like_the_caller_s() -> None:
    cancelled = HandlerFailed("handle", "orders/0@1", asyncio.CancelledError())
    assert raised(FAILURE) is POISON
    assert raised(cancelled) is cancelled
    assert raised(POISON) is POISON


def test_the_code_of_the_failure_wins_at_the_end_of_the_interpreter_after_all_that_is_to_be_done_there() -> None:
    """As in a server that was asked to end, and ends well."""
    program = (
        "import atexit; from kconsume._runtime import exit_guard; atexit.register(print, 'flushed')\n"
        "atexit.register(exit_guard._exit_last, 1)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "flushed\n")


class TestWhatBlocksSayOfThemselves:
    def test_one_on_the_main_thread(self) -> None:
        body = InterruptibleBlock()
        with body:
            assert (body.is_main, body.over, body.heard) == (True, False, False)
        assert (body.over, body.heard, body.unheard) == (True, True, False)

    def test_one_on_another_thread(self) -> None:
        body, said = InterruptibleBlock(), list[bool]()

        def run() -> None:
            with body:
                said.append(body.is_main)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert said == [False]
        assert body.heard

    def test_one_whose_task_ends_while_the_loop_goes_on(self) -> None:
        body = AsyncBlock()

        async def lifespan() -> None:
            with body:
                assert (body.is_main, body.over, body.heard, body.unheard) == (False, False, False, False)
            assert (body.over, body.heard, body.unheard) == (True, False, False), "its task may catch it"

        async def server() -> None:
            await asyncio.create_task(lifespan())
            assert (body.over, body.heard, body.unheard) == (True, False, True)

        asyncio.run(server())
        assert (body.over, body.heard, body.unheard) == (True, True, False)

    def test_a_callback_is_called_on_the_loop_and_not_after_the_block(self) -> None:
        called: list[threading.Thread] = []

        async def main() -> None:
            body = AsyncBlock()
            with body:
                thread = threading.Thread(target=body.call, args=(lambda: called.append(threading.current_thread()),))
                thread.start()
                thread.join()
                await asyncio.sleep(0)
            body.call(lambda: called.append(threading.current_thread()))
            await asyncio.sleep(0)

        asyncio.run(main())
        assert called == [threading.main_thread()]
