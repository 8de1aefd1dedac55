"""Find the names that a script expects a `for` loop to have assigned, from the bytecode of the script."""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Iterable, Iterator
from types import FrameType

_NEAR = 4  # bytes by which a frame's last instruction may be behind its FOR_ITER: inline caches


def names_read_behind(frame: FrameType) -> set[str]:
    """Return the names that do not exist, that a loop's body assigns, and that are read behind the loop.

    A name that is assigned again behind the loop before it is read does not count.

    Args:
        frame: Frame of the script that asks the loop's iterator for its first item.
    """
    code = frame.f_code
    if code.co_flags & inspect.CO_GENERATOR:  # the loop of a wrapper, such as tqdm: the script's is elsewhere
        return set()
    instructions = [*dis.get_instructions(code)]
    heads = [one for one in instructions if one.opname == "FOR_ITER" and one.offset <= frame.f_lasti]
    if not heads or frame.f_lasti - heads[-1].offset > _NEAR:
        return set()
    begin, end = heads[-1].offset, int(heads[-1].argval)
    assigned = {
        name for name, reads in _accesses(i for i in instructions if begin < i.offset < end) if not reads
    }
    first: dict[str, bool] = {}
    for name, reads in _accesses(i for i in instructions if i.offset >= end):
        first.setdefault(name, reads)
    known = {*frame.f_locals, *frame.f_globals, *vars(builtins)}
    return {name for name in assigned if first.get(name)} - known


def _accesses(instructions: Iterable[dis.Instruction]) -> Iterator[tuple[str, bool]]:
    """Yield each access to a variable as its name, and whether it reads."""
    for one in instructions:
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        kinds = [part for part in one.opname.split("_") if part in ("LOAD", "STORE")]
        if not kinds or "ATTR" in one.opname or one.opname in ("LOAD_CONST", "LOAD_METHOD"):
            continue
        # one instruction may stand for two accesses: LOAD_FAST_LOAD_FAST, STORE_FAST_LOAD_FAST
        for kind, name in zip(kinds * len(names), names, strict=False):
            if isinstance(name, str):
                yield name, kind == "LOAD"
