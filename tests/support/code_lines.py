"""Count the lines of code by folder: without blank lines, comments and docstrings.

python tests/support/code_lines.py
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("adaptdl_elastic", "agent", "rendezvous", "autoscaler")
BESIDE = ("tests", "benchmarks", "examples")
"""Folders that are not installed with the product."""

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def code_lines(source: str) -> int:
    """Return the number of lines with code. A string that is a statement counts as a docstring."""
    texts = {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code = {
        number
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _NO_CODE
        for number in range(token.start[0], token.end[0] + 1)
    }
    return len(code - texts)


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
