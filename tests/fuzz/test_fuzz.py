"""Damaged and made-up inputs, from real ones, by chance: only errors of ours come out.

`--fuzz SECONDS` is how long each kind is tried, `--fuzz-seed N` where it begins; a failure tells both and the input.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.patterns import Pattern
from sm70_moe.errors import Sm70MoeError
from sm70_moe.kernels.build.images import RECORD, Cubins
from sm70_moe.kernels.machinecode.elf import Cubin
from sm70_moe.policy import load_policy
from sm70_moe.prediction.measurements import load_run
from sm70_moe.settings.given import read_env_file

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
NUMBERS = (b"-1", b"1e999", b"99999999999999999999", b"NaN")
ODD = (*NUMBERS, b"\x00", b"\xff", b"[" * 999, b'"', b"\\u0000", b"null", b"{}", b"a.b")
"""What parsers trip over."""


def damaged(chance: random.Random, good: bytes) -> bytes:
    """A few bytes changed, cut out, doubled, or replaced by something odd."""
    content = bytearray(good)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(content) + 1)
        end = min(len(content), at + chance.choice((0, 1, 4, 40)))
        part = bytes(content[at:end])
        kinds = (b"", part * 2, bytes(chance.randbytes(len(part))), chance.choice(ODD), part[::-1])
        content[at:end] = chance.choice(kinds)
    return bytes(content)


def run_kind(pytestconfig: pytest.Config, good: bytes, read: Callable[[bytes], object]) -> None:
    seconds, seed = pytestconfig.getoption("--fuzz"), pytestconfig.getoption("--fuzz-seed")
    end = time.process_time() + seconds
    tried = 0
    while time.process_time() < end:
        content = damaged(random.Random(f"{seed} {tried}"), good)
        try:
            read(content)
        except Sm70MoeError:
            pass
        except BaseException as error:
            pytest.fail(f"seed {seed}, input {tried}: {type(error).__name__}: {error}\n{content[:2000]!r}")
        tried += 1
    print(f"{tried} inputs in {seconds} s from seed {seed}")


def of_file(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def written(content: bytes) -> object:
        path.write_bytes(content)
        return read(path)

    return written


def test_policies(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """TOML of a shipped one."""
    good = (ROOT / "policies" / "sample-awq-tp2.toml").read_bytes()
    run_kind(pytestconfig, good, of_file(tmp_path / "x.toml", lambda path: load_policy(str(path))))


def test_env_files(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Quotes, comments, ours and others'."""
    good = b"# x\nSM70_MOE_STRICT=1\nexport SM70_MOE_POLICY='a b'\nPATH=\"x\\n\"\nSM70_MOE_CACHE=/c # y\n"
    run_kind(pytestconfig, good, of_file(tmp_path / ".env", read_env_file))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_checkpoints(pytestconfig: pytest.Config, good: Path, name: str) -> None:
    """Headers and declarations: opened, and every layer's facts asked."""

    def read(path: Path) -> None:
        checkpoint = Checkpoint.open(path.parent)
        for layer in checkpoint.layers:
            checkpoint.facts(layer, tensor_parallel=2, tensor_rank=0, device="cpu")
            checkpoint.check(layer)

    content = (good / name).read_bytes()
    if name == "model.safetensors":
        content = content[: 8 + int.from_bytes(content[:8], "little")]
    run_kind(pytestconfig, content, of_file(good / name, read))


def test_cubins(pytestconfig: pytest.Config) -> None:
    """ELF of a small one."""
    run_kind(pytestconfig, (DATA / "kernels" / "sm_70.cubin").read_bytes(), Cubin.parse)


def test_records_of_builds(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """BUILD.json, opened and every image read."""

    def read(path: Path) -> None:
        cubins = Cubins.open(path.parent)
        for image in cubins.images[:3] if cubins else ():
            cubins.read(image)

    record = json.loads((DATA / "prediction" / "build" / RECORD).read_text())
    record["images"] = record["images"][:3]
    run_kind(pytestconfig, json.dumps(record).encode(), of_file(tmp_path / RECORD, read))


def test_results(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """JSON of `bench`, as `predict` reads it."""
    record = json.loads((DATA / "prediction" / "h200-run9.json").read_text())
    record["rows"] = record["rows"][:4]
    run_kind(pytestconfig, json.dumps(record).encode(), of_file(tmp_path / "x.json", load_run))


def test_patterns(pytestconfig: pytest.Config) -> None:
    """Regular expressions of skip lists."""
    good = rb"^(?!.*shared)(?=.*experts).*\.(1[0-9]|2[0-3])\.\w+{1,3}(?:a|b)*$"
    run_kind(pytestconfig, good, lambda content: Pattern(content.decode(errors="replace")))
