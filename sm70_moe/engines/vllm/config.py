"""The quantization config that vLLM finds under our name: it only decides which of three others to make."""

from __future__ import annotations

from typing import Any

from sm70_moe.engines.vllm.host import refusal, symbol
from sm70_moe.engines.vllm.names import ACTIVATIONS, METHODS, MIN_CAPABILITY, QUANTIZATION
from sm70_moe.errors import BackendError, SettingsError
from sm70_moe.policy import read_operator


class Sm70AwqConfig(symbol("QuantizationConfig")):  # type: ignore[misc]  # vLLM's class
    """Stands for AWQ, compressed-tensors and GPTQ checkpoints; `from_config` gives the one that fits.

    Cheap to import, since every process does it; the classes with kernels come with `from_config`.
    """

    @classmethod
    def get_name(cls) -> str:
        return QUANTIZATION

    @classmethod
    def get_min_capability(cls) -> int:
        return MIN_CAPABILITY

    @classmethod
    def get_supported_act_dtypes(cls) -> list[Any]:
        import torch

        return [getattr(torch, name) for name in ACTIVATIONS]

    def __init__(self) -> None:
        """vLLM makes one by itself only for a model whose config says nothing of quantisation."""
        raise SettingsError(
            f"--quantization {QUANTIZATION}: config.json has no quantization_config; accepted are checkpoints with "
            f"quant_method {', '.join(METHODS)}. For a model without quantisation leave --quantization out"
        )

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # other files say no quant_method

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None) -> Any:
        """Take a checkpoint if, and only if, the user named us.

        vLLM asks while it reads its arguments, before any other process starts: what is wrong with the
        environment is raised here, where whoever started the engine sees it. Raises SettingsError or
        PolicyError; None leaves the checkpoint to others.
        """
        if user_quant != QUANTIZATION:
            return None
        if refusal():
            raise BackendError(f"--quantization {QUANTIZATION}: {refusal()}")
        method = method_of(hf_quant_cfg)
        if method not in METHODS:
            raise SettingsError(
                f"--quantization {QUANTIZATION}: the checkpoint's quant_method is {method!r}; "
                f"accepted: {', '.join(METHODS)}"
            )
        read_operator()
        return QUANTIZATION

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        from sm70_moe.engines.vllm.takeover import TAKEOVERS

        return TAKEOVERS[method_of(config)].from_config(config)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        raise NotImplementedError("from_config gives the config that has methods")


def method_of(config: Any) -> str:
    return str(config.get("quant_method", "")).lower()
