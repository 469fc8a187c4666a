"""The values that name a place in Kafka and what stands there."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconsume import Partition, Record
from kconsume.errors import ConfigurationError
from kconsume.records import record_of
from tests.unit.fakes import FakeMessage

topic_names = st.text("abcXYZ019._-", min_size=1, max_size=30)


class TestPartition:
    @given(topic_names, st.integers(0, 2**31 - 1))
    def test_what_is_written_can_be_read_again(self, topic: str, number: int) -> None:
        assert Partition.parse(str(Partition(topic, number))) == Partition(topic, number)

    def test_it_is_written_with_a_slash(self) -> None:
        assert str(Partition("orders", 3)) == "orders/3"
        assert f"{Partition('orders', 3)}" == "orders/3"

    @pytest.mark.parametrize(
        "text", ["", "orders", "orders/", "/3", "orders/-1", "orders/x", "orders/3@1042", "orders/1.5", "orders/ 3"]
    )
    def test_what_is_no_partition_is_refused_with_an_example(self, text: str) -> None:
        with pytest.raises(ConfigurationError, match="is not a partition: write TOPIC/NUMBER, for example orders/3"):
            Partition.parse(text)

    def test_they_are_sorted_by_topic_and_number(self) -> None:
        given = [Partition("b", 0), Partition("a", 10), Partition("a", 9)]
        assert sorted(given) == [Partition("a", 9), Partition("a", 10), Partition("b", 0)]


class TestRecordOfAMessage:
    def test_it_has_everything_that_is_known(self) -> None:
        message = FakeMessage(
            b"v", offset=2**40, key=b"k", partition=3, headers=[("trace", b"1"), ("trace", b"2")],
            timestamp=(1, 1_700_000_000_123),
        )  # fmt: skip
        record = record_of(message, "shop:Qm9v", attempt=2)
        assert (record.topic, record.partition, record.offset) == ("orders", 3, 2**40)
        assert (record.key, record.value) == (b"k", b"v")
        assert record.headers == (("trace", b"1"), ("trace", b"2"))
        assert record.timestamp == datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)
        assert record.attempt == 2
        assert record.id == f"shop:Qm9v:3:{2**40}"

    def test_the_first_attempt_is_number_one(self) -> None:
        assert record_of(FakeMessage(), "g:t").attempt == 1

    def test_what_is_not_there_is_none_or_empty(self) -> None:
        record = record_of(FakeMessage(None, timestamp=(0, -1)), "g:t")
        assert (record.key, record.value, record.headers, record.timestamp) == (None, None, (), None)

    def test_a_header_without_a_value_is_empty(self) -> None:
        assert record_of(FakeMessage(headers=[("a", None), ("b", b"")]), "g:t").headers == (("a", b""), ("b", b""))

    @pytest.mark.parametrize("kind", [1, 2], ids=["create time", "log append time"])
    @given(millis=st.integers(-62_135_596_800_000, 253_402_300_799_999))
    def test_a_timestamp_is_in_utc_and_exact_to_the_millisecond(self, kind: int, millis: int) -> None:
        moment = record_of(FakeMessage(timestamp=(kind, millis)), "g:t").timestamp
        assert moment is not None
        assert moment.utcoffset() == timedelta(0)
        assert (moment - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(milliseconds=1) == millis

    @pytest.mark.parametrize("millis", [1_700_000_000_000_000, 1_700_000_000_000_000_000, 2**63 - 1, -(2**62)])
    def test_a_timestamp_that_no_date_can_hold_does_not_poison_the_record(self, millis: int) -> None:
        """A producer that writes microseconds: Kafka takes it, and the handler may not even want to know."""
        record = record_of(FakeMessage(b"v", timestamp=(1, millis)), "g:t")
        assert record.value == b"v"
        assert record.timestamp is None

    def test_the_id_is_the_same_at_every_attempt(self) -> None:
        message = FakeMessage(offset=5)
        assert record_of(message, "g:t", 1).id == record_of(message, "g:t", 7).id == "g:t:0:5"


class TestRecord:
    def test_two_with_the_same_content_are_equal_and_have_one_hash(self) -> None:
        message = FakeMessage(b"v", offset=5, headers=[("a", b"b")])
        one, two = record_of(message, "g:t"), record_of(message, "g:t")
        assert one == two
        assert hash(one) == hash(two)
        assert len({one, two}) == 1

    @pytest.mark.parametrize("name", Record.__slots__)
    def test_a_difference_in_anything_is_a_difference(self, name: str) -> None:
        one, two = Record(topic="t"), Record(topic="t")
        setattr(two, name, "other")
        assert one != two

    def test_it_is_not_equal_to_what_is_no_record(self) -> None:
        assert Record() != ("", 0, 0)

    def test_a_unit_test_can_make_one_of_little(self) -> None:
        record = Record(value=b"v")
        assert (record.value, record.attempt, record.headers) == (b"v", 1, ())

    def test_it_shows_its_place_and_not_its_payload(self) -> None:
        assert repr(Record("orders", 3, 9, value=b"card number")) == "Record(orders/3@9)"
