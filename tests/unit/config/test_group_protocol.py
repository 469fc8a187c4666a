"""The three group protocols: chosen by the client's own properties; what contradicts them is refused in words."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, KafkaException

from kconsume._config.client_settings import client_settings
from kconsume._config.group_protocol import OF_CLASSIC, ClientValue, GroupProtocol, check_protocol, protocol_of
from kconsume._runtime.deadlines import revoke_budget
from kconsume.errors import ConfigurationError

CHOICES: list[tuple[dict[str, ClientValue], GroupProtocol]] = [
    ({}, GroupProtocol.COOPERATIVE),
    ({"group.protocol": "classic"}, GroupProtocol.COOPERATIVE),
    ({"partition.assignment.strategy": "cooperative-sticky"}, GroupProtocol.COOPERATIVE),
    ({"partition.assignment.strategy": "range"}, GroupProtocol.EAGER),
    ({"partition.assignment.strategy": "roundrobin"}, GroupProtocol.EAGER),
    ({"partition.assignment.strategy": "range,roundrobin"}, GroupProtocol.EAGER),
    ({"group.protocol": "consumer"}, GroupProtocol.CONSUMER),
    ({"group.protocol": "consumer", "group.remote.assignor": "range"}, GroupProtocol.CONSUMER),
]

REFUSED: list[tuple[dict[str, ClientValue], str]] = [
    ({"group.protocol": "streams"}, "'streams' is unknown: choose 'classic'"),
    ({"partition.assignment.strategy": "geographic"}, "'geographic', which the Kafka client does not have"),
    ({"partition.assignment.strategy": "sticky"}, "the client has no eager sticky assignor"),
    ({"partition.assignment.strategy": "range,cooperative-sticky"}, "mixes cooperative and eager"),
    ({"group.remote.assignor": "uniform"}, "set group.protocol='consumer' too"),
    (
        {"group.protocol": "consumer", "session.timeout.ms": 6000},
        "set group.consumer.session.timeout.ms on the brokers",
    ),
    (
        {"group.protocol": "consumer", "heartbeat.interval.ms": 500},
        "set group.consumer.heartbeat.interval.ms on the brokers",
    ),
    ({"group.protocol": "consumer", "partition.assignment.strategy": "range"}, "set group.remote.assignor='uniform'"),
    ({"group.protocol": "consumer", "group.protocol.type": "consumer"}, "leave it out"),
]


@pytest.mark.parametrize(("overrides", "protocol"), CHOICES)
def test_the_client_s_properties_choose_the_protocol_and_the_client_takes_what_we_make_of_them(
    overrides: dict[str, ClientValue], protocol: GroupProtocol
) -> None:
    check_protocol(overrides)
    settings = client_settings("127.0.0.1:1", "shop", overrides, embedded=True)
    assert protocol_of(settings) is protocol
    Consumer({**settings, "log_level": 0}).close()


@pytest.mark.parametrize(("overrides", "sentence"), REFUSED)
def test_what_a_protocol_refuses_is_refused_with_the_fix(overrides: dict[str, ClientValue], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_protocol(overrides)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("name", OF_CLASSIC)
def test_the_client_itself_refuses_them_under_kip_848(name: str) -> None:
    """Otherwise our own refusal would be out of date."""
    value = "cooperative-sticky" if name == "partition.assignment.strategy" else "consumer"
    value = "6000" if name.endswith(".ms") else value
    with pytest.raises(KafkaException):
        Consumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "shop", "group.protocol": "consumer", name: value})


@pytest.mark.parametrize("protocol", GroupProtocol)
@pytest.mark.parametrize("fenced", [True, False])
def test_the_budget_of_a_revoke_fits_into_the_poll_interval_and_the_shutdown(
    protocol: GroupProtocol, fenced: bool
) -> None:
    for poll_interval in (1.0, 10.0, 300.0):
        for shutdown in (0.5, 5.0, 25.0, 120.0):
            budget = revoke_budget(protocol, fenced=fenced, poll_interval=poll_interval, shutdown=shutdown)
            assert 0 < budget <= min(10.0, poll_interval / 4)
            assert budget <= max(1.0, shutdown - 5.0)
            if protocol is GroupProtocol.COOPERATIVE or (fenced and protocol is GroupProtocol.CONSUMER):
                assert budget <= 1.0, "partitions that do not move wait no longer (P6)"
