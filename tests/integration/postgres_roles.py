"""A role of PostgreSQL that a test makes for itself, and what it connects with."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from kconsume.testing.services import LocalPostgres


class Role(NamedTuple):
    name: str
    url: str


@contextmanager
def a_role(url: str) -> Iterator[Role]:
    """One that may log in and no more, gone afterwards with all that it owns in this database."""
    name = f"role_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
        try:
            yield Role(name, as_user(url, name))
        finally:
            owner.execute(sql.SQL("drop owned by {}").format(sql.Identifier(name)))
            owner.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


@contextmanager
def a_server_with_passwords() -> Iterator[Callable[[str], str]]:
    """A server of its own, where role `shop` must say `right`: what it connects with, by what it says."""
    with LocalPostgres() as server:
        with psycopg.connect(server.url, autocommit=True) as owner:
            owner.execute("create role shop login password 'right'")
            owner.execute("grant create on schema public to shop")
        rules = server.data / "pg_hba.conf"
        rules.write_text("host all shop all scram-sha-256\n" + rules.read_text())
        server.stop()
        server.start()
        place = server.url.rpartition("@")[2]
        yield lambda password: f"postgresql://shop:{password}@{place}"


def as_user(url: str, user: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}").geturl()


def added(url: str, setting: str) -> str:
    """The address with one more setting."""
    return f"{url}{'&' if '?' in url else '?'}{setting}"
