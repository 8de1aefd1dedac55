"""Run trials of Ray Tune as elastic jobs that share the slots of a node by goodput.

| question | module |
|---|---|
| How does a function become a trainable of Ray Tune? | `trainable` |
| What does AdaptDL's scheduler stand for here? | `scheduler` |
| How is a trial's job followed, saved and resumed? | `trial_job` |
| How is the job's process started, and its event log read? | `job_process` |
| Where is the store that the trials of one node share? | `node_store` |
| What does a replica run? | `run_function` |

The package ray is optional (the extra `ray`). `trainable`, `scheduler` and `node_store` import it.
A replica does not.
"""

from importlib import import_module
from typing import Any

_NAMES = {
    "AdaptDLScheduler": "adaptdl_elastic.tune.scheduler",
    "AdaptDLTrainableCreator": "adaptdl_elastic.tune.trainable",
    "report": "adaptdl_elastic.torch",
}

__all__ = ["AdaptDLScheduler", "AdaptDLTrainableCreator", "report"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)
