"""A folder of prepared banks: a file for each layer, layout and rank."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from sm70_moe.banks import file as bankfile
from sm70_moe.banks.banks import Banks
from sm70_moe.banks.file import Progress
from sm70_moe.banks.header import Identity, Unusable
from sm70_moe.layout import BankLayout, BankShape

SUFFIX = ".safetensors"
LONGEST_NAME = 100
"""Characters of a layer's name that a file's name takes; most file systems end at 255 bytes."""


@dataclass(frozen=True, slots=True)
class Key:
    """Which banks are meant. All of it is compared: the banks of another key are not used.

    `ranks` are tensor-parallel size and rank, then expert-parallel size and rank. `policy` is the
    policy's name and digest, `source` the digest of the weights that the banks were made from,
    `version` this package's.
    """

    layer: str
    ranks: tuple[int, int, int, int]
    policy: str
    layout: BankLayout
    shape: BankShape
    source: str
    version: str

    @property
    def file(self) -> str:
        """Name of the file. What may grow stale is not in it: a newer file replaces the older one."""
        size, rank, experts_size, experts_rank = self.ranks
        name = re.sub(r"[^A-Za-z0-9._-]", "_", self.layer)
        if name != self.layer or len(name) > LONGEST_NAME:
            name = f"{name[-LONGEST_NAME:]}-{hashlib.sha256(self.layer.encode()).hexdigest()[:8]}"
        layout = self.layout.tag.replace("/", "-")
        return f"{name}.tp{rank}of{size}.ep{experts_rank}of{experts_size}.{layout}{SUFFIX}"

    @property
    def identity(self) -> Identity:
        """What the file's header says, in text."""
        size, rank, experts_size, experts_rank = self.ranks
        shape = self.shape
        return {
            "layer": self.layer,
            "tensor parallel": f"rank {rank} of {size}",
            "expert parallel": f"rank {experts_rank} of {experts_size}",
            "policy": self.policy,
            "layout": self.layout.tag,
            "shape": f"{shape.experts} experts, hidden {shape.hidden}, intermediate {shape.intermediate}",
            "source": self.source,
            "sm70_moe": self.version,
        }


@dataclass(frozen=True, slots=True)
class Found:
    """What a look into the folder gave: banks, or the reason why a file that is there was not used."""

    banks: Banks | None
    file: Path
    ignored: str = ""


class BankCache:
    """Reads and writes the files of one folder, which is made when the first is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, key: Key, device: str | torch.device, progress: Progress | None = None) -> Found:
        """The banks of this key, every byte of them checked."""
        path = self.folder / key.file
        try:
            return Found(bankfile.read(path, key.identity, key.layout, key.shape, device, progress), path)
        except FileNotFoundError:
            return Found(None, path)
        except Unusable as error:
            return Found(None, path, str(error))
        except OSError as error:
            return Found(None, path, f"it cannot be read: {error.strerror}")

    def store(self, key: Key, banks: Banks) -> Path:
        """Write complete banks under this key. Raises OSError where that is not possible."""
        path = self.folder / key.file
        self.folder.mkdir(parents=True, exist_ok=True)
        bankfile.write(path, banks, key.identity)
        return path

    def sweep(self) -> None:
        """Remove what a writer that was killed has left unfinished."""
        bankfile.sweep(self.folder)
