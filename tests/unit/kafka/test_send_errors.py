"""When a refusal of the group counts, and the sentences."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from kconsume._kafka.cluster import Group, GroupMember
from kconsume._kafka.fetched import FetchedMessages
from kconsume._kafka.join_errors import RefusedMember, why

OTHER, FULL, SESSION = (
    KafkaError.INCONSISTENT_GROUP_PROTOCOL,
    KafkaError.GROUP_MAX_SIZE_REACHED,
    KafkaError.INVALID_SESSION_TIMEOUT,
)
MEMBERS = tuple(GroupMember(f"id-{n}", None, name, ()) for n, name in enumerate(["loop", "loop", "batch"]))


def test_a_refusal_counts_when_it_lasts() -> None:
    turned_away = RefusedMember()
    assert [turned_away.lasts(OTHER, 0, now) for now in (100.0, 105.0, 111.9, 112.0)] == [False, False, False, True]


def test_an_assignment_in_between_begins_the_count_anew() -> None:
    turned_away = RefusedMember()
    assert not turned_away.lasts(OTHER, 0, 100.0)
    assert not turned_away.lasts(OTHER, 1, 200.0)
    assert turned_away.lasts(OTHER, 1, 212.0)


def test_what_cannot_pass_counts_at_once_and_other_trouble_never() -> None:
    assert RefusedMember().lasts(SESSION, 0, 100.0)
    assert not RefusedMember().lasts(KafkaError._TRANSPORT, 0, 100.0)


def test_the_sentence_names_both_assignors_and_the_ways_out() -> None:
    settings = {"partition.assignment.strategy": "cooperative-sticky"}
    said = str(why(KafkaError(OTHER), "shop", settings, Group("stable", "range", MEMBERS)))
    assert "its assignor is 'cooperative-sticky' and the present members (batch, loop) use 'range'" in said
    assert "stop the other members first, or consume under a new group" in said
    assert "App(kafka={'partition.assignment.strategy': 'range'})" in said
    unknown = str(why(KafkaError(OTHER), "shop", settings, None))
    assert "the present members use another: stop the other members first" in unknown


def test_the_sentences_name_the_value_and_the_setting() -> None:
    full = str(why(KafkaError(FULL), "shop", {}, Group("stable", "range", MEMBERS)))
    assert "group 'shop' of 3 members accepts no more members" in full
    assert "raise group.max.size on the brokers" in full
    session = str(why(KafkaError(SESSION), "shop", {"session.timeout.ms": 1000}, None))
    assert "session.timeout.ms=1000" in session
    assert "group.min.session.timeout.ms" in session


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (
            "ConsumerGroupHeartbeat fatal error: Broker: API version not supported",
            "leave group.protocol='consumer' out",
        ),
        (
            "Broker: The assignor or its version range is not supported by the consumer group",
            "group.remote.assignor='uniform' or 'range'",
        ),
        ("Broker: Consumer group has reached maximum size", "raise group.consumer.max.size on the brokers"),
        ("something else", "start it again; records that were not committed are handled again"),
    ],
)
def test_what_ends_the_client_under_kip_848_has_its_fix(words: str, fix: str) -> None:
    assert fix in str(FetchedMessages(None).refusal(KafkaError(KafkaError._FATAL, words), "the Kafka client gave up"))
