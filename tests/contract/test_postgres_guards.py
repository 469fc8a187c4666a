"""The guards of PostgresStore, each with its negative control: taken out of its statement, the test that watches it
fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from kconsume.backends import Position, PostgresStore
from kconsume.backends.claim import granted
from kconsume.backends.postgres.connection import HandlerConnection
from kconsume.backends.postgres.statements import Statements
from kconsume.backends.postgres.transaction import OffsetRow
from kconsume.backends.postgres.tx_statements import Statement
from kconsume.errors import KconsumeError, TransactionMisused
from kconsume.records import Partition
from kconsume.testing.conformance import FencedSuite, OffsetsSuite, Subject, TransactionalSuite
from tests.contract.broken_stores import Promise
from tests.contract.places import fails

ORDERS = Partition("orders", 0)
GROUP = "shop"

L, F, T = OffsetsSuite, FencedSuite, TransactionalSuite
GUARDS: list[tuple[str, str, str, list[Promise]]] = [
    (
        "check",
        "and epoch = %(epoch)s",
        "and %(epoch)s is not null",
        [
            T.test_a_transaction_does_not_begin_after_another_owner_has_claimed,
            T.test_a_transaction_under_an_epoch_that_was_never_given_out_does_not_begin,
        ],
    ),
    (
        "advance",
        "and next_offset = %(old)s",
        "and %(old)s is not null",
        [T.test_an_advance_from_a_wrong_offset_changes_nothing],
    ),
    ("save", "and o.next_offset <= w.next_offset", "", [L.test_an_offset_never_goes_backwards]),
    (
        "save",
        "and o.next_offset in (coalesce(w.previous, o.next_offset), w.next_offset)",
        "",
        [F.test_a_save_is_refused_if_the_row_is_not_at_the_previous_offset],
    ),
    (
        "save",
        "coalesce(w.topic_id, o.topic_id)",
        "w.topic_id",
        [L.test_an_unknown_topic_id_never_overwrites_a_known_one],
    ),
    (
        "save",
        "and o.epoch = w.epoch",
        "",
        [F.test_a_stale_epoch_is_refused_and_changes_nothing, F.test_an_epoch_that_was_never_given_out_is_refused],
    ),
    (
        "raise_epochs",
        "epoch = o.epoch + 1",
        "epoch = 1",
        [F.test_every_claim_raises_the_epoch_even_by_the_same_owner],
    ),
    (
        "raise_epochs",
        "coalesce(%(generation)s::bigint, o.generation)",
        "%(generation)s::bigint",
        [F.test_a_claim_without_terms_is_granted_and_keeps_the_generation_of_the_row],
    ),
    (
        "raise_epochs",
        "generation = coalesce(%(generation)s::bigint, o.generation), ",
        "",
        [F.test_a_claim_of_an_earlier_generation_is_refused_and_changes_nothing],
    ),
    ("reset", "epoch = o.epoch + 1", "epoch = o.epoch", [F.test_a_reset_raises_the_epoch_and_fences_a_running_owner]),
    (
        "_retire",
        "greatest(last_epoch",
        "least(last_epoch",
        [F.test_a_zombie_from_before_a_delete_is_fenced_after_the_row_is_created_again],
    ),
]


def switch_off(monkeypatch: pytest.MonkeyPatch, statement: str, guard: str, instead: str) -> None:
    """Take a guard out of a statement; one that is not in it would control nothing."""
    guarded: Callable[[Statements], str] = getattr(Statements, statement).fget
    assert guard in guarded(Statements())
    monkeypatch.setattr(Statements, statement, property(lambda sql: guarded(sql).replace(guard, instead)))


@pytest.fixture
def place(postgres_url: str, database: psycopg.Connection) -> Callable[[], Subject]:
    def empty() -> Subject:
        tables = "kconsume_offsets, kconsume_outbox, kconsume_schema, kconsume_seen"
        database.execute(f"drop table if exists effects, {tables}")
        database.execute("create table effects (number bigint)")
        return Subject(
            open=lambda: PostgresStore(postgres_url),
            write=lambda connection, number: connection.execute("insert into effects values (%s)", (number,)),
            effects=lambda: [number for (number,) in database.execute("select number from effects").fetchall()],
        )

    return empty


@pytest.mark.parametrize(
    ("statement", "guard", "instead", "promise"),
    [(statement, guard, instead, promise) for statement, guard, instead, promises in GUARDS for promise in promises],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_guard_that_is_taken_out_of_a_statement_is_missed(
    place: Callable[[], Subject],
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
    guard: str,
    instead: str,
    promise: Promise,
) -> None:
    switch_off(monkeypatch, statement, guard, instead)
    fails(promise, place)


@pytest.mark.parametrize(
    "promise",
    [
        T.test_a_claim_during_a_transaction_takes_effect_before_or_after_it,
        T.test_after_a_reclaim_the_transaction_under_the_old_epoch_has_ended_or_cannot_commit,
    ],
)
def test_the_epoch_in_the_advance_is_missed_where_nobody_is_ended(
    place: Callable[[], Subject], monkeypatch: pytest.MonkeyPatch, promise: Promise
) -> None:
    """With the backend ended, the fence has nothing left to do: two guards, of which one is enough."""
    monkeypatch.setattr(PostgresStore, "_end_earlier_owners", lambda *_: None)
    switch_off(monkeypatch, "advance", "and epoch = %(epoch)s", "and %(epoch)s is not null")
    fails(promise, place)


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    with closing(PostgresStore(postgres_url)) as opened:
        yield opened


def claim(store: PostgresStore, owner: str = "me") -> Position:
    return granted(store.claim(GROUP, [ORDERS], owner, lambda ps: dict.fromkeys(ps, Position(0))))[ORDERS]


class TestTheMark:
    """That the transaction in which the offset moves is the one that we began."""

    def test_keeps_the_offset_from_moving_in_a_transaction_of_the_handlers_own(self, store: PostgresStore) -> None:
        position = claim(store)
        with pytest.raises(TransactionMisused, match="ended by a statement of its own"):
            self._pass_in_another(store, position)
        assert store.load(GROUP, [ORDERS])[ORDERS].next_offset == 0

    def test_control_without_it_the_offset_moves_there(
        self, postgres_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        switch_off(monkeypatch, "advance", "current_setting('kconsume.tx', true) = %(mark)s", "%(mark)s <> ''")
        switch_off(monkeypatch, "advance", "current_setting('kconsume.lock_timeout')", "'1s'")
        with closing(PostgresStore(postgres_url)) as store:
            self._pass_in_another(store, claim(store))
            assert store.load(GROUP, [ORDERS])[ORDERS].next_offset == 1

    @staticmethod
    def _pass_in_another(store: PostgresStore, position: Position) -> None:
        with store.transaction(GROUP, ORDERS, position.epoch) as tx:
            connection: Any = tx.connection
            psycopg.Cursor(connection).execute("commit; begin")  # past all that looks at statements
            tx.advance(0, 1)


class TestTheLockBeforeTheQuestion:
    """A claim that comes between the two statements: it sees the lock, or is seen."""

    def test_a_transaction_that_a_claim_overtakes_does_not_get_to_its_handler(
        self, store: PostgresStore, postgres_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert not self._gets_to_its_handler(store, postgres_url, monkeypatch)

    def test_control_the_other_way_round_it_goes_on_unseen(
        self, store: PostgresStore, postgres_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entry = OffsetRow.entry_statements
        monkeypatch.setattr(OffsetRow, "entry_statements", lambda row: entry(row)[::-1])
        assert self._gets_to_its_handler(store, postgres_url, monkeypatch)

    @staticmethod
    def _gets_to_its_handler(store: PostgresStore, url: str, monkeypatch: pytest.MonkeyPatch) -> bool:
        position = claim(store)
        execute_together = HandlerConnection.execute_together

        def overtaken(connection: HandlerConnection, *statements: Statement) -> bool:
            if len(statements) < 3:
                return execute_together(connection, *statements)
            begin, first, second = statements
            execute_together(connection, begin, first)
            with closing(PostgresStore(url)) as other:
                claim(other, "other")
            return execute_together(connection, second)

        monkeypatch.setattr(HandlerConnection, "execute_together", overtaken)
        try:
            with store.transaction(GROUP, ORDERS, position.epoch) as tx:
                connection: Any = tx.connection
                return bool(connection.execute("select 1").fetchone())
        except KconsumeError:
            return False
