"""Provide what a training script imports: AdaptDL's names, on top of `torch.distributed`.

    import adaptdl_elastic.torch as adl

    adl.init_process_group("gloo")
    loader = adl.AdaptiveDataLoader(dataset, batch_size=64, shuffle=True)
    loader.autoscale_batch_size(1024)
    model = adl.AdaptiveDataParallel(model, optimizer, lr_scheduler)
    for epoch in adl.remaining_epochs_until(30):
        for inputs, targets in loader:
            ...

Each name is imported at its first use (PEP 562), so that a script that needs only the loaders does not wait
for the import of the other modules.

| module | question that it answers |
|---|---|
| `data` | How does a script load data with a batch size and a position that survive a change? |
| `iterator` | How is one long sequence of tokens read? |
| `parallel`, `fully_sharded` | What are AdaptiveDataParallel and AdaptiveFSDP? |
| `scaling_rules` | How does the learning rate follow the batch size, and how is a rule added? |
| `gradient_noise_scale` | What are the estimates of the gradient noise scale? |
| `epoch` | How do epoch loops continue after a restart? |
| `accumulator` | How are values summed over all samples of a loop? |
| `gathering` | How does a loss compare the samples of all replicas? |
| `value` | How does a script keep a value, such as the best accuracy? |
| `_startup`, `_job_info` | How are replicas connected, and how does a script learn its rank? |
| `_optimizer_steps` | When does the optimizer of a model step, and what is recorded then? |
| `_model_arguments` | Which arguments may the models get? |
| `_bootstrap` | How are the parts of the library connected with the session? |

The packages `_data`, `_gradient`, `_process_group`, `_sharded` and `_tuning` do the work of these modules.
`_runtime` and `_elastic` let replicas act together and change their number. `frameworks` has the adapters.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adaptdl_elastic.torch._job_info import rank, report, world_size
    from adaptdl_elastic.torch._startup import init_process_group
    from adaptdl_elastic.torch.accumulator import Accumulator
    from adaptdl_elastic.torch.data import (
        AdaptiveDataLoader,
        AdaptiveDataLoaderHelper,
        AdaptiveDataLoaderMixin,
        ElasticSampler,
        batch_counts,
        current_dataloader,
        expected_batches,
        is_optim_step,
    )
    from adaptdl_elastic.torch.epoch import (
        current_epoch,
        finished_epochs,
        once_per_epoch,
        progress,
        remaining_epochs_until,
        steps,
    )
    from adaptdl_elastic.torch.fully_sharded import AdaptiveFSDP
    from adaptdl_elastic.torch.gathering import gather
    from adaptdl_elastic.torch.parallel import AdaptiveDataParallel
    from adaptdl_elastic.torch.value import Value, Values

__all__ = [
    "Accumulator",
    "AdaptiveDataLoader",
    "AdaptiveDataLoaderHelper",
    "AdaptiveDataLoaderMixin",
    "AdaptiveDataParallel",
    "AdaptiveFSDP",
    "ElasticSampler",
    "Value",
    "Values",
    "batch_counts",
    "current_dataloader",
    "current_epoch",
    "expected_batches",
    "finished_epochs",
    "gather",
    "init_process_group",
    "is_optim_step",
    "once_per_epoch",
    "progress",
    "rank",
    "remaining_epochs_until",
    "report",
    "steps",
    "world_size",
]

_HOMES = {
    "Accumulator": "accumulator",
    "AdaptiveDataLoader": "data",
    "AdaptiveDataLoaderHelper": "data",
    "AdaptiveDataLoaderMixin": "data",
    "AdaptiveDataParallel": "parallel",
    "AdaptiveFSDP": "fully_sharded",
    "ElasticSampler": "data",
    "Value": "value",
    "Values": "value",
    "batch_counts": "data",
    "current_dataloader": "data",
    "current_epoch": "epoch",
    "expected_batches": "data",
    "finished_epochs": "epoch",
    "gather": "gathering",
    "init_process_group": "_startup",
    "is_optim_step": "data",
    "once_per_epoch": "epoch",
    "progress": "epoch",
    "rank": "_job_info",
    "remaining_epochs_until": "epoch",
    "report": "_job_info",
    "steps": "epoch",
    "world_size": "_job_info",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
