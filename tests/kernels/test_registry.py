from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest

from sm70_moe.errors import BackendError
from sm70_moe.kernels.portable.legacy import LegacyBackend
from sm70_moe.kernels.protocol import Backend, Broken
from sm70_moe.kernels.registry import MEMBERS, Registry, load

BUILT_IN = ("legacy", "decode", "qpn", "grouped", "indexed")


class Point:
    """An entry point that gives `found`, or raises it."""

    def __init__(self, name: str, found: object, package: str = "plugin", value: str = "plugin:backend") -> None:
        self.name, self.value, self.found = name, value, found
        self.dist = SimpleNamespace(name=package, version="1.0")

    def load(self) -> object:
        if isinstance(self.found, BaseException):
            raise self.found
        return self.found


def complete(own: str, **members: object) -> Any:
    """An object that keeps the protocol, except for what `members` changes."""
    usual = dict.fromkeys(MEMBERS, lambda *_: ())
    return SimpleNamespace(**{**usual, "name": own, "native": False, "orders": {"a"}, "options": set(), **members})


def broken(point: Point) -> Broken:
    found = Registry().load([point])[point.name]  # type: ignore[list-item]  # a stand-in for EntryPoint
    assert isinstance(found, Broken)
    return found


def test_built_in_backends() -> None:
    """The built-in ones are there, keep the protocol and answer to their names."""
    found = Registry().load([])
    assert tuple(found) == BUILT_IN
    for name, backend in found.items():
        assert isinstance(backend, Backend)
        assert backend.name == name
        assert backend.native is (name != "legacy")
    readable = {name: ability.reads.orders for name, one in found.items() if (ability := one.can("sm_70"))}
    assert readable == {key: {"tile32x8", "octet32"} for key in ("legacy", "decode", "qpn", "grouped", "indexed")}
    assert {name for name, one in found.items() if one.can("cpu")} == {"legacy"}


def test_module_function_reads_the_installed_ones() -> None:
    """`load()` holds at least the built-in backends."""
    assert set(BUILT_IN) <= set(load())


def test_plug_in_object_and_class() -> None:
    """A plug-in may be a backend, or a class that makes one."""

    class Other(LegacyBackend):
        def __init__(self) -> None:
            super().__init__(name="other")

    points: Any = [Point("mine", complete("mine")), Point("other", Other)]
    found = Registry().load(points)
    assert found["mine"].name == "mine"
    assert isinstance(found["other"], Other)


def test_real_entry_point() -> None:
    """An EntryPoint of importlib.metadata is loaded by its value; without a distribution it still has an origin."""
    point = EntryPoint("legacy2", "sm70_moe.kernels.portable.legacy:LegacyBackend", "sm70_moe.backends")
    found = Registry().load([point])["legacy2"]
    assert isinstance(found, Broken)  # it calls itself legacy
    assert "'legacy'" in found.error
    assert "'legacy2'" in found.error


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libcudart.so.12: undefined symbol: _Z3foov"),
        AttributeError("no attribute"),
        SystemExit(3),
        GeneratorExit(),
        RuntimeError("at load"),
    ],
)
def test_raising_plug_in_is_broken(error: BaseException) -> None:
    """Whatever a plug-in raises at load, it becomes Broken with the error and the package named."""
    found = broken(Point("bad", error))
    assert type(error).__name__ in found.error
    assert str(error) in found.error
    assert "plugin 1.0" in found.error


def test_keyboard_interrupt_passes() -> None:
    """The operator can stop a plug-in that hangs."""
    with pytest.raises(KeyboardInterrupt):
        broken(Point("bad", KeyboardInterrupt()))


def test_raising_constructor_and_property() -> None:
    """A class that cannot be made, or a member that raises, is broken too."""

    class NeedsArgument:
        def __init__(self, path: str) -> None: ...

    class Raises(LegacyBackend):
        @property
        def options(self) -> None:  # type: ignore[override]  # wrong on purpose
            raise OSError("no driver")

    assert "path" in broken(Point("bad", NeedsArgument)).error
    assert "no driver" in broken(Point("bad", object.__new__(Raises))).error


def test_error_that_cannot_be_printed() -> None:
    """An error whose text raises is named by its type."""

    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert "UnprintableError" in broken(Point("bad", UnprintableError())).error


@pytest.mark.parametrize("member", sorted(MEMBERS))
def test_missing_member_is_named(member: str) -> None:
    """A plug-in that lacks a member of the protocol is broken, and the member is named."""
    backend = complete("bad")
    delattr(backend, member)
    assert member in broken(Point("bad", backend)).error.split("lacks")[1]


@pytest.mark.parametrize(
    ("member", "value"), [("native", 1), ("can", "tile32x8"), ("name", None), ("run", None), ("options", [])]
)
def test_member_of_another_kind_is_named(member: str, value: object) -> None:
    """A member of the wrong kind is named: a string is no set of orders, 1 is no bool."""
    assert member in broken(Point("bad", complete("bad", **{member: value}))).error


def test_two_plug_ins_of_one_name() -> None:
    """Two packages with one backend name are refused, and both are named."""
    points: Any = [Point("x", complete("x"), "one"), Point("x", complete("x"), "two")]
    for ask in (Registry().load, Registry().names):
        with pytest.raises(BackendError) as refused:
            ask(points)
        assert "'x'" in str(refused.value)
        assert "one 1.0" in str(refused.value)
        assert "two 1.0" in str(refused.value)


@pytest.mark.parametrize("name", BUILT_IN)
def test_plug_in_may_not_replace_a_built_in(name: str) -> None:
    """A plug-in under a built-in name is refused, even if it would not load."""
    points: Any = [Point(name, ImportError("never loaded"), "intruder")]
    with pytest.raises(BackendError) as refused:
        Registry().load(points)
    assert "sm70_moe itself" in str(refused.value)
    assert "intruder 1.0" in str(refused.value)


def test_names_load_nothing() -> None:
    """Listing names does not touch the plug-ins."""
    points: Any = [Point("mine", AssertionError("loaded"))]
    assert Registry().names(points) == (*BUILT_IN, "mine")


def test_registries_share_nothing() -> None:
    """Each registry, and each load, has its own backends and cannot be written to."""
    one, two = Registry(), Registry({"only": lambda: complete("only")})
    assert two.names([]) == ("only",)
    assert one.names([]) == BUILT_IN
    first: Any = one.load([])
    assert first["legacy"] is not one.load([])["legacy"]
    with pytest.raises(TypeError):
        first["legacy"] = None


def test_no_torch() -> None:
    """Loading the built-in backends and asking them for scratch imports no torch."""
    code = (
        "import sys; from sm70_moe.kernels.registry import Registry; from sm70_moe.layout import BankShape;"
        "[b.workspace(BankShape(8, 64, 32), 2, 4) for b in Registry().load([]).values()]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
