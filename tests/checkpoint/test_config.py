"""Reading config.json: aliases, silence, contradictions, wrong types, and who is quantised how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sm70_moe.checkpoint.config import ModelConfig, read_config
from sm70_moe.checkpoint.modules import matches
from sm70_moe.checkpoint.quantization import NONE, Quantization
from sm70_moe.errors import CheckpointError

AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True}

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def auto_round(packing: str) -> dict[str, Any]:
    return {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 128, "sym": True}


def read(folder: Path, content: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(content))
    return read_config(folder)


def test_the_real_file(tiny: Path) -> None:
    """Every fact of a config that AutoAWQ wrote."""
    config = read_config(tiny)
    assert (config.hidden, config.intermediate, config.experts, config.top_k, config.layers) == (256, 128, 16, 4, 2)
    assert (config.activation, config.dtype, config.model_type) == ("silu", "float16", "qwen3_moe")
    assert config.quantization.base == Quantization("awq", "gemm", 4, 32, True)


def test_silence_is_unknown(tmp_path: Path) -> None:
    """An empty config gives no defaults; no quantization_config means not quantised."""
    config = read(tmp_path, {})
    assert config.quantization.base == NONE
    facts = (config.hidden, config.intermediate, config.experts, config.top_k, config.layers)
    assert facts == (None, None, None, None, None)
    assert (config.activation, config.dtype, config.model_type) == (None, None, None)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_every_name_for_the_experts(tmp_path: Path, name: str) -> None:
    """Writers do not agree on the name of a fact."""
    assert read(tmp_path, {name: 60}).experts == 60


def test_dtype_by_either_name_and_with_a_prefix(tmp_path: Path) -> None:
    """transformers 5 writes `dtype`, older ones `torch_dtype`; "auto" states nothing."""
    assert read(tmp_path, {"dtype": "bfloat16"}).dtype == "bfloat16"
    assert read(tmp_path, {"torch_dtype": "torch.float16"}).dtype == "float16"
    assert read(tmp_path, {"torch_dtype": "auto"}).dtype is None


def test_intermediate_size_counts_only_without_the_moe_one(tmp_path: Path) -> None:
    """Mixtral has no `moe_intermediate_size`; elsewhere `intermediate_size` is a dense layer's."""
    assert read(tmp_path, {"intermediate_size": 14336}).intermediate == 14336
    assert read(tmp_path, {"intermediate_size": 6144, "moe_intermediate_size": 768}).intermediate == 768


def test_the_text_model_of_a_larger_model(tmp_path: Path) -> None:
    """Facts of `text_config` come first, the outer ones fill in, and they do not contradict each other."""
    text = {"hidden_size": 2048, "num_experts": 128, "torch_dtype": "bfloat16"}
    config = read(tmp_path, {"hidden_size": 1, "dtype": "float16", "text_config": text, "quantization_config": AWQ})
    assert (config.hidden, config.experts, config.dtype) == (2048, 128, "bfloat16")
    assert config.quantization.base.format == "awq"


def test_aliases_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    """Both names and both values are told."""
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, {"num_experts": 128, "num_local_experts": 64})
    for text in ("config.json", "num_experts", "num_local_experts", "128", "64"):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"hidden_size": "2048"}, ["hidden_size", "'2048'"]),
        ({"hidden_size": 2048.0}, ["hidden_size", "2048.0"]),
        ({"num_experts": True}, ["num_experts", "True"]),
        ({"hidden_act": 1}, ["hidden_act", "1"]),
        ({"text_config": []}, ["text_config", "[]"]),
        ({"quantization_config": "awq"}, ["quantization_config", "'awq'"]),
        ({"quantization_config": {**AWQ, "bits": "4"}}, ["quantization_config.bits", "'4'"]),
        ({"quantization_config": {**AWQ, "bits": True}}, ["quantization_config.bits", "True"]),
        ({"quantization_config": {**AWQ, "zero_point": 1}}, ["quantization_config.zero_point", "1"]),
        ({"quantization_config": {**AWQ, "w_bit": 8}}, ["quantization_config.bits", "w_bit", "4", "8"]),
        ({"quantization_config": {**AWQ, "sym": True}}, ["quantization_config.zero_point", "sym"]),
        ({"quantization_config": {**AWQ, "modules_to_not_convert": "gate"}}, ["modules_to_not_convert", "'gate'"]),
        ({"quantization_config": {**AWQ, "ignore": [1]}}, ["ignore", "1"]),
        ({"quantization_config": {**AWQ, "ignore": ["re:("]}}, ["'('"]),
        ({"quantization_config": {**AWQ, "layers": {"a": {"bits": "4"}}}}, ["layers.a.bits", "'4'"]),
        ({"num_experts": 8, "num_experts_per_tok": 9}, ["num_experts_per_tok", "9", "8"]),
        ({"num_experts_per_tok": 2**16 + 1}, ["num_experts_per_tok", "65537", "65536"]),
        ({"num_local_experts": 10**12}, ["num_local_experts", str(10**12)]),
        ({"moe_intermediate_size": [0, 0]}, ["moe_intermediate_size", "0"]),
        ({"text_config": {"moe_topk": -1}}, ["text_config.moe_topk", "-1"]),
        ({"moe_topk": 0, "text_config": {}}, ["moe_topk", "0"]),
        ({"swiglu_limit": 10**400}, ["swiglu_limit"]),
        ([], ["[]"]),
    ],
)
def test_a_wrong_type_is_refused_by_key_and_value(tmp_path: Path, content: Any, named: list[str]) -> None:
    """No text is read as a number, and no truth value as one."""
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, content)
    for text in ["config.json", *named]:
        assert text in str(caught.value)


def test_a_config_that_is_missing_or_no_json(tmp_path: Path) -> None:
    """Both are errors that name the file."""
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (AWQ, Quantization("awq", "gemm", 4, 32, True)),
        ({**AWQ, "version": "GEMM"}, Quantization("awq", "gemm", 4, 32, True)),
        ({**AWQ, "version": "gemv"}, Quantization("awq", "gemv", 4, 32, True)),
        ({**AWQ, "bits": 8}, Quantization("awq", "gemm", 8, 32, True)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, Quantization("awq", None, 4, 128, None)),
        (
            {**AWQ, "version": None, "checkpoint_format": "gemm", "format": "gemm"},
            Quantization("awq", "gemm", 4, 32, True),
        ),
        (GPTQ, Quantization("gptq", "gptq", 4, 128, False)),
        ({**GPTQ, "checkpoint_format": "gptq_v2", "format": "gptq_v2"}, Quantization("gptq", "gptq_v2", 4, 128, False)),
        ({**GPTQ, "checkpoint_format": "marlin"}, Quantization("gptq", "marlin", 4, 128, False)),
        ({**GPTQ, "is_marlin_format": True}, Quantization("gptq", "marlin", 4, 128, False)),
        ({**GPTQ, "desc_act": True}, Quantization("gptq", "gptq, act-order", 4, 128, False)),
        ({**GPTQ, "pack_dtype": "int16"}, Quantization("gptq", "gptq, int16 words", 4, 128, False)),
        ({**GPTQ, "activation": "w4afp8"}, Quantization("gptq", "gptq, activation w4afp8", 4, 128, False)),
        ({**GPTQ, "bits": 3, "group_size": -1}, Quantization("gptq", "gptq", 3, -1, False)),
        (auto_round("auto_round:auto_awq"), Quantization("awq", "gemm", 4, 128, False)),
        (auto_round("auto_round:auto_gptq"), Quantization("gptq", "gptq", 4, 128, False)),
        (auto_round("auto_round:gptqmodel"), Quantization("gptq", "gptq_v2", 4, 128, False)),
        (auto_round("auto_round"), Quantization("gptq", "gptq_v2", 4, 128, False)),
        (auto_round("auto_round:fp8"), Quantization("auto-round", "auto_round:fp8", 4, 128, False)),
        (
            {**auto_round("auto_round:auto_gptq"), "data_type": "mx_fp", "act_bits": 8, "rotation_config": {"a": 1}},
            Quantization("gptq", "gptq, data_type mx_fp, 8-bit activations, rotation_config", 4, 128, False),
        ),
        ({"quant_method": "compressed-tensors"}, Quantization("compressed-tensors")),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, Quantization("fp8", "e4m3")),
        ({"quant_method": "gguf", "bits": "q4_k", "format": "q_k"}, Quantization("gguf", "q_k")),
        ({"quant_method": "awq", "sym": False}, Quantization("awq", zero_point=True)),
        ({}, Quantization(None)),
    ],
)
def test_what_a_quantization_config_says(tmp_path: Path, given: dict[str, Any], expected: Quantization) -> None:
    """Formats by their fields; a method that is not read here keeps its own name."""
    assert read(tmp_path, {"quantization_config": given}).quantization.base == expected


@pytest.mark.parametrize(
    ("entry", "module", "expected"),
    [
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("mlp.gate", "model.layers.0.mlp.gate.weight", True),
        ("gate", "model.layers.0.mlp.experts.0.gate_proj", False),
        ("model.layers.1", "model.layers.1.mlp.experts", True),
        ("model.layers.1", "model.layers.10.mlp.experts", False),
        ("layers.1", "model.layers.11.mlp", False),
        ("lm_head", "lm_head", True),
        ("", "lm_head", False),
        ("re:.*gate$", "model.layers.0.mlp.gate", True),
        ("re:.*gate$", "model.layers.0.mlp.gate_proj", False),
        ("re:gate", "model.layers.0.mlp.gate", False),
    ],
)
def test_entries_match_dotted_components(entry: str, module: str, expected: bool) -> None:
    """A fragment of a component, or of a number, is no match."""
    assert matches(entry, module) is expected


def test_the_most_specific_override_applies(tmp_path: Path) -> None:
    """Overrides change what they name and nothing else; longer names win over shorter ones."""
    rules = read(
        tmp_path,
        {
            "quantization_config": {
                **AWQ,
                "modules_to_not_convert": ["mlp.gate"],
                "extra_config": {
                    "model.layers.1": {"bits": 8},
                    "model.layers.1.mlp.experts": {"group_size": 128},
                    "model.layers.2": {"bits": 16},
                    "comment": {},
                },
            }
        },
    ).quantization
    assert rules.of("model.layers.0.mlp.experts") == rules.base
    assert rules.of("model.layers.1.self_attn.q_proj").bits == 8
    assert rules.of("model.layers.1.mlp.experts.3.up_proj") == Quantization("awq", "gemm", 4, 128, True)
    assert rules.of("model.layers.10.mlp.experts") == rules.base
    assert rules.of("model.layers.2.mlp.experts") == NONE
    assert rules.of("model.layers.1.mlp.gate") == NONE


def test_dynamic_overrides_are_regular_expressions(tmp_path: Path) -> None:
    """ "+:" changes the modules that match, "-:" leaves them unquantised, the first match counts."""
    dynamic = {r"-:.*\.layers\.0\.": {}, r"+:.*\.layers\.[01]\.": {"bits": 8}, r".*\.layers\.2\.": {"group_size": 64}}
    rules = read(tmp_path, {"quantization_config": {**AWQ, "dynamic": dynamic}}).quantization
    assert rules.of("model.layers.0.mlp.experts") == NONE
    assert rules.of("model.layers.1.mlp.experts").bits == 8
    assert rules.of("model.layers.2.mlp.experts").group == 64
    assert rules.of("model.layers.3.mlp.experts") == rules.base


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ([], "awq"),
        (["mlp.gate", "lm_head", "layers.1"], "awq"),
        (["model.layers.0"], "none"),
        (["model.layers.0.mlp.experts"], "none"),
        (["model.layers.0.mlp.experts.1.up_proj"], "mixed"),
        (["experts.1"], "mixed"),
        (["1.up_proj"], "mixed"),
        (["up_proj"], "mixed"),
        (["re:.*experts.0.*"], "mixed"),
        (["model.layers.5.mlp.experts.1.up_proj"], "awq"),
        ([f"model.layers.0.mlp.experts.{n}.{m}_proj" for n in (0, 1) for m in ("gate", "up", "down")], "none"),
    ],
)
def test_entries_for_single_experts(tmp_path: Path, skip: list[str], expected: str) -> None:
    """A layer is of one kind only if all its matrices are; else it is "mixed"."""
    rules = read(tmp_path, {"quantization_config": {**AWQ, "modules_to_not_convert": skip}}).quantization
    found = rules.of_layer("model.layers.0.mlp.experts", range(2), ("gate_proj", "up_proj", "down_proj"))
    assert found.format == expected


@pytest.mark.parametrize("value", [0, -1, 2**31, 10**30])
@pytest.mark.parametrize(
    "name",
    ["hidden_size", "moe_intermediate_size", "intermediate_size", "n_routed_experts", "moe_k", "num_hidden_layers"],
)
def test_absurd_counts_are_refused_by_name(tmp_path: Path, name: str, value: int) -> None:
    """Before anything is sized by them."""
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, {name: value})
    for text in ("config.json", name, str(value), "from 1 to"):
        assert text in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000])
def test_a_config_that_is_nested_too_deeply(tmp_path: Path, text: str) -> None:
    """It is named, instead of ending the program."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="nested"):
        read_config(tmp_path)


@pytest.mark.parametrize("depth", [200, 900])
def test_a_value_is_shown_shortly_however_deep_it_is(tmp_path: Path, depth: int) -> None:
    """Values that Python could read but not print."""
    (tmp_path / "config.json").write_text('{"hidden_size":' + "[" * depth + "]" * depth + "}")
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    assert len(str(caught.value)) < 500


def test_a_method_that_is_not_read_has_no_fault(tmp_path: Path) -> None:
    """What its lists hold is taken as far as it is understood: the layer is refused by its format."""
    rules = read(tmp_path, {"quantization_config": {"quant_method": "fp8", "ignore": ["re:(", "lm_head"]}}).quantization
    assert rules.base.format == "fp8"
    assert rules.skips("lm_head")


@pytest.mark.parametrize(
    ("mark", "name"), [(b"\xef\xbb\xbf", "UTF-8"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16")]
)
def test_a_byte_order_mark_is_named(tmp_path: Path, mark: bytes, name: str) -> None:
    """An editor's mark is said, not an invalid character."""
    (tmp_path / "config.json").write_bytes(mark + b"{}")
    with pytest.raises(CheckpointError, match=rf"config\.json: found a byte order mark \(BOM\) of {name}"):
        read_config(tmp_path)
