"""Which partitions are ours: what can be told without a broker."""

from __future__ import annotations

from typing import cast

from kconsume.runtime.claims import Claims
from kconsume.runtime.errands import Errands
from kconsume.runtime.tenancy import LaneMaker, Tenancy


def test_a_member_that_was_put_out_has_not_caught_up() -> None:
    """`catch_up` ends when everything that it has is read; after an eviction it has nothing, and has read nothing."""
    tenancy = Tenancy(cast(Claims, None), cast(Errands, None), cast(LaneMaker, None), shutdown=1.0, grouped=True)
    before = tenancy.settled
    tenancy.assigned([])
    with_nothing_to_read = tenancy.settled
    tenancy.lost([])
    assert (before, with_nothing_to_read, tenancy.settled) == (False, True, False)
