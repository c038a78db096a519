"""The command line: `sm70-moe`.

Exit codes: 0 done; 1 done, and the answer is no (a bound exceeded, a layer refused under --strict,
policies that differ); 2 bad input: the message names the thing, the value and what is accepted; 3 not done, and
nobody has foreseen why, or nothing could be written to standard output; 130 interrupted; 143 terminated; 141 the
reader of the output left.

A command's module is imported when that command is asked for, so that `explain` meets neither torch nor numpy.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sm70_moe.cli.ending import kept_apart, run

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "explain": "explain:explain",
        "inspect": "inspect:inspect_command",
        "prepare": "prepare:prepare",
        "verify": "verify:verify",
        "sample": "sample:sample",
        "doctor": "doctor:doctor",
        "demo": "demo:demo",
        "kernels": "kernels:kernels",
        "predict": "predict:predict",
        "bench": "bench:bench",
        "build-kernels": "build_kernels:build_kernels",
        "policy": "policy:app",
        "version": "version:version",
    }
)
"""Name -> module of this room, and what in it is the command: a function, or an app with commands of its own."""


class Commands(TyperGroup):
    """The commands of the program; each is imported when it is needed.

    Contexts and commands are click's, or those of a copy of it that newer versions of typer have: no type fits both.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        names: Any = dict.fromkeys(COMMANDS)
        self.commands.update(names)  # where typer looks for names that are like a mistyped one

    def make_context(self, *given: Any, **options: Any) -> Any:
        with kept_apart():
            return super().make_context(*given, **options)

    def invoke(self, ctx: Any) -> Any:
        with kept_apart(whole=ctx.params.get("traceback", False)):
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        found = getattr(import_module(f"sm70_moe.cli.{module}"), attribute)
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        if isinstance(found, typer.Typer):
            alone = found
        else:
            alone.command(cmd_name)(found)
        command = typer.main.get_command(alone)
        command.name = cmd_name
        return command


CODES = (
    "Exit codes: 0 done; 1 done, and the answer is no; 2 bad input; 3 unforeseen, or the output could not be written; "
    "130 interrupted; 143 terminated; 141 the reader of the output left."
)

app = typer.Typer(
    name="sm70-moe",
    cls=Commands,
    help="Decides, explains and runs kernels for 4-bit mixture-of-experts layers on V100-class GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(epilog=CODES)
def program(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Where an error comes from that nobody has foreseen (exit code 3).")
    ] = False,
) -> None:
    """Decides, explains and runs kernels for 4-bit mixture-of-experts layers on V100-class GPUs."""


def main() -> None:
    """Entry point: whatever happens becomes one line and an exit code."""
    sys.exit(run(partial(typer.main.get_command(app), standalone_mode=False)))
