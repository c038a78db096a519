"""`sm70-moe policy`: check, show and compare policy files.

Exit codes: 0 fine, 1 the compared policies differ, 2 a policy cannot be read or is invalid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from sm70_moe.cli.output import UNCUT, AsJson, Grid, aside, line, print_json
from sm70_moe.errors import PolicyError
from sm70_moe.policy import Policy, Route, compare_policies, load_policy, shipped_policies
from sm70_moe.policy.schema import schema_text

app = typer.Typer(help="Check, show and compare policies.", no_args_is_help=True, add_completion=False)

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
            for problem in error.problems:
                line(problem)
        else:
            line(f"{policy.origin}: ok, {policy.name} revision {policy.revision}, digest {policy.digest}")
    if problems:
        aside(f"{problems} problem{'s' if problems > 1 else ''}")
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
    table(heads, rows).show(UNCUT)


@app.command()
def show(name: Name, as_json: AsJson = False) -> None:
    """Show one policy: contract, features, routes, reactions and evidence."""
    policy = opened(name)
    if as_json:
        print_json(headline(policy) | {"content": policy.record()})
        return
    line(f"{policy.name}   revision {policy.revision}   digest {policy.digest}", "bold")
    line(policy.summary)
    line(f"read from {policy.origin}")
    for part in tables(policy):
        line()
        part.show(UNCUT)


@app.command("schema")
def print_schema() -> None:
    """Print the JSON Schema of policy files."""
    for text in schema_text().splitlines():
        line(text)


@app.command("diff")
def diff(a: Name, b: Name, as_json: AsJson = False) -> None:
    """Compare two policies key by key; exit 0 if they are the same, 1 if they differ."""
    left, right = opened(a), opened(b)
    found = compare_policies(left, right)
    if as_json:
        print_json([{"key": d.key, "a": d.a, "b": d.b} for d in found])
    elif found:
        rows = ((d.key, plain(d.a), plain(d.b)) for d in found)
        table(("key", left.name, right.name), rows).show(UNCUT)
    else:
        line(f"no difference, digest {left.digest}")
    raise typer.Exit(1 if found else 0)


def opened(name: str) -> Policy:
    try:
        return load_policy(name)
    except PolicyError as error:
        raise stopped(error) from error


def stopped(error: PolicyError) -> typer.Exit:
    """Print the problems; the exit to raise."""
    for problem in error.problems:
        aside(problem)
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


def tables(policy: Policy) -> Iterator[Grid]:
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


def feature_row(policy: Policy, name: str) -> tuple[str | list[str], ...]:
    feature = policy.features[name]
    variables = [*feature.env, f"SM70_MOE_{name.upper()}"]
    native = "yes" if feature.native else ""
    lists = (plain(feature.needs), plain(feature.checks))
    return (name, feature.kind, feature.unset, *lists, native, variables, feature.doc)


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


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> Grid:
    """A filled table."""
    made = Grid(*heads)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, list) else str(cell) for cell in row))
    return made
