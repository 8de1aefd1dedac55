"""Run PyTorch training jobs that adapt their number of replicas and batch size while they run.

A training script imports `adaptdl_elastic.torch` and, to save states of its own,
`adaptdl_elastic.checkpoint`. This module imports neither torch nor any other module of the package. The
reason: torch loads the entry point in `adaptdl_elastic.rendezvous` while it is importing its own rendezvous
package, so this entry point must not import torch in turn.

`adaptdl_elastic.checkpoint`, `env` and the other modules for scripts are imported at their first use
(PEP 562). So `import adaptdl_elastic` is enough to use them.

| question | module or package |
|---|---|
| What does a training script import? | `torch`, `checkpoint`, `collective`, `env`, `utils` |
| How do trials of Ray Tune become elastic jobs? | `tune` |
| How is a job's goodput predicted, and reported? | `goodput`, `sched_hints` |
| What does the session of a replica hold? | `_session` |
| How do the parts of the training library see each other? | `_interfaces`, `_values` |
| How do replicas exchange small objects without torch? | `reducer`, `_door`, `_wire`, `_codec` |
| Which results of collectives is a newcomer given? | `_past_results` |
| Where are checkpoints kept? | `storage` |
| How do library, agents and coordinator communicate? | `protocol` |
| How is a node's part run, and a cluster? | `agent`, `rendezvous`, `autoscaler` |
| How do other packages add parts? | `extensions` |
| What differs between releases of torch? | `_torch_versions` |
| How are arguments of public calls checked? | `_checks` |
| Which frames on the stack are the script's? | `_frames` |
| Where are messages explained to users? | `_explained` |
| How are secrets and directories kept from other users? | `_secrets`, `_private` |
| How is a file written that decides something, and read only if it is a file? | `_whole_file` |
| How does this product start its own processes? | `_own_python` |
| Which version is this, if two builds have the same number? | `_program` |
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
