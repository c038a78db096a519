"""Puts the quantizer into transformers' tables, once, and asks for it."""

from __future__ import annotations

import copy
import os
from typing import Any

from sm70_moe.engines.transformers.config import NAME, Sm70MoeConfig, declared, taken_over
from sm70_moe.engines.transformers.host import AutoConfig, quantizers
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


def use_sm70_moe(model: Any, **keywords: Any) -> Any:
    """A config that loads a quantised checkpoint through this package; also registers it.

    `model` is a folder or a name on the hub, read with `AutoConfig.from_pretrained(model,
    **keywords)`, or a config, which is copied and left as it is. Pass the result to
    `from_pretrained(..., config=...)`. Raises CheckpointError for a config without
    `quantization_config` and for a method that cannot be read.
    """
    register()
    named = isinstance(model, str | os.PathLike)
    config = AutoConfig.from_pretrained(model, **keywords) if named else copy.deepcopy(model)
    config.quantization_config = taken_over(declared(config), str(model) if named else type(config).__name__)
    return config
