"""How a checkpoint says its modules are quantised: one rule, exceptions, and a skip list."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from sm70_moe.weights.fields import Fields
from sm70_moe.weights.modules import REGEX, Entries

SKIP_LISTS = ("modules_to_not_convert", "ignore")
OVERRIDE_TABLES = ("layers", "modules", "extra_config", "dynamic")
"""Keys of `quantization_config` under which writers put settings of single modules."""

UNQUANTISED_BITS = 16


@dataclass(frozen=True, slots=True)
class Quantization:
    """How one module is stored; None is a fact that the checkpoint does not state.

    `format` is the writer's own name of the method ("awq", "gptq", "compressed-tensors"), "none"
    for an unquantised module, "mixed" for a layer whose experts differ. `packing` is AWQ's
    `version` in lower case. `group` counts rows of K; -1 is one group per column.
    """

    format: str | None
    packing: str | None = None
    bits: int | None = None
    group: int | None = None
    zero_point: bool | None = None


NONE = Quantization("none")


@dataclass(frozen=True, slots=True)
class QuantizationRules:
    """The rule for all modules, overrides for some of them, and the skip list."""

    base: Quantization = NONE
    overrides: Entries[Quantization] = field(default_factory=Entries)
    skipped: Entries[bool] = field(default_factory=Entries)

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

        Entries that reach single experts are rare, so single modules are only looked at if an
        entry could name one. If they differ, the format is "mixed".
        """
        if not any(entries.may_divide(layer, matrices) for entries in (self.skipped, self.overrides)):
            return self.of(layer)
        declared = {self.of(f"{layer}.{expert}.{matrix}") for expert in experts for matrix in matrices}
        if len(declared) > 1:
            return replace(self.base, format="mixed")
        return declared.pop() if declared else self.of(layer)


def read_quantization(config: Fields) -> QuantizationRules:
    """Read `quantization_config` of a config.json; a config without one is not quantised.

    Raises CheckpointError naming file, key and value for a value of the wrong type and for aliases
    that contradict each other.
    """
    fields = config.table("quantization_config")
    if fields is None:
        return QuantizationRules()
    method = fields.text("quant_method")
    version = fields.text("version") if method == "awq" else None
    base = Quantization(
        method,
        version and version.lower(),
        fields.integer("bits", "w_bit"),
        fields.integer("group_size", "q_group_size"),
        _zero_point(fields),
    )
    skipped = Entries((entry, True) for entry in fields.texts(*SKIP_LISTS))
    return QuantizationRules(base, overrides(fields, base), skipped)


def overrides(fields: Fields, base: Quantization) -> Entries[Quantization]:
    """Settings of single modules: every table under a key that writers use for them."""
    found: list[tuple[str, Quantization]] = []
    for key in OVERRIDE_TABLES:
        table = fields.table(key)
        for name in table.values if table else ():
            one = table.table(name) if table else None
            if one is not None:
                entry, excluded = _entry(name, key)
                found.append((entry, NONE if excluded else _changed(base, one)))
    return Entries(found)


def _entry(name: str, key: str) -> tuple[str, bool]:
    """The entry for `Entries`, and whether it excludes modules.

    Names in `dynamic` are regular expressions; "-:" before one leaves its modules unquantised.
    """
    if key != "dynamic":
        return name, False
    return REGEX + name.removeprefix("+:").removeprefix("-:"), name.startswith("-:")


def _changed(base: Quantization, fields: Fields) -> Quantization:
    bits = fields.integer("bits", "w_bit")
    group = fields.integer("group_size", "q_group_size")
    zero_point = _zero_point(fields)
    if bits is not None and bits >= UNQUANTISED_BITS:
        return NONE
    return replace(
        base,
        bits=base.bits if bits is None else bits,
        group=base.group if group is None else group,
        zero_point=base.zero_point if zero_point is None else zero_point,
    )


def _zero_point(fields: Fields) -> bool | None:
    """Whether zeros are stored for use: `zero_point`, or the contrary of `sym`."""
    zero_point, symmetric = fields.flag("zero_point"), fields.flag("sym")
    if zero_point is not None and zero_point is symmetric:
        raise fields.fault("zero_point", zero_point, f"the contrary of sym, which is {symmetric}")
    if zero_point is None and symmetric is not None:
        return not symmetric
    return zero_point
