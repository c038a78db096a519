"""Banks of random experts, in every order and kind of metadata; and what they decode to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from sm70_moe.banks import octets
from sm70_moe.evidence.synthetic import pack as pack_awq
from sm70_moe.reference.arithmetic import AwqExpert, AwqMatrix

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    top_k: int
    experts: int
    group: int = 32


FIRST = Shape(2560, 160, 10, 512)


def up(a: int, b: int) -> int:
    return -(-a // b)


class Bank:
    """Both matrices of random experts, in every order and kind of metadata."""

    def __init__(self, shape: Shape, seed: int, every: bool) -> None:
        self.shape = shape
        source = torch.Generator(DEVICE).manual_seed(seed)
        h, i = shape.hidden, shape.inner
        self.planes = {
            "w13": self.matrix(source, h, 2 * i, every),
            "w2": self.matrix(source, i, h, every),
        }

    def matrix(self, source: torch.Generator, k: int, n: int, every: bool) -> dict[str, torch.Tensor]:
        e, g = self.shape.experts, self.shape.group
        made = {}

        def draw(low: int, high: int, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.randint(low, high, size, generator=source, device=DEVICE, dtype=dtype)

        made["o0"] = draw(-(2**31), 2**31, (e, n // 8, k // 32, 8, 4), torch.int32)
        spread = torch.rand((e, n // 8, k // g, 8), generator=source, device=DEVICE) + 0.5
        sign = torch.where(torch.rand(spread.shape, generator=source, device=DEVICE) < 0.125, -1.0, 1.0)
        scale = (sign * spread / (6.5 * math.sqrt(k))).half()
        zero = draw(0, 16, spread.shape, torch.uint8)
        made["scale"], made["zero"] = scale, zero
        bias = (-zero.float() * scale.float()).half()
        made["o0.m4"] = torch.stack((scale, bias), -1).view(torch.int32).squeeze(-1)
        if every:
            nibbles = torch.zeros(zero.shape[:-1], dtype=torch.int64, device=DEVICE)
            for c in range(8):
                nibbles |= zero[..., c].long() << (4 * c)
            made["o0.m2"] = (nibbles - ((nibbles >> 31) << 32)).int()

            def plain(groups: torch.Tensor) -> torch.Tensor:  # (e, n/8, k/g, 8) -> (e, k/g, n)
                return groups.transpose(1, 2).reshape(e, k // g, n).contiguous()

            width = up(n, 32) * 32
            words = made["o0"].permute(0, 2, 4, 1, 3).reshape(e, k // 8, n)  # K/8, column
            words = torch.nn.functional.pad(words, (0, width - n)).view(e, k // 8, width // 32, 32)
            made["o1"] = words.transpose(1, 2).contiguous()
            made["o1.m4"] = plain(made["o0.m4"])
            made["o1.scale"] = plain(scale)
            made["o1.m3"] = torch.cat((made["o1.scale"].unsqueeze(-1).view(torch.uint8), plain(zero).unsqueeze(-1)), -1)
            made["o1.m2"] = made["o0.m2"].transpose(1, 2).contiguous()
        return made

    def addresses(self, name: str, order: int, metadata: int) -> tuple[int, int, int, int]:
        found = self.planes[name]
        scale = found["scale"] if order == 0 else found.get("o1.scale")
        whole = found[f"o{order}.m4"] if metadata == 4 else found["o1.m3"] if order and metadata == 3 else None
        zeros = found["zero"] if metadata == 3 else found[f"o{order}.m2"] if metadata == 2 else None
        if metadata == 4 or whole is not None:
            scale = zeros = None
        return tuple(0 if t is None else t.data_ptr() for t in (found[f"o{order}"], whole, scale, zeros))

    def decoded(self, name: str, expert: int) -> torch.Tensor:
        """FP16 weights (K, N) of one expert."""
        found = self.planes[name]
        n = found["o0"].shape[1] * 8
        codes = octets.PACKING.unpack(found["o0"][expert], n).T.float()
        scale = octets.restore(found["scale"][expert]).float()
        bias = (-octets.restore(found["zero"][expert]).float() * scale).half().float()
        g = self.shape.group
        return (codes * scale.repeat_interleave(g, 0) + bias.repeat_interleave(g, 0)).half().to(DEVICE)

    def read(self, expert: int) -> AwqExpert:
        """As a checkpoint has it, through the package's own unpacking."""
        h, i = self.shape.hidden, self.shape.inner

        def split(name: str, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            found = self.planes[name]
            codes = octets.PACKING.unpack(found["o0"][expert].cpu(), n).numpy().astype(np.uint8).T
            zeros = octets.restore(found["zero"][expert].cpu()).numpy()
            return codes, zeros, octets.restore(found["scale"][expert].cpu()).numpy()

        def matrix(parts: tuple[np.ndarray, ...], columns: slice) -> AwqMatrix:
            codes, zeros, scales = (np.ascontiguousarray(p[:, columns]) for p in parts)
            return AwqMatrix(pack_awq(codes), pack_awq(zeros), scales, self.shape.group)

        both, down = split("w13", 2 * i), split("w2", h)
        return AwqExpert(matrix(both, slice(0, None, 2)), matrix(both, slice(1, None, 2)), matrix(down, slice(None)))


def slow(
    bank: Bank,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    intermediate: torch.Tensor | None = None,
) -> None:
    """The contract's arithmetic in FP64, one slot after the other."""
    out.zero_()
    for t in range(x.shape[0]):
        total = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if not 0 <= e < bank.shape.experts:
                if intermediate is not None:
                    intermediate[t, k] = 0
                continue
            both = (x[t].double() @ bank.decoded("w13", e).double()).half()
            gate, up_ = both[0::2], both[1::2]
            inner = torch.nn.functional.silu(gate.float()).half() * up_
            if intermediate is not None:
                intermediate[t, k] = inner
            slot = (inner.double() @ bank.decoded("w2", e).double()).half()
            total = (weights[t, k].double() * slot.double() + total.double()).float()
        out[t] = total.half()
