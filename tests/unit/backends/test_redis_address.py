"""Which addresses and clients a Redis store takes, and that no word of a password is in what it says of the others."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import redis
import redis.asyncio

from kconsume.backends import RedisStore, open_store
from kconsume.backends.redis.connection import RedisConnection
from kconsume.errors import ConfigurationError, StoreUnavailable


class TestAddresses:
    @pytest.mark.parametrize(
        ("url", "address"),
        [
            ("redis://localhost", "redis://localhost:6379/0"),
            ("redis://shop:s3cret@db:7000/2?tag=eu", "redis://shop@db:7000/2?tag=eu"),
            ("redis://:s3cret@db", "redis://db:6379/0"),
            ("rediss://db:7000/0", "rediss://db:7000/0"),
            ("redis://db?password=s3cret", "redis://db:6379/0"),
            ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock"),
        ],
    )
    def test_the_address_is_shown_without_the_password(self, url: str, address: str) -> None:
        assert RedisStore(url).address == address

    def test_an_address_opens_no_connection(self) -> None:
        store = open_store("redis://127.0.0.1:1/0?tag=shop")
        assert isinstance(store, RedisStore)
        with pytest.raises(StoreUnavailable):
            store.groups()

    @pytest.mark.parametrize(
        "url",
        [
            "redis://shop:s3cret/more@db:6379/0",
            "redis://:s3cret#more@db/0",
            "redis://:s3cret?more@db/0",
            "redis://:s3cret/more@db/0?tag=shop",
            "redis://:more[s3cret@db/0",
            "redis://shop:s3cret",
            "redis://shop:s3cret@db:99999/0",
            "redis://shop:s3cret@db/0#here",
            "unix://:s3cret/more@/run/redis.sock",
        ],
    )
    def test_a_password_that_is_not_encoded_is_refused_with_the_way_to_encode_it_and_not_shown(self, url: str) -> None:
        """Where it ends is not known, so no word of the address is in the error, nor in what led to it."""
        with pytest.raises(ConfigurationError, match="# as %23") as refused:
            RedisStore(url)
        assert "s3cret" not in repr(refused.value)
        assert refused.value.__cause__ is None
        assert refused.value.__suppress_context__ or refused.value.__context__ is None

    def test_an_encoded_password_arrives_as_it_was(self) -> None:
        store = RedisStore("redis://shop:a%2Fb%3Fc%23d%40e@db:7000/1")
        assert store._connection.pool.connection_kwargs["password"] == "a/b?c#d@e"
        assert "a/b" not in repr(store) + repr(store._connection.pool)

    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("redis://db/shop", "'/shop' .* not a database number"),
            ("redis://db/O", "'/O' .* not a database number"),
            ("redis://db/0/1", "'/0/1' .* not a database number"),
            ("redis://db/-1", "not a database number"),
            ("redis://db/1?db=2", "names its database twice"),
            ("redis://db?db=-1", "no database -1"),
            ("redis://db?db=x", "correct their values"),
            ("redis://db:0/0", "port 0"),
            ("redis://d..b/0", "not a host name"),
            ("redis://u:s3cret@db?no_such=1", "'no_such' .* is not a setting: choose from tag, db"),
            ("redis://u:s3cret@db?retry=3", "'retry' .* is not a setting"),
            ("redis://db?ssl_ca_certs=x", "is not a setting"),
            ("redis://db?tag=", "tag= .* has no value"),
            ("redis://db?tag={a}", "cannot be a hash tag"),
            ("redis://db?tag=a&tag=b", "has one of tag twice"),
            ("redis://db?socket_timeout=", "has no value"),
            ("redis://db?socket_timeout=0", "not a timeout"),
            ("redis://db?socket_timeout=-1", "not a timeout"),
            ("redis://db?socket_timeout=inf", "not a timeout"),
            ("redis://db?socket_connect_timeout=nan", "not a timeout"),
            ("redis://db?protocol=9", "correct their values"),
            ("redis://db?max_connections=-1", "correct their values"),
            ("unix://?db=0", "names no socket"),
            ("http://db", "must begin with redis://"),
        ],
    )
    def test_an_address_that_cannot_be_is_refused_at_once_with_the_fix(self, url: str, says: str) -> None:
        with pytest.raises(ConfigurationError, match=says) as refused:
            RedisStore(url)
        assert "s3cret" not in repr(refused.value)

    @pytest.mark.parametrize("client", [object(), redis.asyncio.Redis(socket_timeout=5), "redis://db"])
    def test_a_client_of_another_kind_is_refused_with_the_fix(self, client: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"takes a redis\.Redis, and this is a"):
            RedisStore(client=client)

    @pytest.mark.parametrize("settings", [{"socket_timeout": 0}, {"socket_timeout": 1e12}, {"host": "d..b"}])
    def test_a_client_that_can_only_fail_is_refused(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError):
            RedisStore(client=redis.Redis(**{"socket_timeout": 5, **settings}))

    @pytest.mark.parametrize("arguments", [{"url": 5}, {"url": b"redis://db"}, {"url": "redis://db", "tag": 5}])
    def test_arguments_of_another_type_are_refused_with_the_fix(self, arguments: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError):
            RedisStore(**arguments)

    def test_without_the_package_the_extra_is_named(self) -> None:
        code = """
import sys
sys.modules["redis"] = None
from kconsume.backends import open_store
try:
    open_store("redis://localhost")
except Exception as error:
    print(type(error).__name__, error)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.startswith("MissingExtra"), done
        assert "pip install 'kconsume[redis]'" in done.stdout

    def test_one_of_address_and_client_is_needed(self) -> None:
        with pytest.raises(ConfigurationError):
            RedisStore()
        with pytest.raises(ConfigurationError):
            RedisStore("redis://localhost", client=redis.Redis())

    def test_answers_are_waited_for_with_a_deadline_unless_said_otherwise(self) -> None:
        connection: RedisConnection = RedisStore("redis://localhost")._connection
        assert connection.pool.connection_kwargs["socket_timeout"] == 5.0
        assert connection.pool.connection_kwargs["retry"].get_retries() == 0
        assert RedisStore("redis://db?socket_timeout=1")._connection.pool.connection_kwargs["socket_timeout"] == 1.0
