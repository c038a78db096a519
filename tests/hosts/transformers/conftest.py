"""Small checkpoints of several model families, quantised, each with its dequantised twin.

Random weights are rounded to 4 bits here, in numpy, and the twin holds what CONTRACT 8 says that
they stand for, computed in FP64: the judge shares no arithmetic with what is judged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

COMMON = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.2, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MIXED_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "shared_expert_intermediate_size": 32,
}  # fmt: skip
QWEN = {"moe_intermediate_size": 32, "intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**QWEN, "norm_topk_prob": True},
    "qwen3_next": {**QWEN, **MIXED_ATTENTION},
    "mixtral": {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {
        "moe_intermediate_size": 32, "intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_hidden_layers": 3,
    },
    "qwen4_exp_text": {
        **QWEN, **MIXED_ATTENTION, "hc_count": 2, "hc_lowrank": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4,
    },
}  # fmt: skip
GROUP = 32

FORMATS: dict[str, dict[str, Any]] = {
    "awq": {
        "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True,
        "modules_to_not_convert": ["mlp.gate"],
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False},
    "compressed": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}}},
    },
}  # fmt: skip
FORMATS["symmetric"] = json.loads(json.dumps(FORMATS["compressed"]).replace('"symmetric": false', '"symmetric": true'))


@dataclass(frozen=True)
class Twins:
    """Folders of one model: `packed` has 4-bit weights, `plain` the FP16 weights they stand for."""

    packed: Path
    plain: Path


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Twins]:
    """Makes twins of a family in a format, once; `linears` quantises the attention as well."""
    known: dict[tuple[str, str, bool], Twins] = {}

    def twins(family: str = "qwen3_moe", form: str = "awq", linears: bool = True) -> Twins:
        key = (family, form, linears)
        if key not in known:
            known[key] = write(tmp_path_factory.mktemp(family), family, form, linears)
        return known[key]

    return twins


@pytest.fixture
def edit(make: Callable[..., Twins], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a packed folder with changed tensors or config: `edit(change, family, config=...)`."""
    from safetensors.torch import load_file, save_file

    def copy(change: Callable[[dict[str, Any]], Any] = dict, *, config: Any = None, **which: Any) -> Path:
        packed = make(**which).packed
        tensors = load_file(packed / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        content = json.loads((packed / "config.json").read_text())
        if config is not None:
            config(content)
        (tmp_path / "config.json").write_text(json.dumps(content))
        return tmp_path

    return copy


@pytest.fixture
def load() -> Callable[..., Any]:
    """Loads a folder, through this package unless `plain`."""
    import torch
    from transformers import AutoModelForCausalLM

    def loaded(folder: Path, dtype: Any = torch.float16, plain: bool = False, **keywords: Any) -> Any:
        from sm70_moe.engines.transformers import use_sm70_moe

        if not plain:
            keywords.setdefault("config", use_sm70_moe(folder))
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **keywords)

    return loaded


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No progress bars; no structlog lines but those that a test captures."""
    import structlog

    pytest.importorskip("transformers").utils.logging.disable_progress_bar()
    with structlog.testing.capture_logs():
        yield


def write(root: Path, family: str, form: str, linears: bool) -> Twins:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    twins = Twins(root / "packed", root / "plain")
    model.save_pretrained(twins.plain)
    model.save_pretrained(twins.packed)
    packed, plain = {}, {}
    for name, tensor in load_file(twins.plain / "model.safetensors").items():
        module = name.rpartition(".")[0]
        if ".experts." in name or (linears and ".self_attn." in name and module.endswith("_proj")):
            stored, plain[name] = quantise(tensor, form)
            packed.update({f"{module}.{part}": value for part, value in stored.items()})
        else:
            packed[name] = plain[name] = tensor
    save_file(packed, twins.packed / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, twins.plain / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((twins.packed / "config.json").read_text())
    (twins.packed / "config.json").write_text(json.dumps({**content, "quantization_config": FORMATS[form]}))
    return twins


def quantise(weight: Any, form: str) -> tuple[dict[str, Any], Any]:
    """FP16 weight (N, K) -> stored tensors, and the FP16 weight that they stand for."""
    import torch

    from sm70_moe.numbers.codes import Codes
    from sm70_moe.numbers.decoding import encode
    from sm70_moe.numbers.formats import AWQ, COMPRESSED, GPTQ_V1

    values = weight.t().double().numpy()
    k, n = values.shape
    groups = values.reshape(k // GROUP, GROUP, n)
    low, high = np.minimum(groups.min(1), 0), np.maximum(groups.max(1), 0)
    scales = ((high - low) / 15).astype(np.float16)
    zeros = np.full(scales.shape, 8) if form == "symmetric" else np.clip(np.rint(-low / scales), 0, 15)
    codes = np.clip(np.rint(groups / scales[:, None].astype(float)) + zeros[:, None], 0, 15)
    bias = (-zeros * scales.astype(float)).astype(np.float16)
    # FP64 holds product and sum exactly: one rounding, as CONTRACT 8.2 wants it
    meant = (codes * scales[:, None].astype(float) + bias[:, None].astype(float)).astype(np.float16)
    parts = Codes(
        *(torch.from_numpy(a) for a in (codes.reshape(k, n).astype(np.uint8), zeros.astype(np.uint8), scales))
    )
    stored = encode({"awq": AWQ, "gptq": GPTQ_V1}.get(form, COMPRESSED), parts)
    if form in ("compressed", "symmetric"):
        stored["weight_shape"] = torch.tensor([n, k])
    if form == "symmetric":
        del stored["weight_zero_point"]
    return stored, torch.from_numpy(meant.reshape(k, n).T.copy())
