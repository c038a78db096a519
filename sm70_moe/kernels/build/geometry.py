"""The sizes that kernels are specialised for: those that policies declare."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FIELDS = ("hidden", "intermediate", "experts", "top_k", "group")


@dataclass(frozen=True, slots=True, order=True)
class Geometry:
    """One rank's layer: counts of elements, `intermediate` and `experts` per rank, `group` as prepared."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    group: int

    @classmethod
    def of_policy(cls, document: Mapping[str, Any]) -> Geometry | None:
        """The geometry of a valid policy's document; None if it leaves a size open or wants no kernels."""
        contract = document["contract"]
        weights = contract.get("weights", {})
        group = weights.get("prepared_group", weights.get("checkpoint_group"))
        sizes = [contract.get(name) for name in FIELDS[:-1]]
        if group is None or None in sizes or not any(_natives(document)):
            return None
        hidden, intermediate, experts, top_k = sizes
        return cls(hidden, intermediate, experts // contract.get("expert_parallel", 1), top_k, group)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Geometry:
        """The inverse of `record`. Raises TypeError for other keys, ValueError for other values."""
        if any(type(value) is not int or value < 1 for value in record.values()):
            raise ValueError(f"geometry {dict(record)}: sizes are positive whole numbers")
        return cls(**record)

    def record(self) -> dict[str, int]:
        return asdict(self)


def _natives(document: Mapping[str, Any]) -> Iterator[bool]:
    for feature in document.get("features", {}).values():
        yield bool(feature.get("native"))


def geometries(policies: Iterable[Path]) -> tuple[Geometry, ...]:
    """The different geometries of these policy files, sorted."""
    found = (Geometry.of_policy(tomllib.loads(path.read_text(encoding="utf-8"))) for path in policies)
    return tuple(sorted({geometry for geometry in found if geometry is not None}))


def shipped_geometries() -> tuple[Geometry, ...]:
    """Geometries of the policies inside the package, or at the top of a checkout."""
    return geometries(shipped_files())


def shipped_architectures() -> tuple[str, ...]:
    """Architectures that these policies name: where there is evidence, and so versions made for their sizes."""
    documents = (tomllib.loads(path.read_text(encoding="utf-8")) for path in shipped_files())
    return tuple(sorted({name for one in documents for name in one["contract"].get("architectures", ())}))


def shipped_files() -> list[Path]:
    package = Path(__file__).resolve().parents[2]
    folder = next((f for f in (package / "policies", package.parent / "policies") if f.is_dir()), None)
    return sorted(folder.glob("*.toml")) if folder else []
