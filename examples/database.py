"""Creates a database for one run of an example. Only the commands that run the examples use it, not the services."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psycopg
from psycopg import sql


@contextmanager
def database(server: str, stage: str) -> Iterator[str]:
    """Yield the address of a new, empty database, which is dropped afterwards.

    server: the address of a PostgreSQL whose user may create databases.
    stage: the name of the database.
    """
    name = sql.Identifier(stage)
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(name))
    try:
        yield urlsplit(server)._replace(path=f"/{stage}").geturl()
    finally:
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(sql.SQL("drop database {} with (force)").format(name))
