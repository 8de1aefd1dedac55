"""Start Python processes of this product that run no code of the working directory.

`python -m` and `python -c` put the working directory first into `sys.path`. There a file `click.py` of
another person (in /tmp) would run as this user, and a `token.py` of a project would replace Python's own.
"""

from __future__ import annotations

import sys

WITHOUT_DIRECTORY = "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); "
"""Code for the beginning of `python -c` that takes the working directory from `sys.path`.

`PYTHONSAFEPATH`, of Python 3.11, leaves it out already; then the first entry is another one.
"""


BELOW = """
import pathlib, sys
where = sys.argv[1]
(site,) = pathlib.Path(where).glob("lib/python*/site-packages")
below = [path for path in sys.path if path.endswith("-packages")]
lines = "; ".join(f"site.addsitedir({path!r})" for path in below)
name = f"below_{len([*site.glob('below*.pth')])}.pth"
(site / name).write_text(f"import site; {lines}\\n")
"""
"""Code that puts the packages of the interpreter that runs it below those of the environment at argv[1].

They come behind those that were put there before. A line of a .pth file that begins with "import" is
executed.
"""

LAYER = f"""
import sys, venv
venv.EnvBuilder(symlinks=True, clear=True).create(sys.argv[1])
{BELOW}
"""
"""Code that makes an empty environment at argv[1] over the packages of the interpreter that runs it."""


def module(name: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return a command line that runs a module as `python -m` does, without the working directory.

    Args:
        name: The module.
        *arguments: Its arguments.
        python: The interpreter.
    """
    run = f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return code(run, *arguments, python=python)


def code(text: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return a command line that runs Python code likewise."""
    return [python, "-c", WITHOUT_DIRECTORY + text, *arguments]
