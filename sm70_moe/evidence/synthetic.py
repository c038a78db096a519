"""A layer with made-up AWQ weights: the same numbers as checkpoint words and as codes.

Experts are made when they are read, each from the layer's seed and its own number, so that the
largest layer takes no memory and can be read in any order and from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sm70_moe.reference.arithmetic import AwqExpert, AwqMatrix, Reference

if TYPE_CHECKING:
    from sm70_moe.numbers.codes import Codes, ExpertCodes

COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of an AWQ word, from the lowest, holds this one of its eight columns (CONTRACT 6)."""

SPREAD = 6.5
"""Standard deviation of code minus zero, both spread evenly over 0..15."""

MATRICES = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Numbers:
    """One matrix: codes (K, N) and zeros (K/g, N) uint8 in 0..15, scales (K/g, N) float16."""

    codes: NDArray[np.uint8]
    zeros: NDArray[np.uint8]
    scales: NDArray[np.float16]

    @property
    def group(self) -> int:
        return int(self.codes.shape[0] // self.scales.shape[0])

    @property
    def words(self) -> AwqMatrix:
        """As an AWQ checkpoint holds it."""
        return AwqMatrix(pack(self.codes), pack(self.zeros), self.scales, self.group)

    def part(self, rows: slice, columns: slice, group: int) -> Numbers:
        """A rank's share, with scales and zeros repeated for groups of `group` rows."""
        codes = self.codes[rows, columns]
        first = np.arange(self.codes.shape[0])[rows][::group] // self.group
        return Numbers(codes, self.zeros[first][:, columns], self.scales[first][:, columns])

    @property
    def tensors(self) -> Codes:
        import torch

        from sm70_moe.numbers.codes import Codes

        return Codes(*(torch.from_numpy(np.ascontiguousarray(a)) for a in (self.codes, self.zeros, self.scales)))


@dataclass(frozen=True, slots=True)
class SyntheticLayer:
    """One rank's view of a made-up layer; keeps the WeightSource protocol.

    `intermediate` is the whole layer's, `group` the checkpoint's. Weights have the standard
    deviation 1/sqrt(K), as a trained layer's roughly have, and one scale in eight is negative.
    """

    experts: int
    hidden: int
    intermediate: int
    group: int
    ranks: int = 1
    rank: int = 0
    seed: int = 0

    @property
    def columns(self) -> slice:
        """The rank's columns of gate and up, which are its rows of down."""
        width = self.intermediate // self.ranks
        return slice(self.rank * width, (self.rank + 1) * width)

    def numbers(self, expert: int) -> dict[str, Numbers]:
        """The whole matrices of one expert."""
        source = np.random.default_rng((self.seed, expert))
        inner, outer = (self.hidden, self.intermediate), (self.intermediate, self.hidden)
        return {name: draw(source, inner if name != "down" else outer, self.group) for name in MATRICES}

    def words(self, expert: int) -> AwqExpert:
        """One expert as an AWQ checkpoint holds it."""
        return AwqExpert(**{name: numbers.words for name, numbers in self.numbers(expert).items()})

    def read(self, expert: int, group: int) -> ExpertCodes:
        """The rank's share of one expert, with groups of `group` rows."""
        from sm70_moe.numbers.codes import ExpertCodes

        found, every = self.numbers(expert), slice(None)
        return ExpertCodes(
            gate=found["gate"].part(every, self.columns, group).tensors,
            up=found["up"].part(every, self.columns, group).tensors,
            down=found["down"].part(self.columns, every, group).tensors,
        )

    @property
    def reference(self) -> Reference:
        """The FP64 reference of this rank."""
        return Reference(self.words, self.experts, self.columns)


def draw(source: np.random.Generator, shape: tuple[int, int], group: int) -> Numbers:
    """One random matrix of K rows and N columns."""
    rows, columns = shape
    groups = (rows // group, columns)
    size = source.uniform(0.5, 1.5, groups) / (SPREAD * np.sqrt(rows))
    return Numbers(
        codes=source.integers(0, 16, shape, np.uint8),
        zeros=source.integers(0, 16, groups, np.uint8),
        scales=np.where(source.random(groups) < 0.125, -size, size).astype(np.float16),
    )


def pack(values: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Numbers 0..15 (rows, N) as AWQ words (rows, N/8)."""
    eights = values.reshape(values.shape[0], -1, 8).astype(np.uint32)
    words = np.zeros(eights.shape[:2], np.uint32)
    for nibble, column in enumerate(COLUMN_OF_NIBBLE):
        words |= eights[:, :, column] << np.uint32(4 * nibble)
    return words.view(np.int32)
