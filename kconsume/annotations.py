"""Annotations as they mean at run time, for handlers, resources and wraps: one way to read them, one set of words."""

from __future__ import annotations

import builtins
import inspect
import typing
from collections.abc import Callable, Mapping

from kconsume.errors import InvalidHandler


def hints_of(
    function: Callable[..., object],
    said: str,
    because: str,
    names: Mapping[str, object] | None = None,
    *,
    extras: bool = False,
) -> dict[str, object]:
    """The types of parameters and result. `said`: what the function is called in an error, `because`: why its
    annotations matter; `names`: the local names of the place where it is decorated; `extras`: with what `Annotated`
    says about them."""
    try:
        return typing.get_type_hints(function, localns=_visible(function, names or {}), include_extras=extras)
    except NameError as error:
        raise InvalidHandler(
            f"{said} has an annotation that does not exist at run time ({error}): import it outside "
            f"`if TYPE_CHECKING:`, because {because}"
        ) from error
    except Exception as error:  # an annotation is an expression, and may raise anything
        raise InvalidHandler(
            f"{said} has an annotation that cannot be read ({type(error).__name__}: {error}): correct it, because "
            f"{because}"
        ) from error


def _visible(function: Callable[..., object], names: Mapping[str, object]) -> dict[str, object]:
    """Of the names where it is decorated, those that it can mean: one that was written in a module, and not in
    a function, means the module's first."""
    innermost = inspect.unwrap(function)
    if "<locals>" in getattr(innermost, "__qualname__", ""):
        return dict(names)
    known = {**vars(builtins), **getattr(innermost, "__globals__", {})}
    return {name: value for name, value in names.items() if name not in known}
