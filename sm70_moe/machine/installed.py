"""The native build of this installation, looked up: its images, self-tests and sizes as admission asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from sm70_moe.errors import BackendError, SettingsError
from sm70_moe.kernels.native.residency import Residency
from sm70_moe.machine.build import Build
from sm70_moe.machine.devices import Device

if TYPE_CHECKING:
    from sm70_moe.kernels.build.images import Cubins
    from sm70_moe.kernels.build.specialiser import Specialiser
    from sm70_moe.kernels.native.backend import NativeBackend
    from sm70_moe.kernels.protocol import Backend, Broken


def installed_build(
    folder: Path | None = None,
    backends: Mapping[str, Backend | Broken] = MappingProxyType({}),
    devices: tuple[Device, ...] = (),
    specialiser: Specialiser | None = None,
) -> Build | None:
    """The native build inside the package, or in `folder`; None if the package has none.

    No cubin is read. Self-tests are those of `backends` on `devices`; `specialiser` compiles what the
    build lacks. Raises SettingsError for a folder without a build, and for one that others may write.
    """
    from sm70_moe.kernels.build import INSTALLED, expected_id
    from sm70_moe.kernels.build.images import RECORD, Cubins
    from sm70_moe.kernels.build.trust import check_own

    try:
        cubins = Cubins.open(folder or INSTALLED)
    except BackendError as error:
        return Build(f"unreadable: {error}", "a whole record", frozenset())
    if cubins is None and folder is not None:
        raise SettingsError(f"kernels {str(folder)!r}: no native build there, accepted is a folder of build-kernels")
    if cubins is None:
        return None
    if folder is not None:
        try:
            check_own(cubins.folder, (RECORD, *cubins.files))
        except BackendError as error:
            raise SettingsError(f"kernels {str(folder)!r}: {error}") from error
    return Build(
        id=cubins.id,
        expected=expected_id(cubins, own=folder is None),
        images=cubins.architectures,
        self_tests=self_tests(backends, devices),
        backends=backend_images(cubins),
        sizes=kernel_sizes(cubins),
        residencies=residencies(backends, devices),
        specialiser=specialiser,
    )


def backend_images(cubins: Cubins) -> Mapping[str, frozenset[str]]:
    """Architectures for which a build holds everything that a backend launches."""
    from sm70_moe.kernels.native.steps import STEPS

    return MappingProxyType({name: cubins.of_sources(route.sources) for name, route in STEPS.items()})


def self_tests(backends: Mapping[str, Backend | Broken], devices: tuple[Device, ...]) -> Mapping[tuple[str, str], str]:
    """The self-tests of this package's native backends on each device, none of them run yet."""
    from sm70_moe.kernels.native.backend import NativeBackend
    from sm70_moe.kernels.native.pending import Pending

    natives = {name: backend for name, backend in backends.items() if isinstance(backend, NativeBackend)}
    natives |= options_of(backends)
    return Pending(
        {(d.name, name): partial(backend.self_test, d.name) for name, backend in natives.items() for d in devices}
    )


def plugin_tests(
    backends: Mapping[str, Backend | Broken], devices: tuple[Device, ...]
) -> Mapping[tuple[str, str], str]:
    """The self-tests of native plug-ins that have one, none of them run yet."""
    from sm70_moe.kernels.native.backend import NativeBackend
    from sm70_moe.kernels.native.pending import Pending
    from sm70_moe.kernels.protocol import SelfTested

    tested = {n: b for n, b in backends.items() if isinstance(b, SelfTested) and not isinstance(b, NativeBackend)}
    return Pending({(d.name, name): partial(one.self_test, d.name) for name, one in tested.items() for d in devices})


def residencies(
    backends: Mapping[str, Backend | Broken], devices: tuple[Device, ...]
) -> Mapping[tuple[str, str], Residency | str]:
    """What each device holds at once of an option's kernels; asked when somebody wants to know."""
    from sm70_moe.kernels.native.pending import Pending

    options = options_of(backends)
    return Pending({(d.name, name): partial(one.residency, d.name) for name, one in options.items() for d in devices})


def options_of(backends: Mapping[str, Backend | Broken]) -> dict[str, NativeBackend]:
    """Option -> the native backend that honours it, as it runs then."""
    from sm70_moe.kernels.native.backend import NativeBackend

    natives = [backend for backend in backends.values() if isinstance(backend, NativeBackend)]
    return {option: native.with_options({option}) for native in natives for option in sorted(native.options)}


def kernel_sizes(cubins: Cubins) -> Mapping[str, tuple[Mapping[str, int], ...]]:
    """Backend, or option of one -> geometries that the build has specialised kernels for."""
    from sm70_moe.kernels.native.steps import STEPS

    def made(name: str) -> tuple[Mapping[str, int], ...]:
        found = {i.version.sizes for i in cubins.images if i.version.source in STEPS[name].sources}
        return tuple(dict(sizes) for sizes in sorted(found) if sizes)

    return MappingProxyType({name: made(name) for name in STEPS})
