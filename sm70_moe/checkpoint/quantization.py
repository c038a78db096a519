"""What a checkpoint declares of its modules: one rule, exceptions, and a skip list."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from sm70_moe.checkpoint.modules import Entries


@dataclass(frozen=True, slots=True)
class Quantization:
    """How one module is stored; None is a fact that the checkpoint does not state.

    `format` is the writer's own name of the method ("awq", "gptq", "compressed-tensors"), "none"
    for an unquantised module, "mixed" for a layer whose experts differ. `packing` is the name that
    the format has for its layout, with everything after a comma that makes it another one.
    `group` counts rows of K; -1 is one group per column.
    """

    format: str | None
    packing: str | None = None
    bits: int | None = None
    group: int | None = None
    zero_point: bool | None = None

    def but(self, *remarks: str) -> Quantization:
        """The same with remarks added to the packing, so that it counts as a packing of its own."""
        return replace(self, packing=", ".join((self.packing or "?", *remarks))) if remarks else self


NONE = Quantization("none")


@dataclass(frozen=True, slots=True)
class QuantizationRules:
    """The rule for all modules, overrides for some of them, and the skip list.

    `stored` is what quantised tensors are that no rule speaks about.
    """

    base: Quantization = NONE
    overrides: Entries[Quantization] = field(default_factory=Entries)
    skipped: Entries[bool] = field(default_factory=Entries)
    stored: Quantization = Quantization(None)

    def skips(self, module: str) -> bool:
        """Whether the skip list names this module or one that contains it."""
        return self.skipped.find(module) is not None

    def of(self, module: str) -> Quantization:
        """What the checkpoint declares for one module, by its dotted name."""
        if self.skips(module):
            return NONE
        override = self.overrides.find(module)
        return self.base if override is None else override

    def of_layer(self, layer: str, experts: Iterable[int], matrices: tuple[str, ...]) -> Quantization:
        """What is declared for a layer whose modules are `layer.EXPERT.MATRIX`.

        Without experts, as where they are stacked, the modules are `layer.MATRIX`. Entries that
        reach single modules are rare, so these are only looked at if an entry could name one. If
        they differ, the format is "mixed".
        """
        if not any(entries.may_divide(layer, matrices) for entries in (self.skipped, self.overrides)):
            return self.of(layer)
        skipped, changed = self.skipped.finder(layer, matrices), self.overrides.finder(layer, matrices)
        prefixes = [f"{layer}.{expert}" for expert in experts] or [layer]
        declared: set[Quantization | None] = set()
        for module in (f"{prefix}.{matrix}" for prefix in prefixes for matrix in matrices):
            declared.add(NONE if skipped(module) else changed(module))
        found = {self.base if one is None else one for one in declared}
        if len(found) > 1:
            return replace(self.base, format="mixed")
        return found.pop() if found else self.of(layer)
