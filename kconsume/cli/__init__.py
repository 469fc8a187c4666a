"""The command line `kconsume`: one file a command, imported when it is used.

Here is what they share: their order, and how an error ends the process. An error of kconsume is a sentence on
standard error and its own exit code, without a traceback.
"""

from __future__ import annotations

from importlib import import_module

import click

from kconsume import __version__
from kconsume.errors import KconsumeError

_COMMANDS = {
    "demo": "kconsume.cli.demo:demo",
    "new": "kconsume.cli.new:new",
    "run": "kconsume.cli.run:run",
    "check": "kconsume.cli.check:check",
    "send": "kconsume.cli.send:send",
    "try": "kconsume.cli.rehearse:rehearse",
    "failed": "kconsume.cli.failed:failed",
    "dlq": "kconsume.cli.dlq:dlq",
    "outbox": "kconsume.cli.outbox:outbox",
    "schema": "kconsume.cli.schema:schema",
    "plan": "kconsume.cli.plan:plan",
    "broker": "kconsume.cli.broker:broker",
}


class Commands(click.Group):
    """The commands in the order a person meets them."""

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
            _tell(error)
            ctx.exit(error.exit_code)


def _tell(error: KconsumeError) -> None:
    click.echo(f"error: {error}", err=True)
    for note in getattr(error, "__notes__", ()):
        for line in note.splitlines():
            click.echo(f"  {line}", err=True)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", message="kconsume %(version)s")
def commands() -> None:
    """Decorate a function, get a production Kafka consumer.

    \b
      kconsume demo                     see it work: one consumer is killed, nothing is lost
      kconsume new shop                 a project to begin with: a handler, and a test that passes
      kconsume run shop:app             consume with the App named app in shop.py
      kconsume check shop:app           what would run, with what guarantee, and what is wrong with it?
      kconsume send orders '{"id": 1}'  write a record by hand
      kconsume try shop:app orders/3@1042
                                        what does my handler do with that record?
      kconsume dlq list shop:app        what failed for good, and why?
      kconsume dlq redrive shop:app     which of them would pass today? With --yes they are sent back
      kconsume outbox list shop:app     what has not been sent yet, and what blocks it?
      kconsume broker shop              a Kafka to develop against, with nothing to install

    APP is written MODULE:ATTRIBUTE, as in shop.consumers:app; the attribute is app unless said otherwise.
    Set KCONSUME_APP to leave it out.
    """


def main() -> None:
    """The program `kconsume`."""
    commands(prog_name="kconsume")
