"""The errors of `MemoryStore` read like those of the stores in databases."""

from __future__ import annotations

import pytest

from kconsume.backends import MemoryStore
from kconsume.backends.base import Position
from kconsume.errors import Fenced
from kconsume.records import Partition

ORDERS = Partition("orders", 0)


@pytest.fixture
def store() -> MemoryStore:
    """The row was claimed twice: by `first` with epoch 1, and by `second` with epoch 2."""
    store = MemoryStore()
    for owner in ("first", "second"):
        store.claim("shop", [ORDERS], owner, lambda missing: {p: Position(7) for p in missing})
    return store


OURS = "orders/0 of group 'shop' is no longer owned by this process: its claim has epoch 1"


def test_a_refused_save_says_in_words_what_the_store_has(store: MemoryStore) -> None:
    with pytest.raises(Fenced) as fenced:
        store.save("shop", {ORDERS: Position(9, 1)})
    assert str(fenced.value) == f"{OURS} at offset 9, the store has epoch 2 at offset 7, owner second"


def test_a_refused_reclaim_says_in_words_what_the_store_has(store: MemoryStore) -> None:
    with pytest.raises(Fenced) as fenced:
        store.reclaim("shop", {ORDERS: 1}, "first")
    assert str(fenced.value) == f"{OURS}, the store has epoch 2 at offset 7, owner second"


def test_a_missing_row_is_named_as_such(store: MemoryStore) -> None:
    store.delete("shop")
    with pytest.raises(Fenced) as fenced:
        store.save("shop", {ORDERS: Position(9, 2)})
    assert str(fenced.value).endswith("its claim has epoch 2 at offset 9, the store has no row")
