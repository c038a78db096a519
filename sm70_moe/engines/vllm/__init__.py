"""vLLM: `quantization="sm70_awq"` gives the routed experts of 4-bit checkpoints to this package.

The entry point `vllm.general_plugins` calls `register` in every process of an engine. Importing
this package imports no vLLM: a plug-in that cannot be imported is only logged there, and the engine
goes on without it.
"""

from __future__ import annotations

from sm70_moe.engines.vllm.names import QUANTIZATION

__all__ = ["QUANTIZATION", "register"]


def register() -> None:
    """Make `sm70_awq` known to vLLM in this process; calling it again changes nothing.

    Changes nothing for engines that do not ask for it.
    """
    from vllm.model_executor.layers.quantization import (  # type: ignore[import-not-found]  # see `host`
        register_quantization_config,
    )

    from sm70_moe.engines.vllm.config import Sm70AwqConfig

    register_quantization_config(QUANTIZATION)(Sm70AwqConfig)
