"""Which statement of the script is being executed, in a form that a later run of the script gives again.

A line number will not do: a line that is inserted above the statement changes it. The text of the line will
not do: the file may have been edited since the process read it. So a statement is known by its compiled form,
as the interpreter has it in memory.
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
"""Of code objects, by id, which stays theirs because they are kept here."""


def running_statements(outermost: CodeType | None) -> str:
    """Return a digest of the script's statements that are being executed, from the innermost call outwards.

    Frames of this library are left out. The digest is the same in every run of the same script, and after
    edits of other lines.

    Args:
        outermost: Code of the last frame that counts. The search ends at a module's code in any case.
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
    """Return the compiled form of each line of `code`, numbered where several lines have the same form."""
    line_at = {start: line for start, _, line in code.co_lines() if line is not None}
    parts: dict[int, list[str]] = defaultdict(list)
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = line_at.get(instruction.offset, line)
        if instruction.opname != "EXTENDED_ARG":  # depends on how many names the rest of the code has
            parts[line].append(f"{instruction.opname} {_argument(instruction)}")
    seen: Counter[str] = Counter()
    forms, where = {}, f"{Path(code.co_filename).name} {code.co_name}"
    for line, instructions in sorted(parts.items()):
        form = "; ".join(instructions)
        seen[form] += 1
        forms[line] = f"{where} {form} #{seen[form]}\n".encode()
    return forms


def _argument(instruction: dis.Instruction) -> str:
    """Return an instruction's argument without what depends on other lines or on the process."""
    if instruction.opcode in _JUMPS:
        return ""
    if instruction.opcode not in _CONSTANTS:
        return instruction.argrepr or str(instruction.arg)
    value = instruction.argval
    if isinstance(value, CodeType):
        return value.co_name
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
