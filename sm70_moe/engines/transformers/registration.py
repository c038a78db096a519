"""Puts the quantizer into transformers' tables, once."""

from __future__ import annotations

from sm70_moe.engines.transformers.config import NAME, Sm70MoeConfig
from sm70_moe.engines.transformers.host import quantizers
from sm70_moe.engines.transformers.quantizer import Sm70MoeQuantizer
from sm70_moe.errors import BackendError


def register() -> None:
    """Make `quant_method: sm70_awq` known; a second call does nothing.

    Needed by itself only for a checkpoint whose own config.json says `sm70_awq`. Raises
    BackendError if somebody else's class has the name.
    """
    for table, ours in (
        (quantizers.AUTO_QUANTIZATION_CONFIG_MAPPING, Sm70MoeConfig),
        (quantizers.AUTO_QUANTIZER_MAPPING, Sm70MoeQuantizer),
    ):
        known = table.get(NAME, ours)
        if known is not ours:
            raise BackendError(f"transformers knows {NAME!r} as {known.__module__}.{known.__qualname__} already")
    # the host's decorators raise for a name that is there
    if NAME not in quantizers.AUTO_QUANTIZATION_CONFIG_MAPPING:
        quantizers.register_quantization_config(NAME)(Sm70MoeConfig)
    if NAME not in quantizers.AUTO_QUANTIZER_MAPPING:
        quantizers.register_quantizer(NAME)(Sm70MoeQuantizer)
