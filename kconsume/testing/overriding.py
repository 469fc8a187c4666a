"""`override`: another broker, store, group, client or resource for an app, while a test lasts.

Handlers that use what the app says are matched anew with what is put in its place, as if the app had been made with it;
what a handler says for itself stays. Everything is put back at the end. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from kconsume.app import App
from kconsume.backends.abc import OffsetStore
from kconsume.errors import ConfigurationError
from kconsume.outlet import Outlet
from kconsume.registration import Declared, Registration
from kconsume.settings import ClientValue, check_group, check_overrides
from kconsume.testing.feeding import Fakes, known

_CLOSING = 5.0


@contextmanager
def override(
    app: App,
    *,
    brokers: str | None = None,
    offsets: str | OffsetStore | None = None,
    group: str | None = None,
    kafka: Mapping[str, ClientValue] | None = None,
    resources: Fakes | None = None,
) -> Iterator[App]:
    """Let the app use these instead of its own, inside the block.

    `offsets` and `group` hold for all handlers but those that name their own. An address in `offsets` is a new store:
    `"memory://"` is empty. `kafka` replaces all client properties; `{}` leaves none. `resources` are ready, by type.
    """
    if app._supervisor is not None:
        raise ConfigurationError("this app is running, and what it uses cannot be replaced now: override it before")
    given = known(app, resources)
    before = _Before.of(app)
    try:
        _replace(app, brokers, offsets, group, kafka)
        app._given = {**app._given, **given}
        app._outlet = None  # the one that is there leads to the brokers from before
        if offsets is not None or group is not None:
            _match_anew(app, before)
        yield app
    finally:
        before.put_back(app)


@dataclass(frozen=True, slots=True)
class _Before:
    """What an app was, as far as it can be replaced."""

    brokers: str
    offsets: str | OffsetStore
    group: str
    kafka: dict[str, ClientValue]
    given: dict[object, object]
    stores: dict[str, OffsetStore]
    registrations: list[Registration]
    outlet: Outlet | None

    @classmethod
    def of(cls, app: App) -> _Before:
        return cls(
            app.brokers,
            app.offsets,
            app.group,
            app.kafka,
            app._given,
            app._stores,
            list(app.registrations),
            app._outlet,
        )

    def put_back(self, app: App) -> None:
        outlet, opened = app._outlet, [store for address, store in app._stores.items() if self._is_new(address, store)]
        added = app.registrations[len(self.registrations) :]
        app.brokers, app.offsets, app.group, app.kafka = self.brokers, self.offsets, self.group, self.kafka
        app._given, app._stores, app._outlet = self.given, self.stores, self.outlet
        app.registrations[:] = self.registrations
        for registration in added:  # a module that was imported meanwhile is imported once and for all
            app._add_handler(_declared(registration))
        if outlet is not None and outlet is not self.outlet:
            outlet.close(_CLOSING)
        for store in opened:
            store.close()

    def _is_new(self, address: str, store: OffsetStore) -> bool:
        return self.stores.get(address) is not store


def _replace(
    app: App,
    brokers: str | None,
    offsets: str | OffsetStore | None,
    group: str | None,
    kafka: Mapping[str, ClientValue] | None,
) -> None:
    if brokers is not None:
        if not brokers or not isinstance(brokers, str):
            raise ConfigurationError(f"brokers={brokers!r} is no address: write 'host:port' or 'embedded://'")
        app.brokers = brokers
    if group is not None:
        app.group = check_group(group)
    if kafka is not None:
        check_overrides(kafka)
        app.kafka = dict(kafka)
    app._stores = dict(app._stores)
    if offsets is not None:
        if isinstance(offsets, str):
            app._stores.pop(offsets, None)
        app._store(offsets)
        app.offsets = offsets


def _match_anew(app: App, before: _Before) -> None:
    app.registrations.clear()
    for old in before.registrations:
        own = old.options
        group = app.group if own.group in (None, before.group) else old.group
        offsets = app.offsets if own.offsets is None or own.offsets == before.offsets else own.offsets
        new = Registration(_declared(old), group, offsets, app._store(offsets), app._resources)
        app._check_conflicts(new)
        app.registrations.append(new)


def _declared(registration: Registration) -> Declared:
    return Declared(registration.options, registration.binding.signature, registration._wraps)
