"""Annotations at run time: how they are read, taken apart, and written in errors.

Handlers, resources, wraps and listeners use the same functions, so their errors use the same words.
"""

from __future__ import annotations

import builtins
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence

from kconsume.errors import InvalidHandler


def hints_of(
    function: Callable[..., object],
    subject: str,
    because: str,
    names: Mapping[str, object] | None = None,
    *,
    extras: bool = False,
) -> dict[str, object]:
    """Return the types of the parameters and of the result. Raises InvalidHandler if one cannot be read.

    Args:
        function: the function whose annotations are read.
        subject: what the error calls the function.
        because: why the annotations matter. The error ends with this text.
        names: the local names of the place where the function is decorated.
        extras: True to keep what `Annotated` adds to a type.
    """
    try:
        return typing.get_type_hints(function, localns=_visible_names(function, names or {}), include_extras=extras)
    except NameError as error:
        raise InvalidHandler(
            f"{subject} has an annotation that does not exist at run time ({error}): import it outside "
            f"`if TYPE_CHECKING:`, because {because}"
        ) from error
    except Exception as error:  # an annotation is an expression, and may raise anything
        raise InvalidHandler(
            f"{subject} has an annotation that cannot be read ({type(error).__name__}: {error}): correct it, because "
            f"{because}"
        ) from error


def _visible_names(function: Callable[..., object], names: Mapping[str, object]) -> dict[str, object]:
    """Return the local names that an annotation of the function can mean.

    For a function that is defined at module level, a name of its module wins over a local name.
    """
    innermost = inspect.unwrap(function)
    if "<locals>" in getattr(innermost, "__qualname__", ""):
        return dict(names)
    known = {**vars(builtins), **getattr(innermost, "__globals__", {})}
    return {name: value for name, value in names.items() if name not in known}


# Parts of an annotation


def bare(hint: object) -> object:
    """Return the type without what `Annotated` adds to it."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def metadata_of(hint: object) -> tuple[object, ...]:
    """Return the metadata that `Annotated` adds to the type."""
    return typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()


def annotated(hint: object, metadata: tuple[object, ...]) -> object:
    """Return the type with metadata, or the type itself if there is none."""
    return typing.Annotated[(hint, *metadata)] if metadata else hint


def is_union(hint: object) -> bool:
    """Return whether the type is `A | B`."""
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def without_none(hint: object) -> tuple[object, bool]:
    """Return the type without None, and whether None was in it. What `Annotated` adds to the type stays."""
    inner = bare(hint)
    if not is_union(inner):
        return hint, False
    members = typing.get_args(inner)
    rest = tuple(member for member in members if member is not type(None))
    if not rest or len(rest) == len(members):
        return hint, False
    return annotated(typing.Union[rest], metadata_of(hint)), True  # noqa: UP007  (built from a tuple at run time)


def union_members(hint: object) -> Iterator[object]:
    """Yield the types of a union, and of unions inside it. A type that is not a union is yielded unchanged."""
    inner = bare(hint)
    if not is_union(inner):
        yield hint
        return
    for member in typing.get_args(inner):
        yield from union_members(member)


# Types in errors


def text_of(hint: object) -> str:
    """Return the type as a user writes it: `Placed | None`."""
    hint = bare(hint)
    if isinstance(hint, type) and not typing.get_args(hint):
        return last_name(hint.__qualname__)
    if is_union(hint):
        return " | ".join("None" if m is type(None) else text_of(m) for m in typing.get_args(hint))
    return str(hint).replace("typing.", "")


def full_name(hint: object) -> str:
    """Return the name of the type with its module."""
    return f"{getattr(hint, '__module__', '')}.{getattr(hint, '__qualname__', '')}"


def distinct_names(hint: object, offered: Sequence[object]) -> tuple[str, list[str]]:
    """Return the name of the type that the handler asks for, and the names of the types that are offered.

    Types that share a name are shown with their modules, because several transaction types are called Connection.
    """
    alike = [each for each in offered if text_of(each) == text_of(hint)]
    return (full_name(hint) if alike else text_of(hint)), [full_name(e) if e in alike else text_of(e) for e in offered]


def last_name(qualified: str) -> str:
    """Return a qualified name without the names of the functions around its definition."""
    return qualified.rpartition("<locals>.")[2]
