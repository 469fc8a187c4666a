"""The command line `kconsume`: one module or package for each command, imported when the command is used.

A `KconsumeError` ends the process with the exit code of its class. Its text is printed on standard error, without a
traceback.
"""

from __future__ import annotations

from importlib import import_module

import click

from kconsume import __version__
from kconsume.cli.command_group import CommandGroup
from kconsume.errors import KconsumeError

_COMMANDS = {
    "demo": "kconsume.cli.demo.command:demo",
    "new": "kconsume.cli.new:new",
    "run": "kconsume.cli.run:run",
    "check": "kconsume.cli.check.command:check",
    "send": "kconsume.cli.send:send",
    "try": "kconsume.cli.try_record:try_record",
    "failed": "kconsume.cli.failed.command:failed",
    "dlq": "kconsume.cli.dlq.command:dlq",
    "outbox": "kconsume.cli.outbox.command:outbox",
    "schema": "kconsume.cli.schema:schema",
    "plan": "kconsume.cli.plan:plan",
    "broker": "kconsume.cli.broker:broker",
}


class Commands(CommandGroup):
    """All commands, in the order of `kconsume --help`. Imports a command's module on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's signature)
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  (as above)
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KconsumeError as error:
            _print_error(error)
            ctx.exit(error.exit_code)


def _print_error(error: KconsumeError) -> None:
    click.echo(f"error: {error}", err=True)
    for note in getattr(error, "__notes__", ()):
        for line in note.splitlines():
            click.echo(f"  {line}", err=True)


@click.group(
    cls=Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(__version__, "-V", "--version", message="kconsume %(version)s")
def commands() -> None:
    """Decorate a function, get a production Kafka consumer.

    \b
      kconsume demo                     watch a takeover: one consumer is killed, nothing is lost
      kconsume new shop                 make a project: a handler, and a test that passes
      kconsume run shop:app             consume with the App named app in shop.py
      kconsume check shop:app           show handlers, guarantees, and problems to correct
      kconsume send orders '{"id": 1}'  write a record by hand
      kconsume try shop:app orders/3@1042
                                        run a handler on that record, and roll back
      kconsume dlq list shop:app        count dead letters, by topic and cause
      kconsume dlq redrive shop:app     try dead letters again; --yes sends them back
      kconsume outbox list shop:app     show outbox rows that are not sent yet, and why
      kconsume broker shop              start a Kafka in memory, with nothing to install

    Write APP as MODULE:ATTRIBUTE, such as shop.consumers:app. The default ATTRIBUTE is app. If APP is left out, the
    variable KCONSUME_APP names the app.
    """


def main() -> None:
    """Entry point of the program `kconsume`."""
    commands(prog_name="kconsume")
