"""Count the lines of code by folder: without blank lines, comments and docstrings.

python tests/support/code_lines.py
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from import_graph import tree, walk

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("adaptdl_elastic", "agent", "rendezvous", "autoscaler")
BESIDE = ("tests", "benchmarks", "examples")
"""Folders that are not installed with the product."""


def code_lines(source: str) -> int:
    """Return the number of lines with code. A string that is a statement counts as a docstring."""
    lines = source.splitlines()
    code = {number for number, line in enumerate(lines) if line.strip() and line.lstrip()[0] != "#"}
    if '"""' not in source and "'''" not in source:
        return len(code)
    texts = set[int]()
    for node in walk(tree(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                texts.update(_lines(node))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and len(inside := _lines(node)) > 1:
            # of a long string also the lines that are empty or begin with # are code
            quoted = '"""' in "".join(lines[number] for number in inside)
            code.update(inside if quoted else ())
    return len(code - texts)


def _lines(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno - 1, node.end_lineno or node.lineno)


def by_folder(folders: Sequence[str] = PRODUCT) -> dict[str, int]:
    """Return the lines of code of each of `folders`. Links between the folders are not followed."""
    return {
        folder: sum(
            code_lines(path.read_text(encoding="utf-8"))
            for path in (ROOT / folder).rglob("*.py")
            if not any(part.is_symlink() for part in path.parents if part != ROOT)
        )
        for folder in folders
    }


if __name__ == "__main__":
    for lines in (by_folder(PRODUCT), by_folder(BESIDE)):
        for folder, number in lines.items():
            print(f"{folder:20}{number:8,}")
        print(f"{'':20}{sum(lines.values()):8,}")
