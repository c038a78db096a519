"""inspect: what a checkpoint holds and what each number of ranks would mean, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sm70_moe.checkpoint.sample import write_sample

TINY = Path(__file__).parents[1] / "data" / "tiny-qwen3-moe-awq"
LAYER = "model.layers.{}.mlp.experts"


def layers_of(command, folder: Path, code: int = 0) -> list[dict[str, Any]]:
    ended = command("inspect", folder, "--json")
    assert ended.code == code
    return json.loads(ended.out)["layers"]


@pytest.fixture
def change(tmp_path: Path):
    """A small checkpoint of 4 layers with its tensors and config edited."""

    def edited(edit=None, group: int = 32, **config: object) -> Path:
        folder = tmp_path / "checkpoint"
        write_sample(folder, hidden=128, intermediate=192, experts=6, top_k=2, layers=4, group=group, seed=0)
        path = folder / "model.safetensors"
        arrays = load_file(path)
        if edit is not None:
            edit(arrays)
        save_file(arrays, path)
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, **config}))
        return folder

    return edited


def unquantise(arrays: dict[str, Any], layer: int) -> None:
    """Plain weights for all experts of a layer."""
    prefix = LAYER.format(layer)
    for name in [name for name in arrays if name.startswith(prefix) and name.endswith(".scales")]:
        matrix = name.removesuffix(".scales")
        k, n = arrays[f"{matrix}.qweight"].shape[0], arrays[name].shape[1]
        for kind in ("qweight", "qzeros", "scales"):
            del arrays[f"{matrix}.{kind}"]
        arrays[f"{matrix}.weight"] = np.zeros((n, k), np.float16)


def test_the_first_contract(command, tmp_path: Path) -> None:
    """48 layers as in CONTRACT 7: TP 4 native with its bytes, TP 8 refused with the numbers."""
    folder = tmp_path / "big"
    assert command("sample", folder, "--policy", "qwen3.8-flash-next-awq-tp4", "--layers", 2, "--headers").code == 0
    (group,) = layers_of(command, folder)
    assert (group["name"], group["count"], group["kind"]) == ("model.layers.0-1.mlp.experts", 2, "quantised")
    four = group["tensor_parallel"]["4"]
    assert (four["verdict"], four["group"], four["intermediate"], four["experts"]) == ("native", 32, 160, 512)
    assert {kind: size * 24 for kind, size in four["bytes"].items()} == {
        "4-byte": 15_099_494_400 + 3_774_873_600,
        "3-byte": 15_099_494_400 + 3_774_873_600 - 943_718_400,
        "2.5-byte": 15_099_494_400 + 2_359_296_000,
    }
    eight = group["tensor_parallel"]["8"]
    assert (eight["verdict"], eight["finding"]["reason"]) == ("refused", "SHARD_CUTS_GROUP")
    assert "gcd(80, 32) = 16" in eight["finding"]["observed"]
    assert group["expert_parallel"]["8"]["experts"] == 64


def test_another_group(command, tmp_path: Path) -> None:
    """sample --group: intermediate 640 in groups of 128 is re-grouped to 32 at TP 4, and native at TP 1."""
    folder = tmp_path / "wide"
    arguments = ("--policy", "qwen3.8-flash-next-awq-tp4", "--layers", 1, "--headers", "--group", 128)
    assert command("sample", folder, *arguments).code == 0
    (group,) = layers_of(command, folder)
    cuts = {ranks: (cut["verdict"], cut["group"]) for ranks, cut in group["tensor_parallel"].items()}
    assert cuts == {"1": ("native", 128), "2": ("re-grouped", 64), "4": ("re-grouped", 32), "8": ("refused", None)}


def test_experts_that_do_not_divide(command, change) -> None:
    """6 experts over 4 ranks: the fullest has 2."""
    (group,) = layers_of(command, change())
    assert {ranks: cut["experts"] for ranks, cut in group["expert_parallel"].items()} == {
        "1": 6,
        "2": 3,
        "4": 2,
        "8": 1,
    }


def test_a_mixed_model(command, change) -> None:
    """Layers by kind: one unquantised, one beyond the model's own layers, the others together."""

    def edit(arrays: dict[str, Any]) -> None:
        unquantise(arrays, 1)

    found = layers_of(command, change(edit, num_hidden_layers=3))
    assert [(group["name"], group["kind"], group["aside"]) for group in found] == [
        ("model.layers.0,2.mlp.experts", "quantised", False),
        ("model.layers.1.mlp.experts", "unquantised", False),
        ("model.layers.3.mlp.experts", "quantised", True),
    ]
    assert found[1]["tensor_parallel"] == {}
    assert found[1]["stopped"] == []


def test_other_bits(command, change) -> None:
    """A format that cannot be read is named with its reason; nothing is said about ranks."""
    quantization = {"quant_method": "awq", "version": "gemv", "bits": 4, "group_size": 32, "zero_point": True}
    (group,) = layers_of(command, change(quantization_config=quantization))
    assert group["kind"] == "not readable"
    assert [finding["reason"] for finding in group["stopped"]] == ["FORMAT"]
    assert group["tensor_parallel"] == {}


def test_a_damaged_layer(command, change) -> None:
    """A missing tensor is named, the other layers are told all the same, and the exit code is 1."""

    def edit(arrays: dict[str, Any]) -> None:
        del arrays[f"{LAYER.format(2)}.4.up_proj.scales"]

    found = layers_of(command, change(edit), code=1)
    assert [(group["name"], group["kind"]) for group in found] == [
        ("model.layers.0-1,3.mlp.experts", "quantised"),
        ("model.layers.2.mlp.experts", "damaged"),
    ]
    assert f"{LAYER.format(2)}.4.up_proj.scales" in found[1]["fault"]


def test_the_table(command, change) -> None:
    """For people: sizes, groups, refusals in words, and the sum where there are several kinds of layers."""

    def edit(arrays: dict[str, Any]) -> None:
        unquantise(arrays, 1)

    ended = command("inspect", change(edit, num_hidden_layers=3))
    assert ended.code == 0
    for text in (
        "model.layers.0,2.mlp.experts   2 layers   quantised",
        "6 experts, top-2, hidden 128, intermediate 192",
        "native, 32",
        "beside the model's own layers",
        "left to the engine: router",
        "tensor parallel 4: expected gcd of rows per rank and group at least 32, found gcd(48, 32) = 16",
        "All quantised layers, fullest rank",
    ):
        assert text in ended.out


def test_no_layer(command, tmp_path: Path) -> None:
    """A folder without experts, and one that is no checkpoint."""
    (tmp_path / "config.json").write_text("{}")
    assert command("inspect", tmp_path).code == 2
    save_file({"model.embed.weight": np.zeros((2, 2), np.float16)}, tmp_path / "model.safetensors")
    ended = command("inspect", tmp_path)
    assert (ended.code, "no mixture-of-experts layer" in ended.out) == (0, True)


def test_torch_is_not_imported() -> None:
    """A process that inspects and prints never loads it."""
    code = (
        "import sys; from sm70_moe.cli.app import app; "
        f"app(['inspect', {str(TINY)!r}], standalone_mode=False); print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "False"


def test_only_the_layers_own_number_is_collapsed(command, tmp_path: Path) -> None:
    """Another part of the name that happens to have the index's number stays; another stack is another entry."""
    folder = tmp_path / "stacks"
    write_sample(folder, hidden=128, intermediate=192, experts=2, top_k=2, layers=1, group=32, seed=0)
    path = folder / "model.safetensors"
    arrays, prefix = load_file(path), LAYER.format(0)
    stacks = ["model.1.layers.1.mlp.experts", "model.1.layers.2.mlp.experts", "model.2.layers.2.mlp.experts"]
    tails = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    save_file({stack + tail: array for stack in stacks for tail, array in tails.items()}, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert [group["name"] for group in layers_of(command, folder)] == [
        "model.1.layers.1-2.mlp.experts",
        "model.2.layers.2.mlp.experts",
    ]
