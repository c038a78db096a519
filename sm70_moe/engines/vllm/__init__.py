"""vLLM: `quantization="sm70_awq"` gives the routed experts of 4-bit checkpoints to this package.

The entry point `vllm.general_plugins` calls `register` in every process of an engine. Importing
this package imports no vLLM: a plug-in that cannot be imported is only logged there, and the engine
goes on without it.
"""

from __future__ import annotations

import logging

from sm70_moe.engines.vllm.names import QUANTIZATION
from sm70_moe.errors import BackendError

__all__ = ["QUANTIZATION", "register"]


def register() -> None:
    """Make `sm70_awq` known to vLLM in this process; calling it again changes nothing.

    Changes nothing for engines that do not ask for it. A host that lacks something essential is told of at
    once; whoever asks for `sm70_awq` there is refused with the same text (BackendError).
    """
    from sm70_moe.engines.vllm.host import refusal, symbol

    if refusal():
        logging.getLogger("sm70_moe").warning("--quantization %s is refused: %s", QUANTIZATION, refusal())
    try:
        from sm70_moe.engines.vllm.config import Sm70AwqConfig

        symbol("register_quantization_config")(QUANTIZATION)(Sm70AwqConfig)
    except BackendError:
        if not refusal():
            raise
        # without even a place for our name, vLLM itself refuses it
