"""`sm70-moe policy`: check, show and compare policy files.

Exit codes: 0 fine, 1 the compared policies differ, 2 a policy cannot be read or is invalid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sm70_moe.cli.output import AsJson, console, print_json
from sm70_moe.cli.output import table as empty_table
from sm70_moe.errors import PolicyError
from sm70_moe.policy import Policy, Route, compare_policies, load_policy, shipped_policies
from sm70_moe.policy.schema import schema_text

app = typer.Typer(help="Check, show and compare policies.", no_args_is_help=True, add_completion=False)

PIPED_WIDTH = 100_000
"""Columns of a table that no terminal shows: nothing is ever cut or wrapped in a pipe."""

Files = Annotated[list[str], typer.Argument(help="Policy files, or names of shipped policies.")]
Name = Annotated[str, typer.Argument(help="A shipped policy's name, or the path of a .toml file.")]


@app.command("check")
def check_files(
    files: Annotated[list[str], typer.Argument(help="Policy files, or names of shipped policies.")],
) -> None:
    """Report every problem of every file; exit 0 if there is none, 2 otherwise."""
    problems = 0
    for file in files:
        try:
            policy = load_policy(file)
        except PolicyError as error:
            problems += len(error.problems)
            typer.echo(error)
        else:
            typer.echo(f"{policy.origin}: ok, {policy.name} revision {policy.revision}, digest {policy.digest}")
    if problems:
        typer.echo(f"{problems} problem{'s' if problems > 1 else ''}", err=True)
        raise typer.Exit(2)


@app.command("list")
def list_shipped(as_json: AsJson = False) -> None:
    """List the policies that come with the package."""
    try:
        policies = shipped_policies()
    except PolicyError as error:
        raise stopped(error) from error
    if as_json:
        print_json([headline(policy) for policy in policies])
        return
    heads = ("policy", "revision", "digest", "routes", "summary")
    rows = ((p.name, p.revision, p.digest[:8], ", ".join(r.name for r in p.routes), p.summary) for p in policies)
    output().print(table(heads, rows))


@app.command()
def show(name: Name, as_json: AsJson = False) -> None:
    """Show one policy: contract, features, routes, reactions and evidence."""
    policy = opened(name)
    if as_json:
        print_json(headline(policy) | {"content": policy.record()})
        return
    out = output()
    out.print(Text(f"{policy.name}   revision {policy.revision}   digest {policy.digest}", "bold"))
    out.print(Text(policy.summary))
    out.print(Text(f"read from {policy.origin}"))
    for part in tables(policy):
        out.print()
        out.print(part)


@app.command("schema")
def print_schema() -> None:
    """Print the JSON Schema of policy files."""
    typer.echo(schema_text(), nl=False)


@app.command("diff")
def diff(a: Name, b: Name, as_json: AsJson = False) -> None:
    """Compare two policies key by key; exit 0 if they are the same, 1 if they differ."""
    left, right = opened(a), opened(b)
    found = compare_policies(left, right)
    if as_json:
        print_json([{"key": d.key, "a": d.a, "b": d.b} for d in found])
    elif found:
        rows = ((d.key, plain(d.a), plain(d.b)) for d in found)
        output().print(table(("key", left.name, right.name), rows))
    else:
        typer.echo(f"no difference, digest {left.digest}")
    raise typer.Exit(1 if found else 0)


def opened(name: str) -> Policy:
    try:
        return load_policy(name)
    except PolicyError as error:
        raise stopped(error) from error


def stopped(error: PolicyError) -> typer.Exit:
    """Print the problems; the exit to raise."""
    typer.echo(error, err=True)
    return typer.Exit(2)


def headline(policy: Policy) -> dict[str, Any]:
    return {
        "name": policy.name,
        "revision": policy.revision,
        "digest": policy.digest,
        "summary": policy.summary,
        "origin": policy.origin,
        "features": list(policy.features),
        "routes": [route.name for route in policy.routes],
    }


def tables(policy: Policy) -> Iterator[Table]:
    """The parts of a policy as tables; empty ones are left out."""
    yield table(("contract", "value"), contract_rows(policy))
    if policy.features:
        heads = ("feature", "kind", "unset", "needs", "checks", "native", "variables", "what")
        yield table(heads, (feature_row(policy, name) for name in policy.features))
    routes = (route_row(route) for route in policy.routes)
    yield table(("route", "tokens", "feature", "backend", "banks", "call"), routes)
    yield table(("on", "reaction"), policy.on.model_dump().items())
    if policy.evidence:
        rows = ((e.route, e.claim, plain(e.bound), e.source, e.limits) for e in policy.evidence)
        yield table(("evidence", "claim", "bound", "source", "limits"), rows)


def contract_rows(policy: Policy) -> Iterator[tuple[str, str]]:
    values = policy.contract.model_dump(mode="json")
    weights = values.pop("weights")
    for key, value in (values | {f"weights.{key}": value for key, value in weights.items()}).items():
        yield key, "any" if value is None else plain(value)


def feature_row(policy: Policy, name: str) -> tuple[str, ...]:
    feature = policy.features[name]
    variables = (*feature.env, f"SM70_MOE_{name.upper()}")
    native = "yes" if feature.native else ""
    lists = (plain(feature.needs), plain(feature.checks))
    return (name, feature.kind, feature.unset, *lists, native, "\n".join(variables), feature.doc)


def route_row(route: Route) -> tuple[str, ...]:
    call = route.call.model_dump(exclude_none=True) if route.call else {}
    return (route.name, str(route.tokens), route.feature or "", route.backend, route.order or "any", plain(call))


def plain(value: Any) -> str:
    """A value of a policy as one line of text."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """A filled table; cells are plain text, whatever brackets they hold."""
    made = empty_table(*heads)
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    return made


def output() -> Console:
    """Where tables go: as wide as the terminal, without an end in a pipe."""
    made = console()
    if not made.is_terminal:
        made.width = PIPED_WIDTH
    return made
