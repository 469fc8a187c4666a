"""Types of other packages that handlers can ask for, and who provides them: DataFrames and Spark sessions.

A provider is a module that registers what it provides under the name of the other package. The provider is
imported when an annotation from that package is read for the first time, so importing kconsume imports neither the
provider nor the package. This module must not import a provider, nor a package whose types it knows by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kconsume._handlers.resources import Resource
from kconsume.records import Message

if TYPE_CHECKING:
    import pyarrow

PROVIDER_MODULES: Mapping[str, str] = {"pyspark": "kconsume.spark._sink.frame_provider"}
"""The module that registers a provider, by the top-level package of the annotation."""

TRANSACTION_ADDRESSES: Mapping[str, str] = {
    "sqlite3.Connection": "'sqlite:///file.db'",
    "psycopg.Connection": "'postgresql://host/database'",
    "psycopg.AsyncConnection": "'postgresql://host/database'",
    "sqlalchemy.orm.session.Session": "PostgresStore(engine=...)",
    "sqlalchemy.ext.asyncio.session.AsyncSession": "PostgresStore(engine=...)",
    "redis.client.Pipeline": "'redis://host/0'",
}
"""For errors: the `offsets=` that provides a transaction, by the full name of the transaction's type."""


@dataclass(frozen=True, slots=True, eq=False)
class FrameType:
    """A type of batch that is made from an Arrow table with the help of a resource."""

    resource_type: object
    """The type of that resource: the Spark session of a DataFrame."""
    make: Callable[[Any, pyarrow.Table, Sequence[Message]], object]
    """Makes the batch. Called with the resource, the table, and the messages that the table was made from."""


@dataclass(frozen=True, slots=True, eq=False)
class TypeProvider:
    """What one module provides for the types of one package."""

    frame_type: Callable[[object], FrameType | None]
    """Recognises the annotation of a batch. Returns None for any other type."""
    default_resource: Callable[[object], Resource | None]
    """Recognises the annotation of a resource that needs no `@app.resource`. Returns None for other types."""


_providers: dict[str, TypeProvider] = {}


def register_provider(package: str, provider: TypeProvider) -> None:
    """Register what a module provides. A provider calls it when it is imported.

    Args:
        package: the top-level package whose types the provider recognises.
    """
    _providers[package] = provider


def frame_type(hint: object) -> FrameType | None:
    """Return how a batch of the annotated type is made, or None if no provider makes it."""
    provider = _provider_of(hint)
    return None if provider is None else provider.frame_type(hint)


def default_resource(hint: object) -> Resource | None:
    """Return the resource that provides the annotated type without a declaration, or None if there is none."""
    provider = _provider_of(hint)
    return None if provider is None else provider.default_resource(hint)


def _provider_of(hint: object) -> TypeProvider | None:
    if not isinstance(hint, type):
        return None
    package = hint.__module__.partition(".")[0]
    if package not in _providers and package in PROVIDER_MODULES:
        import_module(PROVIDER_MODULES[package])
    return _providers.get(package)
