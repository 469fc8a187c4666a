"""What led to an error: a store looks for its own fault among the causes, however a handler has wrapped it."""

from __future__ import annotations

from collections.abc import Iterator


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what led to it; also what somebody hid with `from None`, and what SQLAlchemy keeps in `orig`."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        original = getattr(error, "orig", None)
        error = original if isinstance(original, BaseException) else error.__cause__ or error.__context__
