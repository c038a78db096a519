"""The bench for one number of tokens and one routing: inputs, outputs, and the kernel between layers.

Every arm runs on the same buffers. In front of each layer the same plain kernel writes its ids and
router weights, as a router does, so that no arm overlaps one layer with the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from sm70_moe.benchmark.routing import Routing
from sm70_moe.benchmark.setup import Setup
from sm70_moe.benchmark.timing import Layer
from sm70_moe.errors import BackendError
from sm70_moe.evidence.trial import Inputs
from sm70_moe.kernels.native.launch import Step

WARP = 32
MARK = -7
"""What ids are filled with before a check: no expert."""


class Stand:
    """Buffers of one call, and what each layer's call has in them.

    x (M, H) has the dtype of the layer's engine; ids (M, k) INT32, weights (M, k) FP32 are written by the
    separating kernel; inner (M, k, I) and out (M, H) like x by the arms.
    """

    def __init__(self, setup: Setup, routing: Routing, seed: int = 0) -> None:
        self.setup, self.routing = setup, routing
        self.tokens, slots = routing.ids.shape[1], routing.ids.shape[1:]
        shape, device = setup.shape, setup.device
        source = torch.Generator().manual_seed(seed)
        count = self.tokens * setup.top_k
        padded = [np.resize(routing.distinct(n), count) for n in range(routing.layers)]
        scores = torch.randn(routing.layers, *slots, generator=source)
        self.from_ids = torch.from_numpy(routing.ids).to(device)
        self.from_distinct = torch.from_numpy(np.stack(padded)).to(device).view_as(self.from_ids)
        self.from_weights = torch.softmax(scores, -1).to(device)
        self.ids = torch.full(slots, MARK, dtype=torch.int32, device=device)
        self.weights = torch.zeros(slots, device=device)
        dtype = getattr(torch, setup.plan.admission.facts.activations or "float16")
        self.x = torch.randn(self.tokens, shape.hidden, generator=source).to(device, dtype)
        self.inner = torch.randn(*slots, shape.intermediate, generator=source).to(device, dtype)
        self.out = torch.full_like(self.x, math.nan)
        # by layer: outputs that the reference has found right
        self.right: dict[int, list[torch.Tensor]] = {}
        self.sink = torch.zeros(64, dtype=torch.int32, device=device)

    def inputs(self, layer: int) -> Inputs:
        """The inputs of a layer, in tensors of their own."""
        return Inputs(self.x, self.from_ids[layer].clone(), self.from_weights[layer].clone())

    def separator(self, layer: int, distinct: bool = False) -> Step:
        """The separating kernel; `distinct`: with the different experts instead of the tokens' ids."""
        ids, count = self.from_distinct if distinct else self.from_ids, self.ids.numel()
        return Step(
            "roofline",
            "separator",
            grid=(1,),
            threads=-(-count // WARP) * WARP,
            values={
                "from_ids": ids[layer].data_ptr(),
                "from_weights": self.from_weights[layer].data_ptr(),
                "ids": self.ids.data_ptr(),
                "weights": self.weights.data_ptr(),
                "count": count,
            },
        )

    def separate(self) -> Layer:
        """Launches the separating kernel of a layer; where this machine cannot, two copies do its work."""
        if self.setup.launcher is not None:
            return self.launched(lambda n: (self.separator(n),))

        def copy(n: int) -> None:
            self.ids.copy_(self.from_ids[n])
            self.weights.copy_(self.from_weights[n])

        return copy

    def launched(self, steps: Callable[[int], tuple[Step, ...]]) -> Layer:
        """Launches the steps of a layer, whose arguments all stand in the steps. Raises BackendError
        where the measurement's own kernels cannot run."""
        launcher, stream = self.setup.launcher, self.setup.stream
        if launcher is None:
            raise BackendError(self.setup.no_launcher)
        programs = [launcher.program(steps(n)) for n in range(self.routing.layers)]
        return lambda n: programs[n](stream())

    def poison(self, *outputs: torch.Tensor) -> None:
        """NaN into these outputs, no expert into the ids."""
        self.ids.fill_(MARK)
        for output in outputs:
            output.fill_(math.nan)

    def separated(self, layer: int, distinct: bool) -> bool:
        """Did the separating kernel write this layer's ids?"""
        return torch.equal(self.ids, (self.from_distinct if distinct else self.from_ids)[layer])
