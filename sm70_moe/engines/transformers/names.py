"""Where a checkpoint's tensors belong in a model: transformers renames some families' on the way."""

from __future__ import annotations

import re
from typing import Any

from sm70_moe.checkpoint.names import ASIDE, layer_index
from sm70_moe.engines.transformers.host import WeightRenaming, conversions


class Names:
    """The names of one model. `model` is a `PreTrainedModel`, not loaded yet."""

    def __init__(self, model: Any) -> None:
        found = conversions.get_model_conversion_mapping(model)
        self._renamings = [transform for transform in found if isinstance(transform, WeightRenaming)]
        self.prefix = f"{model.base_model_prefix}."
        self._ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        self._layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
        self.modules = {name for name, _ in model.named_modules()}
        self.tensors = set(model.state_dict())

    def tensor(self, name: str) -> str | None:
        """The model's name of a checkpoint's tensor; None if it has none."""
        return self._known(self._renamed(name), self.tensors)

    def module(self, name: str, tail: str) -> str | None:
        """The model's name of the module that the checkpoint calls `name`; `name.tail` is one of its tensors."""
        renamed = self._renamed(f"{name}.{tail}")
        found = renamed.removesuffix(f".{tail}")
        return None if found == renamed else self._known(found, self.modules)

    def renamed(self, name: str) -> bool:
        """Is a checkpoint's tensor called otherwise in the model?"""
        return self.tensor(name) not in (None, name)

    def aside(self, name: str) -> bool:
        """Is a tensor none of this model's: multi-token prediction, a tower, a layer that was left out?"""
        index = layer_index(name)
        beyond = index is not None and self._layers is not None and index >= self._layers
        tower = any(part.startswith(ASIDE) for part in name.split("."))
        return beyond or tower or any(pattern.search(name) for pattern in self._ignored)

    def _renamed(self, name: str) -> str:
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def _known(self, name: str, names: set[str]) -> str | None:
        """transformers adds and drops the base model's prefix, whichever fits."""
        candidates = (name, self.prefix + name, name.removeprefix(self.prefix))
        return next((candidate for candidate in candidates if candidate in names), None)
