"""Names of a package that are imported when they are first used.

The pytest plugin lives below `kconsume`, and every pytest of an environment loads it, also where nobody consumes
anything: importing the package must cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TypeAlias

Lookup: TypeAlias = Callable[[str], object]
Listing: TypeAlias = Callable[[], list[str]]


def lazily(package: str, homes: Mapping[str, str], names: dict[str, object]) -> tuple[Lookup, Listing]:
    """`__getattr__` and `__dir__` of a package: each name with the module in it that has it. `names` are its globals,
    where a name is kept once it was looked up."""

    def look_up(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        names[name] = getattr(import_module(f"{package}.{homes[name]}"), name)
        return names[name]

    return look_up, lambda: sorted({*names, *homes})
