"""Identify the script's statement that is being executed, in the same way in every run of the script.

A line number is not suitable: inserting a line above the statement changes it. The text of the line is not
suitable: the file may have been edited since the process read it. So a statement is identified by its
bytecode in memory.
"""

from __future__ import annotations

import dis
import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import CodeType

from adaptdl_elastic import _frames

_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_CONSTANTS = frozenset(dis.hasconst)

_forms: dict[int, tuple[CodeType, Mapping[int, bytes]]] = {}
"""id of a code object → (the code object, digest input of each line). The reference keeps the id valid."""


def running_statements(outermost: CodeType | None) -> str:
    """Return a digest of the script's statements that are being executed, from the innermost call outwards.

    Frames of this library are left out. The digest is the same in every run of the same script, and after
    edits of other lines.

    Args:
        outermost: Code of the outermost frame to include. The search ends at a module's code in any case.
    """
    digest = hashlib.blake2b(digest_size=12)
    for frame in _frames.up_to(outermost):
        code = frame.f_code
        known = _forms.get(id(code))  # by identity: a code object's hash and equality read all of it
        if known is None:
            known = _forms[id(code)] = (code, {} if _frames.is_library(code) else _compiled_lines(code))
        digest.update(known[1].get(frame.f_lineno, b""))
    return digest.hexdigest()


def _compiled_lines(code: CodeType) -> Mapping[int, bytes]:
    """Return the bytecode of each line of `code` as text, with a number if several lines have the same."""
    line_at = {start: line for start, _, line in code.co_lines() if line is not None}
    parts: dict[int, list[str]] = defaultdict(list)
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = line_at.get(instruction.offset, line)
        if instruction.opname != "EXTENDED_ARG":  # depends on the number of names in the rest of the code
            parts[line].append(f"{instruction.opname} {_argument(instruction)}")
    seen: Counter[str] = Counter()
    forms, where = {}, f"{Path(code.co_filename).name} {code.co_name}"
    for line, instructions in sorted(parts.items()):
        form = "; ".join(instructions)
        seen[form] += 1
        forms[line] = f"{where} {form} #{seen[form]}\n".encode()
    return forms


def _argument(instruction: dis.Instruction) -> str:
    """Return an instruction's argument as text, the same whatever the other lines and the process are."""
    if instruction.opcode in _JUMPS:
        return ""
    if instruction.opcode not in _CONSTANTS:
        return instruction.argrepr or str(instruction.arg)
    value = instruction.argval
    if isinstance(value, CodeType):
        return value.co_name
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
