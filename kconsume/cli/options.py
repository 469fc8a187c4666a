"""Arguments and options that several commands share, and how their values are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import click

from kconsume.cli.app_loader import VARIABLE

Command = TypeVar("Command", bound=Callable[..., object])

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

app_argument = click.argument("app", required=False, envvar=VARIABLE, metavar="[APP]")
"""The argument APP, for `app_loader.load`. The default is `KCONSUME_APP`."""

optional_app_argument = click.argument("app", required=False, metavar="[APP]")
"""The argument APP of a command that also works with `source_options` alone. It has no default, because
`KCONSUME_APP` must not override these options: the command reads the variable itself."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def source_options(what: str) -> Callable[[Command], Command]:
    """The options `--brokers`, `--group` and `--offsets`. They name the cluster and the store if no APP is named.

    Args:
        what: what the command looks for in that store, for the help text of `--offsets`, such as "the outbox".
    """

    def add(command: Command) -> Command:
        for option in (
            click.option(
                "--offsets",
                metavar="ADDRESS",
                show_default="KCONSUME_OFFSETS",
                help=f"The store that has {what}, if no APP is named.",
            ),
            click.option(
                "--group", metavar="NAME", show_default="every group of the app", help="Only this consumer group."
            ),
            click.option(
                "--brokers",
                metavar="ADDRESS",
                show_default="KCONSUME_BROKERS",
                help="The cluster, if no APP is named.",
            ),
        ):
            command = option(command)
        return command

    return add


topic_option = click.option(
    "--topic", metavar="NAME", show_default="every topic of the app", help="Only the dead letters in this topic."
)
table_option = click.option(
    "--table", metavar="NAME", show_default="every table of the app", help="Only the dead letters in this table."
)


def yes_option(what: str) -> Callable[[Command], Command]:
    """The flag `--yes`. Without it, a command only shows what it would do.

    Args:
        what: a sentence that says what the command does with `--yes`.
    """
    return click.option("--yes", is_flag=True, help=f"{what} Without --yes, nothing is changed.")


def parse_time(_: click.Context, option: click.Parameter, text: str | None) -> datetime | None:
    """Parse a time in ISO 8601 (UTC if it has no zone), or an age such as `1h`, which means one hour ago."""
    if text is None:
        return None
    try:
        if span := re.fullmatch(r"([0-9]+)([smhd])", text):
            return datetime.now(UTC) - timedelta(**{_UNITS[span[2]]: int(span[1])})
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!r} is not a time: write 2026-11-17, 2026-11-17T08:30 (UTC), or how long ago, as in 90s, 30m, 1h "
            f"or 7d",
            param=option,
        ) from None
