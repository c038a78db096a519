"""Reads `quantization_config`: one function for each method that is known, in the table `METHODS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from sm70_moe.checkpoint.compressed import read_compressed
from sm70_moe.checkpoint.fields import SHORT, Fields
from sm70_moe.checkpoint.modules import REGEX, Entries
from sm70_moe.checkpoint.patterns import is_pattern
from sm70_moe.checkpoint.quantization import NONE, Quantization, QuantizationRules
from sm70_moe.numbers.formats import ACT_ORDER, AWQ, GPTQ_V1, GPTQ_V2

SKIP_LISTS = ("modules_to_not_convert", "ignore")
OVERRIDE_TABLES = ("layers", "modules", "extra_config", "dynamic")
"""Keys of `quantization_config` under which writers put settings of single modules."""
PATTERN_SIGNS = set("*+?^$|()[]{}\\")
"""What no module's name holds: a key with one of these is a regular expression."""

UNQUANTISED_BITS = 16

OTHER_PACKINGS = ("quant_algo", "packing_format", "format", "fmt", "quant_type", "bnb_4bit_quant_type")
"""Keys under which methods that are not read say more about themselves."""
OTHER_SKIP_LISTS = (*SKIP_LISTS, "ignored_layers", "exclude_modules", "exclude", "llm_int8_skip_modules")

AUTO_ROUND = {
    "auto_round:auto_awq": AWQ,
    "auto_round:auto_gptq": GPTQ_V1,
    "auto_round:gptqmodel": GPTQ_V2,
    "auto_round": GPTQ_V2,
}
"""auto-round's `packing_format`, and what it is; the last two store zeros without an offset."""


AUTO_ROUND_BACKENDS = {"auto_round:gptq:": GPTQ_V1, "auto_round:awq:": AWQ, "gptq:": GPTQ_V1, "awq:": AWQ}
"""Beginnings of auto-round's older `backend`."""


def read_quantization(fields: Fields, usual: str = "") -> QuantizationRules:
    """Read a `quantization_config`; `usual` is the method of one that does not say.

    Raises CheckpointError naming file, key and value for a value of the wrong type and for aliases
    that contradict each other, in the methods that are known. Of others it takes what it understands.
    """
    method = fields.text("quant_method") or usual
    reader = METHODS.get(method)
    return read_other(fields, method or None) if reader is None else reader(fields)


def read_awq(fields: Fields) -> QuantizationRules:
    """AutoAWQ's `version`; gptqmodel's name for the same is `checkpoint_format`."""
    packing = fields.text("version") or fields.text("checkpoint_format", "format")
    return _rules(fields, _base(fields, "awq", packing and packing.lower()))


def read_gptq(fields: Fields) -> QuantizationRules:
    """AutoGPTQ's and gptqmodel's fields. Files from before `checkpoint_format` existed are version 1."""
    packing = (fields.text("checkpoint_format", "format") or GPTQ_V1.packing).lower()
    if fields.flag("is_marlin_format"):
        packing = "marlin"
    dtype, activation = fields.text("pack_dtype"), fields.given("activation")
    remarks = [f"{dtype} words"] if dtype not in (None, "int32") else []
    shown = activation if isinstance(activation, str) else SHORT.repr(activation)
    remarks += [f"activation {shown:.80}"] if activation else []
    remarks += [ACT_ORDER] if fields.flag("desc_act") else []
    return _rules(fields, _base(fields, "gptq", packing).but(*remarks))


def read_auto_round(fields: Fields) -> QuantizationRules:
    """auto-round's own name for files that are AWQ's or GPTQ's.

    Before `packing_format` there was `backend`, "auto_round:gptq:exllamav2": packing and kernel. Whether
    zeros have GPTQ's offset is not said there, but a symmetric file's tell (`Reader`).
    """
    packing = fields.text("packing_format")
    backend = fields.text("backend")
    form = AUTO_ROUND.get(packing or "")
    remarks = []
    if packing is None and backend is not None:
        form = next((found for start, found in AUTO_ROUND_BACKENDS.items() if f"{backend}:".startswith(start)), None)
        packing = f"no packing_format, backend {backend}"
        if form is not None and not fields.flag("sym"):
            remarks.append(f"offset of zeros not said by backend {backend}")
    base = _base(fields, form.name, form.packing) if form else _base(fields, "auto-round", packing)
    data, activation = fields.text("data_type"), fields.integer("act_bits")
    remarks += [f"data_type {data}"] if data not in (None, "int") else []
    remarks += [f"{activation}-bit activations"] if activation is not None and activation < UNQUANTISED_BITS else []
    remarks += ["rotation_config"] if fields.given("rotation_config") else []
    return _rules(fields, base.but(*remarks))


def read_other(fields: Fields, method: str | None = None) -> QuantizationRules:
    """A method that cannot be read: its name, and nothing that could raise."""
    values = fields.values
    packing = next((values[key] for key in OTHER_PACKINGS if isinstance(values.get(key), str)), None)
    numbers = [values.get(key) if type(values.get(key)) is int else None for key in ("bits", "group_size")]
    base = Quantization(method or fields.text("quant_method"), packing, *numbers)
    lists = [values[key] for key in OTHER_SKIP_LISTS if isinstance(values.get(key), list)]
    texts = (entry for entries in lists for entry in entries if isinstance(entry, str))
    readable = (one for one in texts if not one.startswith(REGEX) or is_pattern(one.removeprefix(REGEX)))
    skipped = Entries((entry, True) for entry in readable)
    return QuantizationRules(base, Entries(), skipped, base)


def read_taken_over(fields: Fields) -> QuantizationRules:
    """Our own name, by which transformers finds our quantizer; `checkpoint_method` says what it is, AWQ if silent."""
    method = fields.text("checkpoint_method") or "awq"
    reader = METHODS.get(method, read_other)
    return read_awq(fields) if method == "sm70_awq" else reader(fields)


METHODS: Mapping[str, Callable[[Fields], QuantizationRules]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,
    "compressed-tensors": read_compressed,
    "sm70_awq": read_taken_over,
}


def _base(fields: Fields, method: str, packing: str | None) -> Quantization:
    return Quantization(
        method,
        packing,
        fields.integer("bits", "w_bit"),
        fields.integer("group_size", "q_group_size"),
        _zero_point(fields),
    )


def _rules(fields: Fields, base: Quantization) -> QuantizationRules:
    skipped = Entries((entry, True) for entry in fields.texts(*SKIP_LISTS))
    return QuantizationRules(base, overrides(fields, base), skipped, base)


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
    if key == "dynamic":
        return REGEX + name.removeprefix("+:").removeprefix("-:"), name.startswith("-:")
    return (REGEX + name if PATTERN_SIGNS & set(name) else name), False


def _changed(base: Quantization, fields: Fields) -> Quantization:
    bits = fields.integer("bits", "w_bit")
    group = fields.integer("group_size", "q_group_size")
    zero_point, ordered = _zero_point(fields), fields.flag("desc_act")
    if bits is not None and bits >= UNQUANTISED_BITS:
        return NONE
    changed = replace(
        base,
        bits=base.bits if bits is None else bits,
        group=base.group if group is None else group,
        zero_point=base.zero_point if zero_point is None else zero_point,
    )
    return changed if ordered is None else with_order(changed, ordered)


def with_order(found: Quantization, permuted: bool) -> Quantization:
    """The same with its rows permuted among the groups, or not."""
    if found.packing is None:
        return found
    plain = replace(found, packing=found.packing.removesuffix(f", {ACT_ORDER}"))
    return plain.but(ACT_ORDER) if permuted else plain


def _zero_point(fields: Fields) -> bool | None:
    """Whether zeros are stored for use: `zero_point`, or the contrary of `sym`."""
    zero_point, symmetric = fields.flag("zero_point"), fields.flag("sym")
    if zero_point is not None and zero_point is symmetric:
        raise fields.fault("zero_point", zero_point, f"the contrary of sym, which is {symmetric}")
    if zero_point is None and symmetric is not None:
        return not symmetric
    return zero_point
