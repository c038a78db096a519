"""Makes compressed-tensors-asymmetric and compressed-tensors-symmetric beside this file.

compressed-tensors' own library calculates scales and zeros, quantises, packs, writes the
quantization_config, and gives the weights that it decodes from the result. Nothing is packed here.
Made with compressed-tensors 0.20.1, transformers 5.24.0, PyTorch 2.13.0 (CPU), safetensors 0.8.0:

    python tests/data/make_compressed_tensors.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from torch import nn

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS = 256, 128, 4, 2
DECODED = ((0, 0), (0, 3), (1, 2))
"""(layer, expert) whose weights, as the library decodes them, are kept."""


def four_bits(strategy: str, group: int | None, symmetric: bool) -> QuantizationArgs:
    return QuantizationArgs(num_bits=4, strategy=strategy, group_size=group, symmetric=symmetric)


VARIANTS: dict[str, tuple[torch.dtype, dict[str, QuantizationScheme]]] = {
    # two groups: a class, and a regular expression that wins over it in the second layer
    "compressed-tensors-asymmetric": (
        torch.float16,
        {
            "group_0": QuantizationScheme(targets=["Linear"], weights=four_bits("group", 32, False)),
            "group_1": QuantizationScheme(
                targets=[r"re:.*layers\.1\..*_proj$"], weights=four_bits("channel", None, False)
            ),
        },
    ),
    "compressed-tensors-symmetric": (
        torch.bfloat16,
        {"group_0": QuantizationScheme(targets=["Linear"], weights=four_bits("group", 128, True))},
    ),
}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Block()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Stack()


def lopsided(shape: torch.Size, source: torch.Generator) -> torch.Tensor:
    """Weights whose rows lean to one side, so that zeros from one end of their range to the other occur."""
    lean = torch.linspace(-0.12, 0.12, shape[0]).unsqueeze(1)
    return torch.randn(shape, generator=source) * 0.04 + lean


def calibrate(linear: nn.Linear) -> None:
    """Scales and zeros from the smallest and largest weight of each group."""
    args = linear.quantization_scheme.weights
    weight = linear.weight.detach()
    groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    linear.weight_scale.data.copy_(scale)
    linear.weight_zero_point.data.copy_(zero)


def quantised(dtype: torch.dtype, groups: dict[str, QuantizationScheme]) -> tuple[Model, dict[str, Any]]:
    """A model whose weights the library has packed, and its quantization_config."""
    source = torch.Generator().manual_seed(20)
    model = Model()
    for parameter in model.parameters():
        parameter.data = lopsided(parameter.shape, source)
    model.to(dtype)
    config = QuantizationConfig(
        config_groups=groups, ignore=["re:.*mlp.gate$"], quantization_status=QuantizationStatus.FROZEN
    )
    apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            calibrate(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    found = compressor.quantization_config.model_dump(mode="json")
    return model, {"quant_method": "compressed-tensors", **found}


def make(folder: Path, name: str) -> None:
    """Write config.json, model.safetensors and decoded.safetensors of one variant."""
    dtype, groups = VARIANTS[name]
    model, quantization = quantised(dtype, groups)
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    content = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "num_hidden_layers": LAYERS,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization_config": quantization,
    }
    (target / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, target / "model.safetensors")
    save_file(decoded(model), target / "decoded.safetensors")


def decoded(model: Model) -> dict[str, torch.Tensor]:
    """Weights (N, K) of some experts as the library decodes what it has packed."""
    ModelCompressor.from_pretrained_model(model).decompress_model(model)
    found = {}
    for layer, expert in DECODED:
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        for matrix in ("gate_proj", "up_proj", "down_proj"):
            found[f"{prefix}.{matrix}"] = model.get_submodule(f"{prefix}.{matrix}").weight.detach().contiguous()
    return found


if __name__ == "__main__":
    for variant in VARIANTS:
        make(Path(sys.argv[1]), variant)
