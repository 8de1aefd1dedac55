"""torchrun's own argument parser, without the seconds that `import torch` takes.

A typing error should be answered at once, and the agent can import torch while the fork server does.
`torch.distributed.run.get_args_parser` needs only two argparse actions and one enum of torch. So its
definition is read from the source of the installed torch and executed with those. If that fails (another
torch, no source), torch is imported. A test checks that both ways give the same parser.
"""

from __future__ import annotations

import argparse
import ast
import enum
import importlib.util
import logging
from collections.abc import Set
from pathlib import Path
from typing import Any

from adaptdl_elastic._torch_versions import NUMA_BINDING, TORCHRUN_ACTIONS, TORCHRUN_ALIASES

logger = logging.getLogger(__name__)


def torchrun_parser() -> argparse.ArgumentParser:
    """Return the parser that `torchrun` of the installed torch uses."""
    spec = importlib.util.find_spec("torch")  # does not import it
    if spec is not None and spec.origin is not None:
        try:
            return from_source(Path(spec.origin).parent)
        except Exception as error:  # a later torch.distributed.run may need more
            logger.debug("torchrun's parser could not be had from its source: %r", error)
    from torch.distributed.run import get_args_parser

    made: argparse.ArgumentParser = get_args_parser()
    return made


def from_source(torch: Path) -> argparse.ArgumentParser:
    """Return the parser defined by the source files in torch's directory."""
    names: dict[str, Any] = {
        "ArgumentParser": argparse.ArgumentParser,
        "REMAINDER": argparse.REMAINDER,
        **dict.fromkeys(TORCHRUN_ALIASES, argparse.Action),
        "Enum": enum.Enum,
    }
    exec("import os", names)
    _define(torch / "distributed" / "argparse_util.py", {"env", "check_env"}, names)
    if (binding := Path(torch, *NUMA_BINDING)).exists():
        _define(binding, {"AffinityMode"}, names)
        names["_AffinityMode"] = names["AffinityMode"]
    run = torch / "distributed" / "run.py"
    _define(run, {"get_args_parser"}, names, where_defined=TORCHRUN_ACTIONS)
    made: argparse.ArgumentParser = names["get_args_parser"]()
    return made


def _define(
    path: Path, wanted: set[str], names: dict[str, Any], where_defined: Set[str] = frozenset()
) -> None:
    """Execute the definitions of some functions and classes of a module, and nothing else of it.

    Args:
        path: source file of the module.
        wanted: names that the module must define; LookupError if it does not.
        names: names that the definitions use; the new ones are added.
        where_defined: names that only some versions of the module define.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    kinds = (ast.FunctionDef, ast.ClassDef)
    tree.body = [
        node for node in tree.body if isinstance(node, kinds) and node.name in wanted | where_defined
    ]
    if not wanted <= {node.name for node in tree.body if isinstance(node, kinds)}:
        raise LookupError(f"{path} does not define all of {sorted(wanted)}")
    exec(compile(tree, str(path), "exec", dont_inherit=True), names)
