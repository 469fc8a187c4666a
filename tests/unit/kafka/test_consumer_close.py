"""What a source asks of the client while it is closed: nothing that the client could not answer any more."""

from __future__ import annotations

from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, TopicPartition

from kconsume._config.client_settings import client_settings
from kconsume._kafka.consumer import AssignmentListener, KafkaConsumer


class Client:
    """Reports a commit while it is closed. Asked for its generation then, the real one would never return."""

    def __init__(self, source: KafkaConsumer, error: KafkaError | None) -> None:
        self._source, self._error = source, error
        self.is_closing = False
        self.asked_too_late = 0

    def consumer_group_metadata(self) -> bytes:
        self.asked_too_late += self.is_closing
        return b"CGMDv2:\x05\x00\x00\x00"

    def close(self) -> None:
        self.is_closing = True
        self._source._on_commit(self._error, [TopicPartition("orders", 0, 7)])


@pytest.mark.parametrize("error", [None, KafkaError(KafkaError.UNKNOWN_MEMBER_ID)], ids=["accepted", "refused"])
def test_a_commit_that_is_answered_while_it_is_closed_has_no_generation(error: KafkaError | None) -> None:
    source = KafkaConsumer(client_settings("127.0.0.1:1", "shop", {}), cast(AssignmentListener, None))
    real, client = source._consumer, Client(source, error)
    source._consumer = cast(Any, client)
    try:
        assert source.generation() == 5
        source.close()
    finally:
        real.close()
    (result,) = source.commit_results
    assert (result.generation, client.asked_too_late) == (-1, 0)
