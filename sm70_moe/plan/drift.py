"""What changed since the plans were made. Reported, never acted on: a restart makes new plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sm70_moe.decision import Finding, Plain, Reason
from sm70_moe.errors import PolicyError
from sm70_moe.machine.machine import Machine
from sm70_moe.policy import load_policy
from sm70_moe.settings.settings import Change, Settings
from sm70_moe.settings.variables import KNOWN_NAMES

HINT = "restart needed: plans keep what they were made from"


@dataclass(frozen=True, slots=True)
class Origin:
    """What plans were made from. `policies` maps the place of a policy to its digest, `aliases` are what they read."""

    settings: Settings
    policies: Mapping[str, str]
    machine: Machine
    aliases: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Present:
    """The same things as they are now.

    `environment` is raw, since it need not be valid any more. A policy that cannot be read any more
    has no digest.
    """

    environment: Settings | Mapping[str, str]
    policies: Mapping[str, str | None]
    machine: Machine


def drift(then: Origin, now: Present) -> tuple[Finding, ...]:
    """Findings for environment, policies, native build and devices; only what differs fails."""
    return (
        *environment(then, now.environment),
        *policies(then.policies, now.policies),
        build(then.machine, now.machine),
        devices(then.machine, now.machine),
    )


def environment(then: Origin, now: Settings | Mapping[str, str]) -> tuple[Finding, ...]:
    changes = then.settings.changes(now, then.aliases)
    if not changes:
        return (Finding.passed("environment"),)
    known = {*KNOWN_NAMES, *then.aliases}
    return tuple(
        Finding.failed(f"environment {c.name}", Reason.ENVIRONMENT_CHANGED, *told(c, c.name in known), HINT)
        for c in changes
    )


def told(change: Change, known: bool) -> tuple[str | None, str | None]:
    """Before and after; of a name that nobody knows not the values, which may be another program's secrets."""
    if known:
        return change.before, change.after
    return change.before and "a value", change.after and "another value"


def policies(then: Mapping[str, str], now: Mapping[str, str | None]) -> tuple[Finding, ...]:
    return tuple(
        Finding.passed(f"policy {name}", digest)
        if now.get(name) == digest
        else Finding.failed(f"policy {name}", Reason.POLICY_CHANGED, digest, now.get(name), HINT)
        for name, digest in then.items()
    )


def build(then: Machine, now: Machine) -> Finding:
    if not then.build_looked_up:
        return Finding.skipped("native build", "it was not looked up: every native flag is 0")
    before, after = (machine.build.id if machine.build else None for machine in (then, now))
    if before == after:
        return Finding.passed("native build", before)
    return Finding.failed("native build", Reason.BUILD_CHANGED, before, after, HINT)


def devices(then: Machine, now: Machine) -> Finding:
    before, after = device_names(then), device_names(now)
    if before == after:
        return Finding.passed("devices", before)
    return Finding.failed("devices", Reason.MACHINE_CHANGED, before, after, HINT)


def device_names(machine: Machine) -> Plain:
    return [f"{device.name} {device.architecture}" for device in machine.devices]


def digest_now(path: str) -> str | None:
    """Digest of a policy's file now; None if it is gone or not valid any more."""
    try:
        return load_policy(path).digest
    except PolicyError:
        return None
