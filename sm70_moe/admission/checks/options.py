"""What a native option needs: kernels of its own, for the layer's sizes and banks, on a device that can run them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sm70_moe.admission.checks.machine import native_findings
from sm70_moe.decision import Finding, Plain, Reason, Status
from sm70_moe.kernels.capability import Reads
from sm70_moe.kernels.declared import declared
from sm70_moe.kernels.native.refusal import Crash, Refusal
from sm70_moe.layout import BankLayout, Metadata
from sm70_moe.machine.build import Build
from sm70_moe.machine.devices import Device
from sm70_moe.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the option's kernels would have to run: one rank's sizes, and banks; None is not known."""

    hidden: int | None
    intermediate: int | None
    top_k: int | None
    banks: BankLayout | None

    @property
    def sizes(self) -> dict[str, int | None]:
        group = self.banks.group if self.banks else None
        return {"hidden": self.hidden, "intermediate": self.intermediate, "top_k": self.top_k, "group": group}


def native_option(
    option: str, wanted: Wanted, device: Finding, where: Device | None, machine: Machine
) -> tuple[Finding, ...]:
    """Machine code, sizes, bank layout, cooperative launch, resident blocks, known answer: each its own reason."""
    *there, test = native_findings(option, device, where, machine)
    build = machine.build
    fits = sizes(option, wanted, build), layout(option, wanted)
    if build is None or where is None or any(f.status is not Status.PASS for f in there):
        missing = next(f.check for f in there if f.status is not Status.PASS)
        names = ("cooperative launch", "resident blocks")
        return (*there, *fits, *(Finding.skipped(name, missing) for name in names), test)
    launch = resident(option, where, build)
    if any(f.status is not Status.PASS for f in launch):
        test = Finding.skipped("self-test", launch[-1].check)
    return (*there, *fits, *launch, test)


def sizes(option: str, wanted: Wanted, build: Build | None) -> Finding:
    """Kernels for one geometry only: is this layer's among those of the build? Whatever the device is."""
    check = "kernel sizes"
    if build is None or build.id != build.expected:
        return Finding.skipped(check, "native build")
    if not build.images_of(option):
        return Finding.skipped(check, "native image")
    accepted: list[Plain] = [sizes_text(made) for made in build.specialised(option)]
    if None in wanted.sizes.values():
        return Finding.unknown(check, accepted)
    found = sizes_text(wanted.sizes)
    if not build.made_for(option, wanted.sizes):
        return Finding.failed(check, Reason.KERNEL_SIZES, accepted, found, "this option has no kernel for any geometry")
    return Finding.passed(check, found)


def sizes_text(sizes: Mapping[str, int | None]) -> str:
    """ "hidden 2560, intermediate 160, top_k 10, group 32"."""
    return ", ".join(f"{name} {sizes[name]}" for name in ("hidden", "intermediate", "top_k", "group"))


def layout(option: str, wanted: Wanted) -> Finding:
    """Do the kernels read the layer's banks?"""
    if wanted.banks is None:
        return Finding.unknown("kernel layout", "banks of this layer")
    found, ability = f"{wanted.banks.order} {wanted.banks.metadata.value}", declared(option)
    if ability is not None and ability.reads.takes(wanted.banks):
        return Finding.passed("kernel layout", found)
    accepted: list[Plain] = [*readable(ability.reads)] if ability else []
    return Finding.failed("kernel layout", Reason.LAYOUT_UNREADABLE, accepted, found)


def readable(reads: Reads) -> Iterator[str]:
    """ "octet32 4-byte" for each pair that is read."""
    for order in sorted(reads.orders):
        yield from (f"{order} {kind.value}" for kind in Metadata if kind in reads.metadata)


def resident(option: str, where: Device, build: Build) -> tuple[Finding, ...]:
    """All blocks of a launch wait for each other: can they be on the device together?"""
    names = ("cooperative launch", "resident blocks")
    found = build.residencies.get((where.name, option))
    if found is None:
        return tuple(Finding.unknown(name, hint=f"{where.name} has not been asked") for name in names)
    if isinstance(found, Crash):
        broke = Finding(names[0], Status.ERROR, Reason.CHECK_BROKE, "an answer", str(found))
        return (broke, Finding.skipped(names[1], names[0]))
    if isinstance(found, str):
        reason = Reason.LAUNCH_REFUSED if isinstance(found, Refusal) else Reason.SELF_TEST_FAILED
        return (Finding.failed(names[0], reason, "an answer", found), Finding.skipped(names[1], names[0]))
    if not found.cooperative:
        lacking = Finding.failed(names[0], Reason.NOT_COOPERATIVE, True, False, "the device cannot do it")
        return (lacking, Finding.skipped(names[1], names[0]))
    able, expected = Finding.passed(names[0], True), "a block on each multiprocessor"
    if found.each < 1:
        return (able, Finding.failed(names[1], Reason.NOT_RESIDENT, expected, f"{found.blocks} blocks"))
    text = f"{found.each} on each of {found.multiprocessors} multiprocessors"
    return (able, Finding.passed(names[1], text))
