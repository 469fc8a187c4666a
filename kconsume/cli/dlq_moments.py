"""Times as a person gives them to `kconsume dlq`: a moment in ISO 8601, or how long ago."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import click

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def moment_said(_: click.Context, option: click.Parameter, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        if span := re.fullmatch(r"([0-9]+)([smhd])", text):
            return datetime.now(UTC) - timedelta(**{_UNITS[span[2]]: int(span[1])})
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!r} is no time: write 2026-11-17, 2026-11-17T08:30 (UTC), or how long ago, as in 90s, 30m, 1h or 7d",
            param=option,
        ) from None
