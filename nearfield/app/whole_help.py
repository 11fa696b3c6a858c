"""How the command line speaks: help that is not cut, and one line about an argument that is wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup


class Commands(TyperGroup):
    """Commands with their whole first paragraph in the list, on as many lines as it takes."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                rows.append((name, " ".join((command.help or "").partition("\n\n")[0].split())))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        given = (args, prog_name, complete_var, False, windows_expand_args)
        if not standalone_mode:
            return super().main(*given, **extra)
        try:
            code = super().main(*given, **extra)
        except typer.Abort:
            typer.echo("stopped", err=True)
            sys.exit(1)
        except Exception as error:
            # Typer brings its own copy of click, whose errors are known by what they can do.
            if not hasattr(error, "format_message"):
                raise
            context = getattr(error, "ctx", None)
            where = context.command_path if context is not None else "nearfield"
            said = " ".join(error.format_message().split()).removeprefix("Invalid value: ")
            typer.echo(f"{where}: {said.rstrip('.')}; see {where} --help", err=True)
            sys.exit(getattr(error, "exit_code", 1))
        sys.exit(code if isinstance(code, int) else 0)
