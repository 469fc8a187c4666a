"""`override`: another broker, store, group, client or resource for an app during a test.

Handlers that use the app's group and store are bound to the new ones, as if the app had been made with them. A handler
keeps a group or a store that it names itself. At the end the former settings apply again. This module runs no app.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kconsume._config.client_settings import ClientValue
from kconsume.app import App
from kconsume.backends.base import OffsetStore
from kconsume.testing._feed import Fakes, checked_resources


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
    """Let the app use other settings inside the block. None keeps the app's own.

    Args:
        app: the app. It must not be running.
        brokers: the address of the brokers.
        offsets: the offset store of handlers that name none. An address opens a new store: `"memory://"` is empty.
        group: the consumer group of handlers that name none.
        kafka: replaces all client properties; `{}` leaves none.
        resources: ready objects by type, in place of declared resources.
    """
    declared = app.declared.overridden(
        brokers=brokers, offsets=offsets, group=group, kafka=kafka, ready_resources=checked_resources(app, resources)
    )
    with app.using(declared):
        yield app
