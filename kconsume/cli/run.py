"""`kconsume run`: consume until told to stop."""

from __future__ import annotations

import click

from kconsume import console
from kconsume.cli.target import app_argument, load

_LEVELS = ["debug", "info", "warning", "error"]


@click.command(short_help="Consume, until SIGTERM or a failure.")
@app_argument
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    envvar="KCONSUME_LOG_FORMAT",
    help="json: one object a line, with time, level, logger and message. Replaces what the program set up.",
)
@click.option(
    "--log-level",
    type=click.Choice(_LEVELS, case_sensitive=False),
    envvar="KCONSUME_LOG_LEVEL",
    help="How much is logged; info unless said otherwise.",
)
@click.option("--reload", is_flag=True, help="Start again when a Python file changes. For development.")
@click.option("--lifeline", type=int, hidden=True)
@click.pass_context
def run(
    context: click.Context,
    app: str | None,
    log_format: console.LogFormat | None,
    log_level: str | None,
    reload: bool,
    lifeline: int | None,
) -> None:
    """Consume with the handlers of APP, until SIGTERM, Ctrl-C or a failure.

    Then what runs is finished, offsets are committed, the group is left, and a report says how far it came;
    all within the app's shutdown= (25 seconds). A second signal leaves at once.

    \b
      kconsume run shop:app
      kconsume run shop:app --reload               start again when a Python file changes
      kconsume run shop:app --log-format json
      KCONSUME_APP=shop:app kconsume run

    \b
    Exit codes
      0      stopped as asked, everything drained
      1      a handler failed, or the broker or the store gave up; the report says how to see it again
      2      the configuration cannot work; nothing was consumed
      3      the time to stop was over with work unfinished; it is handled again at the next start
      128+n  a second signal n cut the drain short
    """
    if reload and app:
        from kconsume.cli.reload import run_and_reload

        console.set_up_logging(log_format, log_level)
        context.exit(run_and_reload(app, _options_of_a_child(context)))
    if lifeline is not None:
        from kconsume.cli.reload import follow

        follow(lifeline)
    found = load(app)
    console.set_up_logging(log_format, log_level)
    found.run()


def _options_of_a_child(context: click.Context) -> list[str]:
    """What was said on this command line, for the `kconsume run` that it starts."""
    options: list[str] = []
    for parameter in context.command.params:
        value = context.params[parameter.name or ""]
        if isinstance(parameter, click.Option) and parameter.name != "reload" and value not in (None, False):
            options += [parameter.opts[0]] if parameter.is_flag else [parameter.opts[0], str(value)]
    return options
