"""What goes around each call of a handler: in which order, what it sees, and what it cannot make undone."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from kconsume import App, Batch, ConfigurationError, Outgoing, Record, Router
from kconsume._handlers.binding import bind
from kconsume._handlers.compiled import Halt
from kconsume._handlers.wraps import Wrap, read_wrap
from kconsume.errors import InvalidHandler
from tests.unit.fakes import FakeMessage, messages_at

if typing.TYPE_CHECKING:
    from nowhere import Elsewhere  # type: ignore[import-not-found]

Handler = Callable[..., Any]
word: ContextVar[str] = ContextVar("word", default="nothing")


def run(
    handler: Handler, *wraps: Handler, offsets: typing.Iterable[int] = (0,), to: str | None = None
) -> tuple[Halt | None, list[Outgoing]]:
    """The compiled runner over some messages, with the wraps around it."""
    binding, made = bind(handler, to=to), [read_wrap(wrap) for wrap in wraps]
    sent: list[Outgoing] = []
    messages = messages_at(offsets)
    if binding.is_async:

        async def main() -> Halt | None:
            return await binding.async_runner(wraps=made)(messages, [], None, "shop:A", sent)

        return asyncio.run(main()), sent
    return binding.runner(wraps=made)(messages, [], None, "shop:A", sent), sent


def error_of(halt: Halt | None) -> BaseException | None:
    return None if halt is None else halt.error


class Log(list[str]):
    """Wraps and handlers that write down what happens."""

    def wrap(self, name: str, *, is_async: bool = False, swallow: bool = False) -> Handler:
        def plain(record: Record | Batch) -> Iterator[None]:
            self.append(f"enter {name}")
            try:
                yield
            except LookupError as error:
                self.append(f"{name} sees {error.args[0]}")
                if not swallow:
                    raise
            else:
                self.append(f"leave {name}")

        async def on_loop(record: Record | Batch) -> AsyncIterator[None]:
            await asyncio.sleep(0)
            self.append(f"enter {name}")
            try:
                yield
            except LookupError as error:
                self.append(f"{name} sees {error.args[0]}")
                if not swallow:
                    raise
            else:
                self.append(f"leave {name}")

        return on_loop if is_async else plain

    def handler(self, fails: bool = False, *, is_async: bool = False) -> Handler:
        def plain(value: bytes) -> None:
            self.append("handle")
            if fails:
                raise LookupError("it")

        async def on_loop(value: bytes) -> None:
            await asyncio.sleep(0)
            plain(value)

        return on_loop if is_async else plain


forms = pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])


class TestOrder:
    @forms
    def test_the_first_that_was_declared_is_outermost(self, is_async: bool) -> None:
        log = Log()
        halt, _ = run(log.handler(is_async=is_async), log.wrap("one"), log.wrap("two"))
        assert halt is None
        assert log == ["enter one", "enter two", "handle", "leave two", "leave one"]

    def test_plain_and_async_ones_around_an_async_handler_keep_it(self) -> None:
        log = Log()
        wraps = [log.wrap("one", is_async=True), log.wrap("two"), log.wrap("three", is_async=True)]
        run(log.handler(is_async=True), *wraps)
        assert log == [
            "enter one", "enter two", "enter three", "handle", "leave three", "leave two", "leave one",
        ]  # fmt: skip

    @forms
    def test_it_goes_around_each_call_anew(self, is_async: bool) -> None:
        log = Log()
        run(log.handler(is_async=is_async), log.wrap("w", is_async=is_async), offsets=range(3))
        assert log == ["enter w", "handle", "leave w"] * 3


class TestWhatItSees:
    def test_the_record_in_hand(self) -> None:
        seen: list[Record] = []

        def look(record: Record) -> Iterator[None]:
            seen.append(record)
            yield

        run(Log().handler(), look, offsets=[3, 7])
        assert [(r.topic, r.partition, r.offset, r.value, r.id) for r in seen] == [
            ("orders", 0, 3, b"3", "shop:A:0:3"),
            ("orders", 0, 7, b"7", "shop:A:0:7"),
        ]

    @forms
    def test_the_batch_in_hand_once(self, is_async: bool) -> None:
        seen: list[list[int]] = []

        def look(batch: Batch) -> Iterator[None]:
            seen.append(batch.offsets)
            yield

        def plain(values: list[bytes]) -> None: ...
        async def on_loop(values: list[bytes]) -> None: ...

        run(on_loop if is_async else plain, look, offsets=[3, 7])
        assert seen == [[3, 7]]

    @forms
    def test_what_it_sets_in_its_context_is_seen_by_the_handler(self, is_async: bool) -> None:
        seen: list[str] = []

        def say() -> Iterator[None]:
            token = word.set("said")
            yield
            word.reset(token)

        async def say_async() -> AsyncIterator[None]:
            token = word.set("said")
            yield
            word.reset(token)

        def plain(value: bytes) -> None:
            seen.append(word.get())

        async def on_loop(value: bytes) -> None:
            seen.append(word.get())

        halt, _ = run(on_loop, say, say_async) if is_async else run(plain, say)
        assert halt is None
        assert seen == ["said"]
        assert word.get() == "nothing"

    @forms
    def test_the_handler_s_error_from_the_inside_out(self, is_async: bool) -> None:
        log = Log()
        halt, _ = run(log.handler(fails=True, is_async=is_async), log.wrap("one"), log.wrap("two"))
        assert isinstance(error_of(halt), LookupError)
        assert log == ["enter one", "enter two", "handle", "two sees it", "one sees it"]

    def test_not_what_cannot_be_decoded(self) -> None:
        """Its handler is not called."""
        log = Log()

        def handle(value: str) -> None: ...

        binding = bind(handle)
        halt = binding.runner(wraps=[read_wrap(log.wrap("w"))])([FakeMessage(b"\xff")], [], None, "shop:A", [])
        assert isinstance(error_of(halt), UnicodeDecodeError)
        assert log == []

    def test_the_cancellation_of_its_handler(self) -> None:
        log: list[str] = []

        async def guard() -> AsyncIterator[None]:
            try:
                yield
            finally:
                await asyncio.sleep(0)
                log.append("cleaned up")

        async def handle(value: bytes) -> None:
            await asyncio.sleep(60)

        async def main() -> None:
            runner = bind(handle).async_runner(wraps=[read_wrap(guard)])
            task = asyncio.ensure_future(runner(messages_at([0]), [], None, "shop:A", []))
            await asyncio.sleep(0.01)
            task.cancel()
            assert isinstance(error_of(await task), asyncio.CancelledError)

        asyncio.run(main())
        assert log == ["cleaned up"]


class TestWhatItCannotMakeUndone:
    @forms
    @pytest.mark.parametrize("inside", [False, True])
    def test_an_error_that_it_swallows_fails_the_record_all_the_same(self, is_async: bool, inside: bool) -> None:
        log = Log()
        swallowing, other = log.wrap("w", is_async=is_async, swallow=True), log.wrap("other")
        wraps = [other, swallowing] if inside else [swallowing, other]
        halt, _ = run(log.handler(fails=True, is_async=is_async), *wraps, offsets=[4, 5])
        assert isinstance(error_of(halt), LookupError)
        assert halt is not None
        assert halt.message.offset() == 4

    @forms
    def test_nor_that_of_a_wrap_further_in_which_may_have_been_a_commit(self, is_async: bool) -> None:
        """The handler has returned, what it wrote is not there: passed, the record would be lost."""
        log = Log()

        def commits() -> Iterator[None]:
            yield
            raise LookupError("COMMIT")

        async def commits_async() -> AsyncIterator[None]:
            yield
            raise LookupError("COMMIT")

        swallowing = log.wrap("outer", is_async=is_async, swallow=True)
        inner = commits_async if is_async else commits
        halt, _ = run(log.handler(is_async=is_async), swallowing, log.wrap("between", swallow=True), inner)
        assert log == ["enter outer", "enter between", "handle", "between sees COMMIT", "leave outer"]
        assert isinstance(error_of(halt), LookupError)

    @forms
    def test_nor_that_of_a_wrap_further_in_that_could_not_begin(self, is_async: bool) -> None:
        log = Log()

        def cannot() -> Iterator[None]:
            if log:
                raise LookupError("BEGIN")
            yield

        halt, _ = run(log.handler(is_async=is_async), log.wrap("outer", swallow=True), cannot, log.wrap("inner"))
        assert log == ["enter outer", "outer sees BEGIN"]
        assert isinstance(error_of(halt), LookupError)

    @forms
    def test_an_error_that_it_replaces_is_the_record_s(self, is_async: bool) -> None:
        def translate() -> Iterator[None]:
            try:
                yield
            except LookupError as error:
                raise RuntimeError("in other words") from error

        log = Log()
        halt, _ = run(log.handler(fails=True, is_async=is_async), log.wrap("outer", swallow=True), translate)
        error = error_of(halt)
        assert isinstance(error, RuntimeError)
        assert isinstance(error.__cause__, LookupError)

    def test_with_nothing_swallowed_the_error_is_the_very_one_with_its_trace(self) -> None:
        log = Log()
        halt, _ = run(log.handler(fails=True), log.wrap("w"))
        error = error_of(halt)
        assert error is not None
        names = []
        trace = error.__traceback__
        while trace is not None:
            names.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        assert names[0] == "run"
        assert names[-1] == "plain"

    @forms
    @pytest.mark.parametrize("times", [0, 2])
    def test_one_that_does_not_yield_exactly_once_fails_the_record(self, is_async: bool, times: int) -> None:
        def plain() -> Iterator[None]:
            for _ in range(times):
                yield

        async def on_loop() -> AsyncIterator[None]:
            for _ in range(times):
                yield

        halt, _ = run(Log().handler(is_async=is_async), on_loop if is_async else plain)
        assert isinstance(error_of(halt), RuntimeError)

    def test_what_a_failed_record_sends_is_not_sent(self) -> None:
        def fails_after() -> Iterator[None]:
            yield
            raise LookupError

        def handle(value: bytes) -> bytes:
            return value

        halt, sent = run(handle, fails_after, to="shipped")
        assert isinstance(error_of(halt), LookupError)
        assert sent == []


class TestCost:
    def test_without_wraps_the_compiled_call_has_no_trace_of_them(self) -> None:
        def handle(value: bytes) -> None: ...

        binding = bind(handle)
        without: Any = binding.runner()
        assert without.__globals__["function"] is handle
        assert "record_of" not in without.__code__.co_names
        assert "Batch" not in without.__code__.co_names
        with_one: Any = binding.runner(wraps=[read_wrap(Log().wrap("w"))])
        assert with_one.__globals__["function"] is not handle, "control"
        assert "record_of" in with_one.__code__.co_names

    def test_a_handler_that_none_applies_to_is_compiled_without(self) -> None:
        app = App("localhost:9092", group="shop")

        @app.wrap
        def of_batches(batch: Batch) -> Iterator[None]:
            yield

        @app.consume("orders")
        def handle(value: bytes) -> None: ...

        assert app.registrations[0].wraps == ()

    @forms
    def test_what_the_handler_returns_comes_through(self, is_async: bool) -> None:
        def plain(value: bytes) -> bytes:
            return b"parcel"

        async def on_loop(value: bytes) -> bytes:
            return b"parcel"

        halt, sent = run(on_loop if is_async else plain, Log().wrap("w"), to="shipped")
        assert halt is None
        assert [(o.topic, o.value) for o in sent] == [("shipped", b"parcel")]


class TestWhereItGoes:
    """By what it asks for, and where it is declared."""

    def names(self, app: App) -> dict[str, list[str]]:
        return {r.name: [wrap.name for wrap in r.wraps] for r in app.registrations}

    def app(self) -> App:
        app = App("localhost:9092", group="shop")

        @app.consume("orders")
        def one(value: bytes) -> None: ...

        @app.consume("payments")
        def many(values: list[bytes]) -> None: ...

        return app

    def test_by_its_annotation_around_records_batches_or_both(self) -> None:
        app = self.app()

        @app.wrap
        def records(record: Record) -> Iterator[None]:
            yield

        @app.wrap
        def batches(batch: Batch) -> Iterator[None]:
            yield

        @app.wrap
        def both(subject: Record | Batch) -> Iterator[None]:
            yield

        @app.wrap
        def all_of_them() -> Iterator[None]:
            yield

        @app.wrap
        def old_style(subject: typing.Union[Batch, Record]) -> Iterator[None]:  # noqa: UP007
            yield

        assert self.names(app) == {
            "one": ["records", "both", "all_of_them", "old_style"],
            "many": ["batches", "both", "all_of_them", "old_style"],
        }

    def test_around_handlers_above_and_below_it(self) -> None:
        app = App("localhost:9092", group="shop")

        @app.consume("orders")
        def above(value: bytes) -> None: ...

        @app.wrap
        def wrap() -> Iterator[None]:
            yield

        @app.consume("payments")
        def below(value: bytes) -> None: ...

        assert self.names(app) == {"above": ["wrap"], "below": ["wrap"]}

    def test_a_router_s_go_around_its_own_handlers_inside_the_app_s(self) -> None:
        app, router, inner = App("localhost:9092", group="shop"), Router(), Router()
        for decorators, name in ((inner, "inner"), (router, "router"), (app, "app")):
            wrap = Log().wrap(name)
            wrap.__name__ = name
            decorators.wrap(wrap)

        @inner.consume("a")
        def a(value: bytes) -> None: ...

        @router.consume("b")
        def b(value: bytes) -> None: ...

        @app.consume("c")
        def c(value: bytes) -> None: ...

        router.include(inner)
        app.include(router)
        assert self.names(app) == {"c": ["app"], "a": ["app", "router", "inner"], "b": ["app", "router"]}


async def of_async() -> AsyncIterator[None]:
    yield


class TestAsyncAroundPlain:
    SENTENCE = "the wrap of_async is async and cannot go around one, a plain def: write the wrap as a plain def"

    def test_a_wrap_below_its_handler_is_refused_and_not_kept(self) -> None:
        app = TestWhereItGoes().app()
        with pytest.raises(InvalidHandler, match=self.SENTENCE):
            app.wrap(of_async)
        assert app._wraps == []
        assert [r.wraps for r in app.registrations] == [(), ()]

    def test_a_handler_below_the_wrap_is_refused_and_not_kept(self) -> None:
        app = App("localhost:9092", group="shop")
        app.wrap(of_async)
        with pytest.raises(InvalidHandler, match=self.SENTENCE):

            @app.consume("orders")
            def one(value: bytes) -> None: ...

        assert app.registrations == []

        @app.consume("orders")  # control
        async def other(value: bytes) -> None: ...

    def test_a_router_s_is_refused_where_it_is_included_or_run(self) -> None:
        app, router, late = App("localhost:9092", group="shop"), Router(), Router()
        router.wrap(of_async)
        for each in (router, late):

            @each.consume(f"orders-{id(each)}")
            def one(value: bytes) -> None: ...

        with pytest.raises(InvalidHandler, match=self.SENTENCE):
            app.include(router)
        app.include(late)
        try:
            late.wrap(of_async)
        except InvalidHandler:
            return
        with pytest.raises(InvalidHandler, match=self.SENTENCE):
            app.plans()

    def test_an_async_one_that_does_not_apply_is_no_harm(self) -> None:
        app = App("localhost:9092", group="shop")

        @app.wrap
        async def of_batches(batch: Batch) -> AsyncIterator[None]:
            yield

        @app.consume("orders")
        def one(value: bytes) -> None: ...

        assert app.registrations[0].wraps == ()


def returns() -> None: ...
async def waits() -> None: ...
def two(record: Record, more: int) -> Iterator[None]:
    yield


def by_name(*, record: Record) -> Iterator[None]:
    yield


def bare(record) -> Iterator[None]:  # type: ignore[no-untyped-def]
    yield


def of_value(value: bytes) -> Iterator[None]:
    yield


def of_none(record: Record | None) -> Iterator[None]:
    yield


def all_there_is(*records: bytes) -> Iterator[None]:
    yield


def not_there(record: Elsewhere) -> Iterator[None]:
    yield


def not_a_type(record: 1 / 0) -> Iterator[None]:  # type: ignore[valid-type]
    yield


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (returns, "needs a generator function, .*: let returns do what comes before the handler, then yield once"),
        (waits, "needs a generator function"),
        (two, r"two takes 2 parameters: it can get the record, as in two\(record: Record\)"),
        (by_name, r"by_name takes the record by name only: remove the \* before it"),
        (bare, "bare must say what 'record' is: annotate it as Record"),
        (of_value, "of_value must say what 'value' is: annotate it as Record"),
        (of_none, "of_none must say what 'record' is"),
        (all_there_is, "all_there_is must say what 'records' is"),
        (not_there, "not_there has an annotation that does not exist at run time .*: import it outside"),
        (not_a_type, r"not_a_type has an annotation that cannot be read \(ZeroDivisionError"),
    ],
)
def test_what_cannot_be_a_wrap_is_refused_where_it_is_declared_with_the_fix(function: Handler, sentence: str) -> None:
    app = App("localhost:9092", group="shop")
    with pytest.raises(ConfigurationError, match=sentence) as refused:
        app.wrap(function)
    assert "\n" not in str(refused.value), "one sentence"
    assert app._wraps == []


def test_it_stays_an_ordinary_function() -> None:
    app, log = App("localhost:9092", group="shop"), Log()
    function = log.wrap("w")
    assert app.wrap(function) is function
    assert isinstance(app._wraps[0], Wrap)
