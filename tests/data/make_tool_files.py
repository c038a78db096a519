"""Makes the small models of `tools/` beside this file: the tools' own whole runs, not their packing alone.

Each tool gets the same source model (Qwen2-MoE: shared expert, router, gate of the shared expert; three
layers, and a multi-token-prediction layer that transformers does not load), or for AutoAWQ one of its families
with shared experts, quantises it in its own way and writes it. Layer 1 has other bits where the tool can do that,
layer 2 is skipped. Kept are config.json and the tensors of the feed-forward blocks; `decoded/` holds weights (N, K) of
an expert as the tool's own code decodes them. Every tool in an environment of its own, PyTorch 2.13.0 (CPU):

    python tests/data/make_tool_files.py llm-compressor FOLDER     # llmcompressor 0.14.0.1, transformers 5.17.0
    python tests/data/make_tool_files.py auto-round FOLDER         # auto-round 0.15.1, the same environment
    python tests/data/make_tool_files.py autoawq FOLDER            # autoawq 0.2.9, transformers 4.51.3
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, GROUP = 64, 32, 2, 3, 32
DECODED = ((0, 1),)
"""(layer, expert) whose weights, as the tool decodes them, are kept."""
OF_THE_MACHINE = ("name_or_path", "_name_or_path", "offload_to_disk_path")

SIZES = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": 64, "moe_intermediate_size": INTERMEDIATE, "intermediate_size": INTERMEDIATE,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def lopsided(model: Any) -> Any:
    """Weights whose rows lean to one side, so that zeros from one end of their range to the other occur."""
    source = torch.Generator().manual_seed(13)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "embed" not in name:
            lean = torch.linspace(-0.12, 0.12, weight.shape[-2])[torch.randperm(weight.shape[-2], generator=source)]
            noise = torch.randn(weight.shape, generator=source) * 0.04
            weight.data.copy_((noise + lean.unsqueeze(-1)).to(weight.dtype))
    return model


def source_model(folder: Path) -> Path:
    """A Qwen2-MoE model with an MTP layer, as its makers publish one."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        **SIZES, num_experts=EXPERTS, shared_expert_intermediate_size=INTERMEDIATE, decoder_sparse_step=1,
        num_mtp_layers=1,
    )  # fmt: skip
    lopsided(Qwen2MoeForCausalLM(config).half()).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    first = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.mlp.")}
    extra = {name.replace("model.layers.0.", "mtp.layers.0."): tensor.clone() for name, tensor in first.items()}
    save_file({**tensors, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def keep(written: Path, target: Path, decoded: dict[str, torch.Tensor] | None) -> None:
    """The feed-forward blocks of what a tool wrote, and what it decodes from them."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(written.glob("*.safetensors")):
        tensors |= load_file(file)
    target.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in sorted(tensors.items()) if ".mlp." in n}, target / "model.safetensors")
    if decoded is not None:
        (target.parent / "decoded").mkdir(exist_ok=True)
        save_file(
            {n: t.contiguous() for n, t in decoded.items()}, target.parent / "decoded" / f"{target.name}.safetensors"
        )
    config = without(json.loads((written / "config.json").read_text()))
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def without(config: Any) -> Any:
    """config.json without what is the machine's and not the file's."""
    if isinstance(config, dict):
        return {key: without(value) for key, value in config.items() if key not in OF_THE_MACHINE}
    return config


def modules_of_interest() -> list[str]:
    return [
        f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj"
        for layer, expert in DECODED
        for matrix in ("gate", "up", "down")
    ]


def llm_compressor(work: Path, target: Path) -> None:
    """Four bits with zeros in groups of 32 in layer 0, eight bits in layer 1 and in every shared expert."""
    from compressed_tensors.compressors import decompress_module
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    def scheme(bits: int, symmetric: bool, *targets: str) -> dict[str, Any]:
        weights = {
            "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP
        }  # fmt: skip
        return {"targets": list(targets), "weights": weights}

    groups = {
        "four": scheme(4, False, r"re:.*layers\.0\.mlp\.experts\..*_proj$"),
        "eight": scheme(8, True, r"re:.*layers\.1\.mlp\.experts\..*_proj$", r"re:.*shared_expert\..*_proj$"),
    }
    ignore = ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$", r"re:.*layers\.2\..*", "re:.*self_attn.*"]
    model = AutoModelForCausalLM.from_pretrained(source_model(work / "source"), dtype="auto")
    oneshot(model=model, recipe=[QuantizationModifier(config_groups=groups, ignore=ignore)])
    model.save_pretrained(work / "written", save_compressed=True)
    decoded = {}
    for name in modules_of_interest():
        module = model.get_submodule(name)
        decompress_module(module)
        decoded[name] = module.weight.data.clone()
    keep(work / "written", target / "llm-compressor", decoded)


def tokenizer(folder: Path) -> Any:
    """One token a character, for tools that will not run without."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {character: number for number, character in enumerate("abcdefghijklmnopqrstuvwxyz .?")}
    made = Tokenizer(models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    found = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?", pad_token=".")
    found.save_pretrained(folder)
    return found


def auto_round(work: Path, target: Path) -> None:
    """Rounding to nearest in three packings; layer 1 and shared experts in eight bits where the packing has
    them, layer 2 not at all. What is decoded is what the tool's own `fake` format has for the same settings."""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM

    source = source_model(work / "source")
    tokens = tokenizer(source)

    def written(form: str, symmetric: bool, bits: tuple[int, ...], shared: int) -> Path:
        other: dict[str, dict[str, Any]] = {}
        for layer in range(LAYERS):
            block = f"model.layers.{layer}"
            other |= {f"{block}.self_attn.{one}_proj": {"bits": 16} for one in "qkvo"}
            for one in ("gate", "up", "down"):
                other[f"{block}.mlp.shared_expert.{one}_proj"] = {"bits": 16 if layer == 2 else shared}
                other |= {f"{block}.mlp.experts.{e}.{one}_proj": {"bits": bits[layer]} for e in range(EXPERTS)}
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        run = AutoRound(
            model, tokens, bits=4, group_size=GROUP, sym=symmetric, iters=0, layer_config=other, nsamples=1, seqlen=8,
            disable_opt_rtn=True,
        )  # fmt: skip
        place = work / f"{form.replace(':', '-')}-{symmetric}"
        run.quantize_and_save(output_dir=str(place), format=form)
        return next(place.rglob("config.json")).parent

    for name, form, symmetric, bits, shared in (
        ("auto-round", "auto_round", True, (4, 8, 16), 8),
        ("auto-round-awq", "auto_round:auto_awq", False, (4, 4, 16), 4),
        ("auto-round-gptq", "auto_gptq", True, (4, 8, 16), 8),
    ):
        fake = written("fake", symmetric, bits, shared)
        weights: dict[str, torch.Tensor] = {}
        for file in fake.glob("*.safetensors"):
            weights |= load_file(file)
        decoded = {one: weights[f"{one}.weight"] for one in modules_of_interest()}
        # the third one's weights are the first one's
        keep(written(form, symmetric, bits, shared), target / name, None if form == "auto_gptq" else decoded)


def autoawq(work: Path, target: Path) -> None:
    """DeepSeek-V3: a dense layer, then two with shared experts; the tool skips no layer and has no MTP."""
    from awq import AutoAWQForCausalLM
    from awq.utils.packing_utils import dequantize_gemm
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **SIZES, n_routed_experts=EXPERTS, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
        q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32,
        num_nextn_predict_layers=0,
    )  # fmt: skip
    lopsided(DeepseekV3ForCausalLM(config).half()).save_pretrained(work / "source")
    tokenizer(work / "source")
    model = AutoAWQForCausalLM.from_pretrained(str(work / "source"), device_map="cpu", torch_dtype=torch.float16)
    model.quantize(
        None, calib_data=[[n % 29 for n in range(17 * seed, 17 * seed + 64)] for seed in range(4)],
        quant_config={"w_bit": 4, "q_group_size": GROUP, "zero_point": True, "version": "GEMM"},
        max_calib_seq_len=64, apply_clip=False,
    )  # fmt: skip
    model.save_quantized(str(work / "written"))
    decoded = {}
    for name in modules_of_interest():
        name = name.replace("layers.0", "layers.1")
        module = model.model.get_submodule(name)
        decoded[name] = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, GROUP).T
    keep(work / "written", target / "autoawq", decoded)


TOOLS: dict[str, Callable[[Path, Path], None]] = {
    "llm-compressor": llm_compressor,
    "auto-round": auto_round,
    "autoawq": autoawq,
}


if __name__ == "__main__":
    tool, folder = sys.argv[1], Path(sys.argv[2])
    scratch = folder / f".{tool}"
    shutil.rmtree(scratch, ignore_errors=True)
    TOOLS[tool](scratch, folder)
    shutil.rmtree(scratch)
