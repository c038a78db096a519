"""What is the host's, it treats as if we were not there, whatever this processor can do.

vLLM's CPU build runs 4-bit experts where the processor has AMX and refuses them elsewhere. What it does
is therefore asked, with an engine without us, and both kinds of processor are pretended as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HOST_S_OWN = ["vllm.model_executor.layers.quantization.auto_awq.AutoAWQMoEMethod"] * 2


@dataclass(frozen=True)
class Seen:
    """What became of an engine: its error, or its tokens and the class that runs each layer of experts."""

    error: BaseException | None = None
    tokens: list[list[int]] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> tuple[object, ...]:
        return (type(self.error), str(self.error), self.tokens, self.methods)

    @property
    def notes(self) -> list[str]:
        return getattr(self.error, "__notes__", [])


@pytest.fixture
def see(engine, model, tokens) -> Callable[..., Seen]:
    """Start an engine and let it generate, or fail."""

    def seen(folder: Path, **options: Any) -> Seen:
        try:
            llm = engine(folder, dtype="float16", **options)
        except Exception as error:
            return Seen(error)
        layers = [module for module in model(llm).modules() if type(module).__name__ == "RoutedExperts"]
        kinds = [type(layer.quant_method) for layer in layers]
        return Seen(None, tokens(llm), [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds])

    return seen


def pretended_kernel(output, x, w13, w2, weights, ids, method, s13, s2, z13, z2, *_: Any) -> None:
    """Not a layer's numbers, but every tensor that the host was given changes them."""
    sums = sum(tensor.double().flatten(1).sum(1) for tensor in (w13, w2, s13, s2, z13, z2))
    output.copy_(x * (weights * sums.sin()[ids.long()]).sum(-1, keepdim=True))


@pytest.fixture(params=["as it is", "with a kernel", "without one"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """This machine's, or one that is pretended where vLLM asks about experts, and nowhere else."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    if request.param != "as it is":
        has = request.param == "with a kernel"
        monkeypatch.setattr(cpu_moe.CPUExpertsInt4, "_supports_current_device", staticmethod(lambda: has))
    if request.param == "with a kernel":
        monkeypatch.setattr(
            cpu_moe, "convert_weight_packed_scale_zp", lambda words, zeros, scales, _: (words, zeros, scales)
        )
        monkeypatch.setattr(cpu_moe, "fused_experts_cpu", pretended_kernel)
    return request.param


def require_the_host_s(seen: Seen, processor: str) -> None:
    """Where the processor is pretended, it is known what the host does."""
    if seen.error is None:
        assert processor != "without one"
        assert seen.methods == HOST_S_OWN
        assert [len(mine) for mine in seen.tokens] == [12, 12, 12]
    else:
        assert processor != "with a kernel", seen.error
        assert type(seen.error) is NotImplementedError
        assert str(seen.error) == "No WNA16 MoE backend supports the deployment configuration."


def test_a_checkpoint_that_nobody_asked_us_for(see, experts_only, tmp_path, processor):
    """Our plug-in is loaded, and the host runs or refuses the checkpoint by itself; no word of ours in its error."""
    seen = see(experts_only.write(tmp_path / "m"), quantization=None)
    require_the_host_s(seen, processor)
    assert seen.notes == []


def test_what_no_route_can_run_is_left_to_the_host_with_our_reason(see, experts_only, tmp_path, journal, processor):
    """The host does what it does without us; its refusal carries why it got the layer, and so does the journal."""
    experts_only.config["quantization_config"]["version"] = "gemv"
    folder = experts_only.write(tmp_path / "m")
    alone, ours = see(folder, quantization=None), see(folder)
    require_the_host_s(alone, processor)
    assert ours.outcome == alone.outcome
    left = "sm70_awq left model.layers.0.mlp.experts to vLLM: format: "
    assert [note.startswith(left) and "gemv" in note for note in ours.notes] == [True] * (alone.error is not None)
    # written while the engine lives; the host's refusal comes with the first layer
    layers = {line["layers"] for line in journal() if line["outcome"] == "unsupported"}
    (summary,) = journal("moe summary")
    assert (layers, summary["layers"], summary["supported"]) == (
        ({"0-1"}, 2, 0) if alone.error is None else ({"0"}, 1, 0)
    )


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What we say in vLLM's own log, which it configures again while it starts."""
    said: list[str] = []

    class Log:
        def log(self, number: int, text: str, *values: object) -> None:
            said.append(text % values)

        def info(self, text: str, *values: object) -> None:
            said.append(text % values)

    monkeypatch.setattr("sm70_moe.engines.vllm.told.LOGGER", Log())
    return said


PRETENDED = pytest.mark.parametrize("processor", ["with a kernel", "without one"], indirect=True)


@PRETENDED
def test_what_is_slow_here_stays_with_a_host_that_can_run_it(
    see, experts_only, tmp_path, journal, processor, monkeypatch, log
):
    """By default: portable routes are for layers that nobody else can run. The table of decisions is told once."""
    monkeypatch.delenv("SM70_MOE_TAKE")
    seen = see(experts_only.write(tmp_path / "m"))
    assert seen.error is None
    (summary,) = journal("moe summary")
    assert [line.startswith("model.layers.0-1.mlp.experts   2 layers   policy ") for line in log].count(True) == 1
    assert [line for line in log if line.startswith("moe summary: ")] == [f"moe summary: {summary['text']}"]
    if processor == "with a kernel":
        assert seen.methods == HOST_S_OWN
        assert summary["left"] == {"portable for all tokens here; SM70_MOE_TAKE=all takes them": 2}
        assert (summary["native"], summary["slow"]) == (0, {})
    else:
        assert {name.rpartition(".")[2] for name in seen.methods} == {"ExpertsMethod"}
        assert (summary["left"], summary["slow"]) == ({}, {"all tokens": 2})


@PRETENDED
def test_nothing_is_taken(see, experts_only, tmp_path, processor, monkeypatch):
    """`none`: as without us, and the host's refusal says who decided it."""
    monkeypatch.setenv("SM70_MOE_TAKE", "none")
    seen = see(experts_only.write(tmp_path / "m"))
    require_the_host_s(seen, processor)
    said = "sm70_awq left model.layers.0.mlp.experts to vLLM: SM70_MOE_TAKE=none"
    assert seen.notes == ([] if processor == "with a kernel" else [said])


def test_nothing_is_taken_that_a_flag_asks_for(see, experts_only, tmp_path, monkeypatch):
    """Two wishes that exclude each other are refused, and the error has both."""
    monkeypatch.setenv("SM70_MOE_TAKE", "none")
    monkeypatch.setenv("SM70_MOE_BATCHED_BANKS", "1")
    seen = see(experts_only.write(tmp_path / "m"))
    assert seen.error is not None
    assert "SM70_MOE_TAKE" in str(seen.error)
    assert "batched_banks" in str(seen.error)
