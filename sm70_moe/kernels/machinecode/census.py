"""What a kernel's machine code contains: registers, memory, instructions by opcode, and their order.

Volta and later: an instruction has 16 bytes, its opcode stands in the low 12 bits of the first word.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sm70_moe.decision import Plain
from sm70_moe.errors import BackendError
from sm70_moe.kernels.machinecode.elf import Cubin

WORDS = struct.Struct("<QQ")

OPCODES: Mapping[int, str] = {
    0x236: "HMMA.884",
    0x23C: "HMMA.16816",
    0x381: "LDG",  # sm_70
    0x981: "LDG",  # sm_75 (either) and later
    0x386: "STG",
    0x986: "STG",
    0x983: "LDL",
    0x387: "STL",
    0x984: "LDS",
    0x388: "STS",
    0x943: "CALL",
    0x944: "CALL",
    0x389: "SHFL",
    0x589: "SHFL",
    0x989: "SHFL",
    0xF89: "SHFL",
    0xB1D: "BAR",
    0x918: "NOP",
    0x94D: "EXIT",
}
"""Names of the opcodes that the gate and the table speak of."""

TENSOR = ("HMMA.884", "HMMA.16816")
LOAD_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 8, 6: 16}
"""Width field of a global load -> bytes a thread."""

WIDE = 16

REGISTERS, FRAME, STACK, PARAMETER = 0x2F, 0x11, 0x12, 0x17
"""Codes of the `.nv.info` attributes: (symbol, count), (symbol, bytes) twice, and one for each parameter."""


@dataclass(frozen=True, slots=True)
class Census:
    """One kernel of one cubin.

    `stack` and `shared` (static) count bytes; `parameters` are the bytes of each parameter, in order.
    `opcodes` counts instructions by name (hexadecimal where it has none), `loads` global loads by
    bytes a thread. `late_loads` are the wide loads that stand after the first tensor-core step.
    """

    kernel: str
    architecture: str
    registers: int
    stack: int
    shared: int
    parameters: tuple[int, ...]
    instructions: int
    opcodes: Mapping[str, int]
    loads: Mapping[int, int]
    late_loads: int

    @property
    def tensor(self) -> int:
        return sum(self.opcodes.get(name, 0) for name in TENSOR)

    @property
    def wide_loads(self) -> int:
        return self.loads.get(WIDE, 0)

    @property
    def local(self) -> int:
        """Loads and stores of local memory: spilled registers, or arrays that did not fit."""
        return self.opcodes.get("LDL", 0) + self.opcodes.get("STL", 0)

    @property
    def calls(self) -> int:
        return self.opcodes.get("CALL", 0)

    @property
    def barriers(self) -> int:
        return self.opcodes.get("BAR", 0)

    def record(self) -> dict[str, Plain]:
        return {
            "kernel": self.kernel,
            "architecture": self.architecture,
            "registers": self.registers,
            "stack": self.stack,
            "local": self.local,
            "shared": self.shared,
            "parameters": list(self.parameters),
            "instructions": self.instructions,
            "tensor": self.tensor,
            "wide_loads": self.wide_loads,
            "late_loads": self.late_loads,
            "barriers": self.barriers,
            "calls": self.calls,
            "opcodes": dict(self.opcodes),
            "loads": {str(size): count for size, count in self.loads.items()},
        }


def census(image: bytes) -> tuple[Census, ...]:
    """Every kernel of a cubin, by name. Raises BackendError for bytes that are no cubin."""
    cubin = Cubin.parse(image)
    try:
        return tuple([_kernel(cubin, name) for name in cubin.kernels()])
    except (struct.error, ValueError) as error:
        raise BackendError(f"cubin of {len(image)} bytes is damaged: {error}") from error


def _kernel(cubin: Cubin, name: str) -> Census:
    text, shared = cubin.section(f".text.{name}"), cubin.section(f".nv.shared.{name}")
    assert text is not None  # `kernels` lists no others
    codes = [(low & 0xFFF, high >> 9 & 7) for low, high in WORDS.iter_unpack(text.data)]
    names = [OPCODES.get(opcode, hex(opcode)) for opcode, _ in codes]
    loads = [LOAD_BYTES.get(width, 0) if name == "LDG" else 0 for name, (_, width) in zip(names, codes, strict=True)]
    first = next((place for place, name in enumerate(names) if name in TENSOR), len(names))
    opcodes = Counter(names)
    padding = opcodes.pop("NOP", 0)
    return Census(
        kernel=name,
        architecture=cubin.architecture,
        registers=_of_symbol(cubin, name, REGISTERS),
        stack=max(_of_symbol(cubin, name, FRAME), _of_symbol(cubin, name, STACK)),
        shared=shared.size if shared else 0,
        parameters=_parameters(cubin, name),
        instructions=len(names) - padding,
        opcodes=dict(sorted(opcodes.items())),
        loads=dict(sorted(Counter(size for size in loads if size).items())),
        late_loads=loads[first:].count(WIDE),
    )


def _of_symbol(cubin: Cubin, name: str, code: int) -> int:
    """The number that `.nv.info` keeps for a kernel under this code."""
    index = next(i for i, symbol in enumerate(cubin.symbols) if symbol.name == name and symbol.function)
    for attribute in cubin.attributes(".nv.info"):
        if attribute.code == code and len(attribute.payload) == 8:
            symbol, value = struct.unpack("<II", attribute.payload)
            if symbol == index:
                return int(value)
    raise BackendError(f"kernel {name!r}: the cubin has no attribute 0x{code:02x} for it")


def _parameters(cubin: Cubin, name: str) -> tuple[int, ...]:
    """Bytes of each parameter: the entries name index, ordinal and offset, and the size from bit 18 on."""
    entries = [struct.unpack("<IHHI", a.payload) for a in cubin.attributes(f".nv.info.{name}") if a.code == PARAMETER]
    return tuple(size >> 18 for _, _, _, size in sorted(entries, key=lambda entry: entry[1]))
