"""Finds the topics and tables of dead letters: those that an app writes, or those that the user names.

Reads no letters: `LetterTopics` reads topics, and `LetterReader` reads tables.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

import click

from kconsume._config import environment
from kconsume._config.client_settings import masked_address
from kconsume._handlers.registration import Registration
from kconsume.app import App
from kconsume.backends import open_store
from kconsume.backends.base import OffsetStore
from kconsume.backends.dead_letters.reader import LetterReader, letters_in
from kconsume.cli.app_loader import VARIABLE, load
from kconsume.cli.letter_topics import LetterTopics
from kconsume.errors import ConfigurationError
from kconsume.failures.dead_letter import DeadLetter


@dataclass(frozen=True)
class TopicPlace:
    """A topic of dead letters."""

    name: str
    topics: LetterTopics
    named: bool
    """True if the user named the topic on the command line."""


@dataclass(frozen=True)
class TablePlace:
    """A table of dead letters. It may not exist yet."""

    name: str
    store: str
    """The address of the store, without a password."""
    letters: LetterReader
    named: bool
    kept_in: OffsetStore

    def missing(self) -> str:
        """Say that the table does not exist. If the user named the table, raise `ConfigurationError`; otherwise return
        a sentence to print, because the first dead letter will create the table."""
        if self.named:
            raise ConfigurationError(
                f"{self.store} has no table {self.name}: correct --table; the first dead letter creates the table"
            )
        return "the table does not exist yet: the first dead letter creates it"


Place: TypeAlias = TopicPlace | TablePlace


@dataclass(frozen=True)
class PlaceChoice:
    """The places that the user named on the command line."""

    app: str | None
    brokers: str | None
    group: str | None
    offsets: str | None
    topic: str | None = None
    table: str | None = None

    def __post_init__(self) -> None:
        if self.topic and self.table:
            raise click.UsageError("--topic and --table both say where to look: give one of the two")
        if self.app and (self.brokers or self.offsets):
            raise click.UsageError("APP, and --brokers or --offsets, both say where to look: give one of the two")
        if self.topic:
            DeadLetter(self.topic)  # raises an error for an invalid topic name
        if self.table:
            DeadLetter(table=self.table)

    def load(self) -> App | None:
        """The app that the argument or `KCONSUME_APP` names; None without a name."""
        name = self.app or (None if self.brokers or self.offsets else os.environ.get(VARIABLE))
        return load(name) if name else None

    def places(self, app: App | None) -> list[Place]:
        """All places to read, each once. `app` is the result of `load`."""
        if app is None:
            return [self._table_by_address() if self.table else self._topic_by_address()]
        registrations = self._registrations(app)
        if self.topic:
            return [TopicPlace(self.topic, LetterTopics(app.brokers, app.kafka), named=True)]
        found = {_key(r): r for r in registrations if r.policy.dead_letter is not None}
        if self.table:
            found = {key: r for key, r in found.items() if key[1] == self.table}
        if not found:
            raise self._nowhere(registrations)
        return [_place(app, registration) for registration in found.values()]

    def table_place(self, app: App | None) -> TablePlace:
        """The only table; raises `ConfigurationError` if there are none or several."""
        if app is None:
            return self._table_by_address()
        tables = [place for place in self.places(app) if isinstance(place, TablePlace)]
        if len(tables) == 1:
            return tables[0]
        if not tables:
            raise ConfigurationError(
                "the app writes its dead letters to topics, where a letter is named by its place: write orders.dlq/0@17"
            )
        if self.table:
            raise ConfigurationError(
                f"the app has a table {self.table} in several stores: choose one with --offsets ADDRESS, and no APP"
            )
        names = " or ".join(sorted({place.name for place in tables}))
        raise ConfigurationError(f"the app has several tables of dead letters: choose one with --table {names}")

    def topics(self, app: App | None) -> LetterTopics:
        """A reader for the dead-letter topics of the cluster."""
        if app is not None:
            return LetterTopics(app.brokers, app.kafka)
        variables = environment.read(os.environ)
        brokers = self.brokers or variables.brokers
        if not brokers:
            raise ConfigurationError(
                f"no cluster was named: write MODULE:APP, as in shop:app, or set {VARIABLE}, or give --brokers ADDRESS"
            )
        return LetterTopics(brokers, variables.kafka)

    def _registrations(self, app: App) -> list[Registration]:
        registrations = [r for r in app.registrations if self.group in (None, r.group)]
        if app.registrations and not registrations:
            raise ConfigurationError(f"the app has no group {self.group!r}: correct --group, or leave it out")
        return registrations

    def _nowhere(self, registrations: list[Registration]) -> ConfigurationError:
        there = [r.policy.dead_letter for r in registrations if r.policy.dead_letter is not None]
        if self.table and there:
            return ConfigurationError(
                f"no handler of the app has on_error=DeadLetter(table={self.table!r}), only "
                f"{', '.join(sorted(set(map(repr, there))))}: correct --table, or give --offsets ADDRESS and no APP"
            )
        return ConfigurationError(
            "no handler of the app has on_error=DeadLetter(...), so it writes no dead letters: add it, or name a "
            "place: --topic, or --offsets and --table without APP"
        )

    def _topic_by_address(self) -> TopicPlace:
        if not self.topic:
            raise ConfigurationError(
                f"no topic or table was named: write MODULE:APP, as in shop:app, or set {VARIABLE}, or give --brokers "
                f"and --topic, or --offsets and --table"
            )
        return TopicPlace(self.topic, self.topics(None), named=True)

    def _table_by_address(self) -> TablePlace:
        variables = environment.read(os.environ)
        offsets = self.offsets or variables.offsets
        if not offsets or not self.table:
            raise ConfigurationError(
                f"no table was named: write MODULE:APP, as in shop:app, or set {VARIABLE}, or give both --offsets "
                f"ADDRESS and --table NAME"
            )
        return _in_store(open_store(offsets), self.table, named=True)


def _key(registration: Registration) -> tuple[str | None, str | None, int]:
    """A key that is equal for handlers that write to the same place."""
    dead_letter = registration.policy.dead_letter
    assert dead_letter is not None
    return dead_letter.topic, dead_letter.table, 0 if dead_letter.table is None else id(registration.store)


def _place(app: App, registration: Registration) -> Place:
    dead_letter = registration.policy.dead_letter
    assert dead_letter is not None
    if dead_letter.table is not None:
        return _in_store(registration.store, dead_letter.table, named=False)
    assert dead_letter.topic is not None
    return TopicPlace(dead_letter.topic, LetterTopics(app.brokers, app.kafka), named=False)


def _in_store(store: OffsetStore, table: str, *, named: bool) -> TablePlace:
    return TablePlace(table, masked_address(store.address), letters_in(store, table), named, store)
