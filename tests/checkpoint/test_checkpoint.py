"""Layers of a checkpoint: what they are, what is missing, and where config and tensors disagree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.quantization import Quantization
from sm70_moe.checkpoint.sample import write_sample
from sm70_moe.errors import CheckpointError
from sm70_moe.facts import LayerFacts

LAYER = "model.layers.0.mlp.experts"
EXPERT_2 = tuple(f"2.{m}_proj.{k}" for m in ("gate", "up", "down") for k in ("qweight", "qzeros", "scales"))
Alter = Callable[..., Path]


def facts_of(folder: Path) -> LayerFacts:
    checkpoint = Checkpoint.open(folder)
    return checkpoint.facts(checkpoint.layers[0], tensor_parallel=1, tensor_rank=0, device="cpu")


def refusal(folder: Path) -> str:
    """What `check` says against the first layer."""
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check(checkpoint.layers[0])
    return str(caught.value)


def test_facts_of_the_real_file(tiny: Path) -> None:
    """Every fact that admission asks for, from a checkpoint that AutoAWQ wrote."""
    checkpoint = Checkpoint.open(tiny)
    assert [layer.name for layer in checkpoint.layers] == [LAYER, "model.layers.1.mlp.experts"]
    assert all(layer.complete and layer.notes == () for layer in checkpoint.layers)
    assert checkpoint.facts(
        checkpoint.layers[1], tensor_parallel=2, tensor_rank=1, device="cuda:1", max_sequences=4, speculative_width=2
    ) == LayerFacts(
        layer="model.layers.1.mlp.experts",
        index=1,
        hidden=256,
        intermediate=128,
        experts=16,
        top_k=4,
        format="awq",
        packing="gemm",
        bits=4,
        zero_point=True,
        checkpoint_group=32,
        activation="silu",
        gated=True,
        bias=False,
        router_weight_on_input=False,
        activations="float16",
        tensor_parallel=2,
        tensor_rank=1,
        expert_parallel=1,
        expert_rank=0,
        device="cuda:1",
        max_sequences=4,
        speculative_width=2,
    )


def test_the_real_file_passes_the_check(tiny: Path) -> None:
    """Every tensor of both layers has the shape and dtype that the contract states."""
    checkpoint = Checkpoint.open(tiny)
    for layer in checkpoint.layers:
        geometry = checkpoint.check(layer)
        assert (geometry.hidden, geometry.intermediate) == (256, 128)


def test_layers_are_found_by_name_and_index(tiny: Path) -> None:
    """A layer that is not there is told with those that are."""
    checkpoint = Checkpoint.open(tiny)
    assert checkpoint.layer(1) is checkpoint.layer("model.layers.1.mlp.experts")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.layer(7)
    assert "7" in str(caught.value)
    assert LAYER in str(caught.value)


def test_bits_8_is_a_fact_and_no_reason_to_stop(alter: Alter) -> None:
    """Admission refuses 8 bits with a reason; only reading the weights is an error here."""
    folder = alter(quantization={"bits": 8})
    assert (facts_of(folder).bits, facts_of(folder).intermediate) == (8, 96)
    assert "bits 8" in refusal(folder)


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "gptq", "checkpoint_format": "gptq_p"}, ("gptq", "gptq_p")),
        ({"quant_method": "fp8", "fmt": "e4m3", "bits": "eight", "ignore": 3}, ("fp8", "e4m3")),
        ({"quant_method": "mxfp4"}, ("mxfp4", None)),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}, ("bitsandbytes", "nf4")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("modelopt", "NVFP4")),
        ({"version": "gemv"}, ("awq", "gemv")),
        ({"version": "marlin"}, ("awq", "marlin")),
        ({"quant_method": "compressed-tensors"}, ("compressed-tensors", None)),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            ("compressed-tensors", "float-quantized"),
        ),
    ],
)
def test_other_formats_are_named_and_not_read(
    alter: Alter, quantization: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    """Sizes come from config.json then; reading is refused with the format."""
    folder = alter(quantization=quantization)
    facts = facts_of(folder)
    assert (facts.format, facts.packing) == expected
    assert (facts.hidden, facts.intermediate, facts.experts) == (64, 96, 3)
    assert all(text in refusal(folder) for text in expected if text)


def drop(*suffixes: str) -> Callable[[dict[str, Any]], None]:
    def edit(arrays: dict[str, Any]) -> None:
        for name in [name for name in arrays if name.endswith(suffixes)]:
            del arrays[name]

    return edit


@pytest.mark.parametrize(
    ("suffix", "named"),
    [
        ("experts.1.up_proj.qweight", f"{LAYER}.1.up_proj.qweight"),
        ("experts.2.down_proj.scales", f"{LAYER}.2.down_proj.scales"),
        ("experts.0.gate_proj.qzeros", f"{LAYER}.0.gate_proj.qzeros"),
        ("qzeros", f"{LAYER}.0.gate_proj.qzeros"),
        (EXPERT_2, f"{LAYER}.2.gate_proj.qweight"),
    ],
)
def test_a_missing_tensor_is_named(alter: Alter, suffix: str | tuple[str, ...], named: str) -> None:
    """One tensor, all zeros, or a whole expert: the layer is incomplete and says what is missing."""
    folder = alter(drop(*((suffix,) if isinstance(suffix, str) else suffix)))
    checkpoint = Checkpoint.open(folder)
    assert not checkpoint.layers[0].complete
    assert checkpoint.layers[0].missing[0] == named
    assert named in refusal(folder)
    with pytest.raises(CheckpointError, match=named):
        facts_of(folder)


def test_a_symmetric_checkpoint_may_leave_out_its_zeros(alter: Alter) -> None:
    """With `zero_point` false no zeros are needed, but zeros for some matrices only are a fault."""
    folder = alter(drop("qzeros"), quantization={"zero_point": False})
    assert Checkpoint.open(folder).layers[0].complete
    assert facts_of(folder).zero_point is False


def test_a_symmetric_checkpoint_with_some_zeros_is_incomplete(alter: Alter) -> None:
    """Zeros that were stored must all be there."""
    folder = alter(drop("1.up_proj.qzeros"), quantization={"zero_point": False})
    assert f"{LAYER}.1.up_proj.qzeros" in refusal(folder)


def replace(name: str, value: np.ndarray[Any, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda arrays: arrays.update({f"{LAYER}.{name}": value})


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("1.up_proj.qweight", np.zeros((64, 12), np.int64), ["I64", "I32 [64, 12]"]),
        ("1.up_proj.qweight", np.zeros((12, 64), np.int32), ["[12, 64]", "[64, 12]"]),
        ("2.down_proj.qzeros", np.zeros((3, 7), np.int32), ["[3, 7]", "[3, 8]"]),
        ("2.down_proj.scales", np.zeros((3, 64), np.float32), ["F32", "F16 [3, 64] or BF16 [3, 64]"]),
        ("2.down_proj.scales", np.zeros((2, 64), np.float16), ["[2, 64]", "[3, 64]"]),
        ("0.down_proj.scales", np.zeros((2, 64), np.float16), ["[2, 64]", "96 / 32 = 3"]),
        ("0.gate_proj.scales", np.zeros((1, 96), np.float16), ["[1, 96]", "64 / 32 = 2"]),
        ("0.gate_proj.qweight", np.zeros(64, np.int32), ["[64]"]),
    ],
)
def test_a_wrong_dtype_or_shape_is_named(
    alter: Alter, name: str, value: np.ndarray[Any, Any], named: list[str]
) -> None:
    """Any expert's tensor that is not exactly as it must be is named with both forms."""
    told = refusal(alter(replace(name, value)))
    assert all(text in told for text in [f"{LAYER}.{name}", *named])


def test_scales_with_a_row_too_few_stop_the_facts_too(alter: Alter) -> None:
    """`scale rows == K / g` is part of what a layer is, so `explain` sees it."""
    folder = alter(replace("0.down_proj.scales", np.zeros((2, 64), np.float16)))
    with pytest.raises(CheckpointError, match=r"96 / 32 = 3"):
        facts_of(folder)


@pytest.mark.parametrize(
    ("config", "quantization", "named"),
    [
        ({"hidden_size": 128}, {}, ["hidden", "128", "64"]),
        ({"moe_intermediate_size": 64}, {}, ["intermediate", "64", "96"]),
        ({"num_experts": 2}, {}, ["experts", "2", "3"]),
        ({"num_experts": 4}, {}, [f"{LAYER}.3.gate_proj.qweight"]),
        ({"num_experts": 10**9}, {}, [f"{LAYER}.3.gate_proj.qweight"]),
        ({}, {"group_size": 16}, ["group 16", "64 / 16 = 4"]),
        ({}, {"group_size": -1}, ["group 64", "64 / 64 = 1"]),
    ],
)
def test_config_against_tensors(
    alter: Alter, config: dict[str, Any], quantization: dict[str, Any], named: list[str]
) -> None:
    """A config.json of another model is told with its value and the tensors'."""
    with pytest.raises(CheckpointError) as caught:
        facts_of(alter(config=config, quantization=quantization))
    assert all(text in str(caught.value) for text in [LAYER, *named])


@pytest.mark.parametrize("group", [0, -2, 40])
def test_a_group_that_cannot_be_is_a_fact_but_not_readable(alter: Alter, group: int) -> None:
    """Admission has the reason; reading such a layer is refused with the number."""
    folder = alter(quantization={"group_size": group})
    assert facts_of(folder).checkpoint_group == group
    assert f"group_size {group}" in refusal(folder)


def test_a_size_that_does_not_fill_words_is_not_readable(alter: Alter) -> None:
    """Eight codes stand in a word, so 36 columns cannot be packed."""

    def narrow(arrays: dict[str, Any]) -> None:
        for name in list(arrays):
            kind = name.rpartition(".")[2]
            rows, columns = (36, 64) if "down" in name else (64, 36)
            if ".experts." in name:
                shape = (rows if kind == "qweight" else rows // 4, columns if kind == "scales" else columns // 8)
                arrays[name] = np.zeros(shape, arrays[name].dtype)

    assert "36 columns" in refusal(alter(narrow, {"moe_intermediate_size": 36}, {"group_size": 4}))


def test_an_expert_number_out_of_line_names_the_first_gap(alter: Alter) -> None:
    """However large the number is."""

    def renumber(arrays: dict[str, Any]) -> None:
        for name in [name for name in arrays if ".experts.2." in name]:
            arrays[name.replace(".experts.2.", ".experts.999999999.")] = arrays.pop(name)

    assert f"{LAYER}.2.gate_proj.qweight" in refusal(alter(renumber))


def unquantise(*experts: int) -> Callable[[dict[str, Any]], None]:
    """Replace the words of these experts by plain weights."""

    def edit(arrays: dict[str, Any]) -> None:
        for expert in experts:
            for matrix, shape in (("gate_proj", (96, 64)), ("up_proj", (96, 64)), ("down_proj", (64, 96))):
                drop(*(f".{expert}.{matrix}.{kind}" for kind in ("qweight", "qzeros", "scales")))(arrays)
                arrays[f"{LAYER}.{expert}.{matrix}.weight"] = np.zeros(shape, np.float16)

    return edit


def test_an_unquantised_layer_is_trusted_over_the_config(alter: Alter) -> None:
    """Plain weights are format "none" with their sizes; a note tells that config.json says otherwise."""
    folder = alter(unquantise(0, 1, 2))
    layer = Checkpoint.open(folder).layers[0]
    assert layer.quantization == Quantization("none")
    assert len(layer.notes) == 1
    facts = facts_of(folder)
    assert (facts.format, facts.hidden, facts.intermediate, facts.experts) == ("none", 64, 96, 3)


def test_a_layer_on_the_skip_list_with_plain_weights_needs_no_note(alter: Alter) -> None:
    """List and tensors agree."""
    folder = alter(unquantise(0, 1, 2), quantization={"modules_to_not_convert": ["model.layers.0"]})
    layer = Checkpoint.open(folder).layers[0]
    assert (layer.quantization.format, layer.notes) == ("none", ())


def test_quantised_tensors_on_the_skip_list_are_trusted(alter: Alter) -> None:
    """Tensors win over the list, with a note."""
    folder = alter(quantization={"modules_to_not_convert": ["model.layers.0"]})
    layer = Checkpoint.open(folder).layers[0]
    assert layer.quantization == Quantization("awq", "gemm", 4, 32, True)
    assert len(layer.notes) == 1


def test_words_without_any_declaration_are_of_unknown_format(alter: Alter) -> None:
    """AWQ and GPTQ share tensor names: nobody guesses."""
    folder = alter()
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("quantization_config", "other_config"))
    assert facts_of(folder).format is None


def test_a_layer_of_both_kinds_is_mixed(alter: Alter) -> None:
    """One odd expert makes the layer "mixed": refused for itself, not for the model."""
    folder = alter(unquantise(1))
    assert Checkpoint.open(folder).layers[0].quantization.format == "mixed"
    assert "mixed" in refusal(folder)


def test_unquantised_stacks_are_format_none(alter: Alter) -> None:
    """transformers 5 holds plain experts as stacks; config.json's sizes count, since models differ in their order."""

    def stack(arrays: dict[str, Any]) -> None:
        arrays.clear()
        arrays[f"{LAYER}.gate_up_proj"] = np.zeros((3, 64, 192), np.float16)
        arrays[f"{LAYER}.down_proj"] = np.zeros((3, 96, 64), np.float16)

    folder = alter(stack)
    facts = facts_of(folder)
    assert (facts.format, facts.hidden, facts.experts, facts.gated, facts.bias) == ("none", 64, 3, True, False)
    assert "none" in refusal(folder)


def test_names_that_no_scheme_has_are_told(alter: Alter) -> None:
    """Tensors of unknown names give config.json's facts, and reading them is refused by name."""

    def rename(arrays: dict[str, Any]) -> None:
        arrays.clear()
        arrays[f"{LAYER}.0.wi.qweight"] = np.zeros((64, 12), np.int32)

    folder = alter(rename)
    facts = facts_of(folder)
    assert (facts.hidden, facts.experts, facts.gated, facts.bias) == (64, 3, None, None)
    assert "0.wi.qweight" in refusal(folder)
    assert "w1/w3/w2" in refusal(folder)


def test_a_bias_is_a_fact(alter: Alter) -> None:
    """Any expert's bias tensor makes the layer one with bias."""
    assert facts_of(alter(replace("1.down_proj.bias", np.zeros(64, np.float16)))).bias is True


def test_a_layer_may_lie_in_two_shards(sharded: Path) -> None:
    """A layer's tensors are gathered from wherever they are."""
    checkpoint = Checkpoint.open(sharded)
    assert len(checkpoint.headers.shards) > 2
    (layer,) = checkpoint.layers
    assert layer.complete
    assert checkpoint.check(layer).hidden == 64


def test_one_odd_layer_does_not_hide_the_others(tmp_path: Path) -> None:
    """Opening finds every layer; only the incomplete one is refused."""
    folder = tmp_path / "two"
    write_sample(folder, hidden=64, intermediate=64, experts=2, top_k=1, layers=2, group=32, seed=0)
    arrays = load_file(folder / "model.safetensors")
    del arrays["model.layers.1.mlp.experts.1.up_proj.scales"]
    save_file(arrays, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    assert [layer.complete for layer in checkpoint.layers] == [True, False]
    checkpoint.check(checkpoint.layers[0])


@pytest.mark.parametrize("rows", [0, 64])
@pytest.mark.parametrize("group", [-1, 32])
def test_tensors_without_rows_or_columns_are_refused(alter: Alter, rows: int, group: int) -> None:
    """Whatever the group; the tensor is named with its shape."""

    def empty(arrays: dict[str, Any]) -> None:
        for name in arrays:
            if ".experts." in name:
                arrays[name] = np.zeros((rows, 0), arrays[name].dtype)

    told = refusal(alter(empty, quantization={"group_size": group}))
    assert f"{LAYER}.0.up_proj" in told
    assert f"[{rows}, 0]" in told


def test_a_stack_without_experts_is_refused(alter: Alter) -> None:
    """Its first dimension is 0."""

    def stack(arrays: dict[str, Any]) -> None:
        for name in [name for name in arrays if ".experts." in name]:
            del arrays[name]
        for name in ("gate_up_proj", "down_proj"):
            arrays[f"{LAYER}.{name}"] = np.zeros((0, 64, 64), np.float16)

    assert "0 experts" in refusal(alter(stack))
