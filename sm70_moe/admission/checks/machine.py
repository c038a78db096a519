"""What the machine must have: a device, native code for it, a backend that reads the banks."""

from __future__ import annotations

from collections.abc import Iterator

from sm70_moe.admission.checks.layer import Layer
from sm70_moe.decision import Finding, Reason, Status
from sm70_moe.facts import LayerFacts
from sm70_moe.kernels.capability import Capability
from sm70_moe.kernels.declared import BUILT_IN, declared
from sm70_moe.kernels.native.refusal import Crash, Refusal
from sm70_moe.kernels.protocol import Backend, Broken
from sm70_moe.machine.build import Build
from sm70_moe.machine.devices import Device
from sm70_moe.machine.machine import Machine
from sm70_moe.policy import Route


def native_findings(backend: str, device: Finding, where: Device | None, machine: Machine) -> tuple[Finding, ...]:
    """Is there machine code for the layer's own device, is it ours, does it compute? Each has its own reason."""
    build = machine.build
    if build is None:
        built = Finding.failed(
            "native build", Reason.BUILD_MISSING, "a native build", "none", "this installation has no native kernels"
        )
    elif build.id != build.expected:
        built = Finding.failed(
            "native build", Reason.BUILD_STALE, build.expected, build.id, "reinstall the package: its kernels are older"
        )
    else:
        built = Finding.passed("native build", build.id)
    if build is None or built.status is not Status.PASS:
        image = Finding.skipped("native image", "native build")
    elif where is None or device.status is not Status.PASS:
        image = Finding.skipped("native image", "device")
    elif where.architecture in build.images_of(backend):
        image = Finding.passed("native image", where.architecture)
    else:
        image = missing_image(build, backend, where.architecture)
    if build is None or where is None or image.status is not Status.PASS:
        test = Finding.skipped("self-test", "native image" if built.status is Status.PASS else "native build")
    else:
        test = self_test(build.self_tests.get((where.name, backend)), where.name)
    return (device, built, image, test)


def spot_findings(backend: str, facts: LayerFacts, machine: Machine) -> tuple[Finding, ...]:
    """Kernels for BF16 are in no build: can they be compiled here, or were they?"""
    ability = declared(backend)
    if facts.activations != "bfloat16" or ability is None or "bfloat16" not in ability.dtypes or not machine.build:
        return ()
    made = machine.build.specialiser
    why = "SM70_MOE_KERNEL_CACHE=0" if made is None else made.missing if not made.holds_any else ""
    if not why:
        return (Finding.passed("kernels for bfloat16", "compiled on this machine"),)
    return (Finding.failed("kernels for bfloat16", Reason.KERNEL_SIZES, "a compiler, or kept kernels", "none", why),)


def plugin_findings(backend: str, device: Finding, where: Device | None, machine: Machine) -> tuple[Finding, ...]:
    """A plug-in's machine code is its own matter: the device, and its own known-answer call if it has one."""
    if (where.name if where else "", backend) not in machine.plugin_tests:
        return (device,)
    if where is None or device.status is not Status.PASS:
        return (device, Finding.skipped("self-test", "device"))
    return (device, self_test(machine.plugin_tests[where.name, backend], where.name))


def missing_image(build: Build, backend: str, architecture: str) -> Finding:
    """No machine code: of this backend at all, or for this architecture."""
    there = sorted(build.images_of(backend))
    if not there:
        return Finding.failed(
            "native image", Reason.ARCH_MISSING, f"kernels of backend {backend!r}", "none in this build"
        )
    return Finding.failed("native image", Reason.ARCH_MISSING, there, architecture)


def self_test(result: str | None, device: str) -> Finding:
    """The known-answer call on the layer's device: "" is right, other text says what went wrong."""
    if result is None:
        return Finding.unknown("self-test", "a known-answer call", hint=f"it has not been run on {device}")
    if isinstance(result, Crash):
        return Finding("self-test", Status.ERROR, Reason.CHECK_BROKE, "the known answer", str(result))
    if isinstance(result, Refusal):
        return Finding.failed("self-test", Reason.LAUNCH_REFUSED, "the known answer", str(result))
    if result:
        return Finding.failed("self-test", Reason.SELF_TEST_FAILED, "the known answer", result)
    return Finding.passed("self-test", "known answer")


def layer_device(facts: LayerFacts, machine: Machine) -> tuple[Finding, Device | None]:
    """The layer's own device, which must be a GPU for a native route."""
    if facts.device is None:
        return Finding.unknown("device", "a CUDA device"), None
    device = machine.device(facts.device)
    if device is None:
        names = [d.name for d in machine.devices]
        return Finding.failed("device", Reason.DEVICE, names, facts.device, "this machine has no such device"), None
    if facts.architecture is not None and not device.unknown and device.architecture != facts.architecture:
        hint = "the engine says another architecture than the driver's management library"
        return Finding.failed("device", Reason.DEVICE, facts.architecture, device.architecture, hint), None
    if facts.architecture is not None:
        device = device.told(facts.architecture)
    if device.unknown:
        return Finding.unknown("device", "a CUDA device", device.unknown, Reason.DEVICE), None
    if device.capability is None:
        return Finding.failed("device", Reason.DEVICE, "a CUDA device", device.name), device
    return Finding.passed("device", f"{device.name} {device.architecture}"), device


def backend_findings(
    route: Route, layer: Layer, architecture: str | None, machine: Machine
) -> tuple[Capability | None, tuple[Finding, ...]]:
    """Is the route's backend there, does it load, can it run what the route promises of this layer?

    Also what it can, None where it does not say. A plug-in's fault is a finding, never a crash.
    """
    name = route.backend
    backend = machine.backends.get(name)
    if backend is None:
        return None, (Finding.failed("backend", Reason.BACKEND_MISSING, name, sorted(machine.backends)),)
    if isinstance(backend, Broken):
        return None, (Finding.failed("backend", Reason.BACKEND_BROKEN, name, backend.error),)
    try:
        ability = ability_of(backend, architecture)
        own = objections(backend, layer)
    except (Exception, SystemExit) as error:
        return None, (Finding.broke("backend", error),)
    if ability is None and name not in BUILT_IN:  # of a built-in one the build has told already
        wanted = f"kernels of backend {name!r} for {architecture or 'any device'}"
        missing = Finding.failed("backend", Reason.ARCH_MISSING, wanted, "none")
        return None, (missing, *own)
    passed = () if own and any(f.check == "backend" for f in own) else (Finding.passed("backend", name),)
    return ability, (*passed, *own, *(fitting(route, ability, layer) if ability else ()))


def ability_of(backend: Backend, architecture: str | None) -> Capability | None:
    """What a backend can do there. Raises TypeError for what is no capability."""
    ability = backend.can(architecture)
    if ability is not None and not isinstance(ability, Capability):
        raise TypeError(f"can() gave {ability!r}; accepted is a Capability, or None")
    return ability


def objections(backend: Backend, layer: Layer) -> tuple[Finding, ...]:
    """What a backend itself says of a layer. Raises TypeError unless these are findings."""
    own = tuple(backend.check(layer.facts))
    if own and not all(isinstance(finding, Finding) for finding in own):
        raise TypeError(f"check() gave {own!r}; accepted are findings")
    if layer.shape is not None and layer.facts.top_k is not None:
        int(backend.workspace(layer.shape, layer.facts.top_k, 1))  # a plan asks it: one that raises is seen here
    return own


def fitting(route: Route, ability: Capability, layer: Layer) -> Iterator[Finding]:
    """What a route promises, and what a layer is, against what the backend can."""
    if (tokens := ability.tokens_finding(route.tokens.first, route.tokens.last)) is not None:
        yield tokens
    if (dtype := ability.dtype_finding(layer.facts.activations)) is not None:
        yield dtype
    yield from ability.size_findings(layer.sizes)


def option_finding(feature: str, backends: tuple[str, ...], machine: Machine) -> Finding:
    """Does any backend of the policy's routes honour this option?"""
    for name in backends:
        backend = machine.backends.get(name)
        if backend is not None and not isinstance(backend, Broken) and feature in backend.options:
            return Finding.passed("option", name)
    return Finding.failed("option", Reason.OPTION_UNSUPPORTED, f"a backend that honours {feature}", list(backends))
