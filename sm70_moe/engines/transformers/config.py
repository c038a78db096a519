"""The configuration under which transformers finds our quantizer."""

from __future__ import annotations

import copy
from typing import Any

from sm70_moe.checkpoint.methods import METHODS
from sm70_moe.engines.transformers.host import QuantizationConfigMixin
from sm70_moe.errors import CheckpointError

NAME = "sm70_awq"
"""The `quant_method` that is ours."""

ORIGINAL = "checkpoint_method"
"""Under this key a configuration that says `sm70_awq` keeps what its checkpoint says."""

DEFAULT = "awq"
"""What a checkpoint is that says `sm70_awq` and no more."""


class Sm70MoeConfig(QuantizationConfigMixin):  # type: ignore[misc]  # a class of transformers is Any, see `host`
    """`quantization_config` of a model that was loaded through this package.

    In memory its method is `sm70_awq`. Written out it is what the checkpoint said before, so that
    a saved model is a plain AWQ (or other) checkpoint: no file says `sm70_awq` unless somebody
    wrote that by hand.
    """

    def __init__(self, quant_method: str = NAME, **fields: Any) -> None:
        self.quant_method = NAME
        self.declared = {"quant_method": fields.pop(ORIGINAL, DEFAULT), **fields}

    def to_dict(self) -> dict[str, Any]:
        """The checkpoint's own fields and method."""
        return copy.deepcopy(self.declared)

    def get(self, key: str, default: Any = None) -> Any:
        """As a dictionary has it: transformers asks so when a model's config is used again."""
        return NAME if key == "quant_method" else self.declared.get(key, default)


def declared(config: Any) -> dict[str, Any]:
    """What a config says of its quantisation, as transformers looks for it; empty if nothing."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if found is None or isinstance(found, dict):
        return dict(found or {})
    return dict(found.to_dict())


def taken_over(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """The same fields under our method; the checkpoint's own stays beside it."""
    method = fields.get("quant_method")
    method = getattr(method, "value", method)  # an enumeration, if transformers made it
    if method == NAME:
        return fields
    if method not in METHODS:
        accepted = ", ".join(sorted({*METHODS} - {NAME}))
        raise CheckpointError(f"{name}: quant_method {method!r}; accepted are {accepted}")
    return {**fields, "quant_method": NAME, ORIGINAL: method}
