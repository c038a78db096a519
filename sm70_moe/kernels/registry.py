"""Which backends there are: the built-in ones, and plug-ins of the group `sm70_moe.backends`.

A registry is a value: it holds no cache, and two of them share nothing. A plug-in that is broken
becomes a `Broken` entry, so that one bad package never stops the layers that do not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from sm70_moe.errors import BackendError
from sm70_moe.kernels.native.backend import NativeBackend
from sm70_moe.kernels.portable.legacy import LegacyBackend
from sm70_moe.kernels.protocol import Backend, Broken

GROUP = "sm70_moe.backends"
"""Entry-point group; an entry's name is the backend's name, its value a backend or a class of one."""

BUILT_IN = "sm70_moe itself"

MEMBERS: Mapping[str, type | None] = MappingProxyType(
    {
        "name": str,
        "native": bool,
        "options": Set,
        "can": None,
        "check": None,
        "workspace": None,
        "prepare": None,
        "run": None,
    }
)
"""Members of the Backend protocol with the type of an attribute; None stands for a method."""

BUILT_INS: Mapping[str, Callable[[], object]] = MappingProxyType(
    {
        "legacy": LegacyBackend,
        "decode": lambda: NativeBackend("decode"),
        "qpn": lambda: NativeBackend("qpn"),
        "grouped": lambda: NativeBackend("grouped"),
        "indexed": lambda: NativeBackend("indexed"),
    }
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One backend before it is loaded: `origin` says who brings it, in words for an error text."""

    name: str
    origin: str
    find: Callable[[], object]

    @classmethod
    def of(cls, point: EntryPoint) -> Entry:
        distribution = getattr(point, "dist", None)
        package = f"{distribution.name} {distribution.version}" if distribution else "an unnamed distribution"
        return cls(point.name, f"{package} ({point.value})", point.load)


@dataclass(frozen=True, slots=True)
class Registry:
    """The built-in backends `builtins` (name -> factory), and whatever entry points add to them.

    Every method takes the entry points to look at; None means those that are installed.
    """

    builtins: Mapping[str, Callable[[], object]] = field(default_factory=lambda: BUILT_INS)

    def names(self, points: Iterable[EntryPoint] | None = None) -> tuple[str, ...]:
        """Names of all backends, built-in ones first; nothing is loaded.

        Raises BackendError if two backends have one name.
        """
        return tuple(entry.name for entry in self.entries(points))

    def load(self, points: Iterable[EntryPoint] | None = None) -> Mapping[str, Backend | Broken]:
        """Load every backend; a plug-in that raises or does not keep the protocol becomes `Broken`.

        Raises BackendError if two backends have one name: which of them an operator would get
        must not depend on the order in which packages were installed.
        """
        return MappingProxyType({entry.name: load_entry(entry) for entry in self.entries(points)})

    def entries(self, points: Iterable[EntryPoint] | None = None) -> tuple[Entry, ...]:
        found: dict[str, Entry] = {}
        for entry in self._all(entry_points(group=GROUP) if points is None else points):
            first = found.setdefault(entry.name, entry)
            if first is not entry:
                raise BackendError(
                    f"two backends are named {entry.name!r}: one from {first.origin}, one from {entry.origin}; "
                    "uninstall or rename one of them"
                )
        return tuple(found.values())

    def _all(self, points: Iterable[EntryPoint]) -> Iterator[Entry]:
        for name, make in self.builtins.items():
            yield Entry(name, BUILT_IN, make)
        yield from map(Entry.of, points)


def load() -> Mapping[str, Backend | Broken]:
    """Every backend that is installed, by name."""
    return Registry().load()


def load_entry(entry: Entry) -> Backend | Broken:
    """Load one backend. Only KeyboardInterrupt passes: a plug-in may raise anything, SystemExit too."""
    try:
        found = entry.find()
        backend = found() if isinstance(found, type) else found
        fault = protocol_fault(entry.name, backend)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Broken(entry.name, f"{entry.origin}: {describe(error)}")
    if fault or not isinstance(backend, Backend):
        return Broken(entry.name, f"{entry.origin}: {fault or 'does not keep the Backend protocol'}")
    return backend


def protocol_fault(name: str, backend: object) -> str:
    """What keeps `backend` from being the backend `name`; "" if nothing does."""
    missing = [member for member in MEMBERS if not hasattr(backend, member)]
    if missing:
        return f"{type(backend).__name__} lacks {', '.join(missing)} of the Backend protocol"
    for member, kind in MEMBERS.items():
        value = getattr(backend, member)
        if kind is None and not callable(value):
            return f"member {member} is {type(value).__name__}, expected a method"
        if kind is not None and not isinstance(value, kind):
            return f"member {member} is {type(value).__name__}, expected {kind.__name__}"
    own = backend.name  # type: ignore[attr-defined]  # its presence was checked above
    return "" if own == name else f"calls itself {own!r} but is registered as {name!r}"


def describe(error: BaseException) -> str:
    """Type and text of an error; a plug-in's error may itself fail to print."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
