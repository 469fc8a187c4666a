"""Whether a store is the one that a group's offsets were copied from: each line of the rule."""

from __future__ import annotations

import pytest

from kconsume._kafka.commit_metadata import KAFKA, MirrorSource, StoreName
from kconsume._runtime.assignment.store_identity import MirroredOffset, StoreVerdict, judged
from kconsume.backends import Position
from kconsume.backends.capabilities import ALWAYS

OURS = StoreName("p", "ourselves", "our place")
OF_US, OF_OTHERS = MirrorSource("p", "ourselves", 5), MirrorSource("p", "another", 5)
OF_SQLITE, OF_KAFKA = MirrorSource("s", "ourselves", 5), MirrorSource("k")
EARLIER, EARLIER_OTHERS = MirrorSource(None, place="our place"), MirrorSource(None, place="another")


def row(offset: int, reset_epoch: int = 0) -> Position:
    return Position(offset, 9, reset_epoch=reset_epoch)


CASES = [
    # nothing is shown, or by nobody who says which store it has
    (None, None, None, StoreVerdict.NEW),
    (None, row(7), None, StoreVerdict.FINE),
    (MirroredOffset(7, None), None, None, StoreVerdict.UNKNOWN),
    (MirroredOffset(7, None), row(3), None, StoreVerdict.FINE),
    # the same store: its row is there
    (MirroredOffset(7, OF_US), row(7), None, StoreVerdict.FINE),
    (MirroredOffset(7, OF_US), row(9), None, StoreVerdict.FINE),
    (MirroredOffset(7, OF_US), row(3), None, StoreVerdict.BEHIND),
    (MirroredOffset(7, OF_US), row(3, reset_epoch=4), None, StoreVerdict.BEHIND),
    (MirroredOffset(7, OF_US), row(3, reset_epoch=5), None, StoreVerdict.FINE),
    (MirroredOffset(7, OF_US), row(3, reset_epoch=6), None, StoreVerdict.FINE),
    # the same store: its row is missing
    (MirroredOffset(7, OF_US), None, None, StoreVerdict.LOST),
    (MirroredOffset(7, OF_US), None, 4, StoreVerdict.LOST),
    (MirroredOffset(7, OF_US), None, 5, StoreVerdict.DELETED),
    (MirroredOffset(7, OF_US), None, ALWAYS, StoreVerdict.DELETED),
    # another id, or another kind
    (MirroredOffset(7, OF_OTHERS), row(7), None, StoreVerdict.FINE),
    (MirroredOffset(7, OF_OTHERS), row(6), None, StoreVerdict.ANOTHER),
    (MirroredOffset(7, OF_OTHERS), None, None, StoreVerdict.ANOTHER),
    (MirroredOffset(7, OF_OTHERS), None, ALWAYS, StoreVerdict.ANOTHER),
    (MirroredOffset(7, OF_SQLITE), row(7), None, StoreVerdict.FINE),
    (MirroredOffset(7, OF_SQLITE), None, None, StoreVerdict.ANOTHER),
    (MirroredOffset(7, OF_KAFKA), row(7), None, StoreVerdict.FINE),
    (MirroredOffset(7, OF_KAFKA), row(6), None, StoreVerdict.ANOTHER),
    (MirroredOffset(7, OF_KAFKA), None, None, StoreVerdict.ANOTHER),
    # notes of earlier versions, which say neither id nor epoch
    (MirroredOffset(7, EARLIER), row(7), None, StoreVerdict.FINE),
    (MirroredOffset(7, EARLIER), None, None, StoreVerdict.LOST),
    (MirroredOffset(7, EARLIER), None, 1, StoreVerdict.DELETED),
    (MirroredOffset(7, EARLIER_OTHERS), row(7), None, StoreVerdict.FINE),
    (MirroredOffset(7, EARLIER_OTHERS), None, None, StoreVerdict.ANOTHER),
]


@pytest.mark.parametrize(("shown", "at", "deleted", "verdict"), CASES)
def test_the_rule(
    shown: MirroredOffset | None, at: Position | None, deleted: int | None, verdict: StoreVerdict
) -> None:
    assert judged(OURS, shown, at, deleted) is verdict


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        (None, StoreVerdict.FINE),
        (OF_KAFKA, StoreVerdict.FINE),
        (OF_US, StoreVerdict.ANOTHER),
        (OF_SQLITE, StoreVerdict.ANOTHER),
        (EARLIER, StoreVerdict.ANOTHER),
    ],
)
def test_on_kafka_any_other_kind_is_another_store_however_far_it_is(
    source: MirrorSource | None, verdict: StoreVerdict
) -> None:
    assert judged(KAFKA, MirroredOffset(7, source), row(7), None) is verdict
