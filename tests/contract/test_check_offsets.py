"""`kconsume check` finds the stored offsets at which a run would hold its partition, in the words of the run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kconsume import App, Partition
from kconsume.backends import open_store
from kconsume.cli.check.command import CheckReport, examine
from kconsume.cli.check.findings import Finding
from kconsume.errors import OffsetError, OffsetOutOfRange, TopicRecreated
from tests.fix_arena import Arena
from tests.waiting import eventually


@pytest.fixture(params=["kafka", "sqlite", "postgresql", "redis"])
def offsets(request: pytest.FixtureRequest) -> str:
    fixture = {"sqlite": "sqlite_url", "postgresql": "postgres_url", "redis": "redis_url"}.get(request.param)
    return "kafka://" if fixture is None else str(request.getfixturevalue(fixture))


def member(arena: Arena, group: str, offsets: str, topic: str) -> App:
    app = arena.app(group, offsets)

    @app.consume(topic)
    def handle(value: str) -> None: ...

    return app


def errors(sheet: CheckReport) -> list[Finding]:
    return [finding for finding in sheet.findings if finding.level == "error"]


def words(text: str) -> str:
    """Without what stands in brackets: a run has there what the client said, and `check` the offsets."""
    return re.sub(r" \(.*?\):", ":", text)


def refusal(app: App, kind: type[OffsetError]) -> str:
    with pytest.raises(kind) as refused:
        app.catch_up(idle=0.2)
    return str(refused.value)


@pytest.mark.dense
@pytest.mark.parametrize(("stored", "begins"), [(2, 5), (99, 0)], ids=["below", "above"])
def test_an_offset_that_is_not_in_the_log_is_found_before_the_run(
    arena: Arena, group: str, offsets: str, stored: int, begins: int
) -> None:
    topic = arena.topic(2)
    arena.fill(topic, 10, partitions=2)
    store = open_store(offsets, brokers=arena.bootstrap)
    store.reset(group, {Partition(topic, 0): 10, Partition(topic, 1): stored})
    store.close()
    if begins:
        arena.delete_records(topic, 1, begins)
    sheet = examine(member(arena, group, offsets, topic), "shop:app")

    (finding,) = errors(sheet)
    assert (sheet.ok, finding.code, finding.about) == (False, "offset-out-of-range", f"{topic}/1 of group {group}")
    assert f"{stored} is stored, and the log goes from {begins} to 10" in finding.problem
    assert words(refusal(member(arena, group, offsets, topic), OffsetOutOfRange)) == words(
        f"{finding.problem} Nothing was skipped. {finding.fix}"
    )


@pytest.mark.parametrize("offsets", ["sqlite", "postgresql", "redis"], indirect=True)  # Kafka forgets them itself
def test_a_topic_that_was_made_again_is_found_before_the_run(arena: Arena, group: str, offsets: str) -> None:
    topic = arena.topic(1)
    arena.produce(topic, ["a", "b"], 0)
    member(arena, group, offsets, topic).catch_up(idle=0.2)
    assert errors(examine(member(arena, group, offsets, topic), "shop:app")) == []

    arena.delete_topic(topic)
    eventually(lambda: topic not in arena.admin.list_topics(timeout=10).topics, what="the topic is gone")
    arena.topic(1, name=topic)
    arena.produce(topic, ["c", "d", "e"], 0)
    (finding,) = errors(examine(member(arena, group, offsets, topic), "shop:app"))
    assert finding.code == "topic-recreated"
    assert refusal(member(arena, group, offsets, topic), TopicRecreated) == (
        f"{finding.problem} Nothing was skipped. {finding.fix}"
    )


@pytest.mark.parametrize("offsets", ["sqlite", "postgresql"], indirect=True)
def test_a_store_without_tables_has_nothing_to_find_and_stays_without(
    arena: Arena, group: str, offsets: str, tmp_path: Path
) -> None:
    app = member(arena, group, offsets, arena.topic(1))
    for _ in range(2):  # the second finds what the first would have made
        sheet = examine(app, "shop:app")
        assert errors(sheet) == []
        found = {finding.code for finding in sheet.findings}
        assert ("postgres-schema" in found) == offsets.startswith("postgresql")
    assert list(tmp_path.glob("*.db*")) == []
