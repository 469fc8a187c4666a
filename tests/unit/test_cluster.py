"""What is said of a cluster that does not answer, told apart without one."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from kconsume.cluster import Cluster
from kconsume.errors import BrokerUnavailable


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (KafkaError._TRANSPORT, "no broker answered at 127.0.0.1:1 within 10 s"),
        (KafkaError.NOT_LEADER_FOR_PARTITION, "the cluster at 127.0.0.1:1 cannot answer yet"),
        (KafkaError.COORDINATOR_LOAD_IN_PROGRESS, "the cluster at 127.0.0.1:1 cannot answer yet"),
    ],
)
def test_a_broker_that_answers_not_yet_is_not_called_silent(code: int, words: str) -> None:
    error = Cluster("127.0.0.1:1")._refused(KafkaError(code))
    assert isinstance(error, BrokerUnavailable)  # either way it is asked again
    assert str(error).startswith(words)
