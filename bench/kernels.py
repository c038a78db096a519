"""The decode kernels of .bench/, bound to a bank and launched through libcuda."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from banks import DEVICE, Bank, Shape, up
from driver import Cuda, Kernel

from sm70_moe.evidence.trial import Inputs

FOLDER = Path(__file__).resolve().parents[1] / ".bench"
KINDS13, KINDS2 = "pp" + "pppp" + "p" + "iiiiii", "ppp" + "pppp" + "p" + "iiiiii"


def w13_plan(shape: Shape, tokens: int) -> tuple[str, tuple[int, int], int]:
    """Kernel, grid, threads, as `native.steps.decode` has them."""
    grid = shape.inner // 4, tokens * shape.top_k
    return f"w13_{tokens if tokens <= 2 else 8}", grid, 32 * min(16, up(shape.hidden, 512))


def w2_plan(shape: Shape, tokens: int) -> tuple[str, tuple[int, int]]:
    """Kernel and grid; threads are those that its launch bounds say."""
    most, name = (1, "w2_1") if tokens <= 2 else (4, "w2_4" if tokens <= 4 else "w2_8")
    return name, (shape.hidden // 8, up(tokens, most))


class Decode:
    """Kernels of one version. `variants` name files of other macros for W13 and W2."""

    def __init__(
        self,
        cuda: Cuda,
        geometry: str,
        bank: Bank,
        *,
        order: int = 0,
        metadata: int = 4,
        volta: bool = False,
        variants: tuple[str, str] = ("", ""),
        dependent: bool = True,
        carveout: int | None = None,
    ) -> None:
        self.bank, self.order, self.metadata, self.dependent = bank, order, metadata, dependent
        self.many = (0, 0)  # octets of a block in W13 and W2; 0: one, and the kernels for that
        tag = f"{geometry}.o{order}.m{metadata}.s{int(volta)}"
        self.kernels = {}
        kernels = {
            "decode_w13": (KINDS13, ("w13_1", "w13_2", "w13_8", "w13_many_1", "w13_many_8")),
            "decode_w2": (KINDS2, ("w2_1", "w2_4", "w2_8", "w2_many")),
        }
        for (source, (kinds, names)), variant in zip(kernels.items(), variants, strict=True):
            file = f"{source}.{geometry}.{variant}" if variant else f"{source}.{tag}"
            module = cuda.module((FOLDER / f"{file}.cubin").read_bytes())
            self.kernels |= {name: Kernel(cuda, module, name, kinds, carveout) for name in names}

    def sizes(self, tokens: int) -> tuple[int, ...]:
        s = self.bank.shape
        return tokens, s.top_k, s.hidden, s.inner, s.experts, s.group

    def w13(self, x: torch.Tensor, ids: torch.Tensor, inner: torch.Tensor, bank: Bank | None = None) -> None:
        name, grid, threads = w13_plan(self.bank.shape, x.shape[0])
        if self.many[0]:
            name, grid = f"w13_many_{1 if x.shape[0] == 1 else 8}", (up(grid[0], self.many[0]), grid[1])
        planes = (bank or self.bank).addresses("w13", self.order, self.metadata)
        sizes = self.sizes(x.shape[0])
        inputs = x.data_ptr(), ids.data_ptr()
        self.kernels[name].launch(grid, threads, *inputs, *planes, inner.data_ptr(), *sizes, dependent=self.dependent)

    def w2(
        self,
        inner: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        bank: Bank | None = None,
    ) -> None:
        name, grid = w2_plan(self.bank.shape, out.shape[0])
        if self.many[1]:
            name, grid = "w2_many", (up(grid[0], self.many[1]), out.shape[0])
        threads = self.kernels[name].threads
        planes = (bank or self.bank).addresses("w2", self.order, self.metadata)
        inputs = inner.data_ptr(), ids.data_ptr(), weights.data_ptr()
        sizes = self.sizes(out.shape[0])
        self.kernels[name].launch(grid, threads, *inputs, *planes, out.data_ptr(), *sizes, dependent=self.dependent)

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        intermediate: torch.Tensor | None = None,
    ) -> None:
        inner = self.poisoned(x.shape[0]) if intermediate is None else intermediate
        self.w13(x, ids, inner)
        self.w2(inner, ids, weights, out)

    def poisoned(self, tokens: int) -> torch.Tensor:
        s = self.bank.shape
        return torch.full((tokens, s.top_k, s.inner), math.nan, dtype=torch.float16, device=DEVICE)

    def once(self, call: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """One call on poisoned buffers: out and intermediate."""
        out, inner = torch.full_like(call.x, math.nan), self.poisoned(call.tokens)
        self(call.x, call.ids, call.weights, out, inner)
        return out, inner
