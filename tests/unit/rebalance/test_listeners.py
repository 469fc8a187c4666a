"""What people write to hear of rebalances: what is taken as it is, and what is refused with the fix."""

from __future__ import annotations

import asyncio
import functools
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import pytest

from kconsume.errors import InvalidHandler
from kconsume.rebalance import Rebalance, RebalanceListener
from kconsume.rebalance.listeners import Event, Listener, listeners_of, read_listener
from kconsume.records import Partition, Record

if typing.TYPE_CHECKING:
    from nowhere import Elsewhere  # type: ignore[import-not-found]

FIX = "def moved(partitions: Sequence[Partition]) -> None"
THREE = (Partition("orders", 3),)
JOINED = Rebalance("joined", "cooperative", THREE, (), (), datetime(2026, 3, 1, tzinfo=UTC), 0.0, 0, 0, (), True)

Function = Callable[..., Any]


def call(listener: Listener) -> object:
    """As the runtime does."""
    arguments = (THREE, JOINED) if listener.takes_rebalance else (THREE,)
    answer = listener.function(*arguments)
    return asyncio.run(answer) if listener.is_async else answer


def refusal(function: object, event: Event = "assigned") -> str:
    with pytest.raises(InvalidHandler) as caught:
        read_listener(typing.cast(Function, function), event)
    return str(caught.value)


class Kept:
    """Functions of every form; each returns what it got."""

    def one(self, partitions: Sequence[Partition]) -> object:
        return (partitions,)

    def two(self, partitions: Sequence[Partition], rebalance: Rebalance) -> object:
        return (partitions, rebalance)

    async def later(self, partitions: Sequence[Partition], rebalance: Rebalance) -> object:
        await asyncio.sleep(0)
        return (partitions, rebalance)

    @staticmethod
    def static(partitions: Sequence[Partition]) -> object:
        return (partitions,)

    @classmethod
    def of_class(cls, partitions: Sequence[Partition]) -> object:
        return (partitions,)


class Called:
    def __call__(self, partitions: Sequence[Partition]) -> object:
        return (partitions,)


class CalledLater:
    async def __call__(self, partitions: Sequence[Partition], rebalance: Rebalance) -> object:
        return (partitions, rebalance)


def with_client(client: str, partitions: Sequence[Partition], rebalance: Rebalance) -> object:
    assert client == "client"
    return (partitions, rebalance)


async def later_with_client(client: str, partitions: Sequence[Partition]) -> object:
    assert client == "client"
    return (partitions,)


def plainly(function: Function) -> Function:
    @functools.wraps(function)
    def inner(*args: object) -> object:
        return function(*args)

    return inner


class Counting:
    """A decorator that is a class."""

    def __init__(self, function: Function) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: object) -> object:
        return self.function(*args)


class TestTaken:
    @pytest.mark.parametrize(
        ("function", "name", "is_async", "takes_rebalance"),
        [
            (lambda partitions: (partitions,), "<lambda>", False, False),
            (lambda partitions, rebalance: (partitions, rebalance), "<lambda>", False, True),
            (lambda *moved: moved, "<lambda>", False, True),
            (lambda partitions, *rest: (partitions, *rest), "<lambda>", False, True),
            (lambda partitions, **named: (partitions,), "<lambda>", False, False),
            (lambda partitions, *, loud=False: (partitions,), "<lambda>", False, False),
            (Kept().one, "Kept.one", False, False),
            (Kept().two, "Kept.two", False, True),
            (Kept().later, "Kept.later", True, True),
            (Kept.static, "static", False, False),
            (vars(Kept)["static"], "static", False, False),
            (Kept.of_class, "of_class", False, False),
            (Called(), "Called", False, False),
            (CalledLater(), "CalledLater", True, True),
            (functools.partial(with_client, "client"), "with_client", False, True),
            (functools.partial(later_with_client, "client"), "later_with_client", True, False),
            (functools.partial(functools.partial(with_client, "client")), "with_client", False, True),
            (plainly(Kept.static), "static", False, False),
            (Counting(Kept.static), "static", False, False),
        ],
    )
    def test_it_is_called_with_what_it_asks_for(
        self, function: Function, name: str, is_async: bool, takes_rebalance: bool
    ) -> None:
        listener = read_listener(function, "revoked")
        assert listener == Listener(name, "revoked", function, is_async, takes_rebalance)
        assert call(listener) == ((THREE, JOINED) if takes_rebalance else (THREE,))

    def test_a_method_of_a_list_will_do(self) -> None:
        seen: list[Partition] = []
        call(read_listener(seen.extend, "assigned"))
        assert seen == [*THREE]

    def test_a_second_parameter_with_a_default_keeps_it(self) -> None:
        def moved(partitions: Sequence[Partition], table: str = "stock", third: int = 3) -> object:
            return table, third

        assert call(read_listener(moved, "assigned")) == ("stock", 3)

    def test_unless_it_is_named_or_typed_as_the_rebalance(self) -> None:
        def named(partitions, rebalance=None):  # type: ignore[no-untyped-def]
            return rebalance

        def typed(partitions: Sequence[Partition], why: Rebalance | None = None) -> object:
            return why

        assert call(read_listener(named, "assigned")) is JOINED
        assert call(read_listener(typed, "assigned")) is JOINED

    def test_a_default_whose_type_cannot_be_read_is_not_guessed_about(self) -> None:
        def moved(partitions: Sequence[Partition], why: Elsewhere = None) -> None: ...

        assert "'Elsewhere'" in refusal(moved)
        assert "`if TYPE_CHECKING:`" in refusal(moved)

    def test_an_annotation_for_the_type_checker_only_is_not_judged(self) -> None:
        def moved(partitions: Sequence[Elsewhere]) -> None: ...

        assert not read_listener(moved, "lost").takes_rebalance

    @pytest.mark.parametrize(
        "hint",
        [
            Sequence[Partition],
            Sequence,
            list[Partition],
            tuple[Partition, ...],
            Collection[Partition],
            Iterable[Partition],
            Iterable[tuple[str, int]],
            typing.Sequence[Partition],
            Sequence[Partition] | None,
            Annotated[Sequence[Partition], "moved"],
            Sequence[Any],
            Any,
            object,
        ],
    )
    def test_whatever_can_be_a_sequence_of_partitions(self, hint: object) -> None:
        def moved(partitions: object) -> None: ...

        moved.__annotations__["partitions"] = hint
        read_listener(moved, "assigned")


class TestRefused:
    @pytest.mark.parametrize("event", ["assigned", "revoked", "lost"])
    def test_what_is_not_a_function(self, event: Event) -> None:
        for wrong in (None, 5, "moved", Kept):
            said = refusal(wrong, event)
            assert f"@app.on_{event} needs a function" in said
            assert FIX in said

    def test_a_classmethod_that_is_not_bound_yet(self) -> None:
        assert FIX in refusal(vars(Kept)["of_class"])

    def test_a_generator_would_do_nothing(self) -> None:
        def moved(partitions: Sequence[Partition]) -> Iterator[None]:
            yield

        async def later(partitions: Sequence[Partition]) -> AsyncIterator[None]:
            yield

        for wrong in (moved, later, functools.partial(moved), plainly(moved), Counting(moved)):
            assert "is a generator" in refusal(wrong)
            assert "remove the yield" in refusal(wrong)

    def test_async_behind_a_plain_decorator_would_not_be_awaited(self) -> None:
        for wrong in (plainly(Kept().later), Counting(Kept().later), functools.partial(plainly(Kept().later))):
            assert "is async, and its decorator is not" in refusal(wrong)

    @pytest.mark.parametrize(
        ("function", "said"),
        [
            (lambda: None, "has no parameter for the partitions"),
            (lambda **named: None, "has no parameter for the partitions"),
            (lambda partitions, rebalance, more: None, "needs 3 arguments, and gets at most two"),
            (lambda *, partitions: None, "takes 'partitions' by name only"),
            (lambda partitions, *, rebalance: None, "takes 'rebalance' by name only"),
            (Kept.one, "is a method with no object to call it on"),
            (functools.partial(with_client, partitions=()), "takes 'rebalance' by name only"),
        ],
    )
    def test_parameters_that_cannot_be_given(self, function: Function, said: str) -> None:
        assert said in refusal(function)
        assert FIX in refusal(function)

    def test_the_sentence_names_the_function(self) -> None:
        def opened() -> None: ...

        assert refusal(opened).startswith("the listener opened has no parameter")

    def test_a_builtin_without_a_signature(self) -> None:
        assert "no signature to read" in refusal(getattr)

    @pytest.mark.parametrize(
        "hint",
        [
            str,
            int,
            bytes,
            Record,
            Partition,
            Rebalance,
            dict[Partition, int],
            set[Partition],
            Sequence[str],
            list[Record],
            str | None,
        ],
    )
    def test_a_first_parameter_that_cannot_be_partitions(self, hint: object) -> None:
        def moved(value: object) -> None: ...

        moved.__annotations__["value"] = hint
        said = refusal(moved)
        assert said.startswith("the listener moved cannot get value: ")
        assert FIX in said

    def test_a_second_parameter_that_cannot_be_the_rebalance(self) -> None:
        def moved(partitions: Sequence[Partition], record: Record) -> None: ...

        assert "cannot get record: Record" in refusal(moved)
        assert "rebalance: Rebalance" in refusal(moved)


class TestObjects:
    def test_only_what_is_overridden_is_heard(self) -> None:
        class Stock(RebalanceListener):
            def on_revoked(self, partitions: Sequence[Partition], rebalance: Rebalance) -> None: ...

        (listener,) = listeners_of(Stock())
        assert (listener.name, listener.event, listener.takes_rebalance) == ("Stock.on_revoked", "revoked", True)

    def test_plain_and_async_methods_in_one_object(self) -> None:
        class Stock(RebalanceListener):
            async def on_assigned(self, partitions: Sequence[Partition], rebalance: Rebalance) -> None: ...

            def on_lost(self, partitions: Sequence[Partition]) -> None: ...  # type: ignore[override]

        first, second = listeners_of(Stock())
        assert (first.event, first.is_async, first.takes_rebalance) == ("assigned", True, True)
        assert (second.event, second.is_async, second.takes_rebalance) == ("lost", False, False)

    def test_what_a_parent_overrides_counts(self) -> None:
        class Stock(RebalanceListener):
            def on_lost(self, partitions: Sequence[Partition], rebalance: Rebalance) -> Awaitable[None] | None: ...

        class Shelf(Stock): ...

        assert [listener.name for listener in listeners_of(Shelf())] == ["Shelf.on_lost"]

    def test_any_object_with_one_of_the_methods_will_do(self) -> None:
        class Duck:
            def on_assigned(self, partitions: Sequence[Partition]) -> object:
                return (self, partitions)

        duck = Duck()
        (listener,) = listeners_of(duck)
        assert call(listener) == (duck, THREE)

    def test_a_function_that_was_put_on_the_object_counts(self) -> None:
        stock, seen = RebalanceListener(), list[object]()
        stock.on_lost = lambda *moved: seen.append(moved)  # type: ignore[method-assign]
        (listener,) = listeners_of(stock)
        call(listener)
        assert seen == [(THREE, JOINED)]

    def test_they_come_in_the_order_of_a_partitions_life(self) -> None:
        class Stock:
            def on_lost(self, partitions: Sequence[Partition]) -> None: ...
            def on_revoked(self, partitions: Sequence[Partition]) -> None: ...
            def on_assigned(self, partitions: Sequence[Partition]) -> None: ...

        assert [listener.event for listener in listeners_of(Stock())] == ["assigned", "revoked", "lost"]

    @pytest.mark.parametrize("wrong", [RebalanceListener(), object(), None, lambda partitions: None])
    def test_one_that_would_hear_nothing_is_refused(self, wrong: object) -> None:
        with pytest.raises(InvalidHandler, match=r"none of on_assigned, on_revoked and on_lost.*def on_assigned\(self"):
            listeners_of(wrong)

    def test_a_class_is_refused_and_its_object_is_not(self) -> None:
        class Stock:
            def on_lost(self, partitions: Sequence[Partition]) -> None: ...

        with pytest.raises(InvalidHandler, match=r"write app\.listen\(Stock\(\.\.\.\)\)"):
            listeners_of(Stock)
        assert listeners_of(Stock())

    def test_a_method_with_a_wrong_signature_is_refused_by_name(self) -> None:
        class Stock:
            def on_lost(self) -> None: ...

        with pytest.raises(InvalidHandler, match=r"Stock\.on_lost has no parameter"):
            listeners_of(Stock())

    def test_the_methods_do_nothing_by_default(self) -> None:
        nobody = RebalanceListener()
        assert nobody.on_assigned(THREE, JOINED) is None
        assert nobody.on_revoked(THREE, JOINED) is None
        assert nobody.on_lost(THREE, JOINED) is None
