"""A Hugging Face folder as a set of mixture-of-experts layers, known from headers and config alone.

Tensors are trusted over config.json: where the two disagree about a size, opening the layer is an
error that names both, because one of them belongs to another model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from sm70_moe.checkpoint.arithmetic import Arithmetic
from sm70_moe.checkpoint.config import ModelConfig, read_config
from sm70_moe.checkpoint.headers import Headers, TensorEntry, collector_paused, read_headers
from sm70_moe.checkpoint.identity import identify
from sm70_moe.checkpoint.leftovers import leftovers
from sm70_moe.checkpoint.model_types import ModelTypes
from sm70_moe.checkpoint.names import BIAS, SCHEMES, Census, Scheme, Tails, group_by_layer, layer_index, neighbours
from sm70_moe.checkpoint.quantization import Quantization
from sm70_moe.checkpoint.shapes import Geometry, check_divides, check_groups, check_tensors, measure
from sm70_moe.errors import CheckpointError
from sm70_moe.facts import PLAIN, LayerFacts
from sm70_moe.numbers.formats import BITS, WEIGHT, Format, Part, accepted, find


@dataclass(frozen=True, slots=True)
class CheckpointLayer:
    """One layer's experts, as far as headers and config tell.

    `name` ends in ".experts"; `index` is None for layers outside the model's own numbering.
    `experts` is the highest number of an expert, plus one. `missing` are full names of tensors that
    a complete layer would have. `notes` tell where config.json and the tensors disagree, and what
    happens to the layer's numbers. `scheme` is None if no known scheme names the tensors, `form`
    if no reader knows the format. `parts` are the tensors that each matrix must have, `beside` what
    stands next to the experts and is left alone ("shared experts", "router"). `unread` are full names of
    tensors under the experts that nobody reads; `config` is the part of config.json that declares the layer.
    """

    name: str
    index: int | None
    quantization: Quantization
    scheme: Scheme | None
    experts: int
    missing: tuple[str, ...]
    bias: bool
    notes: tuple[str, ...]
    form: Format | None
    parts: tuple[Part, ...]
    beside: tuple[str, ...]
    unread: tuple[str, ...]
    config: ModelConfig = field(repr=False, compare=False)
    tails: Tails = field(repr=False, compare=False)

    @property
    def complete(self) -> bool:
        return not self.missing

    def entry(self, expert: int, matrix: str, kind: str) -> TensorEntry | None:
        """Header entry of one tensor; `matrix` is the scheme's own name for it. Stacked experts share one."""
        return None if self.scheme is None else self.tails.get(self.scheme.tail(expert, matrix, kind))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened folder. Nothing but headers, index and config.json has been read.

    `unread` are sentences about experts, or what could be some, that nobody reads; `notes` are worth knowing.
    """

    folder: Path
    config: ModelConfig
    headers: Headers = field(repr=False)
    layers: tuple[CheckpointLayer, ...]
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def open(cls, folder: str | os.PathLike[str], types: ModelTypes | None = None) -> Checkpoint:
        """Read config, index and headers; `types` say what model types compute, the package's if not given.

        Raises CheckpointError for everything that `read_config` and `read_headers` refuse, and for
        numbers of layers and experts that are none. Incomplete layers are found, and refused by `facts` and `check`.
        """
        with collector_paused():  # what comes after the headers holds as many objects, and no cycle either
            return cls._open(Path(folder), types)

    @classmethod
    def _open(cls, root: Path, types: ModelTypes | None) -> Checkpoint:
        config = read_config(root, types)
        headers = read_headers(root)
        known: dict[frozenset[str], Census] = {}
        found, others = group_by_layer(headers.shards.values())
        beside = neighbours(found, others)
        layers = tuple(
            _layer(name, tails, Census.shared(name, tails, known), config.of(name), headers, beside[name])
            for name, tails in found.items()
        )
        left = leftovers(headers, config, found, others)
        return cls(root, config, headers, layers, left.unread, left.notes)

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
        without K / g groups.
        """
        _require_complete(layer)
        if layer.scheme is None:
            return None
        if layer.experts < 1:
            raise CheckpointError(f"{layer.name}: a stack of {layer.experts} experts; accepted is at least 1")
        config = layer.config
        _agree(layer.name, "experts", config.experts, layer.experts)
        found = measure(layer.name, layer.tails, layer.scheme, layer.quantization)
        if found is not None:
            _agree_on_width(layer, found.hidden)
            declared = config.intermediate if config.of_experts else None
            _agree(layer.name, "intermediate size", declared, found.intermediate)
        if found is not None and layer.form is not None:
            check_groups(layer.name, layer.tails, layer.scheme, found, layer.form, layer.quantization.group)
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
        config, quantization = layer.config, layer.quantization
        geometry = self.geometry(layer)
        known = layer.scheme is not None
        said = said_of(layer)
        return LayerFacts(
            layer=layer.name,
            index=layer.index,
            hidden=geometry.hidden if geometry else config.width or config.hidden,
            intermediate=geometry.intermediate if geometry else config.intermediate,
            experts=layer.experts if known else config.experts,
            top_k=config.top_k,
            format=quantization.format,
            packing=quantization.packing,
            bits=quantization.bits,
            zero_point=quantization.zero_point,
            checkpoint_group=quantization.group,
            activation=said.activation,
            gated=layer.scheme.gated if layer.scheme else None,
            bias=layer.bias if known else None,
            router_weight_on_input=said.router_weight_on_input,
            arithmetic=said.arithmetic,
            doubt=said.doubt,
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
        if geometry is None or layer.form is None or quantization.bits != BITS:
            raise CheckpointError(
                f"{layer.name}: format {quantization.format}, packing {quantization.packing}, bits "
                f"{quantization.bits}; accepted are {accepted()}"
            )
        check_divides(layer.name, geometry, quantization.group)
        assert quantization.group is not None
        check_tensors(layer.name, layer.tails, layer.scheme, geometry, layer.parts, quantization.group, layer.experts)
        return geometry


def said_of(layer: CheckpointLayer) -> Arithmetic:
    """What the layer's experts compute by its declaration; tensors that nobody reads could be part of it."""
    said = layer.config.arithmetic(layer.index)
    if not layer.unread or layer.quantization.format == "none":
        return said
    first, more = layer.unread[0], len(layer.unread) - 1
    others = f" and {more} more" if more else ""
    told = "" if said.arithmetic in (None, PLAIN) else f"{said.arithmetic}, and "
    return replace(said, arithmetic=f"{told}tensors that nobody reads: {first}{others}")


def _layer(
    name: str, tails: Tails, census: Census, config: ModelConfig, headers: Headers, beside: tuple[str, ...]
) -> CheckpointLayer:
    quantization, notes = identify(name, tails, census, config, headers)
    form, scheme = find(quantization.format, quantization.packing), census.scheme
    stacked = scheme is not None and scheme.stacked
    parts = form.parts(census.kinds, quantization.zero_point, stacked) if form else ()
    experts = _stacked(tails) if stacked else max((*census.experts, -1)) + 1
    # one number more than there are experts is sure to show a gap, and a silly number costs nothing
    needed = min(max(experts, config.experts or 0), len(census.experts) + 1) if scheme else 0
    kinds = (WEIGHT,) if quantization.format == "none" else tuple(part.kind for part in parts)
    known = frozenset((WEIGHT, BIAS, *(part.kind for part in form.all))) if form else frozenset((WEIGHT, BIAS))
    # of a format that is not read nobody reads anything: told already
    unread = census.unread(known) if scheme and (form or quantization.format == "none") else ()
    unread = tuple(tail for tail in unread if not tail.endswith(f"_{BIAS}"))
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        notes = (*notes, f"tensors that nobody reads: {unread[0]}{more}")
    return CheckpointLayer(
        name=name,
        index=layer_index(name),
        quantization=quantization,
        scheme=scheme,
        experts=experts,
        missing=tuple(f"{name}.{tail}" for tail in census.missing(kinds, needed)),
        bias=census.bias,
        notes=notes,
        form=form,
        parts=parts,
        beside=beside,
        unread=tuple(f"{name}.{tail}" for tail in unread),
        config=config,
        tails=tails,
    )


def _stacked(tails: Tails) -> int:
    """Experts in a stack: the first dimension that most of its tensors have."""
    firsts = [entry.shape[0] for entry in tails.values() if entry.shape]
    return max(firsts, key=firsts.count, default=0)


def _require_complete(layer: CheckpointLayer) -> None:
    if layer.missing:
        shown = ", ".join(layer.missing[:3])
        more = f" and {len(layer.missing) - 3} more" if len(layer.missing) > 3 else ""
        raise CheckpointError(f"{layer.name}: missing tensors {shown}{more}{_why(layer)}")


def _why(layer: CheckpointLayer) -> str:
    """Why zeros are needed, where only they are missing."""
    zeros = layer.form.zeros.kind if layer.form else None
    if zeros is None or not all(name.endswith(f".{zeros}") for name in layer.missing):
        return ""
    cause = "the format" if layer.form and layer.form.zeros_always else "no field says that it is symmetric, so it"
    return f"; {cause} has {zeros} for every matrix"


def _agree_on_width(layer: CheckpointLayer, found: int) -> None:
    """What the experts work on: config.json's width of them, else the hidden size."""
    config = layer.config
    if config.width is not None:
        _agree(layer.name, "width of the experts", config.width, found)
    elif config.hidden is not None and config.hidden != found:
        raise CheckpointError(
            f"{layer.name}: hidden size {config.hidden} in config.json, {found} by the tensors; no key there says that "
            "the experts work on another width (latent experts): moe_hidden_size or moe_latent_size would"
        )


def _agree(layer: str, what: str, declared: int | None, found: int) -> None:
    if declared is not None and declared != found:
        raise CheckpointError(f"{layer}: {what} {declared} in config.json, {found} by the tensors")
