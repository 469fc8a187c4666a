"""What is said of a cluster that does not answer, told apart without one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from kconsume._kafka import cluster
from kconsume._kafka.cluster import Cluster
from kconsume._runtime.deadlines import Deadline
from kconsume.errors import BrokerUnavailable
from kconsume.records import Partition


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


class SlowAdmin:
    """Answers each request after 6 s, if it has as long, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0

    def list_topics(self, timeout: float) -> object:
        self._spend(timeout)
        topic = SimpleNamespace(partitions={0: SimpleNamespace(replicas=[1])})
        return SimpleNamespace(cluster_id="real", topics={"orders": topic})

    def __getattr__(self, name: str) -> Callable[..., dict[object, Future[object]]]:
        """Every other request is never answered."""

        def ask(*_: object, request_timeout: float) -> dict[object, Future[object]]:
            self.now += request_timeout
            silent: Future[object] = Future()
            silent.set_exception(KafkaException(KafkaError(KafkaError._TIMED_OUT)))
            return {name: silent}

        return ask

    def poll(self, seconds: float) -> None: ...

    def _spend(self, timeout: float) -> None:
        self.now += min(timeout, 6.0)
        if timeout < 6.0:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))


@pytest.mark.parametrize(
    "ask",
    [
        lambda asked: asked.topic_ids(["orders"]),
        lambda asked: asked.make_topics({"late": "orders"}),
        lambda asked: asked.set_committed("shop", {Partition("orders", 0): (1, "")}),
    ],
    ids=["topic_ids", "make_topics", "set_committed"],
)
def test_what_is_said_to_have_been_waited_was_waited_for_all_requests_of_a_question(
    ask: Callable[[Cluster], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    admin: Any = SlowAdmin()
    monkeypatch.setattr(cluster, "Deadline", partial(Deadline, clock=lambda: admin.now))
    asked = Cluster("127.0.0.1:1")
    asked._client = admin
    with pytest.raises(BrokerUnavailable, match="within 10 s"):
        ask(asked)
    assert admin.now == pytest.approx(10)
