"""The command line: `sm70-moe`.

Exit codes: 0 done; 1 done, and the answer is no (a bound exceeded, a layer refused under --strict,
policies that differ); 2 bad input: the message names the thing, the value and what is accepted.

Commands import what they need when they run, so that `explain` never meets torch.
"""

from __future__ import annotations

import sys

import typer

from sm70_moe.cli import (
    bench,
    build_kernels,
    demo,
    doctor,
    explain,
    inspect,
    kernels,
    policy,
    predict,
    prepare,
    sample,
    verify,
)
from sm70_moe.errors import Sm70MoeError

app = typer.Typer(
    name="sm70-moe",
    help="Decides, explains and runs kernels for 4-bit mixture-of-experts layers on V100-class GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("explain")(explain.explain)
app.command("inspect")(inspect.inspect_command)
app.command("prepare")(prepare.prepare)
app.command("verify")(verify.verify)
app.command("sample")(sample.sample)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)
app.command("kernels")(kernels.kernels)
app.command("predict")(predict.predict)
app.command("bench")(bench.bench)
app.command("build-kernels")(build_kernels.build_kernels)
app.add_typer(policy.app, name="policy")


@app.command("version")
def version() -> None:
    """Print the version."""
    from sm70_moe import __version__

    typer.echo(__version__)


def main() -> None:
    """Entry point: errors of this package become one message and exit code 2."""
    try:
        app()
    except Sm70MoeError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
