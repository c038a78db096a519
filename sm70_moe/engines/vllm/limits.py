"""Ways of using vLLM in which our experts cannot run: refused by name before a weight is read."""

from __future__ import annotations

from typing import Any

from sm70_moe.engines.vllm.names import QUANTIZATION
from sm70_moe.errors import BackendError


def require_possible(host: Any) -> None:
    """Raise BackendError that names every option of a `VllmConfig` that cannot be had, and what works instead."""
    parallel = getattr(host.parallel_config, "data_parallel_size", 1)
    wrong = [
        text
        for text, found in (
            ("--enable-lora: experts take no LoRA; merge it into the checkpoint", host.lora_config is not None),
            (f"--data-parallel-size {parallel}: accepted is 1; start an engine for each", parallel > 1),
            (
                "--enable-sleep-mode: banks cannot be loaded a second time; end the engine and start it again",
                getattr(host.model_config, "enable_sleep_mode", False),
            ),
        )
        if found
    ]
    if wrong:
        raise BackendError(f"--quantization {QUANTIZATION}: " + "; ".join(wrong))


def require_half(dtype: object, prefix: str, method: Any) -> None:
    """Raise BackendError for a quantised linear in a float32 engine: no host has a kernel, and all say so too late."""
    kind = type(method).__name__
    if method is not None and str(dtype) == "torch.float32" and "Linear" in kind and "Unquantized" not in kind:
        raise BackendError(
            f"{prefix}: 4-bit linears do not run in float32; accepted is --dtype float16 (or bfloat16, or a checkpoint "
            "whose experts alone are quantised)"
        )
