"""A role of PostgreSQL that a test makes for itself, and what it connects with."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import psycopg
from psycopg import sql


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


def as_user(url: str, user: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}").geturl()


def added(url: str, setting: str) -> str:
    """The address with one more setting."""
    return f"{url}{'&' if '?' in url else '?'}{setting}"
