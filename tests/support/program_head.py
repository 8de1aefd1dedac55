"""The first lines of programs that tests put into PATH."""

from __future__ import annotations

import sys

# "#!" cannot name an interpreter whose path has a space: this is a command to sh, and a text to Python
PYTHON_HEAD = f"""#!/bin/sh
'''exec' "{sys.executable}" "$0" "$@"
' '''"""
