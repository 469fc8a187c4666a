"""What a person may write after `postgresql://`, and what is said about what they may not."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from kconsume._config.client_settings import MASK
from kconsume.backends import open_store
from kconsume.backends.postgres.address import POOL, address_of
from kconsume.backends.postgres.store import PostgresStore
from kconsume.errors import ConfigurationError, StoreUnavailable, UnknownStore


def test_an_address_alone_has_the_defaults() -> None:
    address = address_of("postgresql://shop@db:5433/shop")
    assert (address.schema, address.pool, address.isolation) == (None, POOL, "read committed")
    assert address.shown == "postgresql://shop@db:5433/shop"


def test_settings_of_ours_are_read_and_not_given_to_the_client() -> None:
    address = address_of("postgresql://db/shop?schema=billing&pool=3&sslmode=require&isolation=Repeatable+Read")
    assert (address.schema, address.pool, address.isolation) == ("billing", 3, "repeatable read")
    assert address.conninfo == "postgresql://db/shop?sslmode=require"
    assert address.prefix == '"billing".'


def test_a_schema_is_quoted_whatever_it_is_called() -> None:
    assert address_of('postgresql://db/shop?schema=a"b').prefix == '"a""b".'


def test_several_hosts_may_be_named() -> None:
    address = address_of("postgresql://one:5432,two:5432/shop?target_session_attrs=read-write&pool=2")
    assert address.conninfo == "postgresql://one:5432,two:5432/shop?target_session_attrs=read-write"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("postgresql://db/shop?pool=x", "pool='x'"),
        ("postgresql://db/shop?pool=-1", "pool='-1'"),
        ("postgresql://db/shop?pool=0", "pool=0"),
        ("postgresql://db/shop?pool=", "pool=''"),
        ("postgresql://db/shop?pool=1.5", "pool='1.5'"),
        ("postgresql://db/shop?isolation=foo", "isolation='foo'"),
        ("postgresql://db/shop?isolation=read_uncommitted", "isolation='read_uncommitted'"),
        ("postgresql://db/shop?Pool=3", '"Pool"'),
        ("postgresql://db/shop?shema=billing", '"shema"'),
        ("postgresql://", "names no database"),
    ],
)
def test_a_setting_that_is_wrong_is_named(address: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        open_store(address)
    assert said in str(refused.value)
    assert ": " in str(refused.value)  # and after it, what to write


@pytest.mark.parametrize(
    "address",
    ["postgre://shop:hunter2@db/shop", "postgressql://shop:hunter2@db/shop", "postgresql//shop:hunter2@db/shop"],
)
def test_a_typo_in_the_scheme_is_answered_with_what_there_is_and_without_the_password(address: str) -> None:
    with pytest.raises(UnknownStore) as refused:
        open_store(address)
    assert "postgresql://host/database" in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_store_made_by_hand_is_held_to_the_same() -> None:
    with pytest.raises(ConfigurationError, match="isolation='foo'"):
        PostgresStore("postgresql://db/shop", isolation="foo")
    with pytest.raises(ConfigurationError, match="pool=0"):
        PostgresStore("postgresql://db/shop", pool=0)


def test_no_password_is_shown() -> None:
    assert address_of("postgresql://shop:hunter2@db/shop?pool=2").shown == f"postgresql://shop:{MASK}@db/shop"
    assert "hunter2" not in PostgresStore("host=db password=hunter2").address


def test_making_a_store_opens_nothing() -> None:
    PostgresStore.from_url("postgresql://nobody@nowhere.invalid:1/none").close()


def test_a_socket_may_be_named_without_a_host() -> None:
    address_of("postgresql:///shop?host=/run/postgresql")


def test_what_is_not_ours_reaches_the_client_as_it_was_written() -> None:
    address = address_of("postgresql://db/shop?options=-c%20search_path%3Dshop&pool=2")
    assert address.conninfo == "postgresql://db/shop?options=-c%20search_path%3Dshop"


ODD = ["50%zzhunter2", "se?hunter2", "se@hunter2", "se/hunter2", "[hunter2", "hunter2]", "sec hunter2", "%00hunter2"]


@pytest.mark.parametrize("password", [*ODD, "\thunter2", "a b@c?hunter2"])
@pytest.mark.parametrize("opened", [open_store, PostgresStore])
def test_a_password_with_odd_characters_is_a_clear_error_that_does_not_show_it(
    password: str, opened: Callable[[str], object]
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        opened(f"postgresql://shop:{password}@db/shop")
    assert "hunter2" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert "write / as %2F" in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://db/shop?password=%00hunter2",
        "postgresql://db/shop?password=hunter2%zz",
        "postgresql://shop:hunter2@db:5432/shop?options",
        "host=db password='hunter2",
        "password=hunter2 host",
    ],
)
def test_an_address_that_cannot_be_read_is_told_without_what_is_in_it(address: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        PostgresStore(address)
    assert "hunter2" not in str(refused.value)


def test_an_address_is_printed_without_its_password() -> None:
    assert "hunter2" not in repr(PostgresStore("postgresql://shop:hunter2@db/shop").database.address)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("postgresql://db/shop?shema=billing", r'"shema"\): correct its name'),
        ("host=db shema=billing", r'"shema"\): correct its name'),
        ("postgresql://db/shop?schema=billing", r'"schema"\): give PostgresStore\(…, schema=…\)'),
    ],
)
def test_a_typo_in_a_setting_is_told_when_a_store_is_made(address: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        PostgresStore(address)


class _Refusal(psycopg.OperationalError):
    """As a client's library with codes would say it, from a server that speaks another language."""

    def __init__(self, code: str) -> None:
        super().__init__("connection failed: FATAL: so nicht")
        self.sqlstate = code


@pytest.mark.parametrize(("code", "kind"), [("28P01", ConfigurationError), ("3D000", ConfigurationError)])
def test_a_refusal_is_known_by_its_code(code: str, kind: type[Exception]) -> None:
    assert isinstance(address_of("postgresql://db/shop").refused(_Refusal(code)), kind)
    assert isinstance(address_of("postgresql://db/shop").refused(_Refusal("57P03")), StoreUnavailable)
