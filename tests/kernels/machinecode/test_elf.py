"""Reading cubins: what stands in them is found, and what is no cubin is refused and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_moe.errors import BackendError
from sm70_moe.kernels.machinecode import elf
from sm70_moe.kernels.machinecode.budget import Budget
from sm70_moe.kernels.machinecode.census import Census, census
from sm70_moe.kernels.machinecode.elf import Cubin

FOLDER = Path(__file__).parents[2] / "data" / "kernels"
IMAGES = {name: (FOLDER / f"{name}.cubin").read_bytes() for name in ("sm_70", "sm_90", "sm_120")}


def found(architecture: str, kernel: str) -> Census:
    return {row.kernel: row for row in census(IMAGES[architecture])}[kernel]


@pytest.mark.parametrize(
    ("architecture", "kernels"),
    [
        ("sm_70", ("late", "loads", "spills", "volta")),
        ("sm_90", ("loads", "spills", "volta")),
        ("sm_120", ("loads", "spills", "volta")),
    ],
)
def test_architecture_and_kernels(architecture: str, kernels: tuple[str, ...]) -> None:
    """Both layouts of the ELF header's flags; routines that the compiler added are no kernels."""
    cubin = Cubin.parse(IMAGES[architecture])
    assert (cubin.architecture, cubin.kernels()) == (architecture, kernels)


@pytest.mark.parametrize(
    ("architecture", "kernel", "registers", "stack", "shared", "parameters"),
    [
        ("sm_70", "volta", 32, 0, 0, (8, 8, 8)),
        ("sm_70", "loads", 32, 0, 2048, (8, 8, 8, 4)),
        ("sm_70", "spills", 34, 256, 0, (8, 8, 8, 4)),
        ("sm_90", "volta", 32, 0, 0, (8, 8, 8)),
        ("sm_90", "loads", 32, 0, 3072, (8, 8, 8, 4)),
        ("sm_90", "spills", 34, 256, 0, (8, 8, 8, 4)),
        ("sm_120", "loads", 44, 0, 3072, (8, 8, 8, 4)),
        ("sm_120", "spills", 42, 256, 0, (8, 8, 8, 4)),
    ],
)
def test_resources(
    architecture: str, kernel: str, registers: int, stack: int, shared: int, parameters: tuple[int, ...]
) -> None:
    """Registers, stack, static shared memory (1 KB of the system's own from sm_90 on) and parameters."""
    row = found(architecture, kernel)
    assert (row.registers, row.stack, row.shared, row.parameters) == (registers, stack, shared, parameters)


@pytest.mark.parametrize(
    ("architecture", "kernel", "tensor", "wide", "late", "local", "calls", "barriers"),
    [
        # four steps of m8n8k4 are 16 instructions on sm_70, and four calls later
        ("sm_70", "volta", 16, 0, 0, 0, 0, 0),
        ("sm_90", "volta", 0, 0, 0, 0, 4, 0),
        ("sm_120", "volta", 0, 0, 0, 0, 4, 0),
        ("sm_70", "loads", 0, 10, 0, 0, 0, 1),
        ("sm_90", "loads", 0, 10, 0, 0, 0, 1),
        ("sm_120", "loads", 0, 10, 0, 0, 0, 1),
        ("sm_70", "spills", 0, 0, 0, 47, 0, 0),
        ("sm_90", "spills", 0, 0, 0, 47, 0, 0),
        ("sm_120", "spills", 0, 0, 0, 77, 0, 0),
        ("sm_70", "late", 4, 1, 1, 0, 0, 0),
    ],
)
def test_instructions(
    architecture: str, kernel: str, tensor: int, wide: int, late: int, local: int, calls: int, barriers: int
) -> None:
    """Counts by kind, and the wide loads that stand behind the first tensor-core step."""
    row = found(architecture, kernel)
    counted = (row.tensor, row.wide_loads, row.late_loads, row.local, row.calls, row.barriers)
    assert counted == (tensor, wide, late, local, calls, barriers)


def test_instructions_without_padding() -> None:
    """All instructions but NOP, each under one opcode."""
    row = found("sm_70", "loads")
    assert row.instructions == 53 == sum(row.opcodes.values())
    assert row.loads == {4: 1, 16: 10}


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(100), b"MZ" + bytes(200)])
def test_what_is_no_cubin(content: bytes) -> None:
    """Empty, cut off, another file, an ELF file for another machine."""
    with pytest.raises(BackendError):
        Cubin.parse(content)


@given(st.integers(0, len(IMAGES["sm_70"]) - 1))
def test_cut_off(size: int) -> None:
    """A cubin that ends too early is refused, wherever it ends."""
    with pytest.raises(BackendError):
        census(IMAGES["sm_70"][:size])


@given(st.integers(0, len(IMAGES["sm_90"]) - 1), st.integers(0, 255))
def test_damaged(place: int, value: int) -> None:
    """One wrong byte gives an answer or a refusal, never another error."""
    content = bytearray(IMAGES["sm_90"])
    content[place] = value
    try:
        found = census(bytes(content))
    except BackendError:
        return
    assert all(kernel.registers >= 0 for kernel in found)


LABELS = frozenset({"sm_90", "specialised", "hidden=256", "step=volta"})


@pytest.mark.parametrize(
    ("table", "overruns"),
    [
        ({"calls": 4}, ()),
        ({}, ("calls 4, at most 0",)),
        ({"registers": 31, "calls": 4}, ("registers 32, at most 31",)),
        ({"tensor": 16, "calls": 4}, ("tensor 0, expected 16",)),
        ({"tensor": 16, "calls": 4, "sm_90": {"tensor": 0}}, ()),
        ({"sm_90 step=volta": {"calls": 4}}, ()),
        ({"sm_90 step=own": {"calls": 4}}, ("calls 4, at most 0",)),
        ({"specialised": {"calls": 3}, "hidden=256": {"calls": 4}}, ()),
    ],
)
def test_budgets(table: dict, overruns: tuple[str, ...]) -> None:
    """Limits are kept or named; exceptions hold where all of their words fit, the last one wins."""
    assert Budget.of_table(table).overruns(found("sm_90", "volta"), LABELS) == overruns


@pytest.mark.parametrize("table", [{"register": 3}, {"registers": -1}, {"registers": True}, {"sm_90": {"stak": 1}}])
def test_budgets_that_nobody_can_keep(table: dict) -> None:
    """Unknown names and values that are no numbers are refused by name."""
    with pytest.raises(ValueError, match=r"register|stak"):
        Budget.of_table(table)


def test_sections_over_each_other() -> None:
    """Each is copied: a table that names the same bytes again and again would make gigabytes of them."""
    image = bytearray(IMAGES["sm_90"])
    header = list(elf.HEADER.unpack_from(image))
    table, size, count = header[6], header[11], header[12]
    rows = [list(elf.SECTION.unpack_from(image, table + place * size)) for place in range(count)]
    for row in rows:
        if row[1] not in (0, elf.NO_BITS):
            row[4], row[5] = 0, len(image)
    for place, row in enumerate(rows):
        elf.SECTION.pack_into(image, table + place * size, *row)
    with pytest.raises(BackendError, match="over each other"):
        elf.Cubin.parse(bytes(image))
