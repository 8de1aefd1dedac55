"""Define the interfaces between the parts of the training library.

`Session` holds one object of each kind. Modules that use a part import its protocol from here. Only
`adaptdl_elastic.torch._bootstrap` imports the classes that implement the protocols.

| protocol | purpose | implemented by |
|---|---|---|
| `SavedState` | a state that is saved and sent to newcomers | `checkpoint.State` |
| `ElasticModel` | a model whose number of replicas changes | `AdaptiveDataParallel`, `AdaptiveFSDP` |
| `ScaledModel` | a model as scaling rules and GradScalers need it | the same |
| `ElasticLoader` | a data loader and its current batch | `torch._data.loader` |
| `Consensus` | act at the same step on all replicas | `torch._runtime.consensus` |
| `Reporter` | step times, statistics, the best batch size | `torch._tuning.reporter` |
| `Survivor` | continue after the death of a replica | `torch._elastic.recovery` |
| `Rescaling` | change the number of replicas in place | `torch._elastic.rescale` |
| `Joining` | let a newcomer join the running replicas | `torch._elastic.join` |

| question | module |
|---|---|
| What is a model, and what of it is saved? | `models` |
| What is a data loader? | `loaders` |
| What does a session do for models and loaders? | `services` |

No module of this package imports torch at run time.
"""

from adaptdl_elastic._interfaces.loaders import (
    BatchSize,
    ElasticLoader,
    LearntLimit,
    Limits,
    ReportedPosition,
)
from adaptdl_elastic._interfaces.models import (
    ElasticModel,
    GradientStatistics,
    ModelSnapshot,
    SavedState,
    ScaledModel,
    Summed,
)
from adaptdl_elastic._interfaces.services import (
    Capability,
    Closable,
    Command,
    Consensus,
    Joining,
    Place,
    Position,
    Reporter,
    Rescaling,
    RetryDataLoop,
    StepCounter,
    StepOutOfMemory,
    Survivor,
    TorchGroup,
)

__all__ = [
    "BatchSize",
    "Capability",
    "Closable",
    "Command",
    "Consensus",
    "ElasticLoader",
    "ElasticModel",
    "GradientStatistics",
    "Joining",
    "LearntLimit",
    "Limits",
    "ModelSnapshot",
    "Place",
    "Position",
    "ReportedPosition",
    "Reporter",
    "Rescaling",
    "RetryDataLoop",
    "SavedState",
    "ScaledModel",
    "StepCounter",
    "StepOutOfMemory",
    "Summed",
    "Survivor",
    "TorchGroup",
]
