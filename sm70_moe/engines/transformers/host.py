"""What is taken from transformers, in one place.

Everything here is `Any`: the package is checked where transformers is not installed, and this is
the boundary at which its types end.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

AutoConfig: Any = import_module("transformers").AutoConfig
HfQuantizer: Any = import_module("transformers.quantizers.base").HfQuantizer
QuantizationConfigMixin: Any = import_module("transformers.utils.quantization_config").QuantizationConfigMixin
WeightRenaming: Any = import_module("transformers.core_model_loading").WeightRenaming
SiLUActivation: Any = import_module("transformers.activations").SiLUActivation

quantizers: Any = import_module("transformers.quantizers.auto")
experts: Any = import_module("transformers.integrations.moe")
conversions: Any = import_module("transformers.conversion_mapping")
