"""Health: which causes make an app unhealthy, and that each is told."""

from __future__ import annotations

import pytest

from kconsume import App
from kconsume._runtime.observation.causes import CODES, MOVING, Cause
from kconsume._runtime.observation.snapshot import Snapshot
from kconsume.ops.health import UNHEALTHY, Health, Reason, health_of
from kconsume.records import Partition

A, B = Partition("orders", 0), Partition("orders", 1)


def of(**causes: Cause) -> Snapshot:
    return Snapshot(causes={Partition.parse(f"orders/{name[1:]}"): cause for name, cause in causes.items()})


def test_every_code_has_a_verdict_and_only_trouble_is_unhealthy() -> None:
    assert set(CODES) >= UNHEALTHY
    healthy = {MOVING, "paused", "handler_running", "backpressure", "retrying", "throttled", "caught_up", "rebalancing"}
    assert not healthy & UNHEALTHY
    for code in (MOVING, *CODES):
        health = health_of([("shop", of(p0=Cause(MOVING), p1=Cause(code, "evidence")), None)])
        assert health.ok is (code not in UNHEALTHY), code
        assert health.reasons == (Reason(MOVING, "orders/0"), Reason(code, "orders/1: evidence"))


def test_a_member_without_partitions_is_healthy_and_says_so() -> None:
    assert health_of([("shop", Snapshot(), None)]) == Health(
        True, (Reason("not_assigned", "the consumer of group shop has no partition"),)
    )


def test_a_consumer_that_failed_makes_its_app_unhealthy_and_names_its_error() -> None:
    health = health_of([("shop", Snapshot(), ValueError("no such sku")), ("log", of(p0=Cause("caught_up")), None)])
    assert not health.ok
    assert health.reasons == (
        Reason("not_assigned", "the consumer of group shop has failed: no such sku"),
        Reason("caught_up", "orders/0"),
    )


def test_an_app_that_does_not_run_is_not_healthy() -> None:
    assert App("127.0.0.1:1", group="shop").health() == Health(
        False, (Reason("not_assigned", "the app is not running"),)
    )


@pytest.mark.parametrize("paused", [True, False], ids=["paused", "control"])
def test_a_running_app_says_why_each_partition_is_as_it_is(paused: bool) -> None:
    from kconsume.testing import EmbeddedKafka
    from tests.fix_kafka import unique
    from tests.waiting import eventually

    with EmbeddedKafka() as broker:
        name = unique("topic")
        broker.create_topic(name, 2)
        app = App(broker.bootstrap, group="shop")

        @app.consume(name)
        def handle(value: bytes) -> None:
            """There is none."""

        with app.running():
            if paused:
                app.pause(f"{name}/1")
            expected = {"caught_up", "paused"} if paused else {"caught_up"}
            eventually(lambda: {r.code for r in app.health().reasons} == expected, what="the causes are known")
            assert app.health().ok
            assert len(app.health().reasons) == 2
