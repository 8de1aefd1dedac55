"""AdaptDL's names and signatures, so that changing the imports migrates a script.

The left-hand sides are facts read from AdaptDL 0.2.11's source (github.com/petuum/adaptdl). Ours may
accept more, as keywords or behind AdaptDL's arguments with defaults, and nothing less.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

SIZES = "current_local_bsz current_batch_size accumulation_steps training"


def properties(owner: str, names: str) -> dict[str, type]:
    return {f"{owner}.{name}": property for name in names.split()}


ALL = {
    "torch": {
        "init_process_group": "backend, init_method=None, world_size=None, rank=None",
        "AdaptiveDataParallel": (
            "model, optimizer, lr_scheduler=None, mp_scaler=None, scaling_rule=None, "
            "name='adaptdl-dataparallel', **ddp_kwargs"
        ),
        "AdaptiveDataLoader": "dataset, batch_size=1, shuffle=False, **kwargs",
        "Accumulator": "*args, **kwargs",
        "ElasticSampler": "dataset, shuffle=True",
        "current_dataloader": "",
        "current_epoch": "",
        "finished_epochs": "",
        "remaining_epochs_until": "epoch",
    },
    "torch.parallel": {
        "AdaptiveDataParallel.forward": "self, *args, **kwargs",
        "AdaptiveDataParallel.zero_grad": "self",
        "AdaptiveDataParallel.gain": property,
        "AdaptiveDataParallel.to_tensorboard": "self, writer, global_step, tag_prefix=''",
    },
    "torch.data": {
        "AdaptiveDataLoaderHelper": "batch_size=1",
        **properties("AdaptiveDataLoaderHelper", "current_index max_batch_size local_bsz_bounds " + SIZES),
        "AdaptiveDataLoaderHelper.is_accum_step": "self",
        "AdaptiveDataLoaderHelper.is_optim_step": "self",
        "AdaptiveDataLoaderHelper.train": "self",
        "AdaptiveDataLoaderHelper.profile": "self, commit",
        "AdaptiveDataLoaderHelper.context": "self",
        "AdaptiveDataLoaderHelper.skipdone": "self",
        "AdaptiveDataLoaderHelper.autoscale_batch_size": (
            "self, max_batch_size, local_bsz_bounds=None, gradient_accumulation=False"
        ),
        "AdaptiveDataLoaderHelper.to_tensorboard": "self, writer, global_step, tag_prefix=''",
        "AdaptiveDataLoaderMixin": "batch_size",
        **properties("AdaptiveDataLoaderMixin", SIZES),
        "AdaptiveDataLoaderMixin.autoscale_batch_size": (
            "self, max_batch_size, local_bsz_bounds=None, gradient_accumulation=False"
        ),
        "AdaptiveDataLoaderMixin.to_tensorboard": "self, writer, global_step, tag_prefix=''",
        "AdaptiveDataLoader": "dataset, batch_size=1, shuffle=False, **kwargs",
        "ElasticSampler": "dataset, shuffle=True",
        "ElasticSampler.set_epoch": "self, epoch, index=0",
        "current_dataloader": "",
    },
    "torch.accumulator": {
        "Accumulator.synchronized": "self",
        "Accumulator.update": "self, *args, **kwargs",
        "Accumulator.subtract": "self, *args, **kwargs",
        "Accumulator.clear": "self",
        "Accumulator.__iadd__": "self, other",
        "Accumulator.__isub__": "self, other",
    },
    "torch.epoch": {
        "remaining_epochs_until": "epoch",
        "current_epoch": "",
        "finished_epochs": "",
    },
    "torch.iterator": {"AdaptiveBPTTIterator": "dataset, batch_size, bptt_len, **kwargs"},
    "torch.scaling_rules": {
        "ScalingRuleBase": "",
        "ScalingRuleBase.initialize": "self, adp, optimizer, patch_optimizer=False",
        "ScalingRuleBase.scale_lr": "self, scale",
        "ScalingRuleBase.step": "self, *args, **kwargs",
        "ScalingRuleBase.zero_grad": "self, *args, **kwargs",
        "AdaScale": "",
        "AdamScale": "power=0.5",
        "LinearScale": "",
        "SqrtScale": "",
        "LEGWScale": "base_warmup_epochs, data_size",
    },
    "torch.gradient_noise_scale": {
        "GradientNoiseScale": "adp, optimizer, mp_scaler=None, num_replicas=None, accum_scale=None",
        **properties(
            "GradientNoiseScale", "raw_sqr_avg raw_var_avg accum_scale accum_count should_zero_grad"
        ),
        "GradientNoiseScale.gain": "self, scale",
        "GradientNoiseScale.sqr_avg": "self",
        "GradientNoiseScale.var_avg": "self",
        "GradientNoiseScale.get_progress": "self",
        "GradientNoiseScale.set_progress": "self, progress",
        "GradientNoiseScale.set_accum_scale": "self, accum_scale",
        "GradientNoiseScale.reset_accumulation": "self",
        "AdamGradientNoiseScale": "adp, optimizer, mp_scaler=None, num_replicas=None, accum_scale=None",
    },
    "checkpoint": {
        "State": "name",
        "State.save": "self, fileobj",
        "State.load": "self, fileobj",
        "State.sync": "self",
        "save_all_states": "",
        "save_state": "state, checkpoint_dir, sync=True",
        "load_state": "state",
    },
    "collective": {
        "initialize": "master_addr=None, master_port=None, replica_rank=None, num_replicas=None",
        "teardown": "",
        "allreduce": "value, reduce_fn",
        "allreduce_async": "value, reduce_fn",
        "broadcast": "value",
    },
    "reducer": {
        "default_reduce_fn": "a, b",
        "Future.result": "self",
        "Reducer": "rank, replicas, root_host, root_port",
        "Reducer.allreduce": "self, obj, reduce_fn",
        "Reducer.allreduce_async": "self, obj, reduce_fn",
        "Reducer.broadcast": "self, obj",
    },
    "env": dict.fromkeys(
        (
            "checkpoint_path", "share_path", "job_id", "master_addr", "master_port", "replica_rank",
            "num_nodes", "num_replicas", "num_restarts", "adaptdl_sched_version", "supervisor_url",
            "from_ray",
        ),
        "",
    ),
    "goodput": {
        "PerfParams": "alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma",
        "GradParams": "sqr, var",
        "GoodputFunction": "perf_params, grad_params, init_batch_size",
        "GoodputFunction.__call__": "self, num_nodes, num_replicas, atomic_bsz, accum_steps",
        "GoodputFunction.evaluate": "self, num_nodes, num_replicas, atomic_bsz, accum_steps",
        "GoodputFunction.throughput": "self, num_nodes, num_replicas, atomic_bsz, accum_steps",
        "GoodputFunction.efficiency": "self, batch_size",
        "GoodputFunction.optimize": (
            "self, num_nodes, num_replicas, max_batch_size=None, atomic_bsz_range=None, accumulation=False"
        ),
        "fit_perf_params": "num_nodes, num_replicas, atomic_bsz, accum_step_time, optim_step_time",
    },
    "sched_hints": {
        "post_sched_hints": "sched_hints, job_key",
        "PERF_PARAMS": "value",
        "SCHED_HINTS": "value",
    },
    "utils": {"print_exc": "function"},
}  # fmt: skip

CASES = [(module, name, expected) for module, names in ALL.items() for name, expected in names.items()]


def find(module: str, name: str) -> Any:
    found: Any = importlib.import_module(f"adaptdl_elastic.{module}")
    for part in name.split("."):
        found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
    return found


def parameters(text: str) -> list[inspect.Parameter]:
    namespace: dict[str, Any] = {}
    exec(f"def f({text}): pass", namespace)
    return list(inspect.signature(namespace["f"]).parameters.values())


@pytest.mark.parametrize(("module", "name", "expected"), CASES, ids=[f"{m}.{n}" for m, n, _ in CASES])
def test_a_script_of_adaptdls_finds_what_it_calls(module: str, name: str, expected: Any) -> None:
    found = find(module, name)
    if expected is property:
        assert isinstance(found, property)
        return
    if expected == "value":
        return
    theirs, ours = parameters(expected), list(inspect.signature(found).parameters.values())
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for mine, original in zip(ours, theirs, strict=False):
        assert mine.kind == original.kind
        if original.kind in variable:
            continue
        assert mine.name == original.name, "arguments can be given by name"
        if original.default is not inspect.Parameter.empty:
            assert mine.default == original.default
    assert len(ours) >= len(theirs)
    for more in ours[len(theirs) :]:
        assert more.kind in variable or more.default is not inspect.Parameter.empty, "nothing new is needed"
