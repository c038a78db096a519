"""Which unit of a multiprocessor takes an instruction, by opcode.

An opcode's low 9 bits are the operation, the 3 bits above say where its operands come from (registers,
constants, immediate values), so that few rows cover many codes. Read off NVRTC 12.9's cubins for sm_70 and
sm_90. The grouping into pipes is the one that NVIDIA's engineers describe for GV100 and GH100
(forums.developer.nvidia.com, threads 108729 and 302018).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

OPERATION = 0x1FF


class Pipe(StrEnum):
    """What an instruction waits for besides an issue slot."""

    FLOAT = "float"  # FP32 adds and multiplies
    MULTIPLY = "multiply"  # integer multiply-add, which also serves as a move or a shift
    INTEGER = "integer"  # logic, shifts, comparisons, moves, permutations
    HALF = "half"  # pairs of FP16
    TENSOR = "tensor"
    MEMORY = "memory"  # loads and stores of any kind, exchanges between lanes
    SPECIAL = "special"  # conversions, reciprocals, exponentials, bit counts
    UNIFORM = "uniform"  # the scalar path of sm_75 and later
    CONTROL = "control"  # branches, barriers, everything else


WHOLE: Mapping[int, Pipe] = {0x236: Pipe.TENSOR, 0x237: Pipe.TENSOR, 0x23C: Pipe.TENSOR}
"""Codes whose operation means something else with other operands: HMMA.884, IMMA, HMMA.16816."""

OPERATIONS: Mapping[Pipe, tuple[int, ...]] = {
    Pipe.FLOAT: (0x20, 0x21, 0x22, 0x23),
    Pipe.MULTIPLY: (0x24, 0x25, 0x26, 0x27),
    Pipe.INTEGER: (
        *(0x02, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0B, 0x0C, 0x10, 0x11, 0x12, 0x16, 0x17, 0x19, 0x1C),
        *(0x36, 0x3E, 0x46, 0x48),
    ),
    Pipe.HALF: (0x30, 0x31, 0x32, 0x34, 0x35),
    Pipe.MEMORY: (*range(0x180, 0x18B), 0x1AE),
    Pipe.SPECIAL: (0x100, 0x101, 0x104, 0x105, 0x106, 0x108, 0x109),
    Pipe.UNIFORM: (0x82, 0x90, 0x91, 0x92, 0x99, 0xA4, 0xA5, 0xB9, 0xCA, 0x1C3),
}

_PIPES = {operation: pipe for pipe, operations in OPERATIONS.items() for operation in operations}


def pipe_of(opcode: int) -> Pipe:
    """The pipe of an opcode (12 bits); CONTROL for those that none of the tables has."""
    return WHOLE.get(opcode) or _PIPES.get(opcode & OPERATION, Pipe.CONTROL)
