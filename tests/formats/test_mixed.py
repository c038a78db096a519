"""Models whose layers differ: every layer has facts, notes and a verdict of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sm70_moe import AdmissionService, Settings
from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.reading.source import CheckpointSource

Make = Callable[..., Any]
LAYER = "model.layers.0.mlp.experts"


def copied(layer: Any, number: int, prefix: str = "model.layers.") -> dict[str, torch.Tensor]:
    """The same tensors under another layer's name."""
    return {
        name.replace("model.layers.0.", f"{prefix}{number}."): tensor.clone() for name, tensor in layer.tensors.items()
    }


def plain(hidden: int, intermediate: int, experts: int, number: int) -> dict[str, torch.Tensor]:
    """Unquantised experts."""
    sizes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    return {
        f"model.layers.{number}.mlp.experts.{expert}.{matrix}_proj.weight": torch.zeros(shape, dtype=torch.bfloat16)
        for expert in range(experts)
        for matrix, shape in sizes.items()
    }


@pytest.fixture
def mixed(tmp_path: Path, made: Make) -> Path:
    """GPTQ in groups of 32 (0), unquantised (1), groups of 64 (2), 8 bits (3), and a layer of `mtp` (0)."""
    layer = made("gptq-v1", hidden=128, intermediate=128)
    other = made("gptq-v1", hidden=128, intermediate=128, group=64, seed=1)
    eight = made("gptq-v1", hidden=128, intermediate=128, seed=2)
    for name in [name for name in eight.tensors if name.endswith("qweight")]:
        eight.tensors[name] = torch.cat((eight.tensors[name],) * 2)
    layer.tensors = {
        **layer.tensors,
        **plain(128, 128, 2, 1),
        **copied(other, 2),
        **copied(eight, 3),
        **copied(layer, 0, "mtp.layers."),
    }
    layer.config["num_hidden_layers"] = 4
    layer.config["quantization_config"]["dynamic"] = {
        r"-:.*\.layers\.1\..*": {},
        r"+:.*\.layers\.2\..*": {"group_size": 64},
        r".*\.layers\.3\..*": {"bits": 8},
    }
    folder: Path = layer.write(tmp_path)
    return folder


def test_every_layer_has_its_own_facts(mixed: Path) -> None:
    """Bits, group and format by layer; the `mtp` layer has no number and the only note."""
    checkpoint = Checkpoint.open(mixed)
    facts = [checkpoint.facts(x, tensor_parallel=1, tensor_rank=0, device="cpu") for x in checkpoint.layers]
    assert [(f.index, f.format, f.bits, f.checkpoint_group, f.hidden) for f in facts] == [
        (0, "gptq", 4, 32, 128),
        (1, "none", None, None, 128),
        (2, "gptq", 4, 64, 128),
        (3, "gptq", 8, 32, 128),
        (None, "gptq", 4, 32, 128),
    ]
    assert [len(layer.notes) for layer in checkpoint.layers] == [0, 0, 0, 0, 1]


def test_odd_layers_are_refused_for_themselves(mixed: Path) -> None:
    """Three of five layers run; the others are unsupported, and nothing is raised."""
    checkpoint = Checkpoint.open(mixed)
    with AdmissionService(Settings.from_env({}), policy="generic-awq") as service:
        plans = [
            service.admit(checkpoint.facts(layer, tensor_parallel=2, tensor_rank=0, device="cpu"))
            for layer in checkpoint.layers
        ]
    assert [plan.supported for plan in plans] == [True, False, True, False, True]


def test_the_layers_that_run_can_be_read(mixed: Path) -> None:
    """Each with its own groups."""
    checkpoint = Checkpoint.open(mixed)
    for layer in (checkpoint.layers[0], checkpoint.layers[2], checkpoint.layers[4]):
        facts = checkpoint.facts(layer, tensor_parallel=2, tensor_rank=1, device="cpu")
        assert CheckpointSource(checkpoint, layer, facts).read(1, 32).down.codes.shape == (64, 128)


def test_a_skip_list_with_thousands_of_names(tmp_path: Path, made: Make) -> None:
    """auto-round and llm-compressor list every module; an expert's name in it is a fact about that expert."""
    layer = made("compressed", experts=2)
    ignored = [f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in range(1, 40) for e in range(60)]
    layer.config["quantization_config"]["ignore"] = ["re:.*mlp.gate$", *ignored]
    folder = layer.write(tmp_path)
    assert Checkpoint.open(folder).layers[0].quantization.format == "compressed-tensors"
    layer.config["quantization_config"]["ignore"] += [f"{LAYER}.1.up_proj"]
    assert Checkpoint.open(layer.write(tmp_path)).layers[0].quantization.format == "mixed"


def test_an_ignored_layer_that_is_quantised_all_the_same(tmp_path: Path, made: Make) -> None:
    """Tensors win over the list, with a note, in every format that can be read."""
    for form, key in (("awq", "modules_to_not_convert"), ("compressed", "ignore")):
        layer = made(form)
        layer.config["quantization_config"][key] = ["model.layers.0"]
        checkpoint = Checkpoint.open(layer.write(tmp_path / form))
        assert checkpoint.check(checkpoint.layers[0]).hidden == 128
        assert len(checkpoint.layers[0].notes) == 1
