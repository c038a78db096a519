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
from sm70_moe.numbers.formats import ACT_ORDER, CODE_KINDS, FORMATS, WEIGHT, find
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
    return found, (*notes, *_remarks(name, tails, census, config, found))


def _by_tensors(name: str, tails: Tails, census: Census, config: ModelConfig) -> tuple[Quantization, tuple[str, ...]]:
    scheme, rules = census.scheme, config.quantization
    declared = rules.of_layer(name, sorted(census.experts), scheme.matrices if scheme else ())
    codes = census.kinds & CODE_KINDS
    if WEIGHT in census.kinds and codes:
        return replace(declared, format="mixed"), ("some experts are quantised and some are not",)
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
    return all(entry.dtype in FLOATS for entry in _first(tails, census, frozenset((WEIGHT,))))


def _with_order(found: Quantization, tails: Tails, census: Census, headers: Headers) -> Quantization:
    """Trust the first expert's row groups over `desc_act`; without any, the declaration stands."""
    entries = _first(tails, census, INDEX_KINDS)
    if not entries or found.group is None or found.format not in {form.name for form in FORMATS if form.index}:
        return found
    return with_order(found, any(_permuted(headers, entry, found.group) for entry in entries))


def _permuted(headers: Headers, entry: TensorEntry, group: int) -> bool:
    """Is the group of each row another than row // group? `check` refuses another dtype or shape."""
    if entry.dtype not in INDEX_CODES or not entry.shape or group < -1 or group == 0:
        return False
    rows, (path, start) = entry.shape[-1], headers.place(entry)
    values = array(INDEX_CODES[entry.dtype])
    try:
        with regular(path) as file:
            headers.check(entry.file, file.fileno())
            file.seek(start)
            values.fromfile(file, rows)
    except EOFError as error:
        raise CheckpointError(f"{path}: changed since its header was read: {error}") from error
    size = matrix_group(group, rows)
    return values != array(values.typecode, (row // size for row in range(rows)))


def _first(tails: Tails, census: Census, kinds: frozenset[str]) -> list[TensorEntry]:
    """The first expert's tensors of these kinds, or the stacks."""
    scheme = census.scheme
    if scheme is None:
        return []
    names = [scheme.tail(0, name, kind) for name in scheme.matrices for kind in kinds & census.kinds]
    bare = [name for name in scheme.matrices if scheme.stacked and WEIGHT in kinds]
    return [tails[name] for name in (*names, *bare) if name in tails]


def _remarks(name: str, tails: Tails, census: Census, config: ModelConfig, found: Quantization) -> list[str]:
    notes = []
    form, index = find(found.format, found.packing), layer_index(name)
    if form and any(entry.dtype == "BF16" for entry in _first(tails, census, frozenset((form.scales.kind,)))):
        notes.append(
            "scales are BF16 and become FP16: exact from 2^-14 to 65504, rounded below, and refused where FP16 "
            "would make them 0 or infinite"
        )
    if found.packing and found.packing.endswith(ACT_ORDER):
        notes.append("rows are permuted among the groups (act-order), which banks cannot hold")
    if index is None:
        notes.append("no layer of the model's own numbering: it is decided for itself, without a number")
    elif config.layers is not None and index >= config.layers:
        notes.append(f"number {index}, beyond the {config.layers} layers of config.json: multi-token prediction")
    return notes
