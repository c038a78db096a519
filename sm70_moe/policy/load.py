"""Loading: from a name, a file or a text to a policy, or to a list of everything that is wrong."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sm70_moe import opening
from sm70_moe.errors import PolicyError
from sm70_moe.files import text_of
from sm70_moe.policy.check import check
from sm70_moe.policy.document import Policy
from sm70_moe.policy.fault import Fault
from sm70_moe.policy.lines import key_lines, line_of
from sm70_moe.policy.wording import one_of

MARK = "\ufeff"
"""A byte order mark, where somebody else has decoded the text."""

_SYNTAX_LINE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


def policies_folder() -> Path:
    """Where the shipped policies lie: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "policies", package.parent / "policies"):
        if (folder / "schema.json").is_file():
            return folder
    raise PolicyError([f"{package / 'policies'}: found no shipped policies, accepted a complete installation"])


def load_policy(
    name_or_path: str | os.PathLike[str], *, backends: Iterable[str] | None = None, piped: bool = True
) -> Policy:
    """Load a shipped policy by name, or a file: a path that ends in .toml or has a separator.

    `backends` are the names that routes may use; by default the registered ones. `piped`: the file may be a
    pipe, which settings never wait for. Raises
    PolicyError with every problem, each with file, line and key.
    """
    name = os.fspath(name_or_path)
    if name.endswith(".toml") or "/" in name or os.sep in name:
        return load_file(Path(name), backends, piped)
    shipped = {path.stem: path for path in shipped_files()}
    if name not in shipped:
        raise PolicyError([f"policy {name!r}: no such shipped policy, accepted {one_of(name, shipped)}, or a path"])
    return load_file(shipped[name], backends)


def load_policies(name: str | None, *, piped: bool = False) -> tuple[Policy, ...]:
    """The policies that may speak about a layer; `choose_policy` picks among them.

    All shipped ones if none is named; the named one alone; for a folder, its `*.toml` files beside
    the shipped ones, a file's policy in the place of a shipped one of the same name.
    """
    if name is None:
        return shipped_policies()
    if not os.path.isdir(name):
        return (load_policy(name, piped=piped),)
    own = load_all(sorted(Path(name).glob("*.toml")))
    if not own:
        raise PolicyError([f"{name}: the folder has no policy; accepted are files named *.toml"])
    return tuple({policy.name: policy for policy in (*shipped_policies(), *own)}.values())


def shipped_policies() -> tuple[Policy, ...]:
    """Every shipped policy, by name. Raises PolicyError with the problems of all of them."""
    return load_all(shipped_files())


def load_all(paths: Iterable[Path]) -> tuple[Policy, ...]:
    """The policies of these files, by name; two files of one name are a problem like others."""
    policies: dict[str, Policy] = {}
    problems: list[str] = []
    for path in paths:
        try:
            policy = load_file(path, None)
        except PolicyError as error:
            problems += error.problems
            continue
        if policy.name in policies:
            problems.append(f"{path}: name: found {policy.name!r}, which {policies[policy.name].origin} has as well")
        policies[policy.name] = policy
    if problems:
        raise PolicyError(problems)
    return tuple(policies[name] for name in sorted(policies))


LARGEST = 1 << 20
"""Bytes of a policy's file; the shipped ones have less than 10,000."""


def shipped_files() -> list[Path]:
    return sorted(policies_folder().glob("*.toml"))


def load_file(path: Path, backends: Iterable[str] | None, piped: bool = False) -> Policy:
    try:
        content = opening.content(path, LARGEST, piped=piped)
    except OSError as error:
        reason = opening.reason(error)
        raise PolicyError([f"{path}: cannot be read: {reason}, accepted a TOML file"]) from error
    try:
        text = text_of(content)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{content[error.start]:02x}"
        raise PolicyError([f"{path}:{line}: not UTF-8: found {found}, accepted UTF-8 text"]) from error
    except ValueError as error:
        raise PolicyError([f"{path}:1: {error}"]) from error
    return parse_policy(text, str(path), backends=backends)


def parse_policy(text: str, origin: str = "<text>", *, backends: Iterable[str] | None = None) -> Policy:
    """A policy from the text of a file; `origin` names the file in problems."""
    policy, faults = check(parse_toml(text, origin), origin, backends)
    if faults or policy is None:
        raise PolicyError(problem_lines(text, origin, faults))
    return policy


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    if text.startswith(MARK):
        raise PolicyError([f"{origin}:1: found a byte order mark (BOM), accepted text without one"])
    try:
        return tomllib.loads(text)
    except ValueError as error:
        found = _SYNTAX_LINE.search(str(error))
        line = found[1] if found and found[1] else text.count("\n") + 1
        what = str(error)[: found.start()] if found else str(error)
        raise PolicyError([f"{origin}:{line}: not TOML: {what}"]) from error
    except RecursionError as error:
        raise PolicyError([f"{origin}: not a policy: found arrays or tables nested too deeply"]) from error


def problem_lines(text: str, origin: str, faults: list[Fault]) -> list[str]:
    """Faults as lines of text, in the order of the file."""
    lines = key_lines(text)
    placed = sorted((line_of(lines, fault.where), place, fault.text) for place, fault in enumerate(faults))
    return list(dict.fromkeys(f"{origin}:{line}: {problem}" for line, _, problem in placed))
