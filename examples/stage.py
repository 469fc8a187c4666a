"""Where an example runs: a broker with its topics and a database, for the time of one run. For the runners, not for
the services."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

import psycopg
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from psycopg import sql

from kconsume.testing.broker import attach

PARTITIONS = 4


def new_stage() -> str:
    """A name that no other run has."""
    return f"run-{uuid.uuid4().hex[:8]}"


@contextmanager
def topics(brokers: str | None, stage: str, names: Sequence[str]) -> Iterator[str]:
    """The address of brokers that have these topics: those that are given, or an embedded one that all processes of
    this run share."""
    if brokers is None:
        broker = attach(stage, until_exit=True)
        for name in names:
            broker.create_topic(name, PARTITIONS)
        yield broker.bootstrap
        return  # it ends with this process
    admin = AdminClient({"bootstrap.servers": brokers})
    for made in admin.create_topics([NewTopic(name, num_partitions=PARTITIONS) for name in names]).values():
        made.result(30)
    try:
        yield brokers
    finally:
        for gone in admin.delete_topics(list(names)).values():
            gone.result(30)


@contextmanager
def database(server: str, stage: str) -> Iterator[str]:
    """The address of an empty database of this run's own, in a PostgreSQL that is there."""
    name = sql.Identifier(stage)
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(name))
    try:
        yield urlsplit(server)._replace(path=f"/{stage}").geturl()
    finally:
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(sql.SQL("drop database {} with (force)").format(name))


def clean_environment() -> dict[str, str]:
    """Without what is said there of the person's own apps."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KCONSUME_")}
