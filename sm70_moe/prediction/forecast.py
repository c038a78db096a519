"""Predicted times of a layer, and what limits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError
from sm70_moe.kernels.declared import FUSED
from sm70_moe.kernels.native.steps import STEPS
from sm70_moe.prediction.fused import Fused, FusedParts, fused_parts
from sm70_moe.prediction.hardware import Gpu, Range
from sm70_moe.prediction.model import ISSUE, LAUNCH, Parts, Setting, busiest_port, parts_of
from sm70_moe.prediction.parameters import Fitted
from sm70_moe.prediction.readbuild import ReadBuild
from sm70_moe.prediction.spread import layer_time, range_of, sampled, time_range
from sm70_moe.prediction.work import Call, Work

PREDICTED = "predicted, never run on a V100"

STEP_MILLISECONDS = 16.9
EXPERTS_SHARE = 0.07
"""A decode step of the first contract's model on V100s, and the part of it that experts take."""

STEP_SOURCE = "a figure from the project's brief, not checked here"
"""Which names no publication."""

PERFECT_GAIN = EXPERTS_SHARE / (1 - EXPERTS_SHARE)
"""More tokens a second if experts took no time at all."""


@dataclass(frozen=True, slots=True)
class Gains:
    """Microseconds that a layer's kernel would save without its launch, its first touch, its instructions."""

    launch: float
    first: float
    instructions: float


@dataclass(frozen=True, slots=True)
class OneLaunch:
    """The call as one kernel, in microseconds; `saved` against two plain launches, less than 0 if it loses."""

    parts: FusedParts
    time: Range
    saved: Range

    def record(self) -> dict[str, Plain]:
        ranges = {"microseconds": self.time, "saved": self.saved}
        rounded = {key: {n: round(v, 3) for n, v in asdict(value).items()} for key, value in ranges.items()}
        return {**rounded, "parts": self.parts.record()}


@dataclass(frozen=True, slots=True)
class Forecast:
    """One call on one GPU: the kernels' parts in order, and the time of a layer in microseconds.

    `nominal` and `reached` are the floors: all bytes at the GPU's nominal bandwidth, and at what kernels reach.
    `fused` is the same in one launch; where that was asked for and cannot be predicted, `missing` says why.
    """

    gpu: Gpu
    call: Call
    parts: tuple[Parts, ...]
    gains: tuple[Gains, ...]
    time: Range
    nominal: float
    reached: float
    fused: OneLaunch | None
    missing: str

    @property
    def label(self) -> str:
        """No prediction without this line."""
        return PREDICTED if self.gpu.architecture == "sm_70" else f"a model of {self.gpu.title}, not a measurement"

    def record(self) -> dict[str, Plain]:
        fused = {FUSED: self.fused.record() if self.fused else None, "missing": self.missing} if self.has_fused else {}
        return {
            "label": self.label,
            "gpu": self.gpu.name,
            "tokens": self.call.tokens,
            "metadata": str(self.call.metadata),
            "routing": self.call.routing.kind,
            "distinct": self.call.routing.distinct,
            "microseconds": {name: round(value, 3) for name, value in asdict(self.time).items()},
            "floor_nominal": round(self.nominal, 3),
            "floor_reached": round(self.reached, 3),
            "kernels": [kernel_record(p, g, self.gpu) for p, g in zip(self.parts, self.gains, strict=True)],
            **fused,
        }

    @property
    def has_fused(self) -> bool:
        """Is there something to say of one launch?"""
        return self.fused is not None or bool(self.missing)


def forecast(build: ReadBuild, call: Call, gpu: Gpu, fitted: Fitted, with_fused: bool = True) -> Forecast:
    """Predict a call, in one launch too if it is wanted and there is such a kernel for so many tokens.

    Raises BackendError or SettingsError where it has no kernels to read.
    """
    works = build.works(call, gpu.architecture)
    setting = Setting.likely(gpu, fitted.parameters)
    total = sum(work.bytes for work in works) / 1e3
    fused, missing = None, ""
    if with_fused and STEPS[FUSED].first <= call.tokens <= STEPS[FUSED].last:
        try:
            fused = one_launch(build.fused(call, gpu), works, gpu, fitted)
        except BackendError as error:
            missing = str(error)
    return Forecast(
        gpu=gpu,
        call=call,
        parts=tuple(parts_of(work, setting) for work in works),
        gains=tuple(gains_of(work, setting) for work in works),
        time=time_range(works, gpu, fitted),
        nominal=total / gpu.bandwidth,
        reached=total / setting.reached,
        fused=fused,
        missing=missing,
    )


def one_launch(fused: Fused, two: Sequence[Work], gpu: Gpu, fitted: Fitted) -> OneLaunch:
    """One launch, and what it saves against two: the same setting for both, so that what is common cancels."""

    def time(setting: Setting) -> float:
        return fused_parts(fused, setting).total

    return OneLaunch(
        parts=fused_parts(fused, Setting.likely(gpu, fitted.parameters)),
        time=range_of(time, fused.works, gpu, fitted),
        saved=sampled(lambda setting: layer_time(two, setting) - time(setting), gpu, fitted),
    )


def gains_of(work: Work, setting: Setting) -> Gains:
    """What each cost is worth: the time with it less the time without."""
    whole = parts_of(work, setting).total
    return Gains(
        launch=whole - parts_of(work, replace(setting, launch=0.0)).total,
        first=whole - parts_of(work, replace(setting, latency=0.0)).total,
        instructions=whole - parts_of(replace(work, instructions={}, last=0), setting).total,
    )


def limit_of(parts: Parts, gpu: Gpu) -> str:
    """The largest part, and for instructions the unit that they wait for."""
    return f"issue: {busiest_port(parts.work, gpu)}" if parts.limit == ISSUE else parts.limit


def kernel_record(parts: Parts, gains: Gains, gpu: Gpu) -> dict[str, Plain]:
    work = parts.work
    block = work.bytes / work.live
    times = {name: round(getattr(parts, name), 3) for name in TIMES}
    return {
        "kernel": work.kernel,
        "part": work.part,
        "bytes": round(work.bytes),
        "cached_bytes": round(work.cached(gpu.multiprocessors)),
        "instructions": round(work.slots),
        "instructions_per_warp": round(work.per_warp, 1),
        "pipes": {str(pipe): round(count) for pipe, count in sorted(work.instructions.items())},
        "blocks": work.blocks,
        "live_blocks": round(work.live, 1),
        "warps_per_block": work.warps,
        "registers": work.registers,
        "resident_blocks": parts.resident,
        "resident_warps": parts.resident * work.warps,
        "rounds": round(parts.rounds, 2),
        "bytes_in_flight": round(min(parts.resident * gpu.multiprocessors, work.live) * block),
        "microseconds": {LAUNCH: times.pop("launch"), **times, "total": round(parts.total, 3)},
        "limit": limit_of(parts, gpu),
        "saved_without": {name: round(value, 3) for name, value in asdict(gains).items()},
    }


TIMES: Sequence[str] = ("launch", "first", "bytes", "issue", "tensor", "steady", "tail")
