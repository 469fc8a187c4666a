"""Resources: what can be declared, who gets what, in which order they are built and closed, and what goes wrong."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Annotated, Any, Generic, Optional, TypeVar

import pytest

from kconsume import App, Batch, ConfigurationError, Record, Router, Sender
from kconsume._handlers.resources import Resource, ResourceStack, read_resource
from kconsume._runtime.handler_loop import EventLoopThread
from kconsume._runtime.resource_scope import ResourceScope
from kconsume.errors import InvalidHandler, ResourceFailed
from tests.waiting import eventually

if typing.TYPE_CHECKING:
    from nowhere import Elsewhere  # type: ignore[import-not-found]

T = TypeVar("T")

word: ContextVar[str] = ContextVar("word", default="nothing")


class Client: ...


class Cache: ...


class Pool(Generic[T]): ...


def app(offsets: str = "kafka://") -> App:
    return App("localhost:9092", group="shop", offsets=offsets)


def shelf(*functions: Callable[..., object]) -> ResourceStack:
    return ResourceStack(declared(*functions))


def declared(*functions: Callable[..., object]) -> dict[object, Resource]:
    resources = [read_resource(function) for function in functions]
    return {resource.provides: resource for resource in resources}


class TestWhatIsProvided:
    """By its annotation."""

    @staticmethod
    def iterator() -> Iterator[Client]:
        yield Client()

    @staticmethod
    def generator() -> Generator[Client, None, None]:
        yield Client()

    @staticmethod
    def iterable() -> Iterable[Client]:
        yield Client()

    @staticmethod
    async def async_iterator() -> AsyncIterator[Client]:
        yield Client()

    @staticmethod
    async def async_generator() -> AsyncGenerator[Client, None]:
        yield Client()

    @staticmethod
    def function() -> Client:
        return Client()

    @staticmethod
    async def coroutine() -> Client:
        return Client()

    @staticmethod
    def annotated() -> Iterator[Annotated[Client, "the one"]]:
        yield Client()

    @staticmethod
    def optional() -> Iterator[Client | None]:
        yield None

    @staticmethod
    def old_style() -> typing.Iterator[Optional[Client]]:  # noqa: UP045
        yield None

    FORMS = (
        iterator, generator, iterable, async_iterator, async_generator, function, coroutine, annotated, optional,
        old_style,
    )  # fmt: skip

    @pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__func__.__name__)
    def test_each_form_provides_what_it_says(self, form: Any) -> None:
        assert read_resource(form.__func__).provides is Client

    def test_a_generic_type_is_told_apart_by_its_argument(self) -> None:
        def numbers() -> Iterator[Pool[int]]:
            yield Pool()

        def words() -> Iterator[Pool[str]]:
            yield Pool()

        made = app()
        made.resource(numbers)
        made.resource(words)

        @made.consume("orders")
        def handle(value: bytes, number: Pool[int], word: Pool[str]) -> None: ...

        (registration,) = made.registrations
        assert registration.binding.resources == {"number": Pool[int], "word": Pool[str]}
        with pytest.raises(InvalidHandler, match=r"asks for flag: .*Pool\[bool\], which nobody provides"):

            @made.consume("payments")
            def other(value: bytes, flag: Pool[bool]) -> None: ...

    def test_a_type_of_the_place_where_it_is_declared(self) -> None:
        class Local: ...

        made = app()

        @made.resource
        def local() -> Iterator[Local]:
            yield Local()

        @made.consume("orders")
        def handle(value: bytes, local: Local) -> None: ...

        assert made.registrations[0].binding.resources == {"local": Local}

    def test_it_stays_an_ordinary_function(self) -> None:
        @app().resource
        def client() -> Iterator[Client]:
            yield Client()

        assert isinstance(next(client()), Client)


def nothing_said():  # type: ignore[no-untyped-def]
    yield Client()


def yields_something() -> Iterator:  # type: ignore[type-arg]
    yield Client()


def yields_client() -> Client:  # type: ignore[misc]
    yield Client()


async def async_nothing_said():  # type: ignore[no-untyped-def]
    yield Client()


def no_type():  # type: ignore[no-untyped-def]
    return Client()


def nothing() -> None: ...
def anything() -> Any: ...
def an_object() -> Iterator[object]:
    yield Client()


def a_record() -> Iterator[Record]:
    yield typing.cast(Record, None)


def a_batch() -> Batch:
    return typing.cast(Batch, None)


async def a_sender() -> AsyncIterator[Sender]:
    yield typing.cast(Sender, None)


def not_there() -> Iterator[Elsewhere]:
    yield None


def not_a_type() -> Iterator[1 / 0]:  # type: ignore[valid-type]
    yield None


def bare_need(client) -> Iterator[Cache]:  # type: ignore[no-untyped-def]
    yield Cache()


def positional_need(client: Client, /) -> Iterator[Cache]:
    yield Cache()


def many_needs(*clients: Client) -> Iterator[Cache]:
    yield Cache()


def named_needs(**clients: Client) -> Iterator[Cache]:
    yield Cache()


REFUSED: list[tuple[Callable[..., object], str]] = [
    (nothing_said, r"nothing_said does not say what it yields: annotate it, .* -> Iterator\[Client\]"),
    (yields_something, r"yields_something does not say what it yields: annotate it"),
    (yields_client, r"yields_client does not say what it yields: annotate it"),
    (async_nothing_said, r"async_nothing_said does not say what it yields: .* -> AsyncIterator\[Client\]"),
    (no_type, r"no_type must say the type that it provides: annotate it"),
    (nothing, r"nothing must say the type that it provides"),
    (anything, r"anything must say the type that it provides"),
    (an_object, r"an_object must say the type that it provides"),
    (a_record, r"a_record provides Record, which handlers get from kconsume: let it provide a type of its own"),
    (a_batch, r"a_batch provides Batch, which handlers get from kconsume"),
    (a_sender, r"a_sender provides Sender, which handlers get from kconsume"),
    (not_there, r"not_there has an annotation that does not exist at run time .*: import it outside"),
    (not_a_type, r"not_a_type has an annotation that cannot be read \(ZeroDivisionError: .*\): correct it"),
    (bare_need, r"bare_need does not say what 'client' is: annotate it with the type of another resource"),
    (positional_need, r"positional_need takes client: .*Client.*, which cannot be given by name: name each resource"),
    (many_needs, r"many_needs takes \*clients.*: name each resource that it needs as a plain parameter"),
    (named_needs, r"named_needs takes \*\*clients.*: name each resource that it needs as a plain parameter"),
    (Client, r"@app.resource needs a function that makes the resource"),
    (lambda: Client(), r"must say the type that it provides"),
]


@pytest.mark.parametrize(("function", "sentence"), REFUSED)
def test_what_cannot_be_a_resource_is_refused_where_it_is_declared_with_the_fix(
    function: Callable[..., object], sentence: str
) -> None:
    made = app()
    with pytest.raises(InvalidHandler, match=sentence) as refused:
        made.resource(function)
    assert "\n" not in str(refused.value), "one sentence"
    assert made.declared.resources == {}


class TestWhoGetsWhat:
    @pytest.mark.parametrize(
        "hint",
        [Client, Client | None, Optional[Client], Annotated[Client, "x"], Annotated[Client | None, "x"]],  # noqa: UP045
    )
    def test_it_is_asked_for_by_its_type_also_with_none_and_annotated(self, hint: Any) -> None:
        made = app()
        made.resource(TestWhatIsProvided.iterator)

        def handle(value: bytes, client: Any) -> None: ...

        handle.__annotations__["client"] = hint
        made.consume("orders")(handle)
        assert made.registrations[0].binding.resources == {"client": Client}

    def test_annotated_inside_a_union_too(self) -> None:
        made = app()
        made.resource(TestWhatIsProvided.iterator)

        @made.consume("orders")
        def handle(value: bytes, client: Annotated[Client, "x"] | None) -> None: ...

        assert made.registrations[0].binding.resources == {"client": Client}

    def test_a_subclass_is_another_type(self) -> None:
        class Special(Client): ...

        made = app()
        made.resource(TestWhatIsProvided.iterator)
        with pytest.raises(InvalidHandler, match="asks for client: Special, which nobody provides"):

            @made.consume("orders")
            def handle(value: bytes, client: Special) -> None: ...

    def test_what_nobody_provides_is_refused_with_what_there_is(self) -> None:
        made = app()
        made.resource(TestWhatIsProvided.iterator)
        with pytest.raises(InvalidHandler) as refused:

            @made.consume("orders")
            def handle(value: bytes, cache: Cache) -> None: ...

        said = str(refused.value)
        assert "handle asks for cache: Cache, which nobody provides" in said
        assert "it can get Record, Sender, Client" in said
        assert "declare above it an @app.resource" in said
        assert made.registrations == []

    def test_two_for_one_type_are_refused_and_the_first_stays(self) -> None:
        made = app()
        made.resource(TestWhatIsProvided.iterator)
        with pytest.raises(ConfigurationError, match=r"iterator and function both provide Client.* a type of its own"):
            made.resource(TestWhatIsProvided.function)
        with pytest.raises(ConfigurationError, match="iterator and optional both provide Client"):
            made.resource(TestWhatIsProvided.optional)
        assert made.declared.resources[Client].name == "iterator"

    def test_two_for_one_type_by_way_of_routers_are_refused(self) -> None:
        one, two, made = Router(), Router(), app()
        one.resource(TestWhatIsProvided.iterator)
        two.resource(TestWhatIsProvided.function)
        made.include(one)
        with pytest.raises(ConfigurationError, match="both provide Client"):
            made.include(two)

    @pytest.mark.parametrize("hint", [sqlite3.Connection, sqlite3.Connection | None])
    def test_one_of_the_transaction_s_type_is_refused_where_a_handler_asks_for_that(self, hint: Any) -> None:
        def connection() -> Iterator[sqlite3.Connection]:
            yield sqlite3.connect(":memory:")

        def handle(value: bytes, tx: Any) -> None: ...

        handle.__annotations__["tx"] = hint
        made = app("sqlite:///shop.db")
        made.resource(connection)
        with pytest.raises(InvalidHandler, match=r"the store sqlite:///shop.db provides .* the resource connection"):
            made.consume("orders")(handle)

        elsewhere = app("kafka://")  # control: where the store has no transaction, it is the resource
        elsewhere.resource(connection)
        elsewhere.consume("orders")(handle)
        assert elsewhere.registrations[0].binding.resources == {"tx": sqlite3.Connection}

    def test_a_parameter_with_a_default_gets_it_if_it_is_there(self) -> None:
        made = app()

        @made.consume("orders")
        def before(value: bytes, client: Client | None = None) -> None: ...

        made.resource(TestWhatIsProvided.iterator)

        @made.consume("payments")
        def after(value: bytes, client: Client | None = None) -> None: ...

        assert [r.binding.resources for r in made.registrations] == [{}, {"client": Client}]


class Stage:
    """Resources that write down what happens to them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.fail: set[str] = set()
        self.threads: set[str] = set()

    def note(self, event: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.append(event)
        if event in self.fail:
            raise LookupError(event)

    def plain(self) -> tuple[Callable[..., object], ...]:
        def client() -> Iterator[Client]:
            self.note("build client")
            yield Client()
            self.note("close client")

        def cache(client: Client) -> Iterator[Cache]:
            assert isinstance(client, Client)
            self.note("build cache")
            yield Cache()
            self.note("close cache")

        def pool(client: Client, cache: Cache | None) -> Iterator[Pool[int]]:
            assert isinstance(cache, Cache)
            self.note("build pool")
            yield Pool()
            self.note("close pool")

        return client, cache, pool

    def mixed(self) -> tuple[Callable[..., object], ...]:
        """The one in the middle is async."""

        async def cache(client: Client) -> AsyncIterator[Cache]:
            assert isinstance(client, Client)
            await asyncio.sleep(0)
            self.note("build cache")
            yield Cache()
            await asyncio.sleep(0)
            self.note("close cache")

        client, _, pool = self.plain()
        return client, cache, pool


BUILT = ["build client", "build cache", "build pool"]
CLOSED = ["close pool", "close cache", "close client"]

kinds = pytest.mark.parametrize("kind", ["plain", "mixed"])


class Furnished:
    """A furnishing, and a home that is closed after it."""

    def __init__(
        self, functions: Iterable[Callable[..., object]], given: Mapping[object, object] | None = None
    ) -> None:
        self.handler_loop = EventLoopThread("kconsume-loop-test")
        self.resource_scope = ResourceScope(declared(*functions), given or {}, self.handler_loop)

    def build(self, *wanted: object) -> Mapping[object, object]:
        return self.resource_scope.build(wanted)

    def close(self, seconds: float = 5.0) -> BaseException | None:
        trouble = self.resource_scope.close(seconds)
        self.handler_loop.close(seconds)
        return trouble


def raising(error: BaseException) -> Client:
    raise error


def left() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("kconsume-resources", "kconsume-loop-test"))]


class TestBuildingAndClosing:
    @kinds
    def test_each_is_built_after_what_it_needs_and_closed_before_it(self, kind: str) -> None:
        stage = Stage()
        furnished = Furnished(getattr(stage, kind)())
        built = furnished.build(Pool[int])
        assert list(built) == [Pool[int]]
        assert stage.events == BUILT
        assert furnished.close() is None
        assert stage.events == BUILT + CLOSED
        assert len(stage.threads) == 1, "built and closed in the same thread, which SQLite's connections ask for"
        assert left() == []

    @kinds
    def test_each_is_built_once_whoever_asks(self, kind: str) -> None:
        stage = Stage()
        furnished = Furnished(getattr(stage, kind)())
        first = furnished.build(Pool[int], Client, Cache)
        assert stage.events == BUILT
        assert furnished.build(Cache) == {Cache: first[Cache]}
        assert stage.events == BUILT
        furnished.close()

    def test_they_are_built_in_the_order_in_which_they_are_asked_for(self) -> None:
        for wanted in ([Cache, Client], [Client, Cache]):
            events: list[str] = []

            def client(events: list[str] = events) -> Iterator[Client]:
                events.append("client")
                yield Client()

            def cache(events: list[str] = events) -> Iterator[Cache]:
                events.append("cache")
                yield Cache()

            furnished = Furnished([client, cache])
            furnished.build(*wanted)
            furnished.close()
            assert events == [hint.__name__.lower() for hint in wanted]

    @kinds
    def test_what_nobody_asks_for_is_not_built(self, kind: str) -> None:
        stage = Stage()
        furnished = Furnished(getattr(stage, kind)())
        assert furnished.build() == {}
        furnished.build(Client)
        furnished.close()
        assert stage.events == ["build client", "close client"]

    def test_without_an_async_one_among_those_needed_no_event_loop_is_started(self) -> None:
        furnished = Furnished(Stage().mixed())
        furnished.build(Client)
        assert left() == ["kconsume-resources"]
        furnished.close()
        assert left() == []

    def test_one_that_is_returned_and_not_yielded_has_nothing_to_close_and_leaves_no_thread(self) -> None:
        furnished = Furnished([TestWhatIsProvided.function])
        assert isinstance(furnished.build(Client)[Client], Client)
        assert furnished.close() is None
        assert left() == []

    def test_an_async_one_may_be_returned_too(self) -> None:
        furnished = Furnished([TestWhatIsProvided.coroutine])
        assert isinstance(furnished.build(Client)[Client], Client)
        assert furnished.close() is None
        assert left() == []

    @kinds
    def test_one_that_a_test_gives_replaces_it_and_what_only_it_needs_and_is_not_closed(self, kind: str) -> None:
        stage, mine = Stage(), Cache()
        furnished = Furnished(getattr(stage, kind)(), {Cache: mine})
        assert furnished.build(Cache) == {Cache: mine}
        assert stage.events == []
        furnished.build(Pool[int])
        furnished.close()
        assert stage.events == ["build client", "build pool", "close pool", "close client"]

    def test_an_async_one_is_left_in_the_task_and_in_the_context_in_which_it_was_entered(self) -> None:
        """Task groups ask for the same task, tokens of context variables for the same context."""
        tasks: list[object] = []

        async def client() -> AsyncIterator[Client]:
            token = word.set("in the resource")
            tasks.append(asyncio.current_task())
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(0.01))
                yield Client()
            tasks.append(asyncio.current_task())
            word.reset(token)

        furnished = Furnished([client])
        furnished.build(Client)
        assert furnished.close() is None
        assert tasks[0] is tasks[1]
        assert left() == []


class TestOneThatCannotBeBuilt:
    @kinds
    @pytest.mark.parametrize("which", ["client", "cache", "pool"])
    def test_those_before_it_are_closed_and_its_cause_is_told(self, kind: str, which: str) -> None:
        stage = Stage()
        stage.fail = {f"build {which}"}
        furnished = Furnished(getattr(stage, kind)())
        with pytest.raises(ResourceFailed, match=f"the resource {which} could not be built: LookupError") as failed:
            furnished.build(Pool[int])
        assert isinstance(failed.value.__cause__, LookupError)
        assert furnished.close() is None
        begun = BUILT[: BUILT.index(f"build {which}") + 1]
        assert stage.events == begun + CLOSED[len(CLOSED) - len(begun) + 1 :]
        assert left() == []

    @pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError("a dead future")])
    @pytest.mark.parametrize("is_async", [False, True])
    def test_one_that_wants_the_process_to_end_is_told_like_any_other(
        self, error: BaseException, is_async: bool
    ) -> None:
        """On an event loop, SystemExit ends the loop, and whoever waits for the resource waits for ever."""

        def plain() -> Iterator[Client]:
            yield raising(error)

        async def on_loop() -> AsyncIterator[Client]:
            yield raising(error)

        furnished = Furnished([on_loop if is_async else plain])
        with pytest.raises(ResourceFailed, match=type(error).__name__):
            furnished.build(Client)
        furnished.close()

    @pytest.mark.parametrize("is_async", [False, True])
    def test_one_that_yields_nothing(self, is_async: bool) -> None:
        def plain() -> Iterator[Client]:
            if left():
                return
            yield Client()

        async def on_loop() -> AsyncIterator[Client]:
            if left():
                return
            yield Client()

        furnished = Furnished([on_loop if is_async else plain])
        with pytest.raises(ResourceFailed, match="it yields nothing: let it yield the resource once"):
            furnished.build(Client)
        furnished.close()
        assert left() == []

    def test_what_nobody_provides_is_refused_before_any_is_built(self) -> None:
        stage = Stage()
        client, _, pool = stage.plain()
        with pytest.raises(InvalidHandler, match=r"the resource pool asks for Cache, which no @app.resource provides"):
            Furnished([client, pool]).build(Pool[int])
        assert stage.events == []

    def test_a_circle_is_refused_before_any_is_built_and_drawn(self) -> None:
        built: list[str] = []

        def client(cache: Cache) -> Iterator[Client]:
            yield Client()

        def cache(pool: Pool[int]) -> Iterator[Cache]:
            yield Cache()

        def pool(client: Client) -> Iterator[Pool[int]]:
            yield Pool()

        def other() -> Iterator[str]:
            built.append("other")
            yield "other"

        with pytest.raises(InvalidHandler, match=r"in a circle .client → cache → pool → client.: let one of them make"):
            Furnished([other, client, cache, pool]).build(str, Client)
        assert built == []

    def test_one_that_needs_itself_is_a_circle(self) -> None:
        def client(another: Client) -> Iterator[Client]:
            yield another

        with pytest.raises(InvalidHandler, match=r"in a circle .client → client."):
            Furnished([client]).build(Client)

    def test_two_of_one_name_are_no_circle(self) -> None:
        """Each module has its `client`."""

        def make() -> Callable[..., object]:
            def client() -> Iterator[Client]:
                yield Client()

            return client

        def client(inner: Client) -> Iterator[Cache]:
            yield Cache()

        furnished = Furnished([make(), client])
        assert isinstance(furnished.build(Cache)[Cache], Cache)
        furnished.close()

    def test_a_diamond_is_no_circle(self) -> None:
        stage = Stage()
        furnished = Furnished(stage.plain())  # both cache and pool need the client
        furnished.build(Pool[int])
        furnished.close()
        assert stage.events == BUILT + CLOSED

    def test_a_plain_function_that_hands_back_a_coroutine_that_waits_is_told(self) -> None:
        async def connect() -> Client:
            await asyncio.sleep(0)
            return Client()

        def client() -> Client:
            return connect()  # type: ignore[return-value]

        furnished = Furnished([client])
        with pytest.raises(ResourceFailed, match="waits for an event loop: declare it with async def"):
            furnished.build(Client)
        furnished.close()


class TestOneThatCannotBeClosed:
    @kinds
    def test_the_others_are_closed_all_the_same_and_the_first_error_is_told(
        self, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        stage = Stage()
        stage.fail = {"close pool", "close cache"}
        furnished = Furnished(getattr(stage, kind)())
        furnished.build(Pool[int])
        with caplog.at_level(logging.ERROR, "kconsume"):
            trouble = furnished.close()
        assert stage.events == BUILT + CLOSED
        assert isinstance(trouble, ResourceFailed)
        assert "the resource pool could not be closed: LookupError: close pool" in str(trouble)
        assert 'resource not closed resource=cache cause="LookupError: close cache"' in caplog.text, (
            "and the other one is not lost"
        )
        assert not furnished.resource_scope.hangs
        assert left() == []

    @pytest.mark.parametrize("is_async", [False, True])
    def test_one_that_yields_more_than_once(self, is_async: bool) -> None:
        def plain() -> Iterator[Client]:
            yield Client()
            yield Client()

        async def on_loop() -> AsyncIterator[Client]:
            yield Client()
            yield Client()

        furnished = Furnished([on_loop if is_async else plain])
        furnished.build(Client)
        assert "it yields more than once: let it yield the resource once" in str(furnished.close())

    @pytest.mark.parametrize("is_async", [False, True])
    def test_one_that_hangs_is_left_behind_at_the_deadline_and_named(self, is_async: bool) -> None:
        go = threading.Event()

        def plain() -> Iterator[Client]:
            yield Client()
            go.wait(60)

        async def on_loop() -> AsyncIterator[Client]:
            yield Client()
            await asyncio.to_thread(go.wait, 60)

        furnished = Furnished([on_loop if is_async else plain])
        furnished.build(Client)
        trouble = furnished.close(0.2)
        assert isinstance(trouble, ResourceFailed)
        assert f"not closed within 0.2 s: {'on_loop' if is_async else 'plain'} hangs" in str(trouble)
        assert furnished.resource_scope.hangs
        go.set()
        eventually(lambda: not left(), what="it ends after all")


def test_a_shelf_that_is_closed_has_nothing_more_to_close() -> None:
    stage = Stage()
    made = shelf(*stage.plain())

    async def main() -> None:
        await made.build([Client])
        assert not made.empty
        assert await made.close() is None
        assert await made.close() is None
        assert made.empty

    asyncio.run(main())
    assert stage.events == ["build client", "close client"]


def test_a_slow_one_does_not_block_the_thread_of_another_home() -> None:
    """Plain resources are made off the event loop: on it, they would hold up everything that lives there."""
    handler_loop = EventLoopThread("kconsume-loop-test")
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.005)

    def slow() -> Iterator[Client]:
        before = len(ticks)
        eventually(lambda: len(ticks) > before + 3, what="the loop goes on meanwhile")
        yield Client()

    asyncio.run_coroutine_threadsafe(tick(), handler_loop.loop)
    resource_scope = ResourceScope(declared(slow), {}, handler_loop)
    assert isinstance(resource_scope.build([Client])[Client], Client)
    resource_scope.close(5)
    handler_loop.close(5)
    assert left() == []
