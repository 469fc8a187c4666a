"""A click group that suggests the nearest command for a mistyped one."""

from __future__ import annotations

import difflib

import click


class CommandGroup(click.Group):
    """Lists commands in the order of their definition. The error for a mistyped command names the nearest one."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's signature)
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, known = args[0], self.list_commands(ctx)
        if name in known or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"The commands are: {', '.join(known)}."
        raise click.UsageError(f"No such command {name!r}. {hint}", ctx)
