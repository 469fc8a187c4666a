"""What people test their handlers with.

Each name is imported when it is first used: the pytest plugin is in this package, and every pytest of the environment
loads it, also where nobody tests a handler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kconsume.testing.embedded import EmbeddedKafka
    from kconsume.testing.feeding import Fed, afeed, feed
    from kconsume.testing.overriding import override

__all__ = ["EmbeddedKafka", "Fed", "afeed", "feed", "override"]

_HOMES = {
    "EmbeddedKafka": "embedded",
    "Fed": "feeding",
    "afeed": "feeding",
    "feed": "feeding",
    "override": "overriding",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
