"""Greedy tokens through our experts against transformers' own modules on the dequantised weights.

The tie rule: both models see the same tokens, those of the dequantised one. A step is *equal* if
the argmax is the same; a *tie* if it is not, but the dequantised model's logits of the two tokens
are no further apart than twice the largest difference of any logit of that step; else a
*difference*. Ties and differences are listed, never netted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from sm70_moe.engines.transformers import Sm70MoeExperts, service_of

STEPS = 16
PROMPTS = ([1, 5, 9, 2], [100, 3, 77])
NOISE = {torch.float32: 1e-4, torch.float16: 6e-2}
"""Largest difference of a logit (they are of size 1 to 6): FP32 sums in another order, and in FP16
transformers rounds elsewhere: no FP16 silu in between, weights in another order."""

FAMILIES = ("qwen3_moe", "qwen3_next", "mixtral", "glm4_moe", "qwen4_exp_text")


@dataclass
class Streams:
    """Steps of several prompts; `ties` and `differences` as (prompt, step, theirs, ours, gap)."""

    equal: int = 0
    noise: float = 0.0
    ties: list[tuple[int, int, int, int, float]] = field(default_factory=list)
    differences: list[tuple[int, int, int, int, float]] = field(default_factory=list)

    def step(self, place: tuple[int, int], theirs: torch.Tensor, ours: torch.Tensor) -> int:
        """Compare logits (vocabulary,); gives the dequantised model's token."""
        apart = float((theirs - ours).abs().max())
        self.noise = max(self.noise, apart)
        first, second = int(theirs.argmax()), int(ours.argmax())
        gap = float(theirs[first] - theirs[second])
        if first == second:
            self.equal += 1
        else:
            (self.ties if gap <= 2 * apart else self.differences).append((*place, first, second, gap))
        return first


@torch.no_grad()
def compare(plain: Any, ours: Any) -> Streams:
    found = Streams()
    for number, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for step in range(STEPS):
            given = torch.tensor([tokens])
            theirs, own = (model(given, use_cache=False).logits[0, -1].float() for model in (plain, ours))
            tokens.append(found.step((number, step), theirs, own))
    return found


def supported(family: str) -> None:
    from transformers import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_the_dequantised_model(
    make: Callable[..., Any], load: Callable[..., Any], family: str, dtype: torch.dtype
) -> None:
    """No step of any family differs; ties are within the noise, and the noise within its bound."""
    supported(family)
    twins = make(family)
    ours, plain = load(twins.packed, dtype), load(twins.plain, dtype, plain=True)
    experts = [sum(isinstance(module, Sm70MoeExperts) for module in model.modules()) for model in (ours, plain)]
    assert experts == [2, 0]
    found = compare(plain, ours)
    print(f"{family} {dtype}: {found}")
    assert found.differences == []
    assert found.noise <= NOISE[dtype]
    assert found.equal + len(found.ties) == STEPS * len(PROMPTS)
    if dtype is torch.float32:
        assert found.ties == []


@pytest.mark.parametrize("form", ["compressed", "symmetric", "gptq"])
def test_other_formats_give_the_same_tokens(make: Callable[..., Any], load: Callable[..., Any], form: str) -> None:
    """compressed-tensors, with and without zeros, and GPTQ, experts and attention."""
    twins = make("qwen3_moe", form)
    found = compare(load(twins.plain, torch.float32, plain=True), load(twins.packed, torch.float32))
    assert (found.equal, found.ties, found.differences) == (STEPS * len(PROMPTS), [], [])
    assert found.noise <= NOISE[torch.float32]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_generate_gives_the_dequantised_models_tokens(
    make: Callable[..., Any], load: Callable[..., Any], family: str
) -> None:
    """With cache, greedy, a batch of two, in FP32."""
    twins = make(family)
    given = torch.tensor([[1, 5, 9, 2], [7, 7, 100, 3]])
    streams = [
        load(folder, torch.float32, plain=plain).generate(given, max_new_tokens=STEPS, do_sample=False)
        for folder, plain in ((twins.packed, False), (twins.plain, True))
    ]
    assert streams[0].tolist() == streams[1].tolist()


def test_a_real_quantisers_checkpoint_loads_and_generates(load: Callable[..., Any]) -> None:
    """AutoAWQ's file, with its old names in config.json: every layer ours, every linear packed."""
    model = load(Path(__file__).parents[2] / "data" / "tiny-qwen3-moe-awq", "auto")
    assert model.dtype is torch.float16
    experts = [module for module in model.modules() if isinstance(module, Sm70MoeExperts)]
    assert [module.name for module in experts] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert {route.name for module in experts for route in module.plan.routes} == {"legacy_single_token", "legacy"}
    out = model.generate(torch.arange(10)[None], max_new_tokens=8, do_sample=False)
    assert out.shape == (1, 18)
    assert service_of(model).summary().supported == 2


def test_the_comparison_sees_a_planted_fault(make: Callable[..., Any], edit: Callable[..., Path], load: Any) -> None:
    """Zeros that are off by one in every eighth column of one expert is above the bound for FP32."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.experts.0.gate_proj.qzeros"] ^= 1

    found = compare(load(make().plain, torch.float32, plain=True), load(edit(change), torch.float32))
    assert found.noise > 10 * NOISE[torch.float32]
