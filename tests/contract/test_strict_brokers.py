"""What brokers do not grant for good: the app ends with a sentence. On a broker of its own, with such settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from kconsume import App
from kconsume._kafka.consumer import KafkaConsumer
from kconsume._kafka.join_errors import REFUSALS
from kconsume.errors import ClientFailed, GroupRefused
from kconsume.testing.services import LocalKafka
from tests.fix_arena import PROTOCOLS, Arena
from tests.waiting import eventually

FORBIDDEN = "forbidden"
STRICT = {
    "group.max.size": "1",
    "group.coordinator.rebalance.protocols": "classic",
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
}


@pytest.fixture(scope="module")
def broker() -> Iterator[LocalKafka]:
    with LocalKafka(overrides=STRICT) as broker:
        denied = AclBinding(
            ResourceType.GROUP, FORBIDDEN, ResourcePatternType.LITERAL,
            "User:ANONYMOUS", "*", AclOperation.READ, AclPermissionType.DENY,
        )  # fmt: skip
        admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
        (made,) = admin.create_acls([denied]).values()
        made.result(20)
        yield broker


@pytest.fixture
def arena(broker: LocalKafka) -> Iterator[Arena]:
    arena = Arena("real", broker.bootstrap, None)
    yield arena
    arena.clean_up()


def service(arena: Arena, group: str, protocol: str = "cooperative") -> tuple[App, list[str]]:
    app, seen, topic = arena.app(group, kafka=PROTOCOLS[protocol]), list[str](), arena.topic(2)
    arena.produce(topic, ["1"], 0)

    @app.consume(topic)
    def handle(value: str) -> None:
        seen.append(value)

    return app, seen


def test_a_group_that_the_user_may_not_read_ends_the_app_with_the_right_to_give(arena: Arena) -> None:
    app, seen = service(arena, FORBIDDEN)
    with pytest.raises(ClientFailed, match="allow this user READ on the group") as failed:
        app.catch_up(idle=0.2)
    assert (failed.value.exit_code, seen) == (1, [])


def test_brokers_without_kip_848_end_the_app_with_the_setting_to_leave_out(
    arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, seen = service(arena, group, "consumer")
    closed, close = list[bool](), KafkaConsumer.close

    def closing(source: KafkaConsumer, patience: float) -> None:
        close(source, patience)
        closed.append(not source._open)

    monkeypatch.setattr(KafkaConsumer, "close", closing)
    with pytest.raises(ClientFailed, match=r"leave group\.protocol='consumer' out") as failed:
        app.catch_up(idle=0.2)
    assert (failed.value.exit_code, seen) == (1, [])
    assert closed == [True], "a client that has died is closed too"


def test_a_group_that_is_full_ends_the_newcomer_alone(
    arena: Arena, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = KafkaError.GROUP_MAX_SIZE_REACHED
    monkeypatch.setitem(REFUSALS, full, REFUSALS[full]._replace(patience=0.0))
    (there, seen), (newcomer, none) = service(arena, group), service(arena, group)
    with there.running():
        with pytest.raises(
            GroupRefused, match=r"of 1 members accepts no more members: .* raise group.max.size"
        ) as ended:
            newcomer.catch_up(idle=0.2)
        eventually(lambda: seen == ["1"], what="the member goes on")
    assert (ended.value.exit_code, none) == (1, [])
