"""Everything declared is found, everything found is understood or named: files, tensors, places, reasons."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.cli.app import app
from sm70_moe.decision import Reason
from sm70_moe.errors import CheckpointError
from sm70_moe.facts import LayerFacts
from sm70_moe.grouping import Grouping, group_layer
from sm70_moe.record.inspection import Kind, inspect

Make = Callable[..., Any]
LAYER = "model.layers.0.mlp.experts"
OTHER = "model.layers.1.mlp.experts"


def told(command: str, folder: Path, *options: str) -> tuple[int, str]:
    """Exit code, and everything that the command says."""
    result = CliRunner().invoke(app, [command, str(folder), *options])
    fault = "" if isinstance(result.exception, SystemExit | None) else str(result.exception)
    return (2 if fault else result.exit_code), result.output + fault


def facts_of(folder: Path, layer: int = 0) -> LayerFacts:
    checkpoint = Checkpoint.open(folder)
    return checkpoint.facts(checkpoint.layers[layer], tensor_parallel=1, tensor_rank=0, device="cpu")


def copied(layer: Any, *names: str) -> None:
    """The layer's tensors again under other layers' names."""
    first = dict(layer.tensors)
    for name in names:
        layer.tensors |= {old.replace(LAYER, name): tensor.clone() for old, tensor in first.items()}


def indexed(folder: Path, shards: dict[str, dict[str, torch.Tensor]], listed: set[str]) -> None:
    """The tensors in files of these names, an index of those that are `listed`."""
    for file, tensors in shards.items():
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    weight_map = {name: file for file in listed for name in shards[file]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


SIDE = {
    "0.up_proj.pre_quant_scale": (1,),
    "1.down_proj.input_scale": (1,),
    "0.gate_proj.weight_global_scale": (1,),
    "1.per_expert_scale": (1,),
    "0.post_expert_norm.weight": (128,),
    "1.ffn_norm.weight": (96,),
    "weight_global_scale": (1,),
    "per_expert_scale": (2,),
}


@pytest.mark.parametrize("tail", list(SIDE))
def test_a_tensor_that_nobody_reads_refuses_its_layer(tail: str, tmp_path: Path, made: Make) -> None:
    """Report tensors-nobody-reads: named by every command, and no route takes the layer."""
    layer = made("awq")
    copied(layer, OTHER)
    layer.tensors[f"{LAYER}.{tail}"] = torch.full(SIDE[tail], 2.0)
    folder = layer.write(tmp_path)
    facts = facts_of(folder)
    assert f"{LAYER}.{tail}" in (facts.arithmetic or "")
    assert facts_of(folder, 1).arithmetic == "plain"
    for command in ("explain", "inspect"):
        code, text = told(command, folder)
        assert code == 1
        assert tail in " ".join(text.split())
    assert Checkpoint.open(folder).layers[0].quantization.format == "awq"


def test_prepare_leaves_such_a_layer(tmp_path: Path, made: Make) -> None:
    """The others are prepared."""
    layer = made("awq")
    copied(layer, OTHER)
    layer.tensors[f"{LAYER}.0.up_proj.pre_quant_scale"] = torch.ones(1)
    code, text = told("prepare", layer.write(tmp_path / "in"), str(tmp_path / "out"))
    assert code == 1
    assert "pre_quant_scale" in text
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1


@pytest.mark.parametrize("kind", ["shard", "single", "damaged", "dense"])
def test_a_file_outside_of_the_index_is_told(kind: str, tmp_path: Path, made: Make) -> None:
    """Report index-leaves-a-shard-out; a model.safetensors beside an index; a damaged file; one without experts."""
    layer = made("awq")
    layer.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    copied(layer, OTHER)
    layers = [{n: t for n, t in layer.tensors.items() if n.startswith(name)} for name in (LAYER, OTHER)]
    extra = {"single": "model.safetensors", "dense": "extra.safetensors"}.get(kind, "model-2.safetensors")
    shards = {
        "model-1.safetensors": layers[0],
        extra: {"lm_head.weight": torch.ones(1)} if kind == "dense" else layers[1],
    }
    indexed(tmp_path, shards, {"model-1.safetensors"})
    if kind == "damaged":
        (tmp_path / extra).write_bytes(b"short")
    for command in ("explain", "inspect"):
        code, text = told(command, tmp_path)
        assert code == (0 if kind == "dense" else 1)
        assert extra in text
    code, text = told("prepare", tmp_path, str(tmp_path / "out"))
    assert (code, extra in text) == (0 if kind == "dense" else 1, True)


def test_a_file_beside_the_only_one_is_told(tmp_path: Path, made: Make) -> None:
    """Without an index: what is said of the second file does not speak of one."""
    layer = made("awq")
    layer.write(tmp_path)
    save_file({f"{OTHER}.0.up_proj.scales": torch.ones(1)}, tmp_path / "extra.safetensors")
    code, text = told("explain", tmp_path)
    assert code == 1
    assert "extra.safetensors" in text
    assert "index.json" not in text


@pytest.mark.parametrize(
    ("old", "new"),
    [("mlp.experts.", "mlp.experts_list."), ("mlp.experts.", "mlp.moe_experts."), ("mlp.experts.0.", "mlp.expert_0.")],
)
def test_experts_under_other_names_are_told(old: str, new: str, tmp_path: Path, made: Make) -> None:
    """Report: today \"no mixture-of-experts layer\", exit 0."""
    layer = made("awq")
    layer.tensors = {name.replace(old, new): tensor for name, tensor in layer.tensors.items()}
    for command in ("explain", "inspect"):
        code, text = told(command, layer.write(tmp_path))
        assert code == 1
        assert new in text


def test_declared_experts_that_are_not_there_are_told(tmp_path: Path, made: Make) -> None:
    """No tensor has anything of an expert in its name."""
    layer = made("awq")
    layer.tensors = {"model.embed_tokens.weight": torch.ones(2, 2)}
    code, text = told("explain", layer.write(tmp_path))
    assert code == 1
    assert "declares 2 experts" in text
    del layer.config["num_experts"], layer.config["num_experts_per_tok"]
    assert told("explain", layer.write(tmp_path / "dense"))[0] == 0


def test_layers_without_any_tensor_are_told(tmp_path: Path, made: Make) -> None:
    """Of three declared layers one is there."""
    layer = made("awq")
    layer.config["num_hidden_layers"] = 3
    assert "3 layers, 2 of them without any tensor" in told("explain", layer.write(tmp_path))[1]


@pytest.mark.parametrize(
    ("place", "extra"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
        (
            "quantize_config.json",
            {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        ),
        ("compression_config", None),
    ],
)
def test_older_places_of_the_declaration(place: str, extra: dict[str, Any] | None, tmp_path: Path, made: Make) -> None:
    """Report declared-in-quantize-config-json: read, and said where."""
    form = "compressed" if extra is None else "awq" if "zero_point" in extra else "gptq-v1"
    layer = made(form)
    stated = layer.config.pop("quantization_config")
    if extra is None:
        stated.pop("quant_method")
        layer.config[place] = stated
    folder = layer.write(tmp_path)
    if extra is not None:
        (folder / place).write_text(json.dumps(extra))
    facts = facts_of(folder)
    assert (facts.bits, facts.checkpoint_group) == (4, 32)
    assert facts.format == {"compressed": "compressed-tensors", "awq": "awq", "gptq-v1": "gptq"}[form]
    code, text = told("explain", folder)
    assert code == 0
    assert place in text


def test_declarations_that_are_not_read_are_named(tmp_path: Path, made: Make) -> None:
    """modelopt's own file, and a quantization_config without a method."""
    layer = made("awq")
    stated = layer.config.pop("quantization_config")
    folder = layer.write(tmp_path / "modelopt")
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert (facts_of(folder).format, facts_of(folder).packing) == ("modelopt", "NVFP4")
    assert "hf_quant_config.json" in told("explain", folder)[1]
    del stated["quant_method"]
    layer.config["quantization_config"] = stated
    folder = layer.write(tmp_path / "silent")
    assert facts_of(folder).format is None
    assert "quantization_config has no quant_method" in told("explain", folder)[1]


@pytest.mark.parametrize(
    ("backend", "symmetric", "found"),
    [
        ("auto_round:gptq:exllamav2", True, ("gptq", "gptq")),
        ("auto_round:gptq", True, ("gptq", "gptq")),
        ("auto_round:awq:gemm", True, ("awq", "gemm")),
        (
            "auto_round:gptq:exllamav2",
            False,
            ("gptq", "gptq, offset of zeros not said by backend auto_round:gptq:exllamav2"),
        ),
        ("auto_round:triton", True, ("auto-round", "no packing_format, backend auto_round:triton")),
    ],
)
@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
def test_older_keys_of_auto_round(
    method: str, backend: str, symmetric: bool, found: tuple[str, str], tmp_path: Path, made: Make
) -> None:
    """Report auto-round-older-keys: read where nothing is left open, else told with what was found."""
    layer = made("awq" if ":awq" in backend else "gptq-v1")
    layer.config["quantization_config"] = {
        "quant_method": method, "bits": 4, "group_size": 32, "sym": symmetric, "data_type": "int", "backend": backend
    }  # fmt: skip
    facts = facts_of(layer.write(tmp_path))
    assert (facts.format, facts.packing) == found


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["gptq_model-4bit-32g.safetensors"], ["gptq_model-4bit-32g.safetensors", "accepted is model.safetensors"]),
        (["pytorch_model-1.bin", "pytorch_model-2.bin"], ["pytorch_model-1.bin, pytorch_model-2.bin", "pickle"]),
        (["a.safetensors", "b.pt"], ["a.safetensors", "b.pt"]),
        (["readme.md"], ["holds neither"]),
    ],
)
def test_old_file_names_are_told(files: list[str], named: list[str], tmp_path: Path, made: Make) -> None:
    """Report old-file-names: what is there instead, and what is accepted."""
    made("awq").write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    assert all(text in str(caught.value) for text in named)


NESTED = {"text_config": ("text_config",), "llm": ("llm_config",), "language": ("language_config",),
          "thinker": ("thinker_config", "text_config")}  # fmt: skip


@pytest.mark.parametrize("case", list(NESTED))
def test_nested_configs_are_found(case: str, tmp_path: Path, made: Make) -> None:
    """Wherever the table stands that declares experts."""
    layer = made("compressed")
    outer = {key: layer.config.pop(key) for key in ("quantization_config", "dtype")}
    found: dict[str, Any] = layer.config
    for name in reversed(NESTED[case]):
        found = {name: found}
    layer.config = {**found, **outer, "model_type": "outer", "hidden_size": 7}
    facts = facts_of(layer.write(tmp_path))
    assert (facts.activation, facts.top_k, facts.arithmetic, facts.activations) == ("silu", 2, "plain", "float16")


def test_two_tables_and_two_towers(tmp_path: Path, made: Make) -> None:
    """Report omni-nested-text-configs: each layer by its own table; without a sign which, the places are told."""
    layer = made("awq")
    first = {key: layer.config.pop(key) for key in list(layer.config) if key not in ("quantization_config", "dtype")}
    first["model_type"] = "qwen3_omni_moe_text"
    copied(layer, f"thinker.{LAYER}", f"talker.{LAYER}")
    layer.config |= {
        "model_type": "qwen3_omni_moe",
        "thinker_config": {"text_config": first},
        "talker_config": {"text_config": {**first, "num_experts_per_tok": 1, "hidden_act": "gelu"}},
    }
    found = {one.layer: one for one in (facts_of(layer.write(tmp_path), place) for place in range(3))}
    assert {name: (facts.top_k, facts.activation) for name, facts in found.items()} == {
        f"thinker.{LAYER}": (2, "silu"),
        f"talker.{LAYER}": (1, "gelu"),
        LAYER: (None, None),
    }
    assert "thinker_config.text_config and talker_config.text_config" in found[LAYER].doubt


def test_verify_takes_the_first_layer_that_it_can_read(tmp_path: Path, made: Make) -> None:
    """One that is not quantised, and one that is damaged, come before it."""
    layer = made("awq")
    copied(layer, OTHER, OTHER.replace("1", "2"))
    layer.config["num_hidden_layers"] = 3
    for name in [name for name in layer.tensors if name.startswith(LAYER)]:
        del layer.tensors[name]
    for matrix, shape in (("gate", (96, 128)), ("up", (96, 128)), ("down", (128, 96))):
        layer.tensors |= {f"{LAYER}.{n}.{matrix}_proj.weight": torch.ones(*shape).half() for n in (0, 1)}
    del layer.tensors[f"{OTHER}.0.up_proj.scales"]
    code, text = told("verify", layer.write(tmp_path), "--tokens", "1")
    assert code == 0
    assert OTHER.replace("1", "2") in text


def test_explain_goes_on_after_a_damaged_layer(tmp_path: Path, made: Make) -> None:
    """As inspect does; the exit code says that something is wrong."""
    layer = made("awq")
    copied(layer, OTHER)
    del layer.tensors[f"{LAYER}.1.up_proj.scales"]
    folder = layer.write(tmp_path)
    result = CliRunner().invoke(app, ["explain", str(folder), "--json"])
    assert result.exit_code == 1
    assert f"{LAYER}.1.up_proj.scales" in result.stderr
    assert [group["layers"] for group in json.loads(result.stdout)["groups"]] == [[OTHER]]


def test_two_groups_are_told_by_matrix(tmp_path: Path, made: Make) -> None:
    """Report two-groups-declared: by `dynamic`, by a module's own settings, and by a layer's skip list."""
    for config, named in (
        (
            {"dynamic": {"+:.*down_proj.*": {"group_size": 64}}},
            "group 32 in gate_proj and up_proj, group 64 in down_proj",
        ),
        ({"layers": {"gate_proj": {"group_size": -1}}}, "group -1 in gate_proj, group 32 in up_proj and down_proj"),
        ({"modules_to_not_convert": ["up_proj"]}, "not quantised in up_proj"),
    ):
        layer = made("gptq-v1")
        layer.config["quantization_config"] |= config
        facts = facts_of(layer.write(tmp_path))
        assert facts.format == "mixed"
        assert named in (facts.packing or "")


def test_another_group_than_declared_is_no_act_order(tmp_path: Path, made: Make) -> None:
    """g_idx of groups of 64 under a declared 32: the groups are told, not a permutation."""
    layer = made("gptq-v1", intermediate=128)
    wide = made("gptq-v1", intermediate=128, group=64)
    layer.tensors |= {name: tensor for name, tensor in wide.tensors.items() if "down_proj" in name}
    facts = facts_of(layer.write(tmp_path))
    assert (facts.format, facts.packing) == ("mixed", "group 32 declared; rows per group by the tensors: down_proj 64")


@pytest.mark.parametrize(("size", "last"), [(48, 16), (80, 16), (112, 16), (40, 8)])
def test_a_shorter_last_group_is_told_as_that(size: int, last: int) -> None:
    """Report last-group-shorter: writers that round up make such files; banks have groups of one size."""
    facts = LayerFacts(layer="x", hidden=64, intermediate=size, tensor_parallel=1, checkpoint_group=32)
    found = group_layer(facts)
    assert not isinstance(found, Grouping)
    assert found.reason is Reason.GROUP_INDIVISIBLE
    assert f"last group of {last} rows, shorter than 32" in str(found.observed)


def test_explain_lists_a_layer_with_a_shorter_last_group(tmp_path: Path, made: Make) -> None:
    """Not as damaged: its scales have as many groups as writers make."""
    layer = made("gptq-v1", hidden=64, intermediate=64)
    layer.config["moe_intermediate_size"] = 48
    for expert in (0, 1):
        for matrix in ("gate", "up"):
            name = f"{LAYER}.{expert}.{matrix}_proj"
            for kind, width in (("qweight", 48), ("scales", 48), ("qzeros", 6)):
                layer.tensors[f"{name}.{kind}"] = layer.tensors[f"{name}.{kind}"][:, :width].contiguous()
        name = f"{LAYER}.{expert}.down_proj"
        layer.tensors[f"{name}.qweight"] = layer.tensors[f"{name}.qweight"][:6].contiguous()
        layer.tensors[f"{name}.g_idx"] = layer.tensors[f"{name}.g_idx"][:48].contiguous()
    folder = layer.write(tmp_path)
    code, text = told("explain", folder)
    assert code == 0
    assert "last group of 16 rows" in " ".join(text.split())
    assert inspect(Checkpoint.open(folder))[0].kind is Kind.UNREADABLE
    with pytest.raises(CheckpointError, match="last group of 16 rows"):
        Checkpoint.open(folder).check(Checkpoint.open(folder).layers[0])


def test_two_kinds_of_experts_in_one_list(tmp_path: Path, made: Make) -> None:
    """Report ernie-vl-two-modalities; a list of equal sizes is one kind."""
    layer, narrow = made("compressed", experts=4), made("compressed", intermediate=64, experts=4)
    layer.tensors |= {n: t for n, t in narrow.tensors.items() if n.split(".")[5] in "23"}
    layer.config |= {"moe_num_experts": [2, 2], "moe_intermediate_size": [96, 64]}
    del layer.config["num_experts"]
    facts = facts_of(layer.write(tmp_path))
    assert facts.format == "mixed"
    assert facts.packing == "2 kinds of experts in one list: 0-1 with 96 columns, 2-3 with 64 columns"
    same = made("compressed", experts=4)
    same.config |= {"moe_num_experts": [2, 2], "moe_intermediate_size": [96, 96]}
    del same.config["num_experts"]
    facts = facts_of(same.write(tmp_path / "same"))
    assert (facts.format, facts.experts, facts.intermediate) == ("compressed-tensors", 4, 96)


@pytest.mark.parametrize("key", ["moe_hidden_size", "moe_latent_size"])
def test_experts_on_another_width(key: str, tmp_path: Path, made: Make) -> None:
    """Report experts-narrower-than-the-model: known by its key; without one, told as what it may be."""
    layer = made("awq")
    layer.config |= {"hidden_size": 256, key: 128}
    assert facts_of(layer.write(tmp_path)).hidden == 128
    layer.config[key] = 64
    with pytest.raises(CheckpointError, match=r"width of the experts 64 in config\.json, 128 by the tensors"):
        facts_of(layer.write(tmp_path))
    del layer.config[key]
    with pytest.raises(CheckpointError, match="latent experts"):
        facts_of(layer.write(tmp_path))
