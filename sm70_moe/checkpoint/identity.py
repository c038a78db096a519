"""What a layer is: its tensors' kinds against what config.json declares. Tensors win, and it is noted."""

from __future__ import annotations

from array import array
from dataclasses import replace

from sm70_moe.checkpoint.config import ModelConfig
from sm70_moe.checkpoint.headers import Headers, TensorEntry
from sm70_moe.checkpoint.methods import with_order
from sm70_moe.checkpoint.names import BIAS, Census, Tails, layer_index
from sm70_moe.checkpoint.quantization import NONE, Quantization
from sm70_moe.errors import CheckpointError
from sm70_moe.grouping import matrix_group
from sm70_moe.numbers.formats import ACT_ORDER, CODE_KINDS, FORMATS, WEIGHT, Axis, Dim, find
from sm70_moe.regular import regular

FLOATS = ("F16", "BF16", "F32")
INDEX_CODES = {"I32": "i", "I64": "q"}
"""How `array` calls the integers of row groups."""
INDEX_KINDS = frozenset(form.index.kind for form in FORMATS if form.index)


def identify(
    name: str, tails: Tails, census: Census, config: ModelConfig, headers: Headers
) -> tuple[Quantization, tuple[str, ...]]:
    """What the layer is, and notes: where tensors and config.json disagree, and what a reader should know."""
    found, notes = _by_tensors(name, tails, census, config)
    found = _with_order(found, tails, census, headers)
    kinds = _kinds_of_experts(tails, census, config, found)
    if kinds:
        found = replace(found, format="mixed", packing=kinds)
    return found, (*notes, *_remarks(name, tails, census, config, found))


def _by_tensors(name: str, tails: Tails, census: Census, config: ModelConfig) -> tuple[Quantization, tuple[str, ...]]:
    scheme, rules = census.scheme, config.quantization
    declared = rules.of_layer(name, sorted(census.experts), scheme.matrices if scheme else ())
    codes = census.kinds & CODE_KINDS
    if WEIGHT in census.kinds and codes:
        told = "some experts are quantised and some are not"
        return replace(declared, format="mixed", packing=told), (told,)
    if census.kinds and census.kinds <= {WEIGHT, BIAS} and _plain(tails, census):
        notes = () if declared.format == "none" else ("config.json declares it quantised, its tensors are not",)
        return NONE, notes
    if declared.format == "none" and census.kinds - {BIAS}:
        told = "config.json does not declare it quantised, its tensors are"
        # without any declaration the tensors could be AWQ or GPTQ: unknown
        return rules.stored, (told,)
    return declared, ()


def _plain(tails: Tails, census: Census) -> bool:
    """Are the first expert's weights numbers by themselves? FP8 ones need their scales."""
    return all(entry.dtype in FLOATS for entry in _first(tails, census, frozenset((WEIGHT,))).values())


def _with_order(found: Quantization, tails: Tails, census: Census, headers: Headers) -> Quantization:
    """Trust the first expert's row groups over `desc_act` and the declared group; without any, these stand."""
    entries = _first(tails, census, INDEX_KINDS)
    if not entries or found.group is None or found.format not in {form.name for form in FORMATS if form.index}:
        return found
    groups = {name: _group(headers, entry, found.group) for name, entry in entries.items()}
    other = {name: rows for name, rows in groups.items() if rows not in (found.group, None)}
    if other and None not in groups.values():
        told = ", ".join(f"{name} {rows}" for name, rows in other.items())
        return replace(
            found, format="mixed", packing=f"group {found.group} declared; rows per group by the tensors: {told}"
        )
    return with_order(found, None in groups.values())


def _group(headers: Headers, entry: TensorEntry, group: int) -> int | None:
    """The declared group if each row is in group row // `group`, else rows per group if that is so of another number.

    None: rows are permuted among the groups. `check` refuses another dtype or shape.
    """
    if entry.dtype not in INDEX_CODES or not entry.shape or group < -1 or group == 0:
        return group
    rows, (path, start) = entry.shape[-1], headers.place(entry)
    values = array(INDEX_CODES[entry.dtype])
    try:
        with regular(path) as file:
            headers.check(entry.file, file.fileno())
            file.seek(start)
            values.fromfile(file, rows)
    except EOFError as error:
        raise CheckpointError(f"{path}: changed since its header was read: {error}") from error
    for size in (matrix_group(group, rows), values.count(values[0]) if values else 0):
        if size and values == array(values.typecode, (row // size for row in range(rows))):
            return group if size == matrix_group(group, rows) else size
    return None


def _first(tails: Tails, census: Census, kinds: frozenset[str]) -> dict[str, TensorEntry]:
    """The first expert's tensors of these kinds, or the stacks, by the matrix's name."""
    scheme = census.scheme
    if scheme is None:
        return {}
    names = [(name, scheme.tail(0, name, kind)) for name in scheme.matrices for kind in kinds & census.kinds]
    bare = [(name, name) for name in scheme.matrices if scheme.stacked and WEIGHT in kinds]
    return {name: tails[tail] for name, tail in (*names, *bare) if tail in tails}


def _kinds_of_experts(tails: Tails, census: Census, config: ModelConfig, found: Quantization) -> str:
    """Kinds of experts in one list, where config.json has several: "0-1 with 64 columns, 2-3 with 32"; else ""."""
    form, scheme = find(found.format, found.packing), census.scheme
    if not config.kinds or form is None or scheme is None or scheme.stacked:
        return ""
    place = form.scales.dims.index(Dim(Axis.N))
    widths: dict[int, list[int]] = {}
    for expert in sorted(census.experts):
        entry = tails.get(scheme.tail(expert, scheme.up, form.scales.kind))
        if entry is not None and len(entry.shape) > place:
            widths.setdefault(entry.shape[place], []).append(expert)
    if len(widths) < 2:
        return ""
    told = (f"{numbers[0]}-{numbers[-1]} with {width} columns" for width, numbers in widths.items())
    return f"{len(widths)} kinds of experts in one list: {', '.join(told)}"


def _remarks(name: str, tails: Tails, census: Census, config: ModelConfig, found: Quantization) -> list[str]:
    notes = []
    form, index = find(found.format, found.packing), layer_index(name)
    if form and any(entry.dtype == "BF16" for entry in _first(tails, census, frozenset((form.scales.kind,))).values()):
        notes.append(
            "scales are BF16 and become FP16: exact from 2^-14 to 65504, rounded below, and refused where they are "
            "larger, or so small that FP16 would make them 0 although weights of their group are not"
        )
    if found.packing and found.packing.endswith(ACT_ORDER):
        notes.append("rows are permuted among the groups (act-order), which banks cannot hold")
    if index is None:
        notes.append("no layer of the model's own numbering: it is decided for itself, without a number")
    elif config.layers is not None and index >= config.layers:
        notes.append(f"number {index}, beyond the {config.layers} layers of config.json: multi-token prediction")
    return notes
