"""What is asked for in the decorator: kept as it was said, or refused there, in a sentence."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import msgspec
import psycopg
import pytest
import sqlalchemy
from redis.client import Pipeline
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from kconsume import App, Batch, Batching, Outgoing, Record, Sender
from kconsume._handlers.annotations import full_name
from kconsume._handlers.rate import Rate
from kconsume._handlers.registration import Registration
from kconsume.errors import ConfigurationError, InvalidHandler
from tests.unit.fakes import FakeMessage


def one(value: bytes) -> None: ...
def many(values: list[bytes]) -> None: ...
async def later(value: bytes) -> None: ...
async def many_later(values: list[bytes]) -> None: ...
def sends(value: bytes, sender: Sender) -> None: ...


def register(function: Callable[..., object], offsets: str = "kafka://", **options: Any) -> Registration:
    app = App("127.0.0.1:1", group="shop", offsets=offsets)
    app.consume("orders", **options)(function)
    return app.registrations[0]


LENT: dict[str, tuple[type, type]] = {
    "sqlite:///shop.db": (sqlite3.Connection, sqlite3.Connection),
    "postgresql://localhost/shop": (psycopg.Connection, psycopg.AsyncConnection),
    "redis://localhost/0?tag=shop": (Pipeline, Pipeline),
}
"""By store: what a `def` can ask for, and what an `async def`."""


def mismatches() -> Iterator[tuple[type, str, bool, type]]:
    """Every transaction that belongs to another kind of store."""
    for asked in (sqlite3.Connection, psycopg.Connection, psycopg.AsyncConnection, Pipeline, Session, AsyncSession):
        for offsets, lent in LENT.items():
            if asked not in lent:
                yield from ((asked, offsets, is_async, lent[is_async]) for is_async in (False, True))


class TestBatches:
    def test_a_handler_of_a_list_gathers_without_being_told(self) -> None:
        assert register(many).batching == Batching(500, 0.2)
        assert register(many, batch=Batching(7, 1.0)).batching == Batching(7, 1.0)

    def test_a_handler_of_one_record_does_not(self) -> None:
        assert register(one).batching is None
        with pytest.raises(
            InvalidHandler, match=r"one gets one record at a time, so batch= means nothing.*list\[bytes"
        ):
            register(one, batch=Batching())

    def test_chunk_is_for_records_and_batching_for_batches(self) -> None:
        assert register(one, chunk=7).options.chunk == 7
        with pytest.raises(InvalidHandler, match=r"many gets batches.*batch=Batching\(records=7\)"):
            register(many, chunk=7)

    @pytest.mark.parametrize("batch", [500, (500, 0.2), {"records": 5}, Batching])
    def test_what_is_no_batching_is_refused(self, batch: object) -> None:
        with pytest.raises(ConfigurationError, match="batch= takes a Batching"):
            register(many, batch=batch)

    def test_a_batch_goes_with_a_list_and_a_record_with_a_record(self) -> None:
        def both(values: list[bytes], batch: Batch) -> None: ...
        def wrong(values: list[bytes], record: Record) -> None: ...
        def wrong_too(value: bytes, batch: Batch) -> None: ...

        assert register(both).binding.batched
        with pytest.raises(InvalidHandler, match="a batch has many; ask for record: Batch"):
            register(wrong)
        with pytest.raises(InvalidHandler, match="ask for batch: Record, or annotate the payload as list"):
            register(wrong_too)

    @pytest.mark.parametrize(
        "annotation", [list, tuple[bytes, ...], set[bytes], list[Batch], list[Decimal], list[list[bytes]], Batch | None]
    )
    def test_a_batch_of_what_no_record_can_be_is_refused_in_a_sentence(self, annotation: object) -> None:
        def handle(values: Any) -> None: ...

        handle.__annotations__ = {"values": annotation, "return": None}
        with pytest.raises(InvalidHandler, match="annotate"):
            register(handle)


class Placed(msgspec.Struct, tag=True):
    id: int


class Cancelled(msgspec.Struct, tag=True):
    id: int


class Untagged(msgspec.Struct):
    id: int


class UntaggedToo(msgspec.Struct):
    id: int


class TestUnions:
    @pytest.mark.parametrize("annotation", [Placed | Cancelled, list[Placed | Cancelled], list[Placed | None]])
    def test_those_that_can_be_told_apart_are_taken(self, annotation: object) -> None:
        assert register(taking(annotation)).binding.signature.decoding is not None

    @pytest.mark.parametrize("union", [Untagged | UntaggedToo, Placed | str, bytes | str, dict[str, int] | Untagged])
    def test_those_that_cannot_are_refused_alone_and_in_a_list(self, union: Any) -> None:
        for annotation in (union, list[union]):
            with pytest.raises(InvalidHandler, match=r"tag|tells them apart"):
                register(taking(annotation))


def taking(annotation: object) -> Callable[..., object]:
    def handle(value: Any) -> None: ...

    handle.__annotations__ = {"value": annotation, "return": None}
    return handle


class TestReturning:
    @pytest.mark.parametrize("said", [bytes, dict, Outgoing, list[Outgoing], Placed | None, bool])
    def test_a_value_that_nobody_takes_is_refused_where_it_is_annotated(self, said: object) -> None:
        with pytest.raises(InvalidHandler, match=r"returns a value, and nothing takes it.*to='shipped'"):
            register(returning(said))
        assert register(returning(said), to="shipped").binding.to == "shipped"

    def test_a_function_that_says_nothing_of_its_result_is_checked_when_it_is_called(self) -> None:
        def bare(value: bytes):  # type: ignore[no-untyped-def]
            return

        binding = register(bare).binding
        assert binding.signature.returns.name == "UNKNOWN"
        assert binding.runner()([FakeMessage(b"x")], [], None, "shop:A", []) is None

    @pytest.mark.parametrize("to", ["", "no spaces", "a/b", "x" * 250, ".", "..", "ü", 5, ["shipped"]])
    def test_a_topic_that_is_none_is_refused_here_and_not_at_the_first_record(self, to: object) -> None:
        """There it would be the record's failure, and on_error="skip" would skip one after the other."""
        with pytest.raises(ConfigurationError, match=r"to= takes the name of a topic"):
            register(one, to=to)


def returning(said: object) -> Callable[..., object]:
    def handle(value: bytes) -> Any: ...

    handle.__annotations__ = {"value": bytes, "return": said}
    return handle


class TestNumbers:
    @pytest.mark.parametrize("option", ["concurrency", "chunk"])
    @pytest.mark.parametrize("number", [0, -1, 2.5, "4", True, [4]])
    def test_what_is_no_whole_number_is_refused(self, option: str, number: object) -> None:
        with pytest.raises(ConfigurationError, match=rf"{option}=.* must be a whole number, 1 or more"):
            register(one, offsets="kafka://", **{option: number})

    @pytest.mark.parametrize("partitions", [[], [-1], ["0"], [1.5], 3, "01", [True], [None]])
    def test_what_are_no_partition_numbers_is_refused(self, partitions: object) -> None:
        with pytest.raises(ConfigurationError, match="must be partition numbers of exactly one topic"):
            register(one, partitions=partitions)

    @pytest.mark.parametrize("partitions", [[3, 0, 3], (3, 0), range(0, 4, 3), {0, 3}])
    def test_partitions_may_come_as_any_collection(self, partitions: object) -> None:
        assert register(one, "memory://", partitions=partitions).partitions == (0, 3)

    @pytest.mark.parametrize("rate", [50, 0.5, "50/1.0", Rate])
    def test_what_is_no_rate_is_refused(self, rate: object) -> None:
        with pytest.raises(ConfigurationError, match="rate= takes a Rate"):
            register(one, rate=rate)


class TestExecutors:
    def test_async_runs_on_a_loop_and_plain_functions_on_threads(self) -> None:
        assert [register(f).executor for f in (one, many, later, many_later)] == ["thread", "thread", "async", "async"]
        assert register(one, executor="inline").executor == "inline"

    @pytest.mark.parametrize("executor", ["thread", "inline"])
    def test_async_has_no_choice(self, executor: str) -> None:
        with pytest.raises(ConfigurationError, match=f"later is async .* so executor='{executor}' means nothing"):
            register(later, executor=executor)

    @pytest.mark.parametrize(
        ("function", "option", "why"),
        [(one, {"rate": Rate(5)}, "rate="), (one, {"to": "shipped"}, "to="), (sends, {}, "a Sender")],
    )
    def test_what_waits_is_not_run_on_the_polling_thread(
        self, function: Callable[..., object], option: dict[str, Any], why: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=f"{function.__name__} has {why}, so it waits"):
            register(function, executor="inline", **option)
        assert register(function, **option).plan().waits

    def test_a_plain_function_does_not_wait(self) -> None:
        assert not register(one).plan().waits
        assert not register(many).plan().waits

    def test_an_async_handler_waits(self) -> None:
        assert register(later).plan().waits

    def test_what_awaits_its_transaction_waits(self) -> None:
        async def stores(value: bytes, tx: sqlite3.Connection) -> None: ...

        assert register(stores, "sqlite:///shop.db").plan().waits


class TestWhatCannotWork:
    def test_a_transaction_that_the_store_does_not_have(self) -> None:
        def stores(values: list[bytes], tx: sqlite3.Connection) -> None: ...

        with pytest.raises(InvalidHandler, match=r"but its offsets are in kafka://.*use offsets='sqlite:///"):
            register(stores)
        assert register(stores, "sqlite:///shop.db").binding.transaction is sqlite3.Connection

    @pytest.mark.parametrize(("asked", "offsets", "is_async", "lent"), list(mismatches()))
    def test_a_transaction_of_another_store_is_answered_with_the_annotation_that_fits(
        self, asked: type, offsets: str, is_async: bool, lent: type
    ) -> None:
        def plain(value: bytes, tx: Any) -> None: ...

        async def awaited(value: bytes, tx: Any) -> None: ...

        handler = awaited if is_async else plain
        handler.__annotations__["tx"] = asked
        with pytest.raises(InvalidHandler, match="whose transaction is of another type") as refused:
            register(handler, offsets)
        assert f"asks for tx: {full_name(asked)}, but" in str(refused.value)
        assert str(refused.value).endswith(f": annotate it as tx: {full_name(lent)}")
        handler.__annotations__["tx"] = lent
        assert register(handler, offsets).binding.transaction is lent

    def test_a_connection_of_a_library_that_nobody_lends_is_told_from_the_one_that_is_lent(self) -> None:
        def stores(value: bytes, tx: sqlalchemy.Connection) -> None: ...

        with pytest.raises(
            InvalidHandler, match=r"tx: sqlalchemy\.engine\.base\.Connection, which .*Sender, sqlite3\.Connection"
        ):
            register(stores, "sqlite:///shop.db")

    def test_a_handler_that_was_refused_leaves_no_trace(self) -> None:
        app = App("127.0.0.1:1", group="shop")
        with pytest.raises(InvalidHandler):
            app.consume("orders", batch=Batching())(one)
        app.consume("orders")(one)
        assert len(app.registrations) == 1

    def test_decode_where_nothing_is_decoded(self) -> None:
        for annotation in (Record, Batch, list[Record]):
            with pytest.raises(InvalidHandler, match="decode= would do nothing"):
                register(taking(annotation), decode=msgspec.json.decode)
