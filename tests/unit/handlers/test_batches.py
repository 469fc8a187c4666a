"""How records are gathered into batches, and what is known about one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconsume._handlers.batches import Batch, Batching
from kconsume.errors import ConfigurationError
from kconsume.records import Record, record_of
from tests.unit.fakes import FakeMessage, messages_at

SCOPE = "shop:Qm9v"


class Unread(FakeMessage):
    """A message of which nothing but its offset may be read."""

    def _refuse(self) -> NoReturn:
        raise AssertionError("was read, and nobody asked for it")

    key = value = headers = timestamp = topic = partition = _refuse


def batch_at(*offsets: int) -> Batch:
    return Batch(messages_at(offsets), SCOPE)


class TestBatching:
    def test_by_default_it_is_500_records_or_a_fifth_of_a_second(self) -> None:
        assert Batching() == Batching(records=500, wait=0.2)

    @pytest.mark.parametrize("records", [0, -1, True, False, 1.5, 500.0, "500", None])
    def test_a_size_that_holds_nothing_is_refused_with_the_fix(self, records: object) -> None:
        with pytest.raises(
            ConfigurationError, match=r"Batching\(records=.*\) holds no record: give a whole number, 1 or"
        ):
            Batching(records=records)  # type: ignore[arg-type]

    @pytest.mark.parametrize("wait", [-0.1, -1, math.nan, math.inf, -math.inf, True, False, "0.2", None])
    def test_a_wait_that_is_no_time_is_refused_with_the_fix(self, wait: object) -> None:
        with pytest.raises(ConfigurationError, match=r"Batching\(wait=.*\) must be seconds, 0 or more"):
            Batching(wait=wait)  # type: ignore[arg-type]

    @pytest.mark.parametrize(("records", "wait"), [(1, 0), (1, 0.0), (10**6, 3600)])
    def test_any_size_and_any_finite_wait_is_taken(self, records: int, wait: float) -> None:
        assert (Batching(records, wait).records, Batching(records, wait).wait) == (records, wait)

    def test_it_does_not_change(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            Batching().records = 2  # type: ignore[misc]


class TestBatch:
    def test_it_knows_its_place(self) -> None:
        batch = Batch([FakeMessage(offset=n, partition=3) for n in (100, 101, 599)], SCOPE, attempt=2)
        assert (batch.topic, batch.partition, batch.first, batch.last) == ("orders", 3, 100, 599)
        assert batch.attempt == 2
        assert len(batch) == 3

    def test_the_first_attempt_is_number_one(self) -> None:
        assert batch_at(1).attempt == 1

    def test_its_id_is_the_range_and_the_same_at_every_attempt(self) -> None:
        messages = messages_at([5, 9])
        assert Batch(messages, SCOPE).id == Batch(messages, SCOPE, attempt=7).id == "shop:Qm9v:0:5-9"

    def test_its_columns_are_those_of_its_records(self) -> None:
        messages = [
            FakeMessage(b"a", offset=1, key=b"k", headers=[("trace", b"1"), ("empty", None)]),
            FakeMessage(None, offset=7, timestamp=(0, -1)),
        ]
        batch = Batch(messages, SCOPE)
        assert batch.keys == [b"k", None]
        assert batch.values == [b"a", None]
        assert batch.offsets == [1, 7]
        assert batch.timestamps == [datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC), None]
        assert batch.headers == [(("trace", b"1"), ("empty", b"")), ()]

    @given(st.lists(st.integers(0, 2**60), unique=True).map(sorted), st.integers(1, 5))
    def test_it_is_the_sequence_of_its_records(self, offsets: list[int], attempt: int) -> None:
        messages = messages_at(offsets)
        batch: Sequence[Record] = Batch(messages, SCOPE, attempt)
        records = [record_of(message, SCOPE, attempt) for message in messages]
        assert list(batch) == records
        assert [batch[n] for n in range(len(batch))] == records
        assert list(reversed(batch)) == records[::-1]
        assert all(record in batch for record in records)

    def test_it_can_be_read_again(self) -> None:
        batch = batch_at(1, 2)
        assert list(batch) == list(batch) != []

    def test_it_counts_from_the_end_as_a_list_does(self) -> None:
        assert batch_at(4, 8)[-1].offset == 8
        with pytest.raises(IndexError):
            batch_at(4, 8)[2]

    @given(
        st.lists(st.integers(0, 2**60), unique=True).map(sorted),
        st.none() | st.integers(-9, 9),
        st.none() | st.integers(-9, 9),
    )
    def test_a_part_of_it_is_a_batch(self, offsets: list[int], start: int | None, stop: int | None) -> None:
        part = Batch(messages_at(offsets), SCOPE, attempt=3)[start:stop]
        assert isinstance(part, Batch)
        assert part.offsets == offsets[start:stop]
        assert part.attempt == 3

    def test_a_part_has_the_id_of_its_own_range(self) -> None:
        assert batch_at(5, 6, 7, 9)[1:3].id == "shop:Qm9v:0:6-7"

    @pytest.mark.parametrize("step", [2, -1])
    def test_a_part_that_is_no_range_is_refused_because_its_id_would_be_that_of_another(self, step: int) -> None:
        with pytest.raises(ValueError, match=r"select from list\(batch\)"):
            batch_at(1, 2, 3)[::step]

    def test_nothing_is_read_before_it_is_asked_for(self) -> None:
        batch = Batch([Unread(offset=n) for n in (3, 5)], SCOPE)
        part = batch[1:]
        iter(batch)
        assert (batch.first, batch.last, batch.offsets, len(part)) == (3, 5, [3, 5], 1)
        with pytest.raises(AssertionError, match="nobody asked"):  # the control: a read is seen
            batch[0]

    def test_it_shows_its_place_and_not_its_payload(self) -> None:
        batch = Batch([FakeMessage(b"card number", offset=n, partition=3) for n in range(100, 600)], SCOPE)
        assert repr(batch) == "Batch(orders/3@100-599, 500 records)"
        assert repr(batch[:1]) == "Batch(orders/3@100-100, 1 record)"
        assert repr(batch[:0]) == "Batch(empty)"

    def test_an_empty_part_has_no_place(self) -> None:
        empty = batch_at(1)[:0]
        assert (len(empty), empty.keys, empty.offsets) == (0, [], [])
        with pytest.raises(IndexError):
            empty.first  # noqa: B018
