"""Mutation run of one room: small changes of meaning are made in its functions, and its tests must notice.

    python tests/mutation/run.py ROOM... --scratch FOLDER [--sample N] [--seed S]

Works on a copy of the checkout in FOLDER/ROOM and leaves the checkout alone. It needs mutmut and the suite's own
requirements (tests/mutation/constraints.txt); it is no part of CI. docs/testing.md has the scores.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NATIVE = "sm70_moe/kernels/native"

ROOMS: dict[str, tuple[list[str], list[str]]] = {
    "admission": (["sm70_moe/admission/*.py"], ["tests/admission", "tests/matrix/test_fallback.py"]),
    "checks": (
        ["sm70_moe/admission/checks/*.py"],
        [
            "tests/admission",
            "tests/kernels/native/test_availability.py",
            "tests/kernels/native/test_foreign.py",
            "tests/machine",
        ],
    ),
    "plan": (["sm70_moe/plan/*.py"], ["tests/plan", "tests/admission/test_admission.py"]),
    "policy": (["sm70_moe/policy/*.py"], ["tests/policy", "tests/admission/test_declared_layout.py"]),
    "settings": (["sm70_moe/settings/*.py"], ["tests/settings"]),
    "numbers": (["sm70_moe/numbers/*.py"], ["tests/numbers", "tests/formats/test_values.py"]),
    "steps": (
        [f"{NATIVE}/steps.py", f"{NATIVE}/launch.py", "sm70_moe/kernels/arguments.py"],
        ["tests/kernels/native", "tests/kernels/test_arguments.py", "tests/kernels/test_declared.py"],
    ),
    "bounds": (["sm70_moe/reference/bounds.py"], ["tests/reference"]),
}
"""A room: the files whose functions are changed, and the tests that run against each change."""

# a fresh interpreter does not see the change that this process runs under
STARTS_ANOTHER = "not import_reads_neither and not loading_imports_neither and not import_has_no"
VERDICTS = {0: "survived", 1: "killed", 3: "killed", 33: "no test", 37: "killed"}


def copy_checkout(place: Path) -> None:
    """What git knows of the checkout, and the machine code that lies in it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    machine_code = [str(path.relative_to(ROOT)) for path in (ROOT / "sm70_moe/kernels/cubins").rglob("*.*")]
    for name in [*filter(None, listed.stdout.decode().split("\0")), *machine_code]:
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)


def configure(place: Path, files: list[str], tests: list[str]) -> None:
    """mutmut reads setup.cfg of the folder that it runs in."""
    content = configparser.ConfigParser()
    options = ["-p", "no:cacheprovider", "--benchmark-disable", "--hypothesis-profile=quick", "-k", STARTS_ANOTHER]
    content["mutmut"] = {
        "source_paths": "\nsm70_moe",
        "only_mutate": "\n" + "\n".join(files),
        "also_copy": "\n" + "\n".join(p.name for p in sorted(place.iterdir()) if p.name not in ("mutants", "tests")),
        "pytest_add_cli_args_test_selection": "\n" + "\n".join(tests),
        "pytest_add_cli_args": "\n" + "\n".join(options),
        "timeout_multiplier": "6",
        "timeout_constant": "2",
    }
    with (place / "setup.cfg").open("w") as stream:
        content.write(stream)


def names_of(place: Path, files: list[str]) -> list[str]:
    """Every change that mutmut makes of the files, by its name."""
    from mutmut.configuration import reset_config
    from mutmut.mutation.file_mutation import mutate_file_contents

    with contextlib.chdir(place):  # where its settings are
        reset_config()
        return [
            f"{'.'.join(path.relative_to(place).with_suffix('').parts)}.{name}"
            for pattern in files
            for path in sorted(place.glob(pattern))
            for name in mutate_file_contents(str(path), path.read_text(encoding="utf-8")).mutant_names
        ]


def verdicts(place: Path) -> Iterator[tuple[str, str]]:
    """Each change that was run, and what came of it."""
    for path in sorted((place / "mutants").rglob("*.meta")):
        for name, code in json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"].items():
            if code is not None:
                yield name, VERDICTS.get(code, "killed" if code in (-24, 24, 152, 36, 255) else f"exit {code}")


def show(place: Path, name: str) -> str:
    """The change as a diff, without its head."""
    from mutmut.configuration import reset_config
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    with contextlib.chdir(place):
        reset_config()
        text = get_diff_for_mutant(name)
    return "\n".join(line for line in text.splitlines() if not re.match(r"(---|\+\+\+) ", line))


TEXT = re.compile(r"""("[^"]*"|'[^']*')(?!:)""")  # a key of a dict is no wording


def is_wording(diff: str) -> bool:
    """Does a change alter nothing but what stands in quotes? No test asserts on wording."""
    changed = [[line[1:] for line in diff.splitlines() if line.startswith(sign)] for sign in "-+"]
    return bool(changed[0]) and [TEXT.sub("", line) for line in changed[0]] == [
        TEXT.sub("", line) for line in changed[1]
    ]


def score(verdicts: Collection[str]) -> str:
    killed = sum(verdict == "killed" for verdict in verdicts)
    return f"{killed} of {len(verdicts)} ({100 * killed / max(1, len(verdicts)):.0f} %)"


def run(room: str, place: Path, sample: int, seed: int) -> None:
    """Make the copy, run the changes, print the room's row and its survivors."""
    files, tests = ROOMS[room]
    copy_checkout(place)
    configure(place, files, tests)
    names = names_of(place, files)
    chosen = sorted(random.Random(seed).sample(names, sample)) if 0 < sample < len(names) else names
    tool = Path(sys.executable).with_name("mutmut")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    with (place / "run.log").open("w") as log:
        command = [tool, "run", "--max-children", "1", *(chosen if len(chosen) < len(names) else [])]
        subprocess.run(command, cwd=place, check=False, env=environment, stdout=log, stderr=log)
    found = dict(verdicts(place))
    counts = Counter(found.values())
    diffs = {name: show(place, name) for name in found}
    meant = [verdict for name, verdict in found.items() if not is_wording(diffs[name])]
    print(f"{room}: {len(names)} changes, {len(found)} run, {dict(counts)}", flush=True)
    print(f"killed {score(found.values())}, without those of wording alone {score(meant)}", flush=True)
    for name in [name for name, verdict in found.items() if verdict != "killed"]:
        print(f"\n{name}: {found[name]}{', wording alone' if is_wording(diffs[name]) else ''}", flush=True)
        print(diffs[name], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="+", choices=sorted(ROOMS))
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--sample", type=int, default=0, help="how many changes of a room, at random (0: all)")
    parser.add_argument("--seed", type=int, default=9)
    options = parser.parse_args()
    for room in options.rooms:
        place = options.scratch.resolve() / room
        place.mkdir(parents=True, exist_ok=True)
        run(room, place, options.sample, options.seed)


if __name__ == "__main__":
    main()
