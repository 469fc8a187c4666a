"""`kconsume run`: consumes until a signal or a failure."""

from __future__ import annotations

import click

from kconsume import _console
from kconsume.cli.app_loader import load
from kconsume.cli.options import app_argument

_LEVELS = ["debug", "info", "warning", "error"]


@click.command(short_help="Consume until SIGTERM or a failure.")
@app_argument
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    envvar="KCONSUME_LOG_FORMAT",
    show_default="text, or KCONSUME_LOG_FORMAT",
    help="json: one object a line, with time, level, logger and message. Replaces the program's own logging set-up.",
)
@click.option(
    "--log-level",
    type=click.Choice(_LEVELS, case_sensitive=False),
    envvar="KCONSUME_LOG_LEVEL",
    show_default="info, or KCONSUME_LOG_LEVEL",
    help="The lowest level that is logged.",
)
@click.option("--reload", is_flag=True, help="Start again when a Python file changes, for development.")
@click.option("--lifeline", type=int, hidden=True)
@click.pass_context
def run(
    context: click.Context,
    app: str | None,
    log_format: _console.LogFormat | None,
    log_level: str | None,
    reload: bool,
    lifeline: int | None,
) -> None:
    """Consume with the handlers of APP, until SIGTERM, Ctrl-C or a failure.

    To stop, the process lets running handlers finish, commits offsets, leaves the group, and prints a report. This
    takes at most the app's shutdown= (25 seconds by default). A second signal ends the process at once.

    \b
      kconsume run shop:app
      kconsume run shop:app --reload               start again when a Python file changes
      kconsume run shop:app --log-format json
      KCONSUME_APP=shop:app kconsume run

    \b
    Exit codes
      0      the app was stopped, and everything was drained
      1      a handler, the broker or the store failed; the report says how to repeat the failure
      2      the configuration cannot work; nothing was consumed
      3      shutdown= passed with unfinished work; the work is done again after the next start
      128+n  a second signal, n, ended the drain
    """
    if reload and app:
        from kconsume.cli.reload import run_and_reload

        _console.set_up_logging(log_format, log_level)
        context.exit(run_and_reload(app, _options_for_child(context)))
    if lifeline is not None:
        from kconsume.cli.reload import follow

        follow(lifeline)
    found = load(app)
    _console.set_up_logging(log_format, log_level)
    found.run()


def _options_for_child(context: click.Context) -> list[str]:
    """The options of this command line, for the `kconsume run` that it starts."""
    options: list[str] = []
    for parameter in context.command.params:
        value = context.params[parameter.name or ""]
        if isinstance(parameter, click.Option) and parameter.name != "reload" and value not in (None, False):
            options += [parameter.opts[0]] if parameter.is_flag else [parameter.opts[0], str(value)]
    return options
