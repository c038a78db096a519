"""vLLM's own configs of three formats, with the routed experts taken out of them."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch

from sm70_moe.checkpoint.fields import Fields
from sm70_moe.checkpoint.methods import SKIP_LISTS, read_quantization
from sm70_moe.checkpoint.quantization import QuantizationRules
from sm70_moe.engines.vllm.engine import Engine, reasons
from sm70_moe.engines.vllm.facts import declared, layer_facts, matrix_names, require_known
from sm70_moe.engines.vllm.host import mapped_name, symbol
from sm70_moe.engines.vllm.limits import require_half
from sm70_moe.engines.vllm.method import ExpertsMethod
from sm70_moe.engines.vllm.names import ACTIVATIONS, MIN_CAPABILITY, QUANTIZATION
from sm70_moe.errors import AdmissionRefused

ORDER_OF_OTHERS = re.compile(r"^(?!.*\.experts\.).*\.g_idx$")
"""Row groups outside of experts: vLLM's kernels do not use them. Ours are looked at."""


class Takeover:
    """Mixed into a config of vLLM's: routed experts are ours where the plan says yes, the rest is vLLM's."""

    raw: dict[str, Any]
    engine: Engine | None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        raw = copy.deepcopy(config)
        found: Any = super().from_config(config)  # type: ignore[misc]  # the mixed-in config has it
        found.raw, found.engine = raw, None
        return found

    def __getstate__(self) -> dict[str, Any]:
        """What other processes get: the config, and no open engine."""
        return {**self.__dict__, "engine": None}

    def rules(self) -> QuantizationRules:
        """What the checkpoint declares, with names as the model has them."""
        return read_quantization(Fields(Path("config.json"), self.raw, "quantization_config."))

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Raises what admission raises, where vLLM builds the model: nothing swallows it there."""
        if not isinstance(layer, symbol("layer of experts")):
            method = super().get_quant_method(layer, prefix)  # type: ignore[misc]  # as above
            require_half(symbol("get_current_vllm_config")().model_config.dtype, prefix, method)
            return method
        engine = self._engine()
        with engine.deciding():
            return self._experts(engine, layer, prefix)

    def _experts(self, engine: Engine, layer: Any, prefix: str) -> Any:
        names = matrix_names(layer, engine.host.model_config.model, prefix)
        quantization = declared(self.rules(), layer, prefix, names)
        plan = engine.admit(layer_facts(layer, prefix, quantization, engine.host, engine.model))
        if plan.supported:
            spared = engine.spared(plan)
            kept = self._kept_by_the_host(layer, prefix, engine, spared) if spared else None
            if kept is not None:
                return engine.leave(kept)
            require_known(layer, prefix)
            return ExpertsMethod(engine, plan, layer, names)
        if quantization.format == "none":
            return engine.leave(symbol("UnquantizedFusedMoEMethod")(layer.moe_config))
        if quantization.format == "mixed":
            # vLLM would make one kind of parameter for all, and leave those without a tensor as memory was
            raise AdmissionRefused(prefix, plan.decisions, f"{prefix}: {quantization.packing}")
        return engine.leave(self._of_the_host(layer, prefix, engine, reasons(plan)))

    def _kept_by_the_host(self, layer: Any, prefix: str, engine: Engine, spared: str) -> Any:
        """The host's own method for a layer that we could run; None if it has none and may be helped."""
        try:
            method = super().get_quant_method(layer, prefix)  # type: ignore[misc]  # as above
        except Exception as error:
            if engine.service.settings.take != "none":
                return None
            error.add_note(f"{QUANTIZATION} left {prefix} to vLLM: {spared}")
            raise
        engine.service.leave(prefix, spared)
        return method

    def _of_the_host(self, layer: Any, prefix: str, engine: Engine, why: str) -> Any:
        try:
            return super().get_quant_method(layer, prefix)  # type: ignore[misc]  # as above
        except Exception as error:
            error.add_note(f"{QUANTIZATION} left {prefix} to vLLM: {why}")
            engine.service.summary()  # the start ends here; what was decided is written now
            raise

    def _engine(self) -> Engine:
        if self.engine is None or self.engine.closed:
            self.engine = Engine(symbol("get_current_vllm_config")())
        return self.engine

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        super().apply_vllm_mapper(hf_to_vllm_mapper)  # type: ignore[misc]  # as above
        for key in SKIP_LISTS:
            if isinstance(self.raw.get(key), list):
                self.raw[key] = [mapped(hf_to_vllm_mapper, entry) for entry in self.raw[key]]

    def maybe_update_config(self, model_name: str, **more: Any) -> None:
        """vLLM looks into the files for modules without quantisation, where no list names them."""
        super().maybe_update_config(model_name, **more)  # type: ignore[misc]  # as above
        found = getattr(self, "modules_to_not_convert", None)
        if found and not self.raw.get("modules_to_not_convert"):
            self.raw["modules_to_not_convert"] = list(found)

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        return symbol("WeightsMapper")(orig_to_new_regex={ORDER_OF_OTHERS: None})

    def get_name(self) -> str:
        return QUANTIZATION

    @classmethod
    def get_min_capability(cls) -> int:
        return MIN_CAPABILITY

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [getattr(torch, name) for name in ACTIVATIONS]


def mapped(mapper: Any, entry: Any) -> Any:
    """A skip list's entry as the model has it; regular expressions and fragments stay as they are."""
    if not isinstance(entry, str) or entry.startswith("re:") or "." not in entry:
        return entry
    return mapped_name(mapper, entry) or entry


class Sm70Awq(Takeover, symbol("AWQ config")):  # type: ignore[misc]  # vLLM's class
    """AWQ."""


class Sm70CompressedTensors(Takeover, symbol("CompressedTensorsConfig")):  # type: ignore[misc]  # as above
    """compressed-tensors."""


class Sm70Gptq(Takeover, symbol("GPTQ config")):  # type: ignore[misc]  # as above
    """GPTQ."""


TAKEOVERS = {"awq": Sm70Awq, "compressed-tensors": Sm70CompressedTensors, "gptq": Sm70Gptq}
