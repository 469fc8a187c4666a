"""What a signature asks for is what the handler gets; what cannot work is refused when it is decorated."""

from __future__ import annotations

import dataclasses
import functools
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Optional, TypedDict, Union

import msgspec
import pytest

from kconsume import App, Batch, DecodeError, Record
from kconsume._handlers.binding import Available, Binding, bind
from kconsume._handlers.compiled import Halt
from kconsume.errors import InvalidHandler
from tests.ids import short
from tests.unit.fakes import FakeMessage, Writes

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForTheChecker


class Placed(msgspec.Struct, tag=True):
    id: int
    sku: str = "tea"


class Cancelled(msgspec.Struct, tag=True):
    id: int


class Untagged(msgspec.Struct):
    id: int


class AlsoUntagged(msgspec.Struct):
    id: int


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Line(TypedDict):
    sku: str
    quantity: int


def handler_of(annotation: object) -> tuple[Binding, list[object]]:
    """A handler whose first parameter has this annotation, and the list of what it is given."""
    given: list[object] = []

    def handle(value: object) -> None:
        given.append(value)

    handle.__annotations__ = {"value": annotation}
    return bind(handle), given


def run(binding: Binding, *messages: FakeMessage, stop: Sequence[object] = (), tx: object = None) -> Halt | None:
    return binding.runner()(messages, stop, tx, "shop:AAAA", [])


def why(binding: Binding, message: FakeMessage) -> BaseException:
    """What is reported of a record on which the handler must fail."""
    halt = run(binding, message)
    assert halt is not None
    assert halt.message is message
    assert halt.error is not None
    return binding.explain(message, halt.error)


PAYLOADS = [
    (bytes, b"\xff\x00", b"\xff\x00"),
    (bytes | None, b"", b""),
    (str, "tea ☕".encode(), "tea ☕"),
    (str | None, b"", ""),
    (dict, b'{"a": [1, null]}', {"a": [1, None]}),
    (dict[str, int], b'{"a": 1}', {"a": 1}),
    (dict[str, int] | None, b'{"a": 1}', {"a": 1}),
    (Untagged, b'{"id": 7, "unknown": 1}', Untagged(7)),
    (Optional[Untagged], b'{"id": 7}', Untagged(7)),  # noqa: UP045  (people write it)
    (Placed | Cancelled, b'{"type": "Cancelled", "id": 7}', Cancelled(7)),
    (Union[Placed, Cancelled, None], b'{"type": "Placed", "id": 7}', Placed(7)),  # noqa: UP007  (people write it)
    (Point, b'{"x": 1, "y": 2}', Point(1, 2)),
    (Line, b'{"sku": "tea", "quantity": 2}', {"sku": "tea", "quantity": 2}),
]


class TestPayload:
    @pytest.mark.parametrize(("annotation", "value", "expected"), PAYLOADS, ids=short)
    def test_the_annotation_says_what_the_handler_gets(
        self, annotation: object, value: bytes, expected: object
    ) -> None:
        binding, given = handler_of(annotation)
        assert run(binding, FakeMessage(value)) is None
        assert given == [expected]
        assert type(given[0]) is type(expected)

    def test_a_record_is_the_message_with_all_that_is_known_of_it(self) -> None:
        binding, given = handler_of(Record)
        assert run(binding, FakeMessage(b"v", offset=9, partition=3, key=b"k")) is None
        (record,) = given
        assert isinstance(record, Record)
        assert (record.topic, record.partition, record.offset) == ("orders", 3, 9)
        assert (record.key, record.value, record.id) == (b"k", b"v", "shop:AAAA:3:9")

    def test_a_record_may_be_a_tombstone(self) -> None:
        binding, given = handler_of(Record)
        assert run(binding, FakeMessage(None)) is None
        assert isinstance(given[0], Record)
        assert given[0].value is None

    @pytest.mark.parametrize("annotation", [bytes | None, str | None, dict[str, int] | None, Placed | Cancelled | None])
    def test_a_tombstone_is_none_to_a_handler_that_says_so(self, annotation: object) -> None:
        binding, given = handler_of(annotation)
        assert run(binding, FakeMessage(None)) is None
        assert given == [None]

    def test_several_messages_are_handled_in_order(self) -> None:
        binding, given = handler_of(str)
        assert run(binding, *(FakeMessage(b"%d" % n, offset=n) for n in range(5))) is None
        assert given == ["0", "1", "2", "3", "4"]


class TestFurtherParameters:
    def test_a_record_beside_the_payload(self) -> None:
        given: list[tuple[str, int]] = []

        def handle(order: Placed, record: Record) -> None:
            given.append((order.sku, record.offset))

        assert run(bind(handle), FakeMessage(b'{"type": "Placed", "id": 1}', offset=4)) is None
        assert given == [("tea", 4)]

    def test_the_store_s_transaction_by_its_type(self) -> None:
        def handle(value: bytes, tx: Writes) -> None:
            tx.append(int(value))

        tx = Writes()
        binding = bind(handle, [Writes])
        assert binding.transaction is Writes
        assert run(binding, FakeMessage(b"7"), tx=tx) is None
        assert tx == [7]

    def test_parameters_by_keyword_only_and_in_any_order(self) -> None:
        given: list[tuple[bytes, int, bool]] = []

        def handle(value: bytes, *, tx: Writes, record: Record) -> None:
            given.append((value, record.offset, tx is writes))

        writes = Writes()
        assert run(bind(handle, [Writes]), FakeMessage(b"v", offset=2), tx=writes) is None
        assert given == [(b"v", 2, True)]

    def test_a_payload_by_position_only(self) -> None:
        given: list[bytes] = []

        def handle(value: bytes, /, record: Record) -> None:
            given.append(value)

        assert run(bind(handle), FakeMessage(b"v")) is None
        assert given == [b"v"]

    def test_a_parameter_nobody_provides_keeps_its_default(self) -> None:
        given: list[tuple[int, str]] = []

        def handle(value: bytes, times: int = 3, *, note: str = "none") -> None:
            given.append((times, note))

        assert run(bind(handle), FakeMessage()) is None
        assert given == [(3, "none")]

    def test_a_parameter_after_one_that_keeps_its_default_gets_its_own_argument(self) -> None:
        given: list[tuple[int, object]] = []

        def handle(value: bytes, times: int = 3, record: Record = Record()) -> None:  # noqa: B008  (a plain default)
            given.append((times, record.offset))

        assert run(bind(handle), FakeMessage(offset=8)) is None
        assert given == [(3, 8)]

    def test_a_transaction_after_one_that_keeps_its_default_gets_its_own_argument(self) -> None:
        def handle(value: bytes, times: int = 3, tx: Writes = Writes()) -> None:  # noqa: B008  (a plain default)
            tx.append(times)

        tx = Writes()
        assert run(bind(handle, [Writes]), FakeMessage(), tx=tx) is None
        assert tx == [3]

    def test_an_annotation_that_is_no_type_is_refused_in_words(self) -> None:
        def handle(value: bytes, records: [Record]) -> None: ...  # type: ignore[misc, valid-type]

        with pytest.raises(InvalidHandler, match="records"):
            bind(handle)


def fails_with_its_own(value: str) -> None:
    raise LookupError(value)


class TestDecorating:
    def test_the_decorated_function_is_the_same_object(self) -> None:
        app = App("127.0.0.1:1", group="g")

        def handle(value: bytes) -> int:
            return len(value)

        assert app.consume("orders", to="lengths")(handle) is handle
        assert handle(b"abc") == 3

    def test_names_that_are_defined_in_a_function_are_found(self) -> None:
        class Local(msgspec.Struct):
            id: int

        app, given = App("127.0.0.1:1", group="g"), []

        @app.consume("orders")
        def handle(order: Local | None, record: Record) -> None:
            given.append(order)

        assert run(app.registrations[0].binding, FakeMessage(b'{"id": 1}'), FakeMessage(None)) is None
        assert given == [Local(1), None]

    def test_the_names_where_it_is_decorated_do_not_hide_those_where_it_is_written(self) -> None:
        """`takes_placed` was written in the module, where `Placed` is another class than here."""

        class Placed(msgspec.Struct):
            wrong: bool

        app = App("127.0.0.1:1", group="g")
        app.consume("orders")(takes_placed)
        message = FakeMessage(b'{"type": "Placed", "id": 1}')
        assert run(app.registrations[0].binding, message) is None, "decoded as the Placed of the decorating place"
        assert Placed is not takes_placed.__globals__["Placed"]

    def test_fields_of_a_local_type_that_cannot_be_resolved_are_refused_in_words(self) -> None:
        """msgspec looks for the names of fields in the module only."""

        class Item(msgspec.Struct):
            sku: str

        class Order(msgspec.Struct):
            items: list[Item]

        def handle(order: Order) -> None: ...

        with pytest.raises(InvalidHandler, match="Item"):
            bind(handle, names=locals())

    def test_a_method_of_an_object_can_be_a_handler(self) -> None:
        class Shop:
            def __init__(self) -> None:
                self.seen: list[bytes] = []

            def handle(self, value: bytes) -> None:
                self.seen.append(value)

        shop = Shop()
        assert run(bind(shop.handle), FakeMessage(b"v")) is None
        assert shop.seen == [b"v"]

    def test_a_wrapped_function_keeps_its_signature(self) -> None:
        given: list[object] = []

        def logged(function: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(function)
            def wrapper(*args: object, **kwargs: object) -> None:
                function(*args, **kwargs)

            return wrapper

        @logged
        def handle(value: str, *, record: Record) -> None:
            given.append((value, record.offset))

        assert run(bind(handle), FakeMessage(b"v", offset=1)) is None
        assert given == [("v", 1)]


def takes_placed(order: Placed) -> None: ...


def nothing() -> None: ...
def only_by_keyword(*, value: bytes) -> None: ...
def unannotated(value) -> None: ...  # type: ignore[no-untyped-def]
def unannotated_second(value: bytes, other) -> None: ...  # type: ignore[no-untyped-def]
def star(*values: bytes) -> None: ...
def double_star(value: bytes, **rest: object) -> None: ...
async def coroutine(value: bytes) -> None: ...
async def async_generator(value: bytes) -> AsyncIterator[int]:
    yield 1


def generator(value: bytes) -> Iterator[int]:
    yield 1


def returns_a_value(value: bytes) -> int:
    return len(value)


def batch_of_one(value: bytes, batch: Batch) -> None: ...
def record_of_many(values: list[bytes], record: Record) -> None: ...
def a_bare_list(values: list) -> None: ...  # type: ignore[type-arg]
def a_sequence(values: Sequence[Placed]) -> None: ...
def an_int(value: int) -> None: ...
def anything(value: Any) -> None: ...
def any_object(value: object) -> None: ...
def a_literal(value: Literal["a", "b"]) -> None: ...
def unknown_class(value: App) -> None: ...
def only_none(value: None) -> None: ...
def checker_only(value: OnlyForTheChecker) -> None: ...
def checker_only_second(value: bytes, other: OnlyForTheChecker) -> None: ...
def bytes_or_struct(value: bytes | Placed) -> None: ...
def str_or_struct(value: str | Placed | None) -> None: ...
def record_or_struct(value: Record | Placed) -> None: ...
def untagged_union(value: Untagged | AlsoUntagged) -> None: ...
def sqlite_transaction(value: bytes, tx: sqlite3.Connection) -> None: ...
def somebody_s_client(value: bytes, client: App) -> None: ...


REFUSED: list[tuple[Callable[..., object], str]] = [
    (nothing, r"nothing has no parameter for the payload: write def nothing\(value: bytes\)"),
    (only_by_keyword, r"only_by_keyword has no parameter for the payload: write def"),
    (unannotated, r"does not say what 'value' is: annotate it, for example value: bytes"),
    (unannotated_second, r"does not say what 'other' is: annotate it with Record, or with the transaction"),
    (star, r"star takes \*values: .*bytes.*: name each thing it should get"),
    (double_star, r"double_star takes \*\*rest: .*: name each thing it should get"),
    (async_generator, r"async_generator is a generator, so calling it would do nothing: remove the yield"),
    (generator, r"generator is a generator, so calling it would do nothing: remove the yield"),
    (
        a_bare_list,
        r"a_bare_list cannot get values: list: a batch is a list of one type, so annotate values as list\[T\]",
    ),
    (a_sequence, r"a_sequence cannot get values: .*Sequence\[.*Placed\]: a batch is a list of one type"),
    (returns_a_value, r"returns_a_value returns a value, and nothing takes it: name the topic .* to='shipped'"),
    (batch_of_one, r"one record at a time and asks for batch: Batch; ask for batch: Record instead, or .* list\[...\]"),
    (record_of_many, r"list\[bytes\] and asks for record: Record, but a batch has many records; ask for record: Batch"),
    (an_int, r"an_int cannot get value: int: .*annotate it as bytes, str, dict"),
    (anything, r"anything cannot get value: Any: .*annotate it as bytes"),
    (any_object, r"any_object cannot get value: object: .*annotate it as bytes"),
    (a_literal, r"a_literal cannot get value: Literal\['a', 'b'\]: .*annotate it as bytes"),
    (unknown_class, r"unknown_class cannot get value: App: .*annotate it as bytes"),
    (only_none, r"only_none cannot get value: .*annotate it as bytes"),
    (checker_only, r"'OnlyForTheChecker' is not defined.*import it outside `if TYPE_CHECKING:`"),
    (checker_only_second, r"'OnlyForTheChecker' is not defined.*import it outside `if TYPE_CHECKING:`"),
    (bytes_or_struct, r"mixes bytes with other types in value: .*use bytes alone and decode in the handler"),
    (str_or_struct, r"mixes str with other types in value: .*use str alone"),
    (record_or_struct, r"mixes Record with other types in value: .*use Record alone"),
    (untagged_union, r"untagged_union cannot get value: Untagged \| AlsoUntagged: .*give each msgspec.Struct a tag"),
    (sqlite_transaction, r"asks for tx: Connection, but .* memory://.* use offsets='sqlite:///file.db'"),
    (
        somebody_s_client,
        r"asks for client: App, which nobody provides .*it can get Record, Sender; or give .* a default, or declare",
    ),
]


class TestRefused:
    @pytest.mark.parametrize(("function", "sentence"), REFUSED, ids=lambda given: getattr(given, "__name__", ""))
    def test_what_cannot_work_is_refused_with_the_fix(self, function: Callable[..., object], sentence: str) -> None:
        with pytest.raises(InvalidHandler, match=sentence):
            bind(function, Available(store="memory://"))

    def test_the_app_refuses_it_where_it_is_decorated_and_keeps_nothing_of_it(self) -> None:
        app = App("127.0.0.1:1", group="g", offsets="memory://")
        with pytest.raises(InvalidHandler, match=r"sqlite:///file\.db"):
            app.consume("orders")(sqlite_transaction)
        assert app.registrations == []

    def test_a_transaction_of_another_type_is_answered_with_the_one_there_is(self) -> None:
        with pytest.raises(
            InvalidHandler, match="it can get Record, Sender, Writes; or give the parameter a default, or declare"
        ):
            bind(somebody_s_client, Available([Writes], store="list://"))

    def test_an_object_that_is_not_callable(self) -> None:
        with pytest.raises(InvalidHandler, match="3 is not a function: decorate a function"):
            bind(3)  # type: ignore[arg-type]

    @pytest.mark.parametrize("kind", ["partial", "object"])
    def test_a_callable_that_is_no_function_is_bound_or_refused_in_words(self, kind: str) -> None:
        class Handler:
            def __call__(self, value: bytes) -> None: ...

        candidate = functools.partial(takes_placed) if kind == "partial" else Handler()
        try:
            bind(candidate)
        except InvalidHandler as error:
            assert "function" in str(error)  # noqa: PT017  (either is fine)

    @pytest.mark.parametrize("hidden", [coroutine, generator])
    def test_what_would_do_nothing_when_called_is_refused_behind_a_decorator_too(
        self, hidden: Callable[..., object]
    ) -> None:
        """Else each record would be passed, and its coroutine thrown away without a step of it being run."""

        @functools.wraps(hidden)
        def timed(*args: object, **kwargs: object) -> object:
            return hidden(*args, **kwargs)

        with pytest.raises(InvalidHandler, match=hidden.__name__):
            bind(timed)

    def test_a_misspelt_attribute_in_an_annotation_is_refused_in_words(self) -> None:
        def handle(order: msgspec.Strct) -> None: ...  # type: ignore[name-defined]

        with pytest.raises(InvalidHandler, match="Strct"):
            bind(handle)


class TestExplain:
    @pytest.mark.parametrize(
        ("annotation", "payload"),
        [
            (bytes, "bytes"),
            (str, "str"),
            (dict[str, int], "dict[str, int]"),
            (Placed | Cancelled, "Placed | Cancelled"),
        ],
    )
    def test_a_tombstone_that_was_not_asked_for(self, annotation: object, payload: str) -> None:
        error = why(handler_of(annotation)[0], FakeMessage(None))
        assert isinstance(error, DecodeError)
        assert "the value is null (a tombstone)" in str(error)
        assert f"annotate it as {payload} | None to get tombstones as None" in str(error)

    @pytest.mark.parametrize(
        ("annotation", "value", "words"),
        [
            (str, b"\xff", "the value is not str: 'utf-8' codec"),
            (dict, b"not json", "the value is not dict: JSON is malformed"),
            (dict, b"", "the value is not dict: Input data was truncated"),
            (dict, b"[1]", "Expected `object`, got `array`"),
            (dict[str, int], b'{"a": "x"}', "Expected `int`, got `str` - at `$[...]`"),
            (Untagged, b'{"id": "x"}', "the value is not Untagged: Expected `int`, got `str` - at `$.id`"),
            (Untagged, b"{}", "Object missing required field `id`"),
            (Placed | Cancelled, b'{"type": "Lost"}', "the value is not Placed | Cancelled: Invalid value 'Lost'"),
            (Point, b'{"x": 1}', "the value is not Point: Object missing required field `y`"),
            (Line, b'{"sku": 1, "quantity": 1}', "the value is not Line: Expected `str`, got `int` - at `$.sku`"),
            (dict | None, b"null", "Expected `object`, got `null`"),
        ],
    )
    def test_a_payload_that_is_not_what_the_annotation_says(self, annotation: object, value: bytes, words: str) -> None:
        error = why(handler_of(annotation)[0], FakeMessage(value))
        assert isinstance(error, DecodeError)
        assert words in str(error)
        assert isinstance(error.__cause__, UnicodeDecodeError | msgspec.DecodeError)

    def test_what_the_handler_raises_stays_as_it_is(self) -> None:
        error = why(bind(fails_with_its_own), FakeMessage(b"x"))
        assert isinstance(error, LookupError)
        assert error.args == ("x",)

    @pytest.mark.parametrize(
        "own", [msgspec.ValidationError("mine"), UnicodeDecodeError("utf-8", b"", 0, 0, "mine"), TypeError("mine")]
    )
    @pytest.mark.parametrize("annotation", [str, dict, Untagged, bytes, Record])
    def test_an_error_that_looks_like_a_decoder_s_is_still_the_handler_s(
        self, own: Exception, annotation: object
    ) -> None:
        def handle(value: object) -> None:
            raise own

        handle.__annotations__ = {"value": annotation}
        assert why(bind(handle), FakeMessage(b'{"id": 1}')) is own

    def test_a_handler_that_fails_on_a_tombstone_it_asked_for_fails_itself(self) -> None:
        def handle(value: bytes | None) -> None:
            raise LookupError(value)

        assert isinstance(why(bind(handle), FakeMessage(None)), LookupError)

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_no_error_whatever_ends_the_runner_unreported(self, kind: type[BaseException]) -> None:
        def handle(value: bytes) -> None:
            raise kind

        assert isinstance(why(bind(handle), FakeMessage()), kind)


class TestRunner:
    def test_it_stops_before_the_next_record_once_told_to(self) -> None:
        stop: list[str] = []
        given: list[bytes] = []

        def handle(value: bytes) -> None:
            given.append(value)
            if value == b"1":
                stop.append("revoked")

        messages = [FakeMessage(b"%d" % n, offset=n) for n in range(5)]
        halt = run(bind(handle), *messages, stop=stop)
        assert halt == Halt(messages[2], None)
        assert given == [b"0", b"1"]

    def test_it_starts_nothing_when_told_to_stop_already(self) -> None:
        binding, given = handler_of(bytes)
        messages = [FakeMessage(offset=n) for n in range(3)]
        assert run(binding, *messages, stop=["stop"]) == Halt(messages[0], None)
        assert given == []

    def test_it_names_the_record_that_failed_and_runs_none_after_it(self) -> None:
        binding, given = handler_of(str)
        messages = [FakeMessage(value, offset=n) for n, value in enumerate([b"a", b"\xff", b"c"])]
        halt = run(binding, *messages)
        assert halt is not None
        assert halt.message is messages[1]
        assert given == ["a"]

    def test_nothing_to_do_is_done(self) -> None:
        binding, given = handler_of(bytes)
        assert run(binding) is None
        assert given == []

    def test_a_handler_with_names_that_the_runner_uses_itself_is_called_all_the_same(self) -> None:
        given: list[tuple[bytes, int]] = []

        def function(value: bytes, *, message: Record, stop: int = 1, scope: int = 2) -> None:
            given.append((value, message.offset))

        assert run(bind(function), FakeMessage(b"v", offset=3)) is None
        assert given == [(b"v", 3)]
