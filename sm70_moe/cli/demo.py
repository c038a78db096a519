"""`sm70-moe demo`: the main job from end to end, in a temporary folder."""

from __future__ import annotations

from pathlib import Path
from tempfile import gettempdir

from sm70_moe import unfinished
from sm70_moe.cli import explain, sample, verify
from sm70_moe.cli.output import line


def demo() -> None:
    """Write a small checkpoint, explain it for a V100, run its routes on this CPU."""
    with unfinished.folder(Path(gettempdir()), "sm70-moe-demo") as folder:
        checkpoint = folder / "checkpoint"
        say(f"sample {checkpoint}")
        sample.sample(checkpoint, layers=2)
        say(f"explain {checkpoint} --tp 2 --capability 7.0")
        explain.explain(checkpoint, tp=2, capability="7.0")
        say(f"verify {checkpoint} --tp 2 --rank 1")
        verify.verify(checkpoint, tp=2, rank=1)


def say(command: str) -> None:
    line()
    line(f"$ sm70-moe {command}", "bold")
