"""Whether a store is the one that a group's offsets were copied from: each line of the rule."""

from __future__ import annotations

import pytest

from kconsume.backends import Position
from kconsume.backends.abc import ALWAYS
from kconsume.backends.commit_note import KAFKA, Source, StoreName
from kconsume.runtime.same_store import Shown, Verdict, judged

OURS = StoreName("p", "ourselves", "our place")
OF_US, OF_OTHERS = Source("p", "ourselves", 5), Source("p", "another", 5)
OF_SQLITE, OF_KAFKA = Source("s", "ourselves", 5), Source("k")
EARLIER, EARLIER_OTHERS = Source(None, place="our place"), Source(None, place="another")


def row(offset: int, reset_epoch: int = 0) -> Position:
    return Position(offset, 9, reset_epoch=reset_epoch)


CASES = [
    # nothing is shown, or by nobody who says which store it has
    (None, None, None, Verdict.NEW),
    (None, row(7), None, Verdict.FINE),
    (Shown(7, None), None, None, Verdict.UNKNOWN),
    (Shown(7, None), row(3), None, Verdict.FINE),
    # the same store: its row is there
    (Shown(7, OF_US), row(7), None, Verdict.FINE),
    (Shown(7, OF_US), row(9), None, Verdict.FINE),
    (Shown(7, OF_US), row(3), None, Verdict.BEHIND),
    (Shown(7, OF_US), row(3, reset_epoch=4), None, Verdict.BEHIND),
    (Shown(7, OF_US), row(3, reset_epoch=5), None, Verdict.FINE),
    (Shown(7, OF_US), row(3, reset_epoch=6), None, Verdict.FINE),
    # the same store: its row is missing
    (Shown(7, OF_US), None, None, Verdict.LOST),
    (Shown(7, OF_US), None, 4, Verdict.LOST),
    (Shown(7, OF_US), None, 5, Verdict.DELETED),
    (Shown(7, OF_US), None, ALWAYS, Verdict.DELETED),
    # another id, or another kind
    (Shown(7, OF_OTHERS), row(7), None, Verdict.FINE),
    (Shown(7, OF_OTHERS), row(6), None, Verdict.ANOTHER),
    (Shown(7, OF_OTHERS), None, None, Verdict.ANOTHER),
    (Shown(7, OF_OTHERS), None, ALWAYS, Verdict.ANOTHER),
    (Shown(7, OF_SQLITE), row(7), None, Verdict.FINE),
    (Shown(7, OF_SQLITE), None, None, Verdict.ANOTHER),
    (Shown(7, OF_KAFKA), row(7), None, Verdict.FINE),
    (Shown(7, OF_KAFKA), row(6), None, Verdict.ANOTHER),
    (Shown(7, OF_KAFKA), None, None, Verdict.ANOTHER),
    # notes of earlier versions, which say neither id nor epoch
    (Shown(7, EARLIER), row(7), None, Verdict.FINE),
    (Shown(7, EARLIER), None, None, Verdict.LOST),
    (Shown(7, EARLIER), None, 1, Verdict.DELETED),
    (Shown(7, EARLIER_OTHERS), row(7), None, Verdict.FINE),
    (Shown(7, EARLIER_OTHERS), None, None, Verdict.ANOTHER),
]


@pytest.mark.parametrize(("shown", "at", "deleted", "verdict"), CASES)
def test_the_rule(shown: Shown | None, at: Position | None, deleted: int | None, verdict: Verdict) -> None:
    assert judged(OURS, shown, at, deleted) is verdict


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        (None, Verdict.FINE),
        (OF_KAFKA, Verdict.FINE),
        (OF_US, Verdict.ANOTHER),
        (OF_SQLITE, Verdict.ANOTHER),
        (EARLIER, Verdict.ANOTHER),
    ],
)
def test_on_kafka_any_other_kind_is_another_store_however_far_it_is(source: Source | None, verdict: Verdict) -> None:
    assert judged(KAFKA, Shown(7, source), row(7), None) is verdict
