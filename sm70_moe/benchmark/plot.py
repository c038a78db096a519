"""A picture of a result: microseconds a layer over tokens, an axis for each routing and kind of metadata."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm70_moe.benchmark.result import Result, Row
from sm70_moe.errors import SettingsError
from sm70_moe.timings import BOTH, LEGACY, PLAIN, ROOFLINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDINGS = (".png", ".svg")


def require_matplotlib() -> None:
    """Raise SettingsError that names the extra where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise SettingsError(
            f"--plot draws with matplotlib ({error}); install sm70-moe with the extra plot: '.[plot]' in its checkout"
        ) from error


def draw(result: Result, path: Path) -> bytes:
    """The picture, in the format of the path's ending."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row.metadata, row.routing) for row in result.rows if not row.wrong))
    figure = Figure(figsize=(6.4 * max(1, len(panels)), 5.6), layout="constrained")
    grid: Any = figure.subplots(1, max(1, len(panels)), squeeze=False, sharey=True)
    for axes, (metadata, routing) in zip(grid[0], panels, strict=False):
        panel(axes, result, metadata, routing)
    figure.suptitle(f"{result.gpu.get('name', 'unknown GPU')}, {result.policy}, build {(result.build or 'none')[:8]}")
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.removeprefix("."), dpi=150)
    return content.getvalue()


def panel(axes: Axes, result: Result, metadata: str, routing: str) -> None:
    """One axis: an arm a line, with the spread as bars."""
    for label, rows in lines(result, metadata, routing):
        if rows[0].arm == LEGACY:  # a hundred times the others, which nobody could tell apart then
            least, most = (f(row.microseconds for row in rows) for f in (min, max))
            axes.plot([], [], " ", label=f"{label}: {least:.0f} to {most:.0f} us, not drawn")
            continue
        tokens, times = [row.tokens for row in rows], [row.microseconds for row in rows]
        below = [row.microseconds - min(row.samples) for row in rows]
        above = [max(row.samples) - row.microseconds for row in rows]
        axes.errorbar(tokens, times, yerr=[below, above], label=label, marker="o", markersize=3, capsize=2)
    axes.set_title(f"{metadata} metadata, {routing} routing")
    axes.set_xlabel("tokens")
    axes.set_ylabel("microseconds a layer, separating kernel included")
    axes.set_xticks(sorted({row.tokens for row in result.rows}))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:  # a panel of parts alone has no line
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, fontsize="small")


def lines(result: Result, metadata: str, routing: str) -> Iterator[tuple[str, list[Row]]]:
    """Whole layers, an arm and launch each; of the plain roofline the fastest shape. What was wrong is left out."""
    found: dict[str, list[Row]] = {}
    for row in result.rows:
        if (row.metadata, row.routing, row.part) != (metadata, routing, BOTH) or row.wrong:
            continue
        if (row.arm, row.launch) == (ROOFLINE, PLAIN) and row is not result.roofline(row.key):
            continue
        found.setdefault(f"{row.arm} {row.launch}", []).append(row)
    yield from found.items()
