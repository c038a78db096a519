"""Writes a checkpoint with random weights in the form that AWQ quantisers write for Qwen3-MoE.

The files are written tensor by tensor, so that the largest one decides how much memory it takes.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from sm70_moe import unfinished
from sm70_moe.checkpoint.config import CONFIG
from sm70_moe.checkpoint.headers import BITS, INDEX, SINGLE
from sm70_moe.errors import SettingsError

Progress = Callable[[int, int], None]
"""Called with the bytes written and all bytes."""

DEFAULT_SHARD_BYTES = 2_000_000_000

CODE_SPREAD = 6.5
"""Standard deviation of code - zero, both uniform in 0..15."""
NEGATIVE = 0.05
"""Share of scales that are negative, as symmetric quantisers write them."""
SUBNORMAL = 0.01
"""Share of scales below the smallest normal FP16."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What is written: sizes of one layer, how many layers, and the seed of the weights."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int
    group: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "experts", "top_k", "layers", "group"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}; accepted is 1 or more")
        if self.seed < 0:
            raise SettingsError(f"seed is {self.seed}; accepted is 0 or more")
        for name, size in (("hidden", self.hidden), ("intermediate", self.intermediate)):
            if size % self.group or size % 8:
                raise SettingsError(f"{name} is {size}; accepted is a multiple of 8 and of the group, {self.group}")

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.intermediate,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.layers,
            "norm_topk_prob": True,
            "torch_dtype": "float16",
            "quantization_config": {
                "quant_method": "awq",
                "version": "gemm",
                "bits": 4,
                "group_size": self.group,
                "zero_point": True,
                "modules_to_not_convert": ["mlp.gate"],
            },
        }

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor, in the order of the files."""
        shapes = (("gate_proj", self.hidden, self.intermediate), ("up_proj", self.hidden, self.intermediate),
                  ("down_proj", self.intermediate, self.hidden))  # fmt: skip
        for layer in range(self.layers):
            mlp = f"model.layers.{layer}.mlp"
            yield Tensor(f"{mlp}.gate.weight", "F16", (self.experts, self.hidden), (layer,))
            for expert in range(self.experts):
                for number, (matrix, k, n) in enumerate(shapes):
                    name, groups, place = f"{mlp}.experts.{expert}.{matrix}", k // self.group, (layer, expert, number)
                    yield Tensor(f"{name}.qweight", "I32", (k, n // 8), (*place, 0))
                    yield Tensor(f"{name}.qzeros", "I32", (groups, n // 8), (*place, 1))
                    yield Tensor(f"{name}.scales", "F16", (groups, n), (*place, 2), depth=k)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to write. `place` seeds it, whatever file it lands in; `depth` is K, for scales."""

    name: str
    dtype: str
    shape: tuple[int, int]
    place: tuple[int, ...]
    depth: int | None = None

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * BITS[self.dtype] // 8

    def values(self, seed: int) -> NDArray[np.int32] | NDArray[np.float16]:
        """The same values for the same seed, in whatever file and order tensors are written."""
        rng = np.random.Generator(np.random.SFC64([seed, *self.place]))
        if self.dtype == "I32":
            words: NDArray[np.int32] = rng.integers(0, 2**32, self.shape, dtype=np.uint32).view(np.int32)
            return words
        if self.depth is not None:
            return _scales(rng, self.shape, self.depth)
        weights: NDArray[np.float64] = rng.standard_normal(self.shape) / self.shape[1] ** 0.5
        return weights.astype(np.float16)


def _scales(rng: np.random.Generator, shape: tuple[int, int], depth: int) -> NDArray[np.float16]:
    """Scales that keep a layer's outputs about as large as its inputs, with the rare kinds mixed in."""
    usual = rng.uniform(0.5, 1.5, shape) / (CODE_SPREAD * depth**0.5)
    subnormal = rng.integers(1, 1024, shape) * 2.0**-24
    scales = np.where(rng.random(shape) < SUBNORMAL, subnormal, usual)
    return np.where(rng.random(shape) < NEGATIVE, -scales, scales).astype(np.float16)


def write_sample(
    folder: str | os.PathLike[str],
    *,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    layers: int,
    group: int,
    seed: int,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
    data: bool = True,
) -> None:
    """Write config.json, safetensors files and their index into `folder`, all or nothing.

    `shard_bytes` bounds a file's data, unless one tensor is larger. With `data=False` the files
    are sparse: right headers over zeros that take no space. Raises SettingsError for a folder that
    is not empty and for sizes that make no layer.
    """
    sample = Sample(hidden, intermediate, experts, top_k, layers, group, seed)
    target = Path(os.path.realpath(folder))
    try:
        _check_target(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        # beside the target, so that the last step is a rename within one file system
        with unfinished.folder(target.parent, target.name) as partial:
            whole = partial / "new"
            whole.mkdir()
            _write_files(whole, sample, shard_bytes, progress, data)
            os.replace(whole, target)
    except OSError as error:
        raise SettingsError(f"{target}: cannot be written: {error.strerror}; accepted is a writable place") from error


def _check_target(target: Path) -> None:
    """Refuse a place that the finished folder could not take, before anything is written."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{target}: exists and is not an empty folder")
    if target.is_mount() or target == Path.cwd():
        raise SettingsError(f"{target}: is a mount or the current folder, which cannot be replaced; name a new folder")


def _write_files(folder: Path, sample: Sample, shard_bytes: int, progress: Progress | None, data: bool) -> None:
    shards = _shards(sample, shard_bytes)
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]  # fmt: skip
    done = 0
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            file.write(_header(shard))
            if data:
                done = _write_data(file, shard, sample.seed, done, total, progress)
            else:
                file.truncate(file.tell() + sum(tensor.nbytes for tensor in shard))
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / CONFIG, sample.config())


def _shards(sample: Sample, shard_bytes: int) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = []
    size = shard_bytes
    for tensor in sample.tensors():
        if size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _header(shard: list[Tensor]) -> bytes:
    """Length and JSON, filled with blanks so that the data starts at a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard:
        end = offset + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_data(
    file: BinaryIO, shard: list[Tensor], seed: int, done: int, total: int, progress: Progress | None
) -> int:
    for tensor in shard:
        file.write(tensor.values(seed).data)
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    return done


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
