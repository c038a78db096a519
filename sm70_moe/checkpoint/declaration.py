"""Where a checkpoint says how it is quantised: `quantization_config`, or one of the places that older writers used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sm70_moe.checkpoint.compressed import METHOD as COMPRESSED
from sm70_moe.checkpoint.fields import Fields
from sm70_moe.checkpoint.methods import read_quantization
from sm70_moe.checkpoint.quantization import QuantizationRules
from sm70_moe.regular import is_there

KEY = "quantization_config"
OLDER_KEYS = {"compression_config": COMPRESSED}
"""Keys of config.json from before KEY, and the method that they belong to."""
FILES: Mapping[str, str | None] = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files beside config.json, and the method that a file without `quant_method` is of."""
INNER = "quantization"
"""The table of such a file that holds the fields, where they are not at its top."""


@dataclass(frozen=True, slots=True)
class Declared:
    """The rules, and notes: where they were found, if not in `quantization_config`; what is missing there."""

    rules: QuantizationRules
    notes: tuple[str, ...] = ()


def read_declaration(whole: Fields, parts: Iterable[Fields], folder: Path) -> Declared:
    """Read how the modules are stored: of the top of config.json, of a table of experts, or of a file beside it.

    Raises what the readers of the methods raise.
    """
    for fields in (whole, *parts):
        table = fields.table(KEY)
        if table is not None:
            silent = table.value("quant_method") is None
            told = f"{table.path.rstrip('.')} has no quant_method, so its format is not known" if silent else ""
            return Declared(read_quantization(table), (told,) if told else ())
        for key, older in OLDER_KEYS.items():
            table = fields.table(key)
            if table is not None:
                return Declared(read_quantization(table, older), (f"quantisation is read from the key {key}",))
    for name, method in FILES.items():
        if is_there(folder / name, followed=True):
            table = Fields.load(folder / name)
            table = table.table(INNER) or table
            told = f"config.json does not declare it quantised; {name} beside it does, and is read as {KEY}"
            return Declared(read_quantization(table, method or ""), (told,))
    return Declared(QuantizationRules())
