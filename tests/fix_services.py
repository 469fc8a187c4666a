"""Fixtures for tests that need a real PostgreSQL or Redis: one server a run, and for each test a place of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from urllib.parse import urlsplit

import psycopg
import pytest
import redis
from psycopg import sql

from kconsume.testing.services import PostgresService, RedisService, postgres_service, redis_service
from tests.chaos.proxy import CuttingProxy


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresService]:
    """The run's one server, started by the first test that asks. A test that breaks servers makes its own."""
    with postgres_service() as service:
        yield service


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisService]:
    """As `postgres`. An address that a person gave should name a database for tests: it is emptied."""
    with redis_service() as service:
        yield service


@pytest.fixture
def postgres_url(postgres: PostgresService) -> Iterator[str]:
    """An empty database of this test's own."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    create_database(postgres.url, name)
    yield with_database(postgres.url, name)
    drop_database(postgres.url, name)


@pytest.fixture
def database(postgres_url: str) -> Iterator[psycopg.Connection]:
    """A connection to the test's own database, to look with: each statement commits by itself."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def cutting_proxy(postgres_url: str) -> Iterator[CuttingProxy]:
    """A proxy before the test's own database; it passes everything until it is told otherwise."""
    with CuttingProxy(postgres_url) as proxy:
        yield proxy


@pytest.fixture
def redis_url(redis_server: RedisService) -> str:
    """The run's Redis, empty."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushdb()
    return redis_server.url


def create_database(url: str, name: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        # The copy of files, and not of the log, is the faster one for a template that is as small as it comes.
        connection.execute(sql.SQL("create database {} strategy file_copy").format(sql.Identifier(name)))


def drop_database(url: str, name: str) -> None:
    """Also while the code under test is connected; one that is gone already is no error."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


def with_database(url: str, name: str) -> str:
    return urlsplit(url)._replace(path=f"/{name}").geturl()
