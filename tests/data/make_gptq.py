"""Makes gptq-v1-asymmetric and gptq-v2-symmetric beside this file.

gptqmodel's own quantiser finds scales and zeros, its own module packs them, its own function turns
the one convention of zeros into the other, its own configuration is written, and its own module
gives the weights that it decodes. Nothing is packed here. Made with gptqmodel 7.7.0 (from its source
package, which is on PYTHONPATH and not built: packing needs none of its extensions), transformers
5.24.0, PyTorch 2.13.0 (CPU), safetensors 0.8.0:

    python tests/data/make_gptq.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization import FORMAT, QuantizeConfig
from gptqmodel.quantization.quantizer import Quantizer
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from safetensors.torch import save_file
from torch import nn

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS = 256, 128, 4, 2
MATRICES = {"gate_proj": (HIDDEN, INTERMEDIATE), "up_proj": (HIDDEN, INTERMEDIATE), "down_proj": (INTERMEDIATE, HIDDEN)}
DECODED = ((0, 0), (0, 3), (1, 2))
"""(layer, expert) whose weights, as the library decodes them, are kept."""

# layer 1 has groups of its own; its router and everything called `gate` is left out
DYNAMIC = {r"+:.*\.layers\.1\..*_proj": {"group_size": 128}, r"-:.*\.gate$": {}}
VARIANTS = {
    "gptq-v1-asymmetric": {"format": FORMAT.GPTQ, "sym": False, "group_size": 32, "dynamic": DYNAMIC},
    "gptq-v2-symmetric": {"format": FORMAT.GPTQ_V2, "sym": True, "group_size": 128},
}


def lopsided(rows: int, columns: int, source: torch.Generator) -> torch.Tensor:
    """Weights whose rows lean to one side, so that zeros from one end of their range to the other occur."""
    lean = torch.linspace(-0.12, 0.12, rows)[torch.randperm(rows, generator=source)].unsqueeze(1)
    return torch.randn(rows, columns, generator=source) * 0.04 + lean


def packed(weight: torch.Tensor, config: QuantizeConfig, group: int) -> tuple[TorchLinear, torch.Tensor]:
    """A packed module, in the file's convention of zeros, and the weights (N, K) that it decodes before that."""
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=False)
    linear.weight.data = weight
    parameters = []
    for part in weight.split(group, dim=1):
        quantizer = Quantizer(config)
        quantizer.configure(perchannel=True)
        quantizer.find_params(part, weight=True)
        parameters.append((quantizer.scale, quantizer.zero))
    scales, zeros = (torch.cat(parts, dim=1) for parts in zip(*parameters, strict=True))
    module = TorchLinear(4, group, config.sym, False, inputs, outputs, bias=False, register_buffers=True)
    index = torch.arange(inputs, dtype=torch.int32) // group
    module.pack_original(linear, scales.half().float(), zeros, index)
    module.post_init()
    decoded = module.dequantize_weight().T.contiguous()
    if config.format == FORMAT.GPTQ:
        convert_gptq_v2_to_v1_format_module(module, config)
    return module, decoded


def make(folder: Path, name: str) -> None:
    """Write config.json, model.safetensors and decoded.safetensors of one variant."""
    source = torch.Generator().manual_seed(21)
    config = QuantizeConfig(bits=4, desc_act=False, **VARIANTS[name])
    tensors, decoded = {}, {}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}.mlp"
        tensors[f"{block}.gate.weight"] = torch.randn(EXPERTS, HIDDEN, generator=source).half()
        for expert in range(EXPERTS):
            for matrix, (inputs, outputs) in MATRICES.items():
                module = f"{block}.experts.{expert}.{matrix}"
                group = config.dynamic_get(module, "group_size", config.group_size)
                found, weights = packed(lopsided(outputs, inputs, source), config, group)
                for kind in ("qweight", "qzeros", "scales", "g_idx"):
                    tensors[f"{module}.{kind}"] = getattr(found, kind).contiguous()
                if (layer, expert) in DECODED:
                    decoded[module] = weights
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    quantization = config.to_dict()
    quantization["meta"].pop("offload_to_disk_path", None)  # of the machine, not of the file
    content = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "num_hidden_layers": LAYERS,
        "dtype": "float16",
        "quantization_config": quantization,
    }
    (target / "config.json").write_text(json.dumps(content, indent=2, default=str) + "\n")
    save_file(tensors, target / "model.safetensors")
    save_file(decoded, target / "decoded.safetensors")


if __name__ == "__main__":
    for variant in VARIANTS:
        make(Path(sys.argv[1]), variant)
