"""Which rows may leave together: those that a topic surely takes; and none passes another to its topic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from hypothesis import given
from hypothesis import strategies as st

from kconsume._kafka import topic_limits as implementation
from kconsume._kafka.outgoing import Outgoing
from kconsume._kafka.topic_limits import (
    NO_LIMITS,
    TopicLimit,
    TopicLimits,
    divided,
    first_sendable,
    may_refuse,
    record_bytes,
)
from kconsume.backends.outbox.tables import Posted

LIMITS = {"small": TopicLimit(1_000), "compacted": TopicLimit(1_000_000, wants_keys=True)}


def row(number: int, topic: str, size: int = 10, key: bytes | None = b"k") -> Posted:
    return Posted(number, Outgoing(b"x" * size, key, (("h", b"1"),), topic))


ROWS = st.lists(
    st.tuples(st.sampled_from(["small", "compacted", "other"]), st.integers(0, 1_200), st.sampled_from([None, b"k"])),
    max_size=30,
).map(lambda drawn: [row(number, *each) for number, each in enumerate(drawn)])


@given(rows=ROWS)
def test_what_leaves_together_is_surely_taken_and_passes_nothing(rows: Sequence[Posted]) -> None:
    lot, doubtful = first_sendable(rows, LIMITS)
    for topic, limit in LIMITS.items():
        own = [each for each in lot if each.outgoing.topic == topic]
        assert not any(may_refuse(limit, record_bytes(each), has_key=each.outgoing.key is not None) for each in own)
        assert not own or sum(map(record_bytes, own)) + implementation._BATCH_FRAME <= limit.most_bytes
    for topic in ("small", "compacted", "other"):
        own, taken = ([each for each in these if each.outgoing.topic == topic] for these in (rows, lot))
        assert taken == own[: len(taken)], "the first of its topic"
        if topic in doubtful:
            first = own[0].outgoing
            assert not taken
            assert may_refuse(LIMITS[topic], record_bytes(own[0]), has_key=first.key is not None)
    assert lot or doubtful or not rows, "something always goes on"


def test_without_limits_all_rows_leave_together() -> None:
    rows = [row(n, "small", 5_000) for n in range(3)]
    assert first_sendable(rows, NO_LIMITS) == (rows, ())
    assert first_sendable(rows, {"another": TopicLimit(10)}) == (rows, ())


class Brokers:
    def __init__(self, told: Mapping[str, TopicLimit | None]) -> None:
        self.told = told
        self.asked: list[str] = []

    def ask_limits(self, topics: Sequence[str]) -> Mapping[str, Future[TopicLimit | None]]:
        self.asked += topics
        answers: dict[str, Future[TopicLimit | None]] = {topic: Future() for topic in topics if topic in self.told}
        for topic, answer in answers.items():
            answer.set_result(self.told[topic])
        return answers


def test_limits_are_those_that_a_batch_could_exceed_and_are_asked_for_again() -> None:
    now = [100.0]
    compacted = TopicLimit(2_000_000, wants_keys=True)
    brokers = Brokers({"small": TopicLimit(2_000), "large": TopicLimit(2_000_000), "compacted": compacted, "no": None})
    limits = TopicLimits(brokers, 1_000_000, lambda: now[0])
    topics = ["small", "large", "compacted", "no", "mock"]
    known = {"small": TopicLimit(2_000), "compacted": compacted}
    assert [limits.of(topics), limits.of(topics)] == [known, known]
    assert sorted(brokers.asked) == sorted(topics), "asked once"
    brokers.told, now[0] = {"small": TopicLimit(2_000_000)}, 111.0
    assert limits.of(["small"]) == {}, "it was raised"


def test_partitions_that_send_at_once_share_a_limit() -> None:
    """Their rows may come into one batch."""
    limits = {"small": TopicLimit(2_000), "compacted": TopicLimit(9_000, wants_keys=True)}
    assert divided(limits, 1) == limits
    assert divided(limits, 4) == {"small": TopicLimit(500), "compacted": TopicLimit(2_250, wants_keys=True)}
