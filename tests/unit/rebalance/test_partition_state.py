"""State by partition: loaded when it comes, saved when it goes, neither when it is lost; one failure is one's own."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from kconsume.errors import InvalidHandler, KconsumeError, NotHeld
from kconsume.rebalance import AsyncPartitionState, PartitionState, Rebalance
from kconsume.rebalance.listeners import listeners_of
from kconsume.records import Partition

A, B, C = (Partition("orders", number) for number in range(3))
WHY = Rebalance("members", "cooperative", (), (), (), datetime(2026, 3, 1, tzinfo=UTC), 0.0, 0, 0, (), True)

State = PartitionState[int] | AsyncPartitionState[int]


class Shop:
    """Where state is kept; some of it cannot be read, or written."""

    def __init__(self, broken: Sequence[Partition] = ()) -> None:
        self.kept: dict[Partition, int] = {A: 10, B: 20}
        self.broken = set(broken)
        self.calls: Counter[str] = Counter()

    def load(self, partition: Partition) -> int:
        self.calls[f"load {partition}"] += 1
        if partition in self.broken:
            raise LookupError(f"cannot read {partition}")
        return self.kept.get(partition, 0)

    def save(self, partition: Partition, value: int) -> None:
        self.calls[f"save {partition}"] += 1
        if partition in self.broken:
            raise OSError(f"cannot write {partition}")
        self.kept[partition] = value

    async def load_later(self, partition: Partition) -> int:
        await asyncio.sleep(0)
        return self.load(partition)

    async def save_later(self, partition: Partition, value: int) -> None:
        await asyncio.sleep(0)
        self.save(partition, value)


def plain_state(shop: Shop) -> State:
    return PartitionState(load=shop.load, save=shop.save)


def async_state(shop: Shop) -> State:
    return AsyncPartitionState(load=shop.load_later, save=shop.save_later)


Make = Callable[[Shop], State]
forms = pytest.mark.parametrize("make", [plain_state, async_state], ids=["plain", "async"])


def tell(state: State, event: str, *partitions: Partition) -> None:
    """As the runtime does."""
    (listener,) = [each for each in listeners_of(state) if each.event == event]
    answer = listener.function(partitions, WHY)
    if listener.is_async:
        asyncio.run(answer)


@forms
class TestBoth:
    def test_it_is_loaded_changed_and_saved(self, make: Make) -> None:
        shop = Shop()
        state = make(shop)
        tell(state, "assigned", A, B, C)
        state[A] += 1
        state[C] = 7
        assert (state[A], state[B], state[C]) == (11, 20, 7)
        tell(state, "revoked", A, C)
        assert shop.kept == {A: 11, B: 20, C: 7}
        assert state.partitions == (B,)

    def test_what_was_revoked_is_forgotten_and_loaded_anew(self, make: Make) -> None:
        shop = Shop()
        state = make(shop)
        tell(state, "assigned", A)
        tell(state, "revoked", A)
        assert A not in state
        shop.kept[A] = 99
        tell(state, "assigned", A)
        assert state[A] == 99

    def test_what_is_lost_is_forgotten_and_not_saved(self, make: Make) -> None:
        shop = Shop()
        state = make(shop)
        tell(state, "assigned", A, B)
        state[A] = 0
        tell(state, "lost", A)
        assert shop.kept[A] == 10
        assert shop.calls["save orders/0"] == 0
        assert state.partitions == (B,)

    def test_partitions_are_sorted_and_those_that_are_here(self, make: Make) -> None:
        state = make(Shop())
        tell(state, "assigned", C, A)
        assert state.partitions == (A, C)
        assert A in state
        assert B not in state

    def test_one_that_is_not_ours_cannot_be_read_or_set(self, make: Make) -> None:
        state = make(Shop())
        with pytest.raises(NotHeld, match=r"there is no state of orders/0: .*does not own the partition.*app\.listen"):
            state[A]
        with pytest.raises(NotHeld):
            state[A] = 1
        assert A not in state

    def test_a_handler_that_comes_late_cannot_bring_it_back(self, make: Make) -> None:
        shop = Shop()
        state = make(shop)
        tell(state, "assigned", A)
        tell(state, "revoked", A)
        with pytest.raises(NotHeld):
            state[A] = 1
        tell(state, "revoked", A)
        assert shop.calls["save orders/0"] == 1

    def test_a_load_that_fails_keeps_no_other_from_being_loaded(self, make: Make) -> None:
        shop = Shop(broken=[A, C])
        state = make(shop)
        with pytest.raises(ExceptionGroup, match="state could not be loaded partitions=orders/0, orders/2") as caught:
            tell(state, "assigned", A, B, C)
        assert [str(error) for error in caught.value.exceptions] == ["cannot read orders/0", "cannot read orders/2"]
        assert caught.value.exceptions[0].__notes__ == ["the state of orders/0 was not loaded"]
        assert state.partitions == (B,)

    def test_what_could_not_be_loaded_is_not_saved_over(self, make: Make) -> None:
        shop = Shop(broken=[A])
        state = make(shop)
        with pytest.raises(ExceptionGroup):
            tell(state, "assigned", A)
        with pytest.raises(NotHeld, match="could not be loaded"):
            state[A]
        with pytest.raises(NotHeld, match="could not be loaded"):
            state[A] = 1
        shop.broken.clear()
        tell(state, "revoked", A)
        assert shop.kept[A] == 10

    def test_a_value_of_an_earlier_assignment_does_not_outlive_a_failed_load(self, make: Make) -> None:
        shop = Shop()
        state = make(shop)
        tell(state, "assigned", A)
        shop.broken.add(A)
        with pytest.raises(ExceptionGroup):
            tell(state, "assigned", A)
        assert A not in state

    def test_a_save_that_fails_keeps_no_other_from_being_saved_and_all_are_forgotten(self, make: Make) -> None:
        shop = Shop()
        state = make(shop)
        tell(state, "assigned", A, B)
        state[A], state[B] = 1, 2
        shop.broken.add(A)
        with pytest.raises(ExceptionGroup, match="state could not be saved partitions=orders/0") as caught:
            tell(state, "revoked", A, B)
        assert [type(error) for error in caught.value.exceptions] == [OSError]
        assert shop.kept == {A: 10, B: 2}
        assert state.partitions == ()

    def test_revoking_what_never_came_saves_nothing(self, make: Make) -> None:
        shop = Shop()
        tell(make(shop), "revoked", A)
        tell(make(shop), "lost", A)
        assert not shop.calls

    @pytest.mark.parametrize("wrong", [None, 5, "load"])
    def test_what_cannot_be_called_is_refused(self, make: Make, wrong: Any) -> None:
        shop = Shop()
        kind: Callable[..., State] = type(make(shop))
        with pytest.raises(InvalidHandler, match=r"load= needs a function.*lambda partition"):
            kind(load=wrong, save=shop.save)
        with pytest.raises(InvalidHandler, match="save= needs a function"):
            kind(load=shop.load, save=wrong)


def test_the_error_is_of_the_tree_and_a_key_error_and_reads_as_a_sentence() -> None:
    with pytest.raises(KeyError) as caught:
        plain_state(Shop())[A]
    assert isinstance(caught.value, KconsumeError)
    assert str(caught.value).startswith("there is no state of orders/0")


def test_it_hears_all_three_events_and_only_the_async_one_is_awaited() -> None:
    def heard(state: State) -> dict[str, bool]:
        return {listener.event: listener.is_async for listener in listeners_of(state)}

    assert heard(plain_state(Shop())) == {"assigned": False, "revoked": False, "lost": False}
    assert heard(async_state(Shop())) == {"assigned": True, "revoked": True, "lost": False}


class TestAsyncGivenToThePlainOne:
    def test_it_is_refused_at_once(self) -> None:
        shop = Shop()
        with pytest.raises(InvalidHandler, match=r"load of a PartitionState is async.*AsyncPartitionState"):
            PartitionState(load=shop.load_later, save=shop.save)  # type: ignore[misc]
        with pytest.raises(InvalidHandler, match="save of a PartitionState is async"):
            PartitionState(load=shop.load, save=shop.save_later)

    def test_behind_a_lambda_it_is_refused_when_it_is_called(self) -> None:
        shop = Shop()
        state = PartitionState[object](lambda partition: shop.load_later(partition), shop.save)  # type: ignore[arg-type]
        with pytest.raises(ExceptionGroup) as caught:
            state.on_assigned([A], WHY)
        assert "use AsyncPartitionState" in str(caught.value.exceptions[0])
        state = PartitionState[object](shop.load, lambda partition, value: shop.save_later(partition, 1))
        state.on_assigned([A], WHY)
        with pytest.raises(ExceptionGroup) as caught:
            state.on_revoked([A], WHY)
        assert "use AsyncPartitionState" in str(caught.value.exceptions[0])


class TestThreads:
    def test_a_load_that_ends_after_its_partition_went_is_not_seen(self) -> None:
        began, go_on = threading.Event(), threading.Event()
        saved: list[Partition] = []

        def load(partition: Partition) -> int:
            began.set()
            assert go_on.wait(30)
            return 1

        state = PartitionState(load, lambda partition, value: saved.append(partition))
        late = threading.Thread(target=state.on_assigned, args=([A], WHY))
        late.start()
        assert began.wait(30)
        state.on_revoked([A], WHY)
        go_on.set()
        late.join(30)
        assert not late.is_alive()
        assert A not in state
        assert saved == []

    def test_handlers_count_on_their_partitions_while_others_come_and_go(self) -> None:
        shop, failures, done = Shop(), list[BaseException](), threading.Event()
        state = PartitionState(shop.load, shop.save)
        state.on_assigned([A, B], WHY)

        def handle(partition: Partition) -> None:
            try:
                for _ in range(2000):
                    state[partition] += 1
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        def look() -> None:
            try:
                while not done.is_set():
                    assert {A, B} <= set(state.partitions)
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        threads = [threading.Thread(target=handle, args=(p,)) for p in (A, B)]
        looker = threading.Thread(target=look)
        for thread in (*threads, looker):
            thread.start()
        others = [Partition("clicks", n) for n in range(50)]
        for _ in range(50):
            state.on_assigned(others, WHY)
            state.on_revoked(others, WHY)
        for thread in threads:
            thread.join(30)
        done.set()
        looker.join(30)
        state.on_revoked([A, B], WHY)
        assert failures == []
        assert (shop.kept[A], shop.kept[B]) == (2010, 2020)


def test_async_loads_of_several_partitions_run_at_the_same_time() -> None:
    async def main() -> None:
        all_here = asyncio.Barrier(3)

        async def load(partition: Partition) -> int:
            await asyncio.wait_for(all_here.wait(), 30)
            return partition.number

        async def save(partition: Partition, value: int) -> None: ...

        state = AsyncPartitionState(load, save)
        await state.on_assigned([A, B, C], WHY)
        assert state.partitions == (A, B, C)

    asyncio.run(main())
