"""Instructions of a kernel and where its branches lead.

A branch's distance counts from the instruction behind it. Up to sm_89 it stands in the upper half of the
first word, in bytes; from sm_90 on its low 8 bits stand from bit 16 on and the others from bit 34 on, in
units of 4 bytes. Both were read off NVRTC 12.9's cubins, and every branch of the decode kernels for sm_70 to sm_90
was compared with NVIDIA's disassembler. What sm_100 and later do is not known here. A barrier has the number of threads
that it waits for from bit 42 on, 12 bits; 0 are all of the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sm70_moe.errors import BackendError
from sm70_moe.kernels.machinecode.census import LOAD_BYTES, WIDE, WORDS
from sm70_moe.kernels.machinecode.elf import Cubin
from sm70_moe.kernels.machinecode.pipes import OPERATION, Pipe, pipe_of

BYTES = 16
BRANCH, EXIT, PADDING = 0x947, 0x94D, 0x918
"""Opcodes, of 12 bits."""

BARRIER, VOTE, COPY = 0x11D, 0x06, 0x1AE
GLOBAL_LOAD, SHARED_LOAD, GLOBAL_STORE, SHARED_STORE, SHUFFLE = 0x181, 0x184, 0x186, 0x188, 0x189
"""Operations, of 9 bits; a copy goes from global to shared memory by itself (sm_80 and later)."""

ALWAYS = 7  # the predicate that is true
NEW_BRANCHES, LAST_KNOWN = 90, 90
"""The first architecture with the newer encoding, and the last whose branches can be read."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; `target` is the index of the one that a branch leads to.

    `guarded`: it has a predicate, so that some or all threads may pass over it. `threads` are those that a
    barrier waits for; 0 are all of the block, and what other instructions have.
    """

    opcode: int
    guarded: bool
    wide: bool
    target: int | None = None
    threads: int = 0

    @property
    def pipe(self) -> Pipe:
        return pipe_of(self.opcode)

    @property
    def operation(self) -> int:
        return self.opcode & OPERATION

    @property
    def leaves(self) -> bool:
        return self.opcode == EXIT


def instructions(cubin: Cubin, kernel: str) -> tuple[Instruction, ...]:
    """A kernel's code without padding. Raises BackendError for an unknown name, and for sm_100 and later."""
    text = cubin.section(f".text.{kernel}")
    if text is None:
        raise BackendError(f"the cubin has no kernel {kernel!r}; it has {', '.join(cubin.kernels()) or 'none'}")
    number = int(cubin.architecture.removeprefix("sm_"))
    if number > LAST_KNOWN:
        raise BackendError(f"branches of {cubin.architecture} cannot be read; accepted is up to sm_{LAST_KNOWN}")
    code = list(_read(text.data, number >= NEW_BRANCHES))
    while code and (code[-1].opcode == PADDING or code[-1].target == len(code) - 1):
        code.pop()  # behind the end stand a branch to itself and empty instructions
    return tuple(code)


def _read(data: bytes, new: bool) -> Iterator[Instruction]:
    for place, (low, high) in enumerate(WORDS.iter_unpack(data)):
        opcode = low & 0xFFF
        yield Instruction(
            opcode=opcode,
            guarded=low >> 12 & 0xF != ALWAYS,
            wide=opcode & OPERATION == GLOBAL_LOAD and LOAD_BYTES.get(high >> 9 & 7) == WIDE,
            target=place + 1 + distance(low, new) // BYTES if opcode == BRANCH else None,
            threads=low >> 42 & 0xFFF if opcode & OPERATION == BARRIER else 0,
        )


def distance(word: int, new: bool) -> int:
    """Bytes from the end of a branch to its target."""
    upper = word >> 32
    signed = upper - (1 << 32) if upper >> 31 else upper
    return ((signed >> 2) << 8 | word >> 16 & 0xFF) * 4 if new else signed
