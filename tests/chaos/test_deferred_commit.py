"""A commit that the client puts off, because its coordinator is out of reach, takes nothing back from who came after.

The client sends such a commit when it has a coordinator again, with the generation that it has by then. Here its
partition was lost meanwhile, and another member has moved on and left: a group without members is the one that would
take the commit of one who is no member. The client sends it before it can have joined again, so it is refused; or it
has given it up by then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from confluent_kafka.admin import AdminClient

from kconsume import App, Partition
from kconsume._config.client_settings import ClientValue
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.commit_result import CommitResult
from kconsume._kafka.consumer import KafkaConsumer
from kconsume.testing.services import LocalKafka
from kconsume.testing.services.ports import free_port
from tests.contract.redis_proxy import RedisProxy
from tests.fix_arena import PROTOCOLS
from tests.fix_kafka import create_topic, produce, unique
from tests.waiting import eventually

SESSION = 2000


class Broker(NamedTuple):
    """Reached at two addresses; what joins by the second is led back to it by the broker, and can be cut off."""

    bootstrap: str
    cut_off: str
    line: RedisProxy


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    port, behind = free_port(), free_port()
    line = RedisProxy(behind, b"\0no request has this\0")  # it passes whatever it gets, until it is down
    cut_off = line.url.removeprefix("redis://").partition("/")[0]
    kafka = LocalKafka(
        port=port,
        overrides={
            "group.consumer.session.timeout.ms": str(SESSION),
            "group.consumer.heartbeat.interval.ms": "250",
            "advertised.listeners": f"CLIENT://127.0.0.1:{port},CUT://{cut_off}",
            "listener.security.protocol.map": "CLIENT:PLAINTEXT,CUT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        },
    )
    kafka._overrides["listeners"] = (
        f"CLIENT://127.0.0.1:{port},CUT://127.0.0.1:{behind},CONTROLLER://127.0.0.1:{kafka._controller_port}"
    )
    with line, kafka:
        yield Broker(kafka.bootstrap, cut_off, line)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_commit_that_was_put_off_while_the_partition_was_lost_takes_nothing_back(
    broker: Broker, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, note = list[CommitResult](), KafkaConsumer._note_commit

    def noted(source: KafkaConsumer, *answer) -> None:  # type: ignore[no-untyped-def]
        note(source, *answer)
        answers.append(source.commit_results[-1])

    topic, group, is_held, is_cut = unique("topic"), unique("group"), threading.Event(), threading.Event()
    partition = Partition(topic, 0)
    create_topic(AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0}), topic, 1)
    produce(broker.bootstrap, topic, map(str, range(5)), partition=0, anew=True)
    cluster, first, second = Cluster(broker.bootstrap), list[str](), list[str]()
    one = App(broker.cut_off, group=group, kafka=quick(protocol))
    two = App(broker.bootstrap, group=group, kafka=quick(protocol))

    def committed() -> int:
        found = cluster.committed(group, [partition]).get(partition)
        return 0 if found is None else found.offset

    @one.consume(topic)
    def handle(value: str) -> None:
        if value == "5":
            is_held.set()
            is_cut.wait(60)
        first.append(value)

    @two.consume(topic)
    def take_over(value: str) -> None:
        second.append(value)

    with ExitStack() as stack:
        stack.callback(broker.line.up)
        stack.enter_context(one.running())
        eventually(lambda: committed() == 5, what="the first half is committed")
        monkeypatch.setattr(KafkaConsumer, "_note_commit", noted)
        produce(broker.bootstrap, topic, map(str, range(5, 10)), partition=0, anew=True)
        eventually(is_held.is_set, what="the second half is there")
        broker.line.down()
        is_cut.set()
        eventually(lambda: first[-1:] == ["9"], what="the second half is handled, and its commit has nowhere to go")
        produce(broker.bootstrap, topic, map(str, range(10, 20)), partition=0, anew=True)
        two.catch_up(idle=0.2)
        assert second == [str(n) for n in range(5, 20)], "the other has gone on from what was committed, and left"
        assert committed() == 20
        broker.line.up()
        produce(broker.bootstrap, topic, ["last"], partition=0, anew=True)
        eventually(lambda: first[-1:] == ["last"], what="the first is a member again")
        eventually(lambda: committed() == 21, what="and commits")
    put_off = [answer for answer in answers if answer.offsets in ({partition: n} for n in range(6, 11))]
    assert put_off, "a commit was under way when the line was cut"
    assert all(answer.error is not None for answer in put_off), "and not one was accepted"
    assert first == [*map(str, range(10)), "last"], "or it would have gone on from there"


def quick(protocol: str) -> Mapping[str, ClientValue]:
    sessions: Mapping[str, ClientValue] = {"session.timeout.ms": SESSION, "heartbeat.interval.ms": 250}
    return {**PROTOCOLS[protocol], **({} if protocol == "consumer" else sessions), "reconnect.backoff.max.ms": 500}
