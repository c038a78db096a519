"""transformers, 5.15 to 5.24: quantised mixture-of-experts checkpoints through `from_pretrained`.

    config = use_sm70_moe("folder or hub name")
    model = AutoModelForCausalLM.from_pretrained("folder or hub name", config=config)

docs/transformers.md has the details. Nothing else of this package imports this one, which imports
transformers. Importing it registers nothing; `use_sm70_moe` and `register` do.
"""

from __future__ import annotations

from sm70_moe.engines.transformers.config import NAME, Sm70MoeConfig
from sm70_moe.engines.transformers.experts import Sm70MoeExperts
from sm70_moe.engines.transformers.flips import Flip, flips
from sm70_moe.engines.transformers.linear import PackedLinear
from sm70_moe.engines.transformers.quantizer import Sm70MoeQuantizer, service_of
from sm70_moe.engines.transformers.registration import register, use_sm70_moe

__all__ = [
    "NAME",
    "Flip",
    "PackedLinear",
    "Sm70MoeConfig",
    "Sm70MoeExperts",
    "Sm70MoeQuantizer",
    "flips",
    "register",
    "service_of",
    "use_sm70_moe",
]
