"""What a stream asks the cluster before it starts: a group that is new has no offsets there to be asked for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from kconsume._kafka.cluster import Cluster, Committed, Group
from kconsume.backends import SqliteStore
from kconsume.errors import BrokerUnavailable, ClientFailed, ConfigurationError
from kconsume.records import Partition
from kconsume.spark._stream.query_partitions import ask_whether_group_is_new
from tests.unit.runtime.assignment.test_claims import GROUP, ORDERS, FakeCluster, claims, topic_checks

pytestmark = pytest.mark.usefixtures("sqlite_stores_are_closed")


class Asked(FakeCluster):
    """Counts how often it was asked what the group has committed."""

    times = 0

    def committed(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Committed]:
        self.times += 1
        return super().committed(group, partitions)


def test_a_group_that_the_cluster_does_not_know_is_not_asked_for_its_offsets(tmp_path: Path) -> None:
    cluster = Asked()
    ours = claims(SqliteStore(tmp_path / "shop.db"), cluster)
    ours.store_check.is_new = True
    topic_checks(cluster, ours).survey(["orders"])
    assert ours.claim_all([ORDERS])[ORDERS].next_offset == 10
    assert cluster.times == 0


def test_control_one_that_it_knows_is_asked_and_refused_if_they_are_kept_elsewhere(tmp_path: Path) -> None:
    cluster = Asked()
    cluster.mirrored = {ORDERS: Committed(7, None, "kconsume/1 topic=A store=another")}
    with pytest.raises(ConfigurationError, match=f"group '{GROUP}' keeps its offsets in another store"):
        topic_checks(cluster, claims(SqliteStore(tmp_path / "shop.db"), cluster)).survey(["orders"])
    assert cluster.times == 1


@pytest.mark.parametrize(
    ("answer", "is_new"),
    [
        (None, True),
        (Group("empty", "", ()), False),
        (ClientFailed("it may not be asked"), False),
        (BrokerUnavailable("nobody there"), False),
    ],
)
def test_a_query_of_ones_own_has_a_new_group_only_by_the_clusters_word(
    answer: Group | Exception | None, is_new: bool
) -> None:
    class Knows(Cluster):
        def group(self, name: str) -> Group | None:
            assert name == GROUP
            if isinstance(answer, Exception):
                raise answer
            return answer

    assert ask_whether_group_is_new(Knows("nowhere:9092"), GROUP).result(60) is is_new
