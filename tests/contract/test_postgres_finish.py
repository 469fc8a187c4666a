"""The offset and COMMIT in one message, as a plain connection ends: what fails in it, and whose fault it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from kconsume.backends import PostgresStore
from kconsume.backends.base import Position
from kconsume.backends.capabilities import FinishingTx
from kconsume.backends.claim import granted
from kconsume.backends.postgres import tx_statements as texts
from kconsume.backends.postgres.statements import Statements
from kconsume.errors import ConfigurationError, Fenced, KconsumeError, StoreUnavailable
from kconsume.records import Partition
from tests.integration.postgres_roles import a_role

GROUP, ORDERS = "shop", Partition("orders", 3)
DEFERRED = """
    create function refuse() returns trigger language plpgsql as
        $$ begin raise exception 'on purpose' using errcode = '{code}'; end $$;
    create constraint trigger refuse after insert on effects deferrable initially deferred
        for each row execute function refuse()
"""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, postgres_url: str, database: psycopg.Connection) -> Iterator[PostgresStore]:
    assert "'10s'" in texts._LIMIT_LOCK_WAIT
    monkeypatch.setattr(texts, "_LIMIT_LOCK_WAIT", texts._LIMIT_LOCK_WAIT.replace("'10s'", "'300ms'"))
    database.execute("create table effects (number bigint)")
    with closing(PostgresStore(postgres_url)) as store:
        yield store


def claim(store: PostgresStore, owner: str = "me") -> Position:
    return granted(store.claim(GROUP, [ORDERS], owner, lambda ps: dict.fromkeys(ps, Position(0))))[ORDERS]


def finish(store: PostgresStore, epoch: int, before: Callable[[], object] = lambda: None) -> None:
    """An effect, then something that happens meanwhile, then the end."""
    with store.transaction(GROUP, ORDERS, epoch) as tx:
        connection: Any = tx.connection
        connection.execute("insert into effects values (0)")
        before()
        assert isinstance(tx, FinishingTx)
        tx.finish(0, 1)


def effects(database: psycopg.Connection) -> int:
    (count,) = database.execute("select count(*) from effects").fetchone() or (None,)
    assert isinstance(count, int)
    return count


def test_the_effect_and_the_offset_are_there_together(store: PostgresStore, database: psycopg.Connection) -> None:
    finish(store, claim(store).epoch)
    assert (effects(database), store.load(GROUP, [ORDERS])[ORDERS].next_offset) == (1, 1)


def zombie(store: PostgresStore, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another claims in the middle of it, and ends nobody."""
    monkeypatch.setattr(PostgresStore, "_end_earlier_owners", lambda *_: None)
    with closing(PostgresStore(url)) as other:
        finish(store, claim(store, "zombie").epoch, lambda: claim(other, "other"))


def test_a_fenced_owner_commits_nothing(
    store: PostgresStore, postgres_url: str, database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Fenced, match="no longer owned by this process"):
        zombie(store, postgres_url, monkeypatch)
    assert effects(database) == 0


def test_control_with_a_plain_update_the_commit_behind_it_keeps_the_zombie_s_effect(
    postgres_url: str, database: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, store: PostgresStore
) -> None:
    guarded = Statements.advance.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Statements, "advance", property(lambda sql: guarded(sql).replace("1 / count(*)", "count(*)")))
    with closing(PostgresStore(postgres_url)) as careless:
        zombie(careless, postgres_url, monkeypatch)
    assert effects(database) == 1


@pytest.mark.parametrize("lock", ["select * from kconsume_offsets for update", "lock table kconsume_offsets"])
def test_what_others_have_locked_is_the_store_s_trouble(
    store: PostgresStore, postgres_url: str, database: psycopg.Connection, lock: str
) -> None:
    epoch = claim(store).epoch
    with closing(psycopg.connect(postgres_url)) as person:
        # A table that somebody has read cannot be locked whole: the check of the epoch has.
        mode = "" if "select" in lock else " in share mode"
        with pytest.raises(StoreUnavailable, match="locked"):
            finish(store, epoch, lambda: person.execute(lock + mode))
    assert effects(database) == 0


def test_a_right_that_is_missing_is_told_with_what_is_needed(
    store: PostgresStore, postgres_url: str, database: psycopg.Connection
) -> None:
    epoch = claim(store).epoch
    with a_role(postgres_url) as role:
        database.execute(f"grant select on kconsume_offsets, kconsume_schema to {role.name}")
        database.execute(f"grant insert on effects to {role.name}")
        with closing(PostgresStore(role.url)) as poor:
            with pytest.raises(ConfigurationError, match=r"the role needs .* on kconsume_offsets"):
                finish(poor, epoch)
    assert effects(database) == 0


@pytest.mark.parametrize("code", ["P0001", "23514", "42501", "55P03"])
def test_what_a_deferred_trigger_of_the_handler_s_table_says_is_the_handler_s(
    store: PostgresStore, database: psycopg.Connection, code: str
) -> None:
    database.execute(DEFERRED.format(code=code))
    with pytest.raises(psycopg.Error, match="on purpose") as raised:
        finish(store, claim(store).epoch)
    assert not isinstance(raised.value, KconsumeError)
    assert (raised.value.sqlstate, effects(database)) == (code, 0)
