"""adaptdl-elastic: PyTorch training jobs that adapt while they run.

What a training script imports is `adaptdl_elastic.torch`, and for states of its own
`adaptdl_elastic.checkpoint`. This package imports neither torch nor any of its own parts by itself:
torch loads the entry point in `adaptdl_elastic.rendezvous` while it is still importing its own
rendezvous package, so whatever that needs must not import torch in turn.

`adaptdl_elastic.checkpoint`, `env` and the other modules of a training script are imported when they are
first used (PEP 562), so that `import adaptdl_elastic` is enough to name them.
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
