"""Reads compressed-tensors' `quantization_config`: groups of modules, each with a scheme of its own."""

from __future__ import annotations

from sm70_moe.checkpoint.fields import Fields
from sm70_moe.checkpoint.modules import REGEX, Entries
from sm70_moe.checkpoint.quantization import NONE, Quantization, QuantizationRules
from sm70_moe.numbers.formats import ACT_ORDER

METHOD = "compressed-tensors"

EXPERT_CLASS = "Linear"
"""The class, as a target names it, of every matrix of an expert."""

MIXED = "mixed-precision"
"""What the whole file's `format` says if each group has its own."""

PERMUTED = ("group", "dynamic", True)
"""Values of `actorder` that permute rows among groups; "weight" and "static" only order the work."""

ROWWISE = ("group", "channel")
"""Strategies with a scale for each column and each group of rows, or for each column."""


def read_compressed(fields: Fields) -> QuantizationRules:
    """The rules of a file. A target is a class name, a module's name, or "re:" and a regular expression.

    Where several targets mean a module, its name counts first, then regular expressions in
    alphabetical order, then its class: the order that the format's own library has. Raises
    CheckpointError naming key and value for a value of the wrong type.
    """
    targets: list[tuple[str, Quantization]] = []
    groups = fields.table("config_groups")
    for name in groups.values if groups else ():
        # the name of a preset with a list of targets is legal too; what the preset means is not known here
        one = None if groups is None or isinstance(groups.values[name], list) else groups.table(name)
        found = Quantization(METHOD) if one is None else _scheme(one, fields)
        targets += [(target, found) for target in one.texts("targets")] if one else [(EXPERT_CLASS, found)]
    classes = dict(reversed(targets))  # of several for one class, the first
    schemes = {found for _, found in targets if found != NONE}
    stored = schemes.pop() if len(schemes) == 1 else Quantization(METHOD, fields.text("format"))
    return QuantizationRules(
        base=classes.get(EXPERT_CLASS, NONE) if targets else stored,
        overrides=Entries(sorted(targets, key=lambda pair: (pair[0].startswith(REGEX), pair[0])), anchored=True),
        skipped=Entries(((entry, True) for entry in fields.texts("ignore")), anchored=True),
        stored=stored,
    )


def _scheme(group: Fields, whole: Fields) -> Quantization:
    """How the modules of one group are stored."""
    weights = group.table("weights")
    if weights is None:
        return NONE
    packing = group.text("format") or whole.text("format")
    strategy, rows = weights.text("strategy"), weights.integer("group_size")
    symmetric = weights.flag("symmetric")
    return Quantization(
        METHOD,
        None if packing == MIXED else packing,
        weights.integer("num_bits"),
        -1 if strategy == "channel" else rows,
        None if symmetric is None else not symmetric,
    ).but(*_remarks(group, weights, whole))


def _remarks(group: Fields, weights: Fields, whole: Fields) -> list[str]:
    """Everything that makes it another arithmetic or another layout than plain packed integers."""
    strategy, kind = weights.text("strategy"), weights.text("type")
    found = [f"strategy {strategy}"] if strategy not in (None, *ROWWISE) else []
    found += [f"type {kind}"] if kind not in (None, "int") else []
    found += ["quantised activations"] if group.given("input_activations") else []
    sparsity = whole.table("sparsity_config")
    found += ["sparsity"] if sparsity and sparsity.text("format") not in (None, "dense") else []
    found += ["transforms"] if whole.given("transform_config") else []
    found += [ACT_ORDER] if weights.given("actorder") in PERMUTED else []
    return found
