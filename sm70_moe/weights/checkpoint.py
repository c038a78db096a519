"""A Hugging Face folder as a set of mixture-of-experts layers, known from headers and config alone.

Tensors are trusted over config.json: where the two disagree about a size, opening the layer is an
error that names both, because one of them belongs to another model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from sm70_moe.errors import CheckpointError
from sm70_moe.facts import LayerFacts
from sm70_moe.grouping import matrix_group
from sm70_moe.weights.config import ModelConfig, read_config
from sm70_moe.weights.headers import Headers, TensorEntry, read_headers
from sm70_moe.weights.names import SCHEMES, Census, Scheme, Tails, group_by_layer, layer_index
from sm70_moe.weights.quantization import Quantization
from sm70_moe.weights.shapes import (
    QWEIGHT,
    QZEROS,
    WEIGHT,
    Geometry,
    check_groups,
    check_tensors,
    is_awq_gemm,
    kinds,
    measure,
)

READABLE_BITS = 4


@dataclass(frozen=True, slots=True)
class CheckpointLayer:
    """One layer's experts, as far as headers and config tell.

    `name` ends in ".experts"; `experts` is the highest number of an expert, plus one. `missing`
    are full names of tensors that a complete layer would have. `notes` tell where config.json and
    the tensors disagree about what is quantised. `scheme` is None if no known scheme names the
    tensors.
    """

    name: str
    index: int | None
    quantization: Quantization
    scheme: Scheme | None
    experts: int
    missing: tuple[str, ...]
    bias: bool
    notes: tuple[str, ...]
    tails: Tails = field(repr=False, compare=False)

    @property
    def complete(self) -> bool:
        return not self.missing

    def entry(self, expert: int, matrix: str, kind: str) -> TensorEntry | None:
        """Header entry of one tensor; `matrix` is the scheme's own name for it."""
        return self.tails.get(f"{expert}.{matrix}.{kind}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened folder. Nothing but headers, index and config.json has been read."""

    folder: Path
    config: ModelConfig
    headers: Headers = field(repr=False)
    layers: tuple[CheckpointLayer, ...]

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Checkpoint:
        """Read config, index and headers.

        Raises CheckpointError for a config.json that cannot be read and for everything that
        `read_headers` refuses. Incomplete layers are found, and refused by `facts` and `check`.
        """
        root = Path(folder)
        config = read_config(root)
        headers = read_headers(root)
        known: list[Census] = []
        layers = tuple(
            _layer(name, tails, Census.shared(tails, known), config)
            for name, tails in group_by_layer(headers.shards.values()).items()
        )
        return cls(root, config, headers, layers)

    def layer(self, name: str | int) -> CheckpointLayer:
        """The layer of this name or index; raises CheckpointError that lists what there is."""
        found = next((layer for layer in self.layers if name in (layer.name, layer.index)), None)
        if found is None:
            names = ", ".join(layer.name for layer in self.layers) or "none"
            raise CheckpointError(f"{self.folder}: no layer {name!r}; there are: {names}")
        return found

    def geometry(self, layer: CheckpointLayer) -> Geometry | None:
        """Sizes of an expert by the tensors; None if the format's shapes are not understood.

        Raises CheckpointError for an incomplete layer, sizes other than config.json's, and scales
        without K / g rows.
        """
        _require_complete(layer)
        if layer.scheme is None:
            return None
        _agree(layer.name, "experts", self.config.experts, layer.experts)
        found = measure(layer.name, layer.tails, layer.scheme, layer.quantization)
        if found is not None:
            _agree(layer.name, "hidden size", self.config.hidden, found.hidden)
            _agree(layer.name, "intermediate size", self.config.intermediate, found.intermediate)
        if found is not None and is_awq_gemm(layer.quantization):
            check_groups(layer.name, layer.tails, layer.scheme, found, layer.quantization.group)
        return found

    def facts(
        self,
        layer: CheckpointLayer,
        *,
        tensor_parallel: int | None,
        tensor_rank: int | None,
        device: str | None,
        expert_parallel: int | None = 1,
        expert_rank: int | None = 0,
        max_sequences: int | None = None,
        speculative_width: int | None = None,
    ) -> LayerFacts:
        """What admission asks of a layer; raises what `geometry` raises.

        Sizes are the tensors' where they tell, else config.json's, else unknown.
        """
        config, quantization = self.config, layer.quantization
        geometry = self.geometry(layer)
        known = layer.scheme is not None
        return LayerFacts(
            layer=layer.name,
            index=layer.index,
            hidden=geometry.hidden if geometry else config.hidden,
            intermediate=geometry.intermediate if geometry else config.intermediate,
            experts=layer.experts if known else config.experts,
            top_k=config.top_k,
            format=quantization.format,
            packing=quantization.packing,
            bits=quantization.bits,
            zero_point=quantization.zero_point,
            checkpoint_group=quantization.group,
            activation=config.activation,
            gated=True if known else None,
            bias=layer.bias if known else None,
            # a scheme with three matrices per expert comes from models that weight the output
            router_weight_on_input=False if known else None,
            activations=config.dtype,
            tensor_parallel=tensor_parallel,
            tensor_rank=tensor_rank,
            expert_parallel=expert_parallel,
            expert_rank=expert_rank,
            device=device,
            max_sequences=max_sequences,
            speculative_width=speculative_width,
        )

    def check(self, layer: CheckpointLayer) -> Geometry:
        """Verify that every tensor of every expert has the exact dtype and shape to be read.

        Raises CheckpointError naming the first tensor that is missing or unlike, or the format,
        packing, bits or group that cannot be read.
        """
        geometry = self.geometry(layer)
        if layer.scheme is None:
            raise CheckpointError(
                f"{layer.name}: tensors such as {next(iter(layer.tails))!r} follow no known scheme; accepted are "
                + " and ".join("/".join(scheme.matrices) for scheme in SCHEMES)
            )
        quantization = layer.quantization
        if geometry is None or not is_awq_gemm(quantization) or quantization.bits != READABLE_BITS:
            raise CheckpointError(
                f"{layer.name}: format {quantization.format}, packing {quantization.packing}, bits "
                f"{quantization.bits}; accepted is format awq, packing gemm, bits {READABLE_BITS}"
            )
        _check_divides(layer, geometry)
        check_tensors(layer.name, layer.tails, layer.scheme, geometry, quantization, layer.experts)
        return geometry


def _layer(name: str, tails: Tails, census: Census, config: ModelConfig) -> CheckpointLayer:
    quantization, notes = _quantization(name, census, config)
    experts = max((*census.experts, -1)) + 1
    # one number more than there are experts is sure to show a gap, and a silly number costs nothing
    needed = min(max(experts, config.experts or 0), len(census.experts) + 1) if census.scheme else 0
    missing = census.missing(kinds(quantization, census.kinds), needed)
    return CheckpointLayer(
        name=name,
        index=layer_index(name),
        quantization=quantization,
        scheme=census.scheme,
        experts=experts,
        missing=tuple(f"{name}.{tail}" for tail in missing),
        bias="bias" in census.kinds,
        notes=notes,
        tails=tails,
    )


def _quantization(name: str, census: Census, config: ModelConfig) -> tuple[Quantization, tuple[str, ...]]:
    """What the layer is by its tensors, the declared details, and a note if the two disagree."""
    matrices = census.scheme.matrices if census.scheme else ()
    declared = config.quantization.of_layer(name, sorted(census.experts), matrices)
    if WEIGHT in census.kinds and QWEIGHT in census.kinds:
        return replace(declared, format="mixed"), ("some experts are quantised and some are not",)
    if census.kinds and census.kinds <= {WEIGHT, "bias"}:
        notes = () if declared.format == "none" else ("config.json declares it quantised, its tensors are not",)
        return Quantization("none"), notes
    if declared.format == "none" and QWEIGHT in census.kinds:
        base = config.quantization.base
        told = "config.json does not declare it quantised, its tensors are"
        # without any declaration the tensors could be AWQ or GPTQ: unknown
        return (Quantization(None) if base.format == "none" else base), (told,)
    return declared, ()


def _require_complete(layer: CheckpointLayer) -> None:
    if layer.missing:
        shown = ", ".join(layer.missing[:3])
        more = f" and {len(layer.missing) - 3} more" if len(layer.missing) > 3 else ""
        hint = "; zero_point is not false, so every matrix needs qzeros" if _only_zeros(layer.missing) else ""
        raise CheckpointError(f"{layer.name}: missing tensors {shown}{more}{hint}")


def _only_zeros(missing: Iterable[str]) -> bool:
    return all(name.endswith(f".{QZEROS}") for name in missing)


def _agree(layer: str, what: str, declared: int | None, found: int) -> None:
    if declared is not None and declared != found:
        raise CheckpointError(f"{layer}: {what} {declared} in config.json, {found} by the tensors")


def _check_divides(layer: CheckpointLayer, geometry: Geometry) -> None:
    group = layer.quantization.group
    if group is None or group == 0 or group < -1:
        raise CheckpointError(f"{layer.name}: group_size {group}; accepted is a positive number of rows, or -1")
    for k in (geometry.hidden, geometry.intermediate):
        if k % matrix_group(group, k):
            raise CheckpointError(f"{layer.name}: group_size {group} does not divide K = {k}")
        if k % 8:
            raise CheckpointError(f"{layer.name}: {k} columns; accepted is a multiple of 8, the codes in a word")
