"""The quantizer: swaps modules before transformers loads, fills the experts after."""

from __future__ import annotations

import re
import weakref
from dataclasses import replace
from typing import Any

import torch

from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.checkpoint.model_types import read_model_types
from sm70_moe.engines.devices import architecture_of
from sm70_moe.engines.transformers.experts import Sm70MoeExperts, arithmetic
from sm70_moe.engines.transformers.flips import watch
from sm70_moe.engines.transformers.host import HfQuantizer
from sm70_moe.engines.transformers.linear import PackedLinear
from sm70_moe.engines.transformers.linears import place_linears
from sm70_moe.engines.transformers.names import Names
from sm70_moe.engines.transformers.placing import PlacedLayer, kinds_beside, open_checkpoint, place_layers
from sm70_moe.engines.transformers.stored import Stored
from sm70_moe.errors import BackendError, SettingsError
from sm70_moe.reading.source import CheckpointSource
from sm70_moe.runtime.service import AdmissionService

_services: weakref.WeakKeyDictionary[torch.nn.Module, AdmissionService] = weakref.WeakKeyDictionary()
"""Process-wide, by model: a service holds locks and files, which no copy of a model can have."""


def service_of(model: Any) -> AdmissionService:
    """The service that decided a model's layers: plans, summary, drift. Raises BackendError for another model."""
    if model not in _services:
        raise BackendError(f"{type(model).__name__}: accepted is a model that from_pretrained loaded through sm70_moe")
    return _services[model]


class Sm70MoeQuantizer(HfQuantizer):  # type: ignore[misc]  # a class of transformers is Any, see `host`
    """Loads experts straight from the checkpoint's files into banks, one expert at a time.

    transformers loads everything else, quantised linears too. Settings are read, and the
    checkpoint checked, before any weight is.
    """

    requires_calibration = True

    def __init__(self, quantization_config: Any, **keywords: Any) -> None:
        super().__init__(quantization_config, **keywords)
        self._loading: Loading | None = None

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        require_one_rank(model)
        self._loading = Loading(model, checkpoint_files)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        require_one_rank(model)
        loading, self._loading = self._loading, None
        assert loading is not None  # transformers calls the one before
        _services[model] = loading.finish(model)
        return model


class Loading:
    """One model between the two calls of the quantizer."""

    def __init__(self, model: Any, files: list[str] | None) -> None:
        self.service = AdmissionService(rank=_rank())
        if self.service.settings.take == "none":
            raise SettingsError(
                "SM70_MOE_TAKE='none': transformers cannot run these experts without this package, so nobody could "
                "be left with them; accepted are native and all"
            )
        self.checkpoint: Checkpoint = open_checkpoint(files, read_model_types(self.service.settings.model_types))
        names, beside = Names(model), kinds_beside(self.checkpoint)
        layers = place_layers(self.checkpoint, model, names, beside)
        self.layers = [one for one in layers if one.quantised]
        self.left = [one for one in layers if not one.quantised]
        self.linears = place_linears(self.checkpoint, model, names, beside)
        self.arithmetic = {one.module: arithmetic(model.get_submodule(one.module)) for one in self.layers}
        for one in self.layers:
            model.set_submodule(one.module, Sm70MoeExperts(one.layer.name))
        for linear in self.linears:
            old = model.get_submodule(linear.module)
            packed = PackedLinear(
                old.in_features, old.out_features, linear.form, linear.parts, linear.group, old.bias is not None
            )
            model.set_submodule(linear.module, packed)
        theirs = [f"{module}.{kind}" for module, kinds in beside.items() for kind in kinds]
        renamed = {names.tensor(name) for name in theirs if names.renamed(name)}
        plain = {one.module for one in layers if not one.quantised}
        self.dtypes = {
            name: parameter.dtype
            for name, parameter in model.named_parameters()
            if name in renamed or name.rpartition(".")[0] in plain
        }
        # transformers sees the experts' tensors in the files, and nothing in the model to put them into
        ours = {rf"(^|\.){re.escape(one.module.removeprefix(names.prefix))}\." for one in self.layers}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *ours}

    def finish(self, model: Any) -> AdmissionService:
        """Check the linears' values, admit and fill every layer of experts."""
        restore_dtypes(model, self.dtypes)
        for linear in self.linears:
            model.get_submodule(linear.module).check(linear.name)
        with self.service as service:
            for one in self.left:  # told, and a `1` with no layer of ours at all is refused
                device = str(device_of(model, one.module))
                service.admit(self.checkpoint.facts(one.layer, tensor_parallel=1, tensor_rank=0, device=device))
            for one in self.layers:
                self._fill(model, one)
        watch(model, len(self.layers), len(self.left))
        return service

    def _fill(self, model: Any, placed: PlacedLayer) -> None:
        device = device_of(model, placed.module)
        facts = self.checkpoint.facts(placed.layer, tensor_parallel=1, tensor_rank=0, device=str(device))
        activations = str(model.dtype).removeprefix("torch.")
        architecture = architecture_of(str(device))
        facts = replace(facts, activations=activations, architecture=architecture, **self.arithmetic[placed.module])
        source = CheckpointSource(self.checkpoint, placed.layer, facts)
        layer = self.service.layer(facts, source, device=str(device))
        model.get_submodule(placed.module).hold(layer, Stored.of(placed.layer))


def device_of(model: Any, module: str) -> torch.device:
    """Where transformers has put what stands beside the experts; raises BackendError if it is not in memory."""
    block, _, _ = module.rpartition(".")
    found: torch.device = next(model.get_submodule(block).parameters()).device
    if found.type == "meta":
        raise BackendError(f"{block}: offloaded; accepted is a device_map that keeps every block on a device")
    return found


def restore_dtypes(model: Any, dtypes: dict[str, torch.dtype]) -> None:
    """Up to some version, transformers leaves tensors that it renames in the file's dtype where a
    model is quantised: Mixtral's routers then stay FP16 in an FP32 model, which does not run.
    """
    kept = (*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ()))
    for name, dtype in dtypes.items():
        parameter = model.get_parameter(name)
        wanted = torch.float32 if any(part in name for part in kept) else dtype
        if parameter.is_floating_point() and parameter.dtype is not wanted:
            parameter.data = parameter.data.to(wanted)


def require_one_rank(model: Any) -> None:
    """Tensor parallelism of transformers shards parameters, which our experts do not have."""
    size = getattr(model, "_tp_size", None) or 1
    if size > 1 or getattr(model.config, "distributed_config", None) is not None:
        raise BackendError(f"tensor parallel {size} by transformers; accepted is one rank, or vLLM for several")


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
