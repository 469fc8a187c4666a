"""Who gets which partition: every one once, evenly, with as little moved as can be, and the same answer everywhere."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kconsume.rebalance
from kconsume.errors import ConfigurationError
from kconsume.rebalance import (
    ASSIGNORS,
    Assignment,
    Member,
    assign_in_turn,
    assign_ranges,
    assign_stickily,
    assignor_named,
    moved,
    skew,
    step_towards,
)
from kconsume.records import Partition

TOPICS = ("clicks", "orders", "payments")

EXPORTED = [
    "ASSIGNORS",
    "Assignment",
    "Assignor",
    "AsyncPartitionState",
    "History",
    "Member",
    "PartitionState",
    "Rebalance",
    "RebalanceListener",
    "Statistics",
    "assign_in_turn",
    "assign_ranges",
    "assign_stickily",
    "assignor_named",
    "moved",
    "skew",
    "step_towards",
]

every = pytest.mark.parametrize("name", sorted(ASSIGNORS))


def partitions_of(**counts: int) -> list[Partition]:
    return [Partition(topic, number) for topic, count in counts.items() for number in range(count)]


def after(members: list[Member], assignment: Assignment) -> list[Member]:
    """The members, having what they were given."""
    return [Member(m.id, m.topics, m.metadata, tuple(assignment[m.id])) for m in members]


@st.composite
def groups(draw: st.DrawFn, equal: bool = False, most: int = 7) -> tuple[list[Member], list[Partition]]:
    """Members with subscriptions of their own, some of which say that they have partitions, rightly or not."""
    partitions = partitions_of(**{topic: draw(st.integers(0, most)) for topic in TOPICS})
    ids = draw(st.lists(st.sampled_from([f"m{n:02}" for n in range(12)]), unique=True, min_size=1, max_size=most))
    said = st.lists(st.sampled_from([*partitions, Partition("gone", 0)]), max_size=8).map(tuple)
    topics = st.just(frozenset(TOPICS)) if equal else st.frozensets(st.sampled_from(TOPICS))
    return [Member(id, draw(topics), {}, draw(said)) for id in ids], partitions


@st.composite
def settled_groups(draw: st.DrawFn) -> tuple[list[Member], list[Partition]]:
    """Equal members, each of whom has what nobody else has; some partitions are nobody's."""
    partitions = partitions_of(clicks=draw(st.integers(0, 9)), orders=draw(st.integers(0, 9)))
    count = draw(st.integers(1, 6))
    owners = [draw(st.integers(0, count)) for _ in partitions]
    topics = frozenset({"clicks", "orders"})
    owned = [tuple(p for p, owner in zip(partitions, owners, strict=True) if owner == n) for n in range(count)]
    return [Member(f"m{n}", topics, {}, has) for n, has in enumerate(owned)], partitions


def loads(assignment: Assignment) -> list[int]:
    return [len(given) for given in assignment.values()]


def most_even(members: list[Member], partitions: list[Partition]) -> list[int]:
    """The most even shares that there are, by trying all ways to deal out the partitions."""
    reached = {(0,) * len(members)}
    for partition in partitions:
        takers = [place for place, member in enumerate(members) if partition.topic in member.topics]
        dealt = {(*has[:at], has[at] + 1, *has[at + 1 :]) for has in reached for at in takers}
        reached = dealt or reached
    return min(sorted(has, reverse=True) for has in reached)


class TestEveryAssignor:
    @every
    @given(group=groups())
    def test_a_partition_is_given_once_to_a_member_that_wants_its_topic(
        self, name: str, group: tuple[list[Member], list[Partition]]
    ) -> None:
        members, partitions = group
        assignment = ASSIGNORS[name](members, partitions)
        assert set(assignment) == {member.id for member in members}
        wanted = {topic for member in members for topic in member.topics}
        assert Counter(p for given in assignment.values() for p in given) == Counter(
            p for p in partitions if p.topic in wanted
        )
        for member in members:
            assert {p.topic for p in assignment[member.id]} <= member.topics

    @every
    @given(group=groups(), seed=st.integers(0, 99))
    def test_every_member_comes_to_the_same_answer(
        self, name: str, group: tuple[list[Member], list[Partition]], seed: int
    ) -> None:
        members, partitions = group
        shuffled, chance = (list(members), list(partitions)), random.Random(seed)
        for one in shuffled:
            chance.shuffle(one)
        assert ASSIGNORS[name](*shuffled) == ASSIGNORS[name](members, partitions)

    @pytest.mark.parametrize("name", ["roundrobin", "sticky", "cooperative-sticky"])
    @given(group=groups(equal=True))
    def test_members_that_want_the_same_differ_by_one_at_most(
        self, name: str, group: tuple[list[Member], list[Partition]]
    ) -> None:
        shares = loads(ASSIGNORS[name](*group))
        assert max(shares) - min(shares) <= 1

    @given(group=groups(equal=True))
    def test_ranges_differ_by_one_at_most_in_each_topic(self, group: tuple[list[Member], list[Partition]]) -> None:
        assignment = assign_ranges(*group)
        for topic in TOPICS:
            shares = [sum(p.topic == topic for p in given) for given in assignment.values()]
            assert max(shares) - min(shares) <= 1

    @every
    def test_a_partition_that_is_named_twice_is_given_once(self, name: str) -> None:
        given = ASSIGNORS[name]([Member(id, frozenset({"orders"})) for id in "ab"], partitions_of(orders=3) * 2)
        assert sorted(p.number for has in given.values() for p in has) == [0, 1, 2]

    @every
    def test_nobody_and_nothing_are_no_error(self, name: str) -> None:
        assert ASSIGNORS[name]([], partitions_of(orders=3)) == {}
        assert ASSIGNORS[name]([Member("a", frozenset({"orders"}))], []) == {"a": []}


class TestWhatEachIsKnownFor:
    def test_ranges_are_consecutive_and_the_first_get_one_more(self) -> None:
        members = [Member(id, frozenset({"orders"})) for id in "abc"]
        given = assign_ranges(members, partitions_of(orders=7))
        assert {id: [p.number for p in has] for id, has in given.items()} == {"a": [0, 1, 2], "b": [3, 4], "c": [5, 6]}

    def test_round_robin_passes_over_who_does_not_want_it(self) -> None:
        members = [Member("a", frozenset({"x"})), Member("b", frozenset({"x", "y"})), Member("c", frozenset({"y"}))]
        given = assign_in_turn(members, partitions_of(x=2, y=3))
        assert {id: [str(p) for p in has] for id, has in given.items()} == {
            "a": ["x/0"],
            "b": ["x/1", "y/1"],
            "c": ["y/0", "y/2"],
        }

    def test_one_that_dies_is_shared_out_and_nothing_else_moves(self) -> None:
        members = [
            Member("a", frozenset({"t"}), {}, tuple(Partition("t", n) for n in (0, 1, 2))),
            Member("c", frozenset({"t"}), {}, tuple(Partition("t", n) for n in (6, 7, 8))),
        ]
        given = assign_stickily(members, partitions_of(t=9))
        assert moved(members, given) == set()
        assert sorted(loads(given)) == [4, 5]


class TestEvenness:
    @given(group=groups(most=3))
    def test_no_assignment_is_more_even_whatever_each_subscribes_to_and_has(
        self, group: tuple[list[Member], list[Partition]]
    ) -> None:
        assert sorted(loads(assign_stickily(*group)), reverse=True) == most_even(*group)

    def test_one_passes_on_what_another_cannot_take_itself(self) -> None:
        members = [
            Member("a", frozenset({"x"}), {}, tuple(partitions_of(x=3))),
            Member("b", frozenset({"x", "y"}), {}, tuple(partitions_of(y=2))),
            Member("c", frozenset({"y", "z"}), {}, tuple(partitions_of(z=1))),
        ]
        given = assign_stickily(members, partitions_of(x=3, y=2, z=1))
        assert loads(given) == [2, 2, 2]
        assert len(moved(members, given)) == 2


class TestStickiness:
    @given(group=groups(equal=True), joining=st.sampled_from(["a", "m05-", "z"]))
    def test_a_join_moves_at_most_the_share_of_the_one_that_joins(
        self, group: tuple[list[Member], list[Partition]], joining: str
    ) -> None:
        old, partitions = group
        members = [*after(old, assign_stickily(old, partitions)), Member(joining, frozenset(TOPICS))]
        target = assign_stickily(members, partitions)
        assert len(moved(members, target)) <= math.ceil(len(partitions) / len(members))
        assert moved(members, target) == set(target[joining])

    @given(group=groups(equal=True), chosen=st.integers(0, 6))
    def test_a_leave_moves_only_what_the_leaver_had(
        self, group: tuple[list[Member], list[Partition]], chosen: int
    ) -> None:
        members, partitions = group
        members = after(members, assign_stickily(members, partitions))
        leaver = members[chosen % len(members)]
        left = [member for member in members if member is not leaver]
        target = assign_stickily(left, partitions)
        assert moved(left, target) == set()
        assert moved(members, target) == (set(leaver.owned) if left else set())

    @given(group=settled_groups())
    def test_no_more_moves_than_evenness_asks_for(self, group: tuple[list[Member], list[Partition]]) -> None:
        members, partitions = group
        share, larger = divmod(len(partitions), len(members))
        had = sorted((len(member.owned) for member in members), reverse=True)
        kept = sum(min(has, share + (place < larger)) for place, has in enumerate(had))
        assert len(moved(members, assign_stickily(members, partitions))) == sum(had) - kept

    @settings(max_examples=400)
    @given(group=groups(), seed=st.integers(0, 999))
    def test_what_is_free_again_finds_its_place_without_anything_else_moving(
        self, group: tuple[list[Member], list[Partition]], seed: int
    ) -> None:
        members, partitions = group
        target, chance = assign_stickily(members, partitions), random.Random(seed)
        kept = {id: [p for p in has if chance.random() < 0.5] for id, has in target.items()}
        members = after(members, kept)
        assert moved(members, assign_stickily(members, partitions)) == set()

    def test_what_nobody_had_makes_way_before_what_somebody_has(self) -> None:
        members = [
            Member("a", frozenset({"x", "y"}), {}, (Partition("x", 0),)),
            Member("b", frozenset({"x", "y"})),
            Member("c", frozenset({"y"})),
            Member("d", frozenset({"x"})),
        ]
        given = assign_stickily(members, partitions_of(x=2, y=2))
        assert (loads(given), moved(members, given)) == ([1, 1, 1, 1], set())

    def test_on_a_long_way_each_passes_on_what_it_did_not_have(self) -> None:
        members = [
            Member("a", frozenset({"x"})),
            Member("b", frozenset({"x", "y"}), {}, (Partition("y", 0),)),
            Member("c", frozenset({"x", "y"}), {}, (Partition("x", 0),)),
        ]
        given = assign_stickily(members, partitions_of(x=1, y=2))
        assert (loads(given), moved(members, given)) == ([1, 1, 1], {Partition("x", 0)})

    @given(group=groups())
    def test_asked_again_nothing_moves(self, group: tuple[list[Member], list[Partition]]) -> None:
        members, partitions = group
        settled = after(members, assign_stickily(members, partitions))
        assert assign_stickily(settled, partitions) == {m.id: list(m.owned) for m in settled}

    def test_control_round_robin_is_not_sticky(self) -> None:
        partitions = partitions_of(orders=12)
        old = [Member(id, frozenset({"orders"})) for id in "abc"]
        members = [*after(old, assign_in_turn(old, partitions)), Member("d", frozenset({"orders"}))]
        assert len(moved(members, assign_in_turn(members, partitions))) > 3


class TestInTwoSteps:
    @given(group=groups())
    def test_nothing_is_given_while_another_has_it_and_the_second_step_is_the_target(
        self, group: tuple[list[Member], list[Partition]]
    ) -> None:
        members, partitions = group
        target = assign_stickily(members, partitions)
        first = step_towards(target, members)
        for id, at_once in first.items():
            assert not {p for other in members if other.id != id for p in other.owned} & set(at_once)
        settled = after(members, first)
        assert assign_stickily(settled, partitions) == target
        assert step_towards(target, settled) == target

    def test_what_two_say_they_have_is_given_up_by_both_first(self) -> None:
        both = [Member(id, frozenset({"orders"}), {}, (Partition("orders", 0),)) for id in "ab"]
        target = assign_stickily(both, partitions_of(orders=2))
        assert (
            step_towards(target, both) == step_towards(target, both[::-1]) == {"a": [], "b": [Partition("orders", 1)]}
        )

    def test_control_the_target_itself_gives_what_another_still_has(self) -> None:
        members = [
            Member("a", frozenset({"orders"}), {}, tuple(partitions_of(orders=2))),
            Member("b", frozenset({"orders"})),
        ]
        target = assign_stickily(members, partitions_of(orders=2))
        assert set(target["b"]) & set(members[0].owned)
        assert step_towards(target, members)["b"] == []


@pytest.mark.parametrize("share", [1.0, 0.8], ids=["equal", "mixed"])
@pytest.mark.parametrize("topics", [1, 20, 1000])
@every
def test_a_thousand_partitions_and_a_hundred_members_are_no_trouble(name: str, topics: int, share: float) -> None:
    # Worst for the sticky ones: all of it is with one member, and nearly all has to move.
    partitions = partitions_of(**{f"t{n}": 1000 // topics for n in range(topics)})
    chance, everything = random.Random(topics), frozenset(p.topic for p in partitions)
    others = [frozenset(topic for topic in everything if chance.random() < share) for _ in range(99)]
    members = [
        Member("m00", everything, {}, tuple(partitions)),
        *(Member(f"m{n:02}", t) for n, t in enumerate(others, 1)),
    ]
    given = ASSIGNORS[name](members, partitions)
    assert sum(loads(given)) == 1000
    assert name == "range" or max(loads(given)) <= math.ceil(1000 / sum(bool(member.topics) for member in members)) + 3


@pytest.mark.parametrize(
    ("shares", "expected"), [((4, 4, 4), 0), ((5, 4, 4), 0), ((6, 3, 3), 0.5), ((3, 0), 0.5), ((0, 0), 0), ((), 0)]
)
def test_skew_is_what_the_largest_share_has_above_an_even_one(shares: tuple[int, ...], expected: float) -> None:
    assert skew({f"m{n}": partitions_of(orders=count) for n, count in enumerate(shares)}) == expected


def test_the_names_of_the_package_are_these() -> None:
    assert kconsume.rebalance.__all__ == EXPORTED
    assert all(hasattr(kconsume.rebalance, name) for name in EXPORTED)


def test_a_name_that_nobody_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match="no assignor 'geo': write one of range, roundrobin, sticky"):
        assignor_named("geo")
