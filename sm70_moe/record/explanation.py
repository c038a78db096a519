"""The story of a plan for a reader: which route would run, what stopped the others, what it takes.

The same content as plain records, and as text; the command line only adds colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sm70_moe.decision import Decision, Finding, Plain, obstacle_text
from sm70_moe.kernels.build.images import RUN_TIME
from sm70_moe.kernels.declared import ANY_SIZES
from sm70_moe.machine.build import Build
from sm70_moe.plan.layergroup import LayerGroup
from sm70_moe.plan.plan import Plan
from sm70_moe.plan.specialised import layer_of, sizes_of
from sm70_moe.plan.speed import speed_text
from sm70_moe.policy import Policy, TokenRange


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an explanation: a decision, or one finding under it (then `detail` is True)."""

    feature: str
    tokens: str
    outcome: str
    note: str
    reason: str = ""
    detail: bool = False


def tokens_text(tokens: TokenRange, last_resort: bool = False) -> str:
    if last_resort:
        return "otherwise"
    if tokens.last is None:
        return f"{tokens.first}+ tokens"
    if tokens.first == tokens.last:
        return f"{tokens.first} token" + ("" if tokens.first == 1 else "s")
    return f"{tokens.first}-{tokens.last} tokens"


SHARED = "every feature"


def shared_obstacles(decisions: Sequence[Decision]) -> tuple[Finding, ...]:
    """What stops every feature alike; a reader wants it once. Empty where anything is admitted."""
    asked = [decision.obstacles for decision in decisions if decision.flag != "off" and decision.kind != "flag"]
    if len(asked) < 2:
        return ()
    return tuple(finding for finding in asked[0] if all(finding in others for others in asked[1:]))


def lines_of(group: LayerGroup) -> list[Line]:
    """All lines of a group: what stops everything, then each decision."""
    decisions = group.example.decisions
    shared = shared_obstacles(decisions)
    lines = [Line(SHARED, "", "stopped", "")] if shared else []
    lines += [obstacle_line(SHARED, finding) for finding in shared]
    for decision in decisions:
        lines += decision_lines(group.example.policy, decision, shared)
    return lines


def decision_lines(policy: Policy, decision: Decision, told: tuple[Finding, ...] = ()) -> list[Line]:
    """A decision, then everything that stopped it and was not told before."""
    routes = [r for r in policy.routes if (r.feature or r.name) == decision.feature]
    tokens = ", ".join(tokens_text(r.tokens, r is policy.routes[-1]) for r in routes) or decision.kind
    flag = f"flag {decision.flag} ({decision.flag_source})" if decision.flag else ""
    lines = [Line(decision.feature, tokens, decision.outcome.value, flag)]
    if decision.flag != "off" or decision.kind == "flag":
        lines += [obstacle_line(decision.feature, finding) for finding in decision.obstacles if finding not in told]
    return lines


def obstacle_line(feature: str, finding: Finding) -> Line:
    return Line(feature, finding.check, finding.status.value, obstacle_text(finding), reason_name(finding), True)


def reason_name(finding: Finding) -> str:
    return finding.reason.name if finding.reason else ""


def heading(group: LayerGroup) -> str:
    policy, count = group.example.policy, group.count
    layers = f"{count} layer{'s' if count != 1 else ''}"
    digest = policy.digest[:8]
    return f"{group.name}   {layers}   policy {policy.name} (revision {policy.revision}, digest {digest})"


def refusal_lines(group: LayerGroup) -> list[str]:
    """A line where an engine would not start."""
    refused = ", ".join(decision.feature for decision in group.example.refused)
    return [f"an engine would refuse to start: {refused}"] if refused else []


def memory_line(plan: Plan, layers: int) -> str:
    """Banks of all the group's layers together; the workspace is the device's, so it counts once."""
    if plan.memory is None:
        return "memory per rank: none, no route can run this layer"
    banks = plan.memory.banks * layers
    resident = plan.admission.resident_tokens
    workspace = max((size for (_, tokens), size in plan.memory.workspace.items() if tokens <= resident), default=0)
    return (
        f"memory per rank: banks {size_text(banks)} ({plan.memory.chosen.value} metadata), "
        f"workspace up to {size_text(workspace)} for {resident} tokens, shared by all layers"
    )


def build_line(plan: Plan) -> str:
    """The native build that was asked, and whether its kernels were made for the layer's sizes or for any."""
    admission = plan.admission
    machine, build = admission.machine, admission.machine.build
    if build is None:
        return "native build: " + ("none" if machine.build_looked_up else "not looked for, since no flag wants it")
    if build.id != build.expected:
        return f"native build: stale, {build.id}"  # no id at all where its record cannot be read
    return f"native build: {build.id[:16]}{version_text(plan, build)}"


def version_text(plan: Plan, build: Build) -> str:
    """Which version of the kernels the native routes take; nothing without such a route."""
    sized = build.sizes.keys() - ANY_SIZES
    natives = [route for route in plan.routes if route.choice.version and route.backend in sized]
    if not natives:
        return ""
    if any(route.choice.version == RUN_TIME for route in natives):
        sizes, layer = sizes_of(plan.admission), layer_of(plan.admission)
        possible = build.specialiser and any(build.wanted(route.backend, sizes, layer) for route in natives)
        hint = build.specialiser.missing if build.specialiser and possible else ""
        return ", kernels for any sizes" + (f"; none for these sizes can be compiled: {hint}" if hint else "")
    if any(route.choice.images != build.id for route in natives):
        return ", kernels for these sizes, compiled once on each machine"
    return ", kernels made for these sizes"


def size_text(size: int) -> str:
    """Bytes in binary units."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def explain(groups: Sequence[LayerGroup]) -> str:
    """The table of all groups as plain text."""
    blocks: list[str] = []
    for group in groups:
        rows = [heading(group), *map(line_text, lines_of(group))]
        rows += refusal_lines(group)
        plan = Plan(group.example)
        rows += [f"runs: {speed_text(plan)}", build_line(plan), memory_line(plan, group.count)]
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks)


def line_text(line: Line) -> str:
    if line.detail:
        return f"      {line.tokens:<22}  {line.note}" + (f"   {line.reason}" if line.reason else "")
    return f"  {line.feature:<22}{line.tokens:<14}{line.outcome:<12}{line.note}".rstrip()


def group_record(group: LayerGroup) -> dict[str, Plain]:
    """One group as plain JSON types."""
    example, plan = group.example, Plan(group.example)
    return {
        "layers": list(group.layers),
        "count": group.count,
        "policy": {"name": example.policy.name, "revision": example.policy.revision, "digest": example.policy.digest},
        "facts": example.facts.record(),
        "supported": plan.supported,
        "refused": [decision.feature for decision in example.refused],
        "decisions": [decision.record() for decision in example.decisions],
        "routes": [r.name for r in plan.routes],
        "layout": plan.layout.tag if plan.layout else None,
        "memory": plan.memory.record() if plan.memory else None,
        "plan": plan.digest,
        "runs": speed_text(plan),
        "native_build": build_line(plan).removeprefix("native build: "),
    }
