"""The causes of an error. A store looks for its own errors among the causes, because handlers may wrap errors."""

from __future__ import annotations

from collections.abc import Iterator


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """The error and all its causes, also causes that `from None` hides, and causes that SQLAlchemy keeps in `orig`."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        original = getattr(error, "orig", None)
        error = original if isinstance(original, BaseException) else error.__cause__ or error.__context__
