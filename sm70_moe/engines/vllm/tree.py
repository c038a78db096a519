"""What a Python source tree defines, read without running any of it: modules, names, attributes, signatures."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path


class Tree:
    """The modules under a folder, by what their sources say.

    A target is "package.module:Name" or "package.module:Class.attribute". Base classes are not followed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module | None] = {}

    @classmethod
    def installed(cls, package: str) -> Tree | None:
        """The tree that `import package` would read; None if there is none. Imports nothing."""
        spec = find_spec(package)
        places = spec.submodule_search_locations if spec else None
        return cls(Path(next(iter(places))).parent) if places else None

    def has(self, target: str) -> bool:
        module, _, path = target.partition(":")
        name, _, attribute = path.partition(".")
        found = self._module(module)
        if found is None or name not in found.names:
            return False
        return not attribute or attribute in found.attributes(name)

    def parameters(self, target: str) -> tuple[str, ...]:
        """Positional parameters of a class's method, without `self`; empty if it is not there."""
        module, _, path = target.partition(":")
        name, _, method = path.partition(".")
        found = self._module(module)
        return found.parameters(name, method) if found else ()

    def _module(self, name: str) -> Module | None:
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> Module | None:
        place = self.root.joinpath(*name.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return Module(ast.parse(file.read_bytes()))
        return None


class Module:
    """One parsed file."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree

    @cached_property
    def names(self) -> frozenset[str]:
        """What can be imported from it, as far as it stands at the top level or in its `if` and `try`."""
        return frozenset(name for node in flat(self.tree.body) for name in bound(node))

    def attributes(self, name: str) -> frozenset[str]:
        """Methods, fields and what methods assign to `self`; of classes alone."""
        return frozenset(found for node in self._class(name) for found in members(node))

    def parameters(self, name: str, method: str) -> tuple[str, ...]:
        for node in self._class(name):
            for one in node.body:
                if isinstance(one, ast.FunctionDef) and one.name == method:
                    return tuple(argument.arg for argument in one.args.args)[1:]
        return ()

    def _class(self, name: str) -> Iterator[ast.ClassDef]:
        return (node for node in flat(self.tree.body) if isinstance(node, ast.ClassDef) and node.name == name)


def flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, those of conditions among them."""
    for node in body:
        if isinstance(node, ast.If):
            yield from flat([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from flat([*node.body, *node.orelse, *(one for h in node.handlers for one in h.body)])
        else:
            yield node


def bound(node: ast.stmt) -> Iterator[str]:
    """Names that a statement binds."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def members(node: ast.ClassDef) -> Iterator[str]:
    for one in flat(node.body):
        yield from bound(one)
    for inner in ast.walk(node):
        targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                yield target.attr
