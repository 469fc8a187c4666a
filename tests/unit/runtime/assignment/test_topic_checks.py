"""What the cluster is asked about topics: what is missing or was made again is noticed, and nothing is guessed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from kconsume._kafka.cluster import Group, GroupMember
from kconsume._runtime.assignment.topic_checks import TopicChecks
from kconsume.backends import MemoryStore, Position
from kconsume.errors import (
    BrokerUnavailable,
    ClientFailed,
    ConfigurationError,
    StoreUnavailable,
    TopicNotFound,
    TopicRecreated,
)
from kconsume.records import Partition
from tests.unit.runtime.assignment.test_claims import FakeCluster, claims, topic_checks


class TestWhileItRuns:
    def test_a_topic_made_again_is_noticed(self) -> None:
        found = topic_checks(FakeCluster({"orders": "Z"})).check_topics({"orders": "A"})
        assert isinstance(found["orders"], TopicRecreated)
        assert "topic 'orders' had id A and now has Z" in str(found["orders"])

    @pytest.mark.parametrize("now", ["A", None])
    def test_the_same_topic_and_one_without_an_id_are_fine(self, now: str | None) -> None:
        assert topic_checks(FakeCluster({"orders": now})).check_topics({"orders": "A"}) == {}

    def test_a_cluster_that_is_away_proves_nothing(self) -> None:
        class Away(FakeCluster):
            def topic_ids(self, topics: Iterable[str]) -> dict[str, str | None]:
                raise BrokerUnavailable("no answer")

        assert topic_checks(Away()).check_topics({"orders": "A"}) == {}

    def test_a_topic_that_is_gone_is_an_error_if_a_handler_names_it(self) -> None:
        class Gone(FakeCluster):
            def topics(self, wanted: Sequence[str]) -> dict[str, int]:
                if "orders" in wanted:
                    raise TopicNotFound("topic 'orders' is not on the cluster")
                return super().topics(wanted)

            def topic_ids(self, topics: Iterable[str]) -> dict[str, str | None]:
                raise TopicNotFound("the cluster does not know the topic")

        made = topic_checks(Gone())
        found = made.check_topics({}, ["orders", "payments"])
        assert list(found) == ["orders"]
        assert isinstance(found["orders"], TopicNotFound)
        assert made.check_topics({"orders-eu": "A"}, ["payments"]) == {}, "which a pattern had matched"

    def test_a_survey_that_is_made_again_proves_nothing_of_a_cluster_that_is_away(self) -> None:
        made, _, cluster = self.unanswered()
        cluster.away = True
        assert made.check_topics({}, ["orders", "payments"]) == {}
        assert made.last_error is not None, "it is asked again"

    def test_a_survey_that_is_made_again_says_which_topic_has_gone_meanwhile_and_reads_the_others(self) -> None:
        made, store, cluster = self.unanswered()
        store.away, cluster.gone = False, "orders"
        found = made.check_topics({}, ["orders", "payments"])
        assert list(found) == ["orders"]
        assert isinstance(found["orders"], TopicNotFound)
        assert (made.store_answered, made.last_error) == (True, None)

    @staticmethod
    def unanswered() -> tuple[TopicChecks, Absent, Changing]:
        """A store that was away at the survey."""
        store, cluster = Absent(), Changing()
        made = topic_checks(cluster, claims(store, cluster))
        made.survey(["orders", "payments"])
        assert isinstance(made.last_error, StoreUnavailable)
        return made, store, cluster


class Absent(MemoryStore):
    away = True

    def load(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Position]:
        if self.away:
            raise StoreUnavailable("away")
        return super().load(group, partitions)


class Changing(FakeCluster):
    away, gone = False, ""

    def topics(self, wanted: Sequence[str]) -> dict[str, int]:
        if self.away:
            raise BrokerUnavailable("no answer")
        if self.gone in wanted:
            raise TopicNotFound(f"topic {self.gone!r} is not on the cluster")
        return super().topics(wanted)

    def those_there(self, topics: Iterable[str]) -> list[str]:
        if self.away:
            raise BrokerUnavailable("no answer")
        return [topic for topic in topics if topic != self.gone]


class TestAGroupOfOnesOwn:
    """Partitions that a person chose are claimed only where no member of the group can be put out by that."""

    @pytest.mark.parametrize("group", [None, Group("empty", "", ())])
    def test_a_group_without_members_may_be_used(self, group: Group | None) -> None:
        topic_checks(Described(group)).must_be_alone()

    def test_one_with_members_is_refused_by_their_names(self) -> None:
        member = GroupMember("1", None, "kconsume-host-7", ())
        with pytest.raises(ConfigurationError, match=r"'shop' has members \(kconsume-host-7\).*group= of its own"):
            topic_checks(Described(Group("stable", "range", (member,)))).must_be_alone()

    def test_a_broker_that_cannot_say_is_believed(self) -> None:
        topic_checks(Described(ClientFailed("not supported"))).must_be_alone()


class Described(FakeCluster):
    def __init__(self, group: Group | ClientFailed | None) -> None:
        super().__init__()
        self.described = group

    def group(self, name: str) -> Group | None:
        if isinstance(self.described, ClientFailed):
            raise self.described
        return self.described
