"""What a checkpoint declares of its modules: one rule, exceptions, and a skip list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        declared: dict[str, set[Quantization | None]] = {matrix: set() for matrix in matrices}
        for prefix in prefixes:
            for matrix, found in declared.items():
                module = f"{prefix}.{matrix}"
                found.add(NONE if skipped(module) else changed(module))
        by_matrix = {matrix: {self.base if one is None else one for one in found} for matrix, found in declared.items()}
        every = set().union(*by_matrix.values())
        if len(every) > 1:
            return replace(self.base, format="mixed", packing=differences(by_matrix))
        return every.pop() if every else self.of(layer)


def differences(by_matrix: Mapping[str, set[Quantization]]) -> str:
    """How matrices that are stored in several ways differ: "group 32 in gate_proj, group 64 in down_proj"."""
    every = set().union(*by_matrix.values())
    quantised = [one for one in every if one != NONE]
    alike = len({replace(one, group=None) for one in quantised}) == 1
    places: dict[str, list[str]] = {}
    for matrix, found in by_matrix.items():
        for one in sorted(found, key=repr):
            places.setdefault(_short(one, alike), []).append(matrix)
    told = ", ".join(f"{what} in {' and '.join(names)}" for what, names in places.items())
    return f"some experts are quantised and some are not: {told}" if NONE in every else told


def _short(one: Quantization, groups: bool) -> str:
    if one == NONE:
        return "not quantised"
    group = f"group {one.group}"
    return group if groups else f"{one.format} ({one.packing}), {one.bits} bits, {group}"
