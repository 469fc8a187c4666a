"""Log events: a name that a human can grep for, then fields.

`_log = EventLog("rebalance")`, then `_log.warning("partition lost", partition=p, cause=error)` writes the line
`partition lost partition=orders/3 cause="..."` to the logger `kconsume.rebalance`. A handler that writes JSON
reads `event` and `fields` from the log record instead of the text. Event names are constants: they are listed on
one docs page, and a test compares that page with the code. Formatting happens only if the level is enabled.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import msgspec

from kconsume.errors import KconsumeError


class EventLog:
    """Writes events to one logger of the package.

    Args:
        name: the part after `kconsume.`; the empty name is the logger `kconsume` itself.
    """

    __slots__ = ("logger",)

    def __init__(self, name: str = "") -> None:
        self.logger = logging.getLogger(f"kconsume.{name}" if name else "kconsume")

    def debug(self, event: str, /, **fields: object) -> None:
        self._write(logging.DEBUG, event, fields, None)

    def info(self, event: str, /, **fields: object) -> None:
        self._write(logging.INFO, event, fields, None)

    def warning(self, event: str, /, *, exc_info: BaseException | None = None, **fields: object) -> None:
        self._write(logging.WARNING, event, fields, exc_info)

    def error(self, event: str, /, *, exc_info: BaseException | None = None, **fields: object) -> None:
        self._write(logging.ERROR, event, fields, exc_info)

    def at(self, level: int, event: str, /, *, exc_info: BaseException | None = None, **fields: object) -> None:
        """Write at a level that was computed, or at CRITICAL."""
        self._write(level, event, fields, exc_info)

    def _write(self, level: int, event: str, fields: Mapping[str, object], error: BaseException | None) -> None:
        if self.logger.isEnabledFor(level):
            extra = {"event": event, "fields": {name: field_value(value) for name, value in fields.items()}}
            self.logger.log(level, "%s", _Line(event, fields), exc_info=error, extra=extra, stacklevel=3)


def field_value(value: object) -> object:
    """Return a field as a JSON value: numbers, booleans and None unchanged, collections as lists, the rest as text.

    A named tuple, such as `Partition`, is text. An error that is not kconsume's own is shown with its class.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): field_value(each) for name, each in value.items()}
    if type(value) is tuple or (isinstance(value, Collection) and not isinstance(value, bytes | tuple)):
        return [field_value(each) for each in value]
    if isinstance(value, BaseException) and not isinstance(value, KconsumeError):
        return f"{type(value).__name__}: {value}"
    return str(value)


class _Line:
    """The text of an event, made only when a log handler formats the line."""

    __slots__ = ("_event", "_fields")

    def __init__(self, event: str, fields: Mapping[str, object]) -> None:
        self._event = event
        self._fields = fields

    def __str__(self) -> str:
        return " ".join((self._event, *(f"{name}={_text(field_value(v))}" for name, v in self._fields.items())))


def _text(value: object) -> str:
    """Return one word, or a quoted text. The items of a list are joined by commas."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ",".join(map(_text, value)) or "-"
    if isinstance(value, dict):
        return ",".join(f"{name}@{_text(each)}" for name, each in value.items()) or "-"
    text = " ".join(str(value).split())
    return msgspec.json.encode(text).decode() if not text or " " in text or '"' in text else text
