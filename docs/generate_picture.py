"""Write the picture of the packages, drawn from the imports, into docs/contributing/architecture.md.

Nodes are packages, and modules that stand beside packages. An arrow means "imports". Arrows that follow from
others (A imports B, B imports C, A imports C) are left out. `--check` exits with 1 where the page is out of
date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from import_graph import TREES, imports, product  # noqa: E402

PAGE = ROOT / "docs" / "contributing" / "architecture.md"
BEGIN, END = "<!-- picture: docs/generate_picture.py -->", "<!-- end of picture -->"
PUBLIC = "public modules"


def box_of(tree: str, module: str) -> str:
    """Return the package below `tree` that `module` stands in; modules beside packages share one box."""
    inside = module.removeprefix(TREES[tree]).lstrip(".").split(".")
    depth = 2 if inside[0] == "torch" else 1
    if len(inside) <= depth - 1 or (len(inside) == depth and not is_package(tree, inside)):
        inside = inside[: depth - 1]
    name = ".".join(inside[:depth])
    return f"{tree}/{name}" if name else f"{tree}/{PUBLIC}"


def is_package(tree: str, inside: list[str]) -> bool:
    """Return whether the module `inside` of `tree` is a folder."""
    return (ROOT / tree).joinpath(*inside, "__init__.py").is_file()


def reduced(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without the edges that follow from paths of two or more edges."""
    below: dict[str, set[str]] = {}

    def reach(node: str, seen: frozenset[str]) -> set[str]:
        if node not in below:
            found: set[str] = set()
            for other in graph.get(node, set()) - seen:
                found |= {other} | reach(other, seen | {node})
            below[node] = found
        return below[node]

    for node in sorted(graph):
        reach(node, frozenset())
    return {
        node: {other for other in others if not any(other in below[via] for via in others - {other})}
        for node, others in graph.items()
    }


def picture() -> str:
    """Return the Mermaid text."""
    modules = product()
    box = {name: box_of(module.tree, name) for name, module in modules.items()}
    graph: dict[str, set[str]] = {name: set() for name in box.values()}
    for name, others in imports(modules).items():
        graph[box[name]] |= {box[other] for other in others} - {box[name]}
    lines = ["```mermaid", "flowchart TD"]
    names = {name: f"n{number}" for number, name in enumerate(sorted(graph))}
    for tree in TREES:
        lines.append(f'    subgraph {tree}["{tree}/"]')
        for name in sorted(name for name in graph if name.startswith(f"{tree}/")):
            text = label(name, [member for member in box if box[member] == name])
            lines.append(f'        {names[name]}["{text}"]')
        lines.append("    end")
    lines += edges(reduced(graph), names)
    return "\n".join([*lines, "```"])


def label(name: str, members: Iterable[str]) -> str:
    """Return a package's path, or the names of the modules that share a box."""
    inside = name.partition("/")[2]
    if not inside.endswith(PUBLIC) and inside != "torch":
        return inside.replace(".", "/")
    last = {member.rpartition(".")[2] for member in members} - {"adaptdl_elastic", "torch", *TREES}
    shown = sorted(name for name in last if not name.startswith("_"))
    text = ", ".join(shown[:5]) + (", …" if len(shown) > 5 else "")
    return f"torch: {text}" if inside == "torch" else text


def edges(graph: Mapping[str, Iterable[str]], names: Mapping[str, str]) -> list[str]:
    """Return one Mermaid line per arrow."""
    return [f"    {names[a]} --> {names[b]}" for a in sorted(graph) for b in sorted(graph[a])]


def main() -> int:
    """Write the picture, or with --check compare it; return the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    new = f"{head}{BEGIN}\n{picture()}\n{END}{tail}"
    if "--check" in sys.argv[1:]:
        if new != text:
            print(
                "docs/contributing/architecture.md: the picture is out of date: run docs/generate_picture.py"
            )
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
