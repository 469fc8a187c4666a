"""`kconsume plan assignment`: what would move, in a group that is thought of or a real one, which is not touched."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from confluent_kafka import Consumer

from kconsume import App, DeadLetter
from kconsume._kafka import two_member_consumer
from kconsume._kafka.cluster import Cluster, Group
from kconsume.failures.letter_headers import redrive_topic
from kconsume.rebalance import ASSIGNORS
from kconsume.testing.services import KafkaService
from tests.cli.conftest import Shop
from tests.fix_kafka import MakeTopic
from tests.waiting import eventually

THOUGHT = ("--members", "3", "--partitions", "orders=12", "--partitions", "payments=5")

APP = """
    from kconsume import App

    app = App({brokers!r}, group={group!r})

    @app.consume({topic!r})
    def reserve(order: bytes) -> None: ...

    several = App({brokers!r}, group="one")

    @several.consume({topic!r})
    def first(order: bytes) -> None: ...

    @several.consume({topic!r}, group="two")
    def second(order: bytes) -> None: ...
"""


def plan(shop: Shop, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return shop.run("plan", "assignment", *arguments, **environment)


def answered(shop: Shop, *arguments: str, **environment: str) -> dict[str, dict]:  # type: ignore[type-arg]
    """The document's plans, by assignor."""
    done = plan(shop, *arguments, "--json", **environment)
    assert done.returncode == 0, done.stderr
    return {each["assignor"]: each for each in json.loads(done.stdout)["plans"]}


class TestAGroupThatIsThoughtOf:
    def test_a_join_is_shown_for_all_assignors_side_by_side(self, shop: Shop) -> None:
        plans = answered(shop, *THOUGHT, "--join", "1")
        assert list(plans) == list(ASSIGNORS)
        for each in plans.values():
            new = each["members"][-1]
            assert (new["member"], new["now"], new["loses"]) == ("~new-1", None, [])
            assert each["moves"] == sum(len(member["gains"]) for member in each["members"])
            assert sum(len(member["then"]) for member in each["members"]) == each["partitions"] == 17
        assert plans["sticky"]["moves"] == 4 < plans["range"]["moves"]

    def test_it_is_a_table_and_a_line_for_each(self, shop: Shop) -> None:
        shown = plan(shop, *THOUGHT, "--join", "1", "--assignor", "range", "--assignor", "sticky").stdout
        assert [" ".join(line.split()) for line in shown.splitlines()] == [
            "range",
            "member now then gains loses",
            "member-1 6 5 orders/3",
            "member-2 6 4 orders/3 orders/6-7 payments/3",
            "member-3 5 4 orders/6-7 payments/3 orders/9-11 payments/4",
            "~new-1 joins 4 orders/9-11 payments/4",
            "moves 8 of 17 partitions; skew 0.00 now, 0.00 then",
            "",
            "sticky",
            "member now then gains loses",
            "member-1 6 4 orders/0,3",
            "member-2 6 4 orders/1,4",
            "member-3 5 5",
            "~new-1 joins 4 orders/0-1,3-4",
            "moves 4 of 17 partitions; skew 0.00 now, 0.00 then",
            "",
        ]

    @pytest.mark.parametrize("leaving", [("--leave", "member-3"), ("--leave", "1")], ids=["by name", "by number"])
    def test_a_leave_moves_what_the_leaver_had(self, shop: Shop, leaving: tuple[str, str]) -> None:
        sticky = answered(shop, *THOUGHT, *leaving, "--assignor", "sticky")["sticky"]
        first, second, leaver = sticky["members"]
        assert (leaver["member"], leaver["then"], leaver["loses"]) == ("member-3", None, leaver["now"])
        assert {*first["gains"], *second["gains"]} == set(leaver["now"])
        assert sticky["moves"] == len(leaver["now"]) == 5

    def test_ids_are_in_the_order_of_their_numbers_and_skew_is_above_an_even_share(self, shop: Shop) -> None:
        many = ("--members", "12", *(f"--partitions=topic-{n}=1" for n in range(6)))
        ranges = answered(shop, *many, "--assignor", "range")["range"]
        assert [m["member"] for m in ranges["members"]] == [f"member-{n:02}" for n in range(1, 13)]
        assert len(ranges["members"][0]["now"]) == 6
        assert (ranges["moves"], ranges["skew_now"], ranges["skew_then"]) == (0, 5.0, 5.0)

    def test_an_app_of_the_environment_is_not_asked(self, shop: Shop) -> None:
        assert answered(shop, *THOUGHT, KCONSUME_APP="not_there").keys() == ASSIGNORS.keys()

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ((*THOUGHT, "--assignor", "geo"), "no assignor 'geo': write one of range, roundrobin, sticky"),
            (
                (*THOUGHT, "--leave", "member-9"),
                "no member 'member-9' in the group: it has member-1, member-2, member-3",
            ),
            (
                (*THOUGHT, "--leave", "member"),
                "'member' matches several members, member-1, member-2, member-3: write more",
            ),
            ((*THOUGHT, "--leave", "3"), "all 3 members would leave the group"),
            ((*THOUGHT, "--leave", "4"), "the group has only 3 members"),
            ((), "no group was named: write MODULE:APP"),
            (("--members", "3"), "--members and --partitions belong together"),
            (("--partitions", "orders=12"), "--members and --partitions belong together"),
            ((*THOUGHT, "--group", "shop"), "give one of the two"),
            (("shop", "--brokers", "localhost:9092"), "give one of the two"),
            (("--members", "3", "--partitions", "orders"), "'orders' is not TOPIC=N, as in orders=12"),
            (("--members", "3", "--partitions", "orders=0"), "'orders=0' is not TOPIC=N, as in orders=12"),
            (("--brokers", "localhost:9092"), "no group was named"),
            (("--brokers", "embedded://shop", "--group", "shop"), "cannot list the members of a group"),
        ],
    )
    def test_what_cannot_be_answered_is_an_error_with_the_fix(
        self, shop: Shop, arguments: tuple[str, ...], says: str
    ) -> None:
        done = plan(shop, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert says in " ".join(done.stderr.split()), done.stderr


class Live:
    """A group of three bare consumers on the real broker, and an app of that group."""

    def __init__(self, shop: Shop, bootstrap: str, group: str, topic: str) -> None:
        self.shop, self.bootstrap, self.group, self.topic = shop, bootstrap, group, topic
        self.where = ("--brokers", bootstrap, "--group", group)
        self.cluster = Cluster(bootstrap)
        shop.write("shop", APP.format(brokers=bootstrap, group=group, topic=topic))

    def seen(self) -> Group:
        seen = self.cluster.group(self.group)
        assert seen is not None
        return seen


@pytest.fixture
def live(shop: Shop, kafka: KafkaService, topic: MakeTopic, group: str) -> Iterator[Live]:
    opened = Live(shop, kafka.bootstrap, group, topic(partitions=8))
    with ExitStack() as stack:
        _join(stack, opened, 3, {"partition.assignment.strategy": "cooperative-sticky"})
        yield opened


def _join(stack: ExitStack, live: Live, count: int, settings: dict[str, str]) -> list[Consumer]:
    common = {"bootstrap.servers": live.bootstrap, "group.id": live.group}
    consumers = [Consumer({**common, **settings, "client.id": f"pod-{n}"}) for n in range(count)]
    for consumer in consumers:
        stack.enter_context(closing(consumer))
        consumer.subscribe([live.topic], on_revoke=lambda *_: None)  # with one, it waits for a poll

    def settled() -> bool:
        for consumer in consumers:
            consumer.poll(0.01)
        if sum(len(consumer.assignment()) for consumer in consumers) != 8:
            return False
        seen = live.seen()
        return seen.state == "stable" and sum(bool(member.owned) for member in seen.members) == count

    eventually(settled, within=40, what=f"a stable group of {count}")
    return consumers


class TestALiveGroup:
    def test_the_groups_own_assignor_answers_and_the_group_is_as_it_was(self, live: Live) -> None:
        before = live.seen()
        plans = answered(live.shop, "shop", "--join", "1")
        (own,) = plans.values()
        assert own["assignor"] == "cooperative-sticky"
        assert {m["member"]: m["now"] for m in own["members"] if m["now"] is not None} == {
            member.id: [str(p) for p in member.owned] for member in before.members
        }
        assert own["moves"] == 2 <= math.ceil(8 / 4)
        assert live.seen() == before

    def test_a_member_can_be_meant_by_its_client_id_and_the_group_by_address(self, live: Live) -> None:
        leaver = next(member for member in live.seen().members if member.client == "pod-1")
        (own,) = answered(live.shop, *live.where, "--leave", "pod-1").values()
        assert own["moves"] == len(leaver.owned)
        assert {m["member"] for m in own["members"] if m["then"] is None} == {leaver.id}

    def test_other_assignors_can_be_asked_and_the_head_names_the_group(self, live: Live) -> None:
        shown = plan(live.shop, "--assignor", "range", KCONSUME_APP="shop:app").stdout
        assert shown.startswith(f"group {live.group}  brokers {live.bootstrap}\nrange\n")
        assert "of 8 partitions; skew 0.00 now, 0.00 then" in shown

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (("shop", "--leave", "pod-7"), "there is no member 'pod-7' in the group: it has pod-0-"),
            (("shop", "--leave", "pod"), "'pod' matches several members, pod-0-"),
            (("shop", "--group", "other"), "no handler that joins group 'other': it has group-"),
            (("shop:several",), "the app has several groups: choose one with --group one or two"),
        ],
    )
    def test_what_is_not_there_is_an_error_with_what_is(
        self, live: Live, arguments: tuple[str, ...], says: str
    ) -> None:
        done = plan(live.shop, *arguments)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr

    def test_a_group_that_is_none_is_an_error_with_the_likely_name(self, live: Live) -> None:
        done = plan(live.shop, "--brokers", live.bootstrap, "--group", live.group[:-1])
        assert (done.returncode, f"did you mean '{live.group}'?" in done.stderr) == (2, True), done.stderr


def test_a_group_whose_members_are_gone_is_an_error(
    shop: Shop, kafka: KafkaService, topic: MakeTopic, group: str
) -> None:
    live = Live(shop, kafka.bootstrap, group, topic(partitions=8))
    with ExitStack() as stack:
        _join(stack, live, 1, {})
    eventually(lambda: live.seen().state == "empty", what="an empty group")
    done = plan(shop, "shop")
    assert (done.returncode, "has no members now" in done.stderr) == (2, True), done.stderr


def test_a_group_in_the_middle_of_a_rebalance_is_an_error(
    shop: Shop, kafka: KafkaService, topic: MakeTopic, group: str
) -> None:
    live = Live(shop, kafka.bootstrap, group, topic(partitions=8))
    with ExitStack() as stack:
        members = _join(stack, live, 1, {"partition.assignment.strategy": "range"})
        # It joins by itself; the first, which nobody polls any more, does not hear of it and keeps the group waiting.
        second = stack.enter_context(closing(Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})))
        second.subscribe([live.topic])
        eventually(lambda: live.seen().state == "preparing_rebalancing", what="a rebalance that waits")
        done = plan(shop, "shop")

        def over() -> bool:
            for consumer in (*members, second):
                consumer.poll(0.01)
            return live.seen().state == "stable"

        # A client that is closed in the middle of one may wait in its own callback for ever (seen in librdkafka).
        eventually(over, within=40, what="the rebalance is over")
    assert (done.returncode, "in the middle of a rebalance (preparing rebalancing)" in done.stderr) == (2, True)


def test_a_group_of_kip_848_is_read_too(shop: Shop, kafka: KafkaService, topic: MakeTopic, group: str) -> None:
    live = Live(shop, kafka.bootstrap, group, topic(partitions=8))
    with ExitStack() as stack:
        _join(stack, live, 2, {"group.protocol": "consumer"})
        plans = answered(shop, *live.where, "--join", "2")
    assert list(plans) == ["sticky"]  # what the broker calls uniform
    assert (plans["sticky"]["moves"], plans["sticky"]["skew_then"]) == (4, 0.0)


@pytest.mark.parametrize("split", [True, False], ids=["two members", "one member"])
def test_partitions_of_side_topics_are_counted_apart(
    shop: Shop, kafka: KafkaService, topic: MakeTopic, group: str, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that reads a re-drive topic is two members; one of an earlier version is one, with both topics."""
    if not split:
        monkeypatch.setattr(two_member_consumer, "balances_the_total", lambda settings: False)
    source = topic(partitions=4)
    back = topic(partitions=4, name=redrive_topic(source, group))
    apps = [App(kafka.bootstrap, group=group, kafka={"client.id": f"pod-{n}"}) for n in range(2)]
    for app in apps:
        app.consume(source, on_error=DeadLetter(f"{source}.dlq"))(handled)
    cluster = Cluster(kafka.bootstrap)

    def settled(members: int) -> bool:
        seen = cluster.group(group)
        return (
            seen is not None
            and seen.state == "stable"
            and len(seen.members) == members
            and all(member.owned for member in seen.members)
            and sum(len(member.owned) for member in seen.members) == 8
        )

    where = ("--brokers", kafka.bootstrap, "--group", group)
    with apps[0].running():
        eventually(lambda: settled(1 + split), what="the first has all")
        with apps[1].running():
            eventually(lambda: settled(2 + 2 * split), what="the second has its share")
            (own,) = answered(shop, *where, "--join", "1", "--leave", "pod-0").values()
            (more,) = answered(shop, *where, "--join", "2").values()
            shown = plan(shop, *where).stdout
    assert (own["partitions"], own["side_partitions"]) == (4, 4)
    assert own["skew_now"] == (0.0 if split else 1.0), "the load, without what is empty"
    counts = [len(member["now"]) for member in own["members"] if member["now"] is not None]
    assert sorted(counts) == ([2, 2] if split else [0, 4])
    assert {p for m in own["side_members"] for p in m["now"] or ()} == {f"{back}/{n}" for n in range(4)}
    assert "retry and redrive topics (no load, not in the skew)" in shown
    if split:
        gone = [m["member"] for m in (*own["members"], *own["side_members"]) if m["then"] is None]
        assert len(gone) == 2, "both members of the process leave"
        assert [m["member"] for m in (*own["members"], *own["side_members"]) if m["now"] is None] == [
            "~new-1",
            "~new-1-side",
        ]
        assert (more["skew_then"], more["moves"], more["side_moves"]) == (0.0, 2, 2)


def handled(value: bytes) -> None: ...
