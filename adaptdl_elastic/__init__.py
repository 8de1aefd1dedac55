"""Run PyTorch training jobs that adapt their number of replicas and batch size while they run.

A training script imports `adaptdl_elastic.torch` and, to save states of its own,
`adaptdl_elastic.checkpoint`. This module imports neither torch nor any other module of the package. The
reason: torch loads the entry point in `adaptdl_elastic.rendezvous` while it is importing its own rendezvous
package, so this entry point must not import torch in turn.

`adaptdl_elastic.checkpoint`, `env` and the other modules for scripts are imported at their first use
(PEP 562). So `import adaptdl_elastic` is enough to use them.
"""

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"

_MODULES = frozenset({"checkpoint", "collective", "env", "goodput", "reducer", "sched_hints", "utils"})


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
