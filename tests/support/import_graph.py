"""Measure the import graph of the product, and find uses of other modules' underscored names.

Every import counts: at the top of a module, inside a function, and under `TYPE_CHECKING`. Run as a script it
prints one line for each tree: files, lines, most files in one folder, and the largest import cycle.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "adaptdl_elastic"
TREES = {
    "adaptdl_elastic": PACKAGE,
    "agent": f"{PACKAGE}.agent",
    "rendezvous": f"{PACKAGE}.rendezvous",
    "autoscaler": f"{PACKAGE}.autoscaler",
}
"""Top-level folder → the name that it is imported by."""


# of os, named tuples, threading, and tensors (autograd counts changes in place there)
_PUBLIC_ALL_THE_SAME = {"_exit", "_replace", "_asdict", "_shutdown", "_version"}


@dataclass(frozen=True)
class Module:
    """One source file of the product."""

    name: str
    tree: str  # the top-level folder
    path: Path
    text: str

    def parsed(self) -> ast.Module:
        return tree(self.text)


@functools.cache
def tree(text: str) -> ast.Module:
    """Parse the text of a module, once in each process."""
    return ast.parse(text)


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but contexts, in no order; `ast.walk` takes three times as long."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        for name in node._fields:
            value = getattr(node, name, None)
            if type(value) is list:
                left += [one for one in value if isinstance(one, ast.AST)]
            elif name != "ctx" and isinstance(value, ast.AST):
                left.append(value)


def product() -> dict[str, Module]:
    """Return every module of the product by its name."""
    found = {}
    for tree, package in TREES.items():
        folder = ROOT / tree
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder)
            if tree == PACKAGE and inside.parts[0] in TREES:  # the links to the other three trees
                continue
            parts = [package, *inside.with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, tree, path, path.read_text(encoding="utf-8"))
    return found


def imports(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Return for each module those that it imports, anywhere in its text."""
    return {name: set(_imported(module, modules)) - {name} for name, module in modules.items()}


def _imported(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    for node in walk(module.parsed()):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                if name in modules:
                    yield name
                elif base in modules:
                    yield base


def _base(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + (module.path.name == "__init__.py")]
    return ".".join([*parts, *([node.module] if node.module else [])])


def cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the strongly connected components with more than one module, the largest first (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        on_stack.add(name)
        for other in graph.get(name, ()):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in on_stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            on_stack.difference_update(component)
            if len(component) > 1:
                found.append(sorted(component))

    for name in graph:
        if name not in index:
            visit(name)
    return sorted(found, key=len, reverse=True)


@dataclass(frozen=True)
class Reach:
    """One use of an underscored name of another module."""

    path: Path
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.name}"


def private_uses(paths: Iterable[Path], modules: Mapping[str, Module]) -> list[Reach]:
    """Return where `paths` use underscored names that only other modules of the product define.

    A name that the file defines itself counts as its own. A name that no module of the product defines is
    another project's, such as torch's. Modules whose file name begins with an underscore may be imported.
    """
    elsewhere = set[str]().union(*(_defined(module.text) for module in modules.values()))
    found = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for line, name in _uses(tree(text), modules):
            if name in elsewhere and name not in _defined(text):
                found.append(Reach(path, line, name))
    return found


@functools.cache
def _defined(text: str) -> frozenset[str]:
    return frozenset(_definitions(tree(text)))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _definitions(tree: ast.Module) -> Iterator[str]:
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if _is_private(node.name):
                yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if own and _is_private(node.attr):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and _is_private(node.id):
            yield node.id


def _uses(tree: ast.Module, modules: Mapping[str, Module]) -> Iterator[tuple[int, str]]:
    for node in walk(tree):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            own = own or node.attr in _PUBLIC_ALL_THE_SAME
            if _is_private(node.attr) and not own and f"{_dotted(node)}" not in modules:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            for alias in node.names:
                if _is_private(alias.name) and f"{node.module}.{alias.name}" not in modules:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr":
            yield from _patched(node)


def _patched(call: ast.Call) -> Iterator[tuple[int, str]]:
    """Yield the name of `monkeypatch.setattr(target, "_name", …)`."""
    for argument in call.args[:2]:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            name = argument.value.rpartition(".")[2]
            if _is_private(name):
                yield call.lineno, name


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@dataclass(frozen=True)
class Figures:
    """What is measured of one tree."""

    files: int
    lines: int
    most_in_one_folder: int
    largest_cycle: int


def measure(tree: str, modules: Mapping[str, Module]) -> Figures:
    """Return the figures of one top-level folder."""
    members = {name: module for name, module in modules.items() if module.tree == tree}
    graph = {name: others & members.keys() for name, others in imports(members).items()}
    folders = Counter(module.path.parent for module in members.values())
    components = cycles(graph)
    return Figures(
        files=len(members),
        lines=sum(module.text.count("\n") for module in members.values()),
        most_in_one_folder=max(folders.values()),
        largest_cycle=len(components[0]) if components else 0,
    )


def main() -> None:
    modules = product()
    print(f"{'tree':16} {'files':>5} {'lines':>6} {'one folder':>10} {'cycle':>5} {'private':>7}")
    for tree in TREES:
        figures = measure(tree, modules)
        paths = [module.path for module in modules.values() if module.tree == tree]
        reaches = len(private_uses(paths, modules))
        print(
            f"{tree:16} {figures.files:5} {figures.lines:6} {figures.most_in_one_folder:10} "
            f"{figures.largest_cycle:5} {reaches:7}"
        )
    tests = sorted((ROOT / "tests").rglob("*.py"))
    print(f"{'tests':16} {len(tests):5} {'':6} {'':10} {'':5} {len(private_uses(tests, modules)):7}")


if __name__ == "__main__":
    main()
