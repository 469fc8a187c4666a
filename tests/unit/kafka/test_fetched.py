"""Messages cut into runs: every record once, in order, whatever comes between them."""

from __future__ import annotations

from itertools import groupby
from typing import cast

import pytest
from confluent_kafka import KafkaError
from confluent_kafka import Message as ClientMessage
from hypothesis import given
from hypothesis import strategies as st

from kconsume._kafka import fetched as arrivals
from kconsume._kafka.fetched import FetchedMessages
from kconsume.errors import ClientFailed, InstanceTaken, NotAuthorized, OffsetOutOfRange, TopicNotFound, UnreadableBatch
from kconsume.records import Partition
from tests.unit.fakes import FakeMessage


class Event(FakeMessage):
    """What the client reports as a message: with an error."""

    failure: KafkaError | None = None

    def error(self) -> KafkaError | None:
        return self.failure


def record(partition: int, offset: int, topic: str = "orders") -> Event:
    return Event(b"x", offset=offset, partition=partition, topic=topic)


def event(code: int, partition: int = 0, offset: int = 0) -> Event:
    made = record(partition, offset)
    made.failure = KafkaError(code)
    return made


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_error_of", Event.error)
    monkeypatch.setattr(arrivals, "_topic_of", Event.topic)
    monkeypatch.setattr(arrivals, "_number_of", Event.partition)


def sort(messages: list[Event], one_topic: str | None = "orders", instance: str | None = None) -> FetchedMessages:
    sorter = FetchedMessages(instance)
    sorter.one_topic = one_topic
    runs = sorter.sort(cast("list[ClientMessage]", messages))
    records = [m for m in messages if m.failure is None]
    assert [m for _, run in runs for m in run] == records, "each once and in order"
    expected = [Partition(*place) for place, _ in groupby(records, lambda m: (m.topic(), m.partition()))]
    assert [partition for partition, _ in runs] == expected, "cut where the partition changes, and only there"
    for partition, run in runs:
        assert {(m.topic(), m.partition()) for m in run} == {(partition.topic, partition.number)}
    return sorter


def _offsets(sorter: FetchedMessages, messages: list[Event]) -> dict[Partition, list[int]]:
    found: dict[Partition, list[int]] = {}
    for partition, run in sorter.sort(cast("list[ClientMessage]", messages)):
        found.setdefault(partition, []).extend(message.offset() for message in run)
    return found


STREAM = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.booleans()), max_size=40)
"""Steps: of which partition, how far its offset goes on, whether its end is reported first."""


class TestRuns:
    @given(STREAM, st.booleans())
    def test_every_record_is_in_one_run_of_its_partition(
        self, steps: list[tuple[int, int, bool]], one_topic: bool
    ) -> None:
        offsets, messages = [0, 0, 0], list[Event]()
        for partition, step, ends in steps:
            if ends:
                messages.append(event(KafkaError._PARTITION_EOF, partition, offsets[partition]))
            offsets[partition] += step
            messages.append(record(partition, offsets[partition]))
        sort(messages, "orders" if one_topic else None)

    def test_an_end_in_the_place_of_an_offset_that_is_not_there_is_no_record(self) -> None:
        """As many messages as offsets, and one of them is an event: transactions leave such holes."""
        sorter = sort([record(0, 4), event(KafkaError._PARTITION_EOF, 0, 5), record(0, 6)])
        assert sorter.ends == set(), "something came behind it"

    def test_as_many_as_there_are_offsets_but_of_two_partitions(self) -> None:
        sort([record(0, 4), record(1, 9), record(0, 6)])
        sort([record(0, 4), record(1, 5), record(0, 6), record(1, 7)])

    def test_topics_with_the_same_numbers_are_told_apart(self) -> None:
        sort([record(0, 1), record(0, 2, "payments"), record(0, 3)], one_topic=None)


class TestEvents:
    def test_an_end_holds_until_something_comes(self) -> None:
        sorter = sort([record(0, 1), event(KafkaError._PARTITION_EOF, 0, 2)])
        assert sorter.ends == {Partition("orders", 0)}
        sorter.sort(cast("list[ClientMessage]", [record(0, 2)]))
        assert sorter.ends == set()

    @pytest.mark.parametrize(
        ("code", "error"),
        [
            (KafkaError._FATAL, ClientFailed),
            (KafkaError.GROUP_AUTHORIZATION_FAILED, ClientFailed),
            (KafkaError.FENCED_INSTANCE_ID, InstanceTaken),
        ],
    )
    def test_what_is_wrong_for_good_is_raised_once(self, code: int, error: type[Exception]) -> None:
        sorter = sort([record(0, 1), event(code), record(0, 2)], instance="pod-1")
        with pytest.raises(error):
            sorter.raise_fault()
        sorter.raise_fault()

    def test_the_first_fault_is_the_one_that_is_raised(self) -> None:
        sorter = sort([event(KafkaError.GROUP_AUTHORIZATION_FAILED), event(KafkaError._FATAL)])
        with pytest.raises(ClientFailed, match="allow this user READ on the group"):
            sorter.raise_fault()

    def test_a_topic_that_is_not_there_is_that_topic_s_fault(self) -> None:
        sorter = sort([record(0, 1), event(KafkaError.UNKNOWN_TOPIC_OR_PART)])
        sorter.raise_fault()
        assert isinstance(sorter.topic_faults["orders"], TopicNotFound)

    def test_an_end_behind_what_is_wrong_with_a_partition_is_none(self) -> None:
        """It would pass what was not let through."""
        end = event(KafkaError._PARTITION_EOF, 0, 9)
        for messages in ([event(KafkaError._BAD_MSG, 0, 2), end], [end, event(KafkaError._BAD_MSG, 0, 2)]):
            sorter = sort([record(0, 1), *messages])
            assert sorter.ends == set()
        sorter.forget([Partition("orders", 0)])
        sorter.sort(cast("list[ClientMessage]", [end]))
        assert sorter.ends == {Partition("orders", 0)}, "it was placed again, and has read to the end"

    @pytest.mark.parametrize(
        ("code", "error"),
        [
            (KafkaError._AUTO_OFFSET_RESET, OffsetOutOfRange),
            (KafkaError._BAD_MSG, UnreadableBatch),
            (KafkaError._BAD_COMPRESSION, UnreadableBatch),
            (KafkaError.MSG_SIZE_TOO_LARGE, UnreadableBatch),
            (KafkaError.INVALID_RECORD, UnreadableBatch),
        ],
    )
    def test_behind_what_is_wrong_with_a_partition_nothing_of_it_is_let_through(
        self, code: int, error: type[Exception]
    ) -> None:
        """The client may read on behind it: later batches of the same fetch come after the error."""
        bad, good = Partition("orders", 0), Partition("orders", 1)
        sorter = FetchedMessages(None)
        fetched = [record(0, 1), record(1, 1), event(code), record(0, 2), record(1, 2)]
        assert _offsets(sorter, fetched) == {bad: [1], good: [1, 2]}
        assert isinstance(sorter.faults[bad], error)
        assert list(sorter.faults) == [bad]
        sorter.raise_fault()
        assert _offsets(sorter, [record(0, 3), record(1, 3)]) == {good: [3]}, "nor by a later fetch"
        sorter.forget([bad])
        assert _offsets(sorter, [record(0, 2)]) == {bad: [2]}, "until it is placed again"

    def test_rights_that_are_missing_are_the_topic_s_fault(self) -> None:
        sorter = sort([record(0, 1), event(KafkaError.TOPIC_AUTHORIZATION_FAILED)])
        sorter.raise_fault()
        assert isinstance(sorter.topic_faults["orders"], NotAuthorized)
        assert (sorter.faults, sorter.stopped) == ({}, set())

    @pytest.mark.parametrize(("topic", "offset"), [("", 0), ("orders", None)], ids=["the group", "a whole topic"])
    def test_an_error_that_is_of_no_partition_holds_none(self, topic: str, offset: int | None) -> None:
        """The client says partition 0 for both."""
        made = event(KafkaError.INCONSISTENT_GROUP_PROTOCOL)
        made._topic, made._offset = topic, cast(int, offset)
        sorter = sort([record(0, 1), made, record(0, 2)])
        assert sorter.faults == {}
        assert [trouble.code() for trouble in sorter.connection_errors] == [KafkaError.INCONSISTENT_GROUP_PROTOCOL]

    def test_control_without_the_stop_what_is_unreadable_would_be_passed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FetchedMessages, "_stop", lambda *_: None)
        fetched = [record(0, 1), event(KafkaError._BAD_MSG), record(0, 3)]
        assert _offsets(FetchedMessages(None), fetched) == {Partition("orders", 0): [1, 3]}

    def test_what_the_client_mends_itself_is_only_told(self) -> None:
        sorter = sort([event(KafkaError._TRANSPORT)])
        sorter.raise_fault()
        assert [trouble.code() for trouble in sorter.connection_errors] == [KafkaError._TRANSPORT]
