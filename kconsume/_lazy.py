"""Names of a package that are imported at their first use.

The pytest plugin is a module of `kconsume`, and every pytest run of an environment loads it, also in projects that
do not use kconsume. So importing the package must be cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TypeAlias

Lookup: TypeAlias = Callable[[str], object]
Listing: TypeAlias = Callable[[], list[str]]


def lazily(package: str, modules: Mapping[str, str], names: dict[str, object]) -> tuple[Lookup, Listing]:
    """Return `__getattr__` and `__dir__` for a package.

    Args:
        package: its name, for the error about an unknown name.
        modules: each public name, and the full name of the module that defines it.
        names: the package's globals. A name that was looked up is stored there.
    """

    def look_up(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        names[name] = getattr(import_module(modules[name]), name)
        return names[name]

    return look_up, lambda: sorted({*names, *modules})
