"""What the model says about one row of a benchmark."""

from __future__ import annotations

from dataclasses import replace

from sm70_moe.errors import SettingsError
from sm70_moe.kernels.build.geometry import Geometry
from sm70_moe.layout import Metadata
from sm70_moe.prediction.hardware import Gpu
from sm70_moe.prediction.measurements import Measured
from sm70_moe.prediction.model import Parts, Setting, parts_of, roofline
from sm70_moe.prediction.parameters import Parameters
from sm70_moe.prediction.readbuild import ReadBuild
from sm70_moe.prediction.routing import Routing
from sm70_moe.prediction.work import Call, Work
from sm70_moe.timings import BOTH, DEPENDENT, FLOOR, FUSED, OURS, PLAIN, ROOFLINE, SEPARATOR


def call_of(geometry: Geometry, row: Measured) -> Call:
    """The call that a row timed, with the number of experts that it says. Raises SettingsError if none has so many."""
    least, most = geometry.top_k, min(geometry.experts, row.tokens * geometry.top_k)
    if not least <= row.distinct <= most:
        raise SettingsError(f"{row.name}: distinct {row.distinct}, accepted are {least} to {most}")
    routing = Routing.of(row.routing, row.tokens, geometry.top_k, geometry.experts)
    groups = routing.groups * row.distinct / routing.distinct
    return Call(geometry, Metadata(row.metadata), row.tokens, replace(routing, distinct=row.distinct, groups=groups))


def works_of(build: ReadBuild, geometry: Geometry, gpu: Gpu, row: Measured) -> tuple[Work, ...]:
    """The kernels that a row timed; two for a floor too, whose work is then not looked at."""
    works = build.works(call_of(geometry, row), gpu.architecture)
    return works if row.part == BOTH else tuple(work for work in works if work.part == row.part)


def microseconds(row: Measured, works: tuple[Work, ...], gpu: Gpu, fitted: Parameters) -> float:
    """A layer's time without the separating kernel. Dependent launch hides a share of all but the first start."""
    setting = Setting.likely(gpu, fitted)
    if row.arm == SEPARATOR:
        return 0.0
    if row.arm == FLOOR:
        return len(works) * setting.launch
    times: list[Parts] = [(roofline if row.arm == ROOFLINE else parts_of)(work, setting) for work in works]
    hidden = fitted.hidden * sum(p.launch + p.first for p in times[1:]) if row.launch == DEPENDENT else 0.0
    return sum(p.total for p in times) - hidden


def judged(row: Measured) -> bool:
    """Is a row used in a fit? With dependent launch only ours: floors and rooflines overlap whole layers then."""
    return row.arm == OURS or (row.arm in (FLOOR, ROOFLINE) and row.launch == PLAIN)


def checked(row: Measured) -> bool:
    """Is a row one to judge a fit by, that no fit uses? One launch instead of two."""
    return (row.arm, row.launch, row.part) == (FUSED, PLAIN, BOTH)
