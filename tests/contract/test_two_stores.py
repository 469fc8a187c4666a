"""Two deployments of one group, their offsets in two places: the second is refused at start, the first goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from kconsume import App, ConfigurationError, Partition
from kconsume.backends import open_store
from kconsume.cluster import Cluster
from kconsume.runtime import claims
from tests.fix_arena import Arena
from tests.waiting import eventually


def deployment(arena: Arena, group: str, topic: str, offsets: str) -> tuple[App, list[str]]:
    app, seen = arena.app(group, offsets), list[str]()

    @app.consume(topic)
    def note(value: str) -> None:
        seen.append(value)

    return app, seen


def stands(cluster: Cluster, group: str, partition: Partition) -> int | None:
    """What the Kafka group shows."""
    committed = cluster.committed(group, [partition]).get(partition)
    return None if committed is None else committed.offset


def files(folder: Path) -> tuple[str, str]:
    return f"sqlite:///{folder}/one.db", f"sqlite:///{folder}/two.db"


def test_the_second_is_refused_with_the_choices_and_the_first_goes_on(arena: Arena, group: str, tmp_path: Path) -> None:
    topic, (here, there) = arena.topic(2), files(tmp_path)
    one, first = deployment(arena, group, topic, here)
    two, second = deployment(arena, group, topic, there)
    place, cluster = Partition(topic, 0), Cluster(arena.bootstrap)
    arena.produce(topic, ["a", "b"], 0)
    with one.running():
        eventually(lambda: stands(cluster, group, place) == 2, what="the first says where it stands")
        with pytest.raises(ConfigurationError, match=rf"another store than {there}.*{topic}/0 stands at 2 there"):
            two.catch_up()
        arena.produce(topic, ["c"], 0)
        arena.produce(topic, ["d"], 1)
        eventually(lambda: len(first) == 4, what="the first has all")
    assert (sorted(first), second) == (["a", "b", "c", "d"], [])


def test_a_group_that_was_moved_with_its_offsets_goes_on_in_the_other_store(
    arena: Arena, group: str, tmp_path: Path
) -> None:
    topic, (here, there) = arena.topic(1), files(tmp_path)
    one, _ = deployment(arena, group, topic, here)
    two, second = deployment(arena, group, topic, there)
    arena.produce(topic, ["a", "b"])
    one.catch_up(idle=0.1)
    store = open_store(there)
    store.reset(group, {Partition(topic, 0): 2})
    store.close()
    arena.produce(topic, ["c"])
    two.catch_up(idle=0.1)
    assert second == ["c"]
    arena.produce(topic, ["d"])
    with pytest.raises(ConfigurationError, match=f"another store than {here}"):
        one.catch_up(idle=0.1)  # the old one, started again by mistake


def test_control_without_the_look_the_second_begins_again(
    arena: Arena, group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "place_in", lambda _: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_the_second_is_refused_with_the_choices_and_the_first_goes_on(arena, group, tmp_path)
