"""Recognise what torch's C++ code writes to stderr after a death: the loss of a connection, and C++ stacks.

It says in 20 to 40 lines for each replica what the agent says in one.
"""

from __future__ import annotations

import re

# torch's times have months without a leading zero, as in W929 05:54:49
_LOST_CONNECTION = (
    r"\[[WEF]\d{3,4} [\d:.]+ (ProcessGroup\w+|TCPStore\w*)\.cpp:\d+\] .*"
    r"(Broken pipe|Connection (reset|closed)|got 0 bytes|remote process exited|server has shut down)"
)
_STACK = (
    r"(?P<stack>Exception raised from .+ at \S+:\d+ \(most recent call first\):$"
    r"|frame #\d+: .+ \(0x[0-9a-f]+ in .+\)$|<omitting python frames>$)"
)
_LINE = re.compile(rf"(\[rank\d+\]: ?)?({_LOST_CONNECTION}|{_STACK})")


class StackFilter:
    """Tells which lines of one stream are torch's."""

    def __init__(self) -> None:
        self._in_stack = False

    def hides(self, line: str) -> bool:
        """Return whether a line is such a line, or the empty one that ends a stack."""
        found, ends = _LINE.match(line), self._in_stack and not line
        self._in_stack = found is not None and found["stack"] is not None
        return ends or found is not None
