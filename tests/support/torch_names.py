"""List the names of torch that the product uses: `tests/torch_names.txt` has those of the oldest torch.

Run as a script under the oldest torch it writes that file again, and `make matrix-3.11-2.8.0` does so. The
modules in `APART` are left out: they ask by themselves what torch has.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator

import import_graph

RECORD = import_graph.ROOT / "tests" / "torch_names.txt"
APART = {"adaptdl_elastic._torch_versions", "adaptdl_elastic.torch._sharded.fully_shard"}


def used() -> dict[str, set[str]]:
    """Return the names of torch that the product uses, each with the modules that use it."""
    found: dict[str, set[str]] = {}
    for module in import_graph.product().values():
        for name in () if module.name in APART else names(module.parsed()):
            found.setdefault(name, set()).add(module.name)
    return found


def names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of torch in a module: what it imports, and attributes of that, as `torch.nn.Module`."""
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = {alias.asname or "torch": alias.name for alias in node.names if _is_torch(alias.name)}
            yield from modules.values()
            known |= {name: module for name, module in modules.items() if name != "torch"}
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_torch(node.module or ""):
            members = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            yield from members.values()
            known |= members
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and (name := _name(node.value, known)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            known |= {target.id: name for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := _name(node, known)):
            yield name


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def _name(node: ast.expr | None, known: dict[str, str]) -> str | None:
    if isinstance(node, ast.Attribute):
        inner = _name(node.value, known)
        return inner and f"{inner}.{node.attr}"
    return known.get(node.id) if isinstance(node, ast.Name) else None


def exists(name: str) -> bool:
    """Whether the torch of this interpreter has the name."""
    found, path = importlib.import_module("torch"), "torch"
    for part in name.split(".")[1:]:
        path += f".{part}"
        try:
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
        except ImportError:
            return False
    return True


def main() -> None:
    RECORD.write_text("".join(f"{name}\n" for name in sorted(used()) if exists(name)), encoding="utf-8")


if __name__ == "__main__":
    main()
