"""A layer's banks bound to the kernels of one backend: the hot path of a native route."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from sm70_moe.banks.banks import Bank, Banks
from sm70_moe.errors import BackendError
from sm70_moe.kernels.arguments import bank_tensors, check_call, inputs_of, outputs_of
from sm70_moe.kernels.call import Call
from sm70_moe.kernels.declared import ALIGNMENT
from sm70_moe.kernels.native.case import RULE, Case
from sm70_moe.kernels.native.launch import Launcher, Program
from sm70_moe.kernels.native.steps import CALL, SCRATCH, Route, bank_arguments, numbers
from sm70_moe.kernels.native.stopwatch import microseconds
from sm70_moe.kernels.native.tactics import bucket_of
from sm70_moe.kernels.protocol import Workspace

HALF, WORD = 2, 4
"""Bytes of an activation, and of an id or a router weight."""

PLACES = 512
"""Bytes at a multiple of which what is lent to a call is divided."""

MOST_PROGRAMS = 512
"""Programs that a layer keeps before it forgets them all: prompts have every length."""

INT32, FP32 = torch.int32, torch.float32

BF16 = "bfloat16"


class Bound:
    """One layer on one device.

    A program is made for each number of tokens, by `ready` or at the first such call; after that a
    call checks its arguments, packs them and launches. Holds no bank: the layer's owner does. What
    kernels keep between calls belongs to the layer, other working memory is lent for a call.
    """

    def __init__(self, name: str, launcher: Launcher, route: Route, banks: Banks, dependent: bool) -> None:
        if not banks.layout.batched:
            raise BackendError(f"backend {name!r}: banks {banks.layout.tag!r}, accepted are batched ones")
        self.name, self.launcher, self.route, self.dependent = name, launcher, route, dependent
        self.layout, self.shape, self.filled = banks.layout, banks.shape, banks.filled
        self.planes = bank_arguments({**addresses("w13", banks.w13), **addresses("w2", banks.w2)})
        planes = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in bank_tensors(banks))
        self.starts, self.ends = [start for start, _ in planes], [end for _, end in planes]
        self.row = banks.shape.intermediate * HALF
        # zero at first: a kernel that counts arrivals starts from there
        self.scratch = torch.zeros(max(1, route.scratch), dtype=torch.uint8, device=banks.device)
        if route.scratch and self.scratch.is_cuda and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(banks.device).synchronize()  # the first call may be on another stream
        self.programs: dict[tuple[int, int, torch.dtype], Program] = {}
        self.tactics: dict[int, str] = {}  # by the largest number of tokens of a bucket
        self.dtypes = frozenset(getattr(torch, name) for name in route.runs.dtypes)
        self.varying = (*CALL, SCRATCH) if route.pieces else CALL
        self.stream = current_stream(banks.device)
        # -1 for the CPU, as torch numbers it: tests run there
        self.hidden, self.experts, self.index = banks.shape.hidden, banks.shape.experts, self.scratch.get_device()

    def ready(self, top_k: int) -> None:
        """Make programs in advance, so that every kernel is loaded and the first call may already be captured.

        Kernels for BF16 are there only where they were compiled for a layer of these sizes.
        """
        for dtype in sorted(self.route.runs.dtypes):
            case = self._case(self.route.first, top_k, dtype)
            if dtype == BF16 and not all(
                self.launcher.holds(s, case.geometry.record()) for s in self.route.steps(case)
            ):
                continue
            for tokens in (*self.route.planned(self.shape, top_k), *self.tactics):
                self._program(tokens, top_k, getattr(torch, dtype))

    def offered(self, tokens: int, top_k: int, dtype: str) -> tuple[str, ...]:
        """The tactics of a bucket, by its largest number of tokens."""
        if self.route.tactics is None or tokens > self.route.most(self.shape, top_k):
            return ()
        return self.route.tactics(self._case(tokens, top_k, dtype))

    def timed(self, call: Call, tactic: str, space: Workspace | None) -> float:
        """Microseconds of a call by a tactic, of some that follow each other; `take` is what changes other calls."""
        x, (tokens, top_k) = call.x, call.ids.shape
        key, before = (tokens, top_k, x.dtype), dict(self.programs)
        case = replace(self._case(tokens, top_k, str(x.dtype).removeprefix("torch.")), tactic=tactic)
        self.programs[key] = self._made(case)
        try:
            return microseconds(lambda: self._pieces(call, space), x.device)
        finally:
            self.programs = before

    def take(self, top_k: int, chosen: Mapping[int, str]) -> None:
        """Run calls by these tactics from now on, whose kernels are loaded now."""
        self.tactics = dict(chosen)
        self.programs.clear()
        self.ready(top_k)

    def __call__(self, banks: Banks, call: Call, space: Workspace | None) -> None:
        """Run one call; see `Backend.run`. No tensor value is read; only `ready` allocates, and who lends memory."""
        x, ids, weights, out, inner = call.x, call.ids, call.weights, call.out, call.intermediate
        places = x.data_ptr(), ids.data_ptr(), weights.data_ptr(), out.data_ptr()
        if inner is not None or not self._usual(x, ids, weights, out, places):
            self._examine(banks, call)
        tokens, top_k = ids.shape
        if self.route.pieces is not None:
            self._pieces(call, space)
            return
        program = self.programs.get((tokens, top_k, x.dtype)) or self._program(tokens, top_k, x.dtype)
        if inner is None:
            size = tokens * top_k * self.row
            inner = space.lend(size) if space is not None else x.new_empty(size // HALF)
        program(self.stream(), *places, inner.data_ptr())

    def _pieces(self, call: Call, space: Workspace | None) -> None:
        """Run a call of any length in pieces, one after the other in the same memory."""
        tokens, top_k = call.ids.shape
        most = self.route.most(self.shape, top_k)
        first = min(tokens, most)
        scratch = -(-self.route.lent(self.shape, top_k, first) // PLACES) * PLACES
        size = scratch + (first * top_k * self.row if call.intermediate is None else 0)
        lent = space.lend(size) if space is not None else call.x.new_empty(size, dtype=torch.uint8)
        at = lent.data_ptr()
        for part in (call,) if tokens <= most else call.chunks(most):
            program = self.programs.get((part.tokens, top_k, part.x.dtype)) or self._program(
                part.tokens, top_k, part.x.dtype
            )
            places = part.x.data_ptr(), part.ids.data_ptr(), part.weights.data_ptr(), part.out.data_ptr()
            inner = at + scratch if part.intermediate is None else part.intermediate.data_ptr()
            program(self.stream(), *places, inner, at)

    def _usual(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, places: tuple[int, ...]
    ) -> bool:
        """Is the call as an engine makes it? Quick, and never True for one that is not.

        `places` are the addresses; what is asked of all four tensors is asked in few words, since this
        is most of a call's host time.
        """
        slots, row, at = ids.shape, x.shape, self.index
        if len(slots) != 2 or weights.shape != slots or out.shape != row or row != (slots[0], self.hidden):
            return False
        if not (x.dtype is out.dtype and x.dtype in self.dtypes and ids.dtype is INT32 and weights.dtype is FP32):
            return False
        if not (x.is_contiguous() and ids.is_contiguous() and weights.is_contiguous() and out.is_contiguous()):
            return False
        if not (x.get_device() == ids.get_device() == weights.get_device() == out.get_device() == at):
            return False
        given, named, weighted, start = places
        size, word = slots[0] * self.hidden * HALF, slots[0] * slots[1] * WORD
        end = start + size
        if (start | given) % ALIGNMENT or len(self.filled) != self.experts:
            return False
        if given < end and start < given + size:
            return False
        if (named < end and start < named + word) or (weighted < end and start < weighted + word):
            return False
        # planes do not overlap, so only the last one that starts below `end` can reach into the output
        below = bisect_left(self.starts, end)
        return not below or self.ends[below - 1] <= start

    def _examine(self, banks: Banks, call: Call) -> None:
        """Say what is wrong with an unusual call; only one that exports its activations passes."""
        x, inputs, outputs = call.x, inputs_of(call), outputs_of(call)
        banks.require_complete()
        check_call(banks, call)
        if x.dtype not in self.dtypes:
            accepted = " or ".join(sorted(map(str, self.dtypes)))
            raise BackendError(f"backend {self.name!r}: x has dtype {x.dtype}, accepted is {accepted}")
        for name, tensor in {**inputs, **outputs}.items():
            if not tensor.is_contiguous():
                raise BackendError(
                    f"backend {self.name!r}: {name} has strides {tensor.stride()}, accepted is contiguous"
                )
            if name not in ("ids", "weights") and tensor.data_ptr() % ALIGNMENT:
                raise BackendError(f"backend {self.name!r}: {name} starts at no multiple of {ALIGNMENT} bytes")

    def _case(self, tokens: int, top_k: int, dtype: str) -> Case:
        tactic = self.tactics.get(bucket_of(tokens) or 0, RULE) if self.tactics else RULE
        return Case(self.shape, self.layout, top_k, tokens, self.launcher.architecture, self.dependent, dtype, tactic)

    def _program(self, tokens: int, top_k: int, dtype: torch.dtype) -> Program:
        """Plan, load and pack everything for calls of this shape."""
        runs = self.route.runs.tokens
        if self.route.pieces is None and tokens not in runs:
            raise BackendError(f"backend {self.name!r}: {tokens} tokens, accepted are {runs}")
        if len(self.programs) >= MOST_PROGRAMS:
            self.programs.clear()
        case = self._case(tokens, top_k, str(dtype).removeprefix("torch."))
        self.programs[tokens, top_k, dtype] = program = self._made(case)
        return program

    def _made(self, case: Case) -> Program:
        return self.launcher.program(
            self.route.steps(case),
            varying=self.varying,
            values={**numbers(case), **self.planes, SCRATCH: self.scratch.data_ptr()},
            sizes=case.geometry.record(),
        )


def addresses(bank: str, matrix: Bank) -> dict[str, int]:
    """Addresses of a batched bank's planes by argument name."""
    return {
        f"{bank}_{name}": plane.data_ptr() for name, plane in matrix.planes.items() if isinstance(plane, torch.Tensor)
    }


def current_stream(device: torch.device) -> Callable[[], int]:
    """Handle of torch's current stream on a device. The private call is what torch's own compiler uses;
    the public one costs three times as much."""
    index = device.index or 0
    quick: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if quick is None:
        return lambda: int(torch.cuda.current_stream(index).cuda_stream)
    return lambda: quick(index)
