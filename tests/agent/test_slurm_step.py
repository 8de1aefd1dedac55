"""What a task of a Slurm step is given, from the variables that Slurm 22.05 sets; no Slurm is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from adaptdl_elastic.agent.machine.slurm import SlurmError, allocation
from adaptdl_elastic.agent.terminal.run_options import parse
from adaptdl_elastic.agent.terminal.run_parser import OptionError

STEP = {
    "SLURMD_NODENAME": "n2",
    "SLURM_CPUS_ON_NODE": "4",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_SUBMIT_DIR": "/shared/me",
}
"""Of the second task of `srun` on two nodes of an allocation of three."""

ARRAY = {"SLURM_JOB_ID": "79", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "2"}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {"job": "slurm-77", "step": "77.0.0", "node": "n2", "first": False, "max_nodes": 3, "slots": 4}),
        ({"SLURM_RESTART_COUNT": "1"}, {"job": "slurm-77", "step": "77.0.1"}),
        (ARRAY, {"job": "slurm-77_2", "step": "79.0.0"}),
        ({"SLURM_PROCID": "0"}, {"first": True}),
        ({"SLURM_CPUS_PER_TASK": "2"}, {"cores": 2, "slots": 2}),
        ({"CUDA_VISIBLE_DEVICES": "0,3"}, {"cores": 4, "slots": 2}),
        ({"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "8"}, {"slots": 1}),
        ({"SLURM_GPUS_ON_NODE": "8"}, {"slots": 8}),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, {"slots": 4}),
        ({"SLURM_SRUN_COMM_HOST": "10.0.0.2"}, {"reached_by": ("10.0.0.1", "10.0.0.2")}),
    ],
)
def test_a_task_has_what_slurm_gave_it(more: Mapping[str, str], expected: Mapping[str, object]) -> None:
    found = vars(allocation({**STEP, **more}, cores=16))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("step", [None, "4294967290", "4294967291"])
def test_a_batch_script_and_a_shell_of_salloc_are_no_tasks(step: str | None) -> None:
    environ = {name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"}
    assert allocation(environ if step is None else {**environ, "SLURM_STEP_ID": step}, cores=16) is None


@pytest.mark.parametrize(
    ("more", "by_hand", "line"),
    [
        ({"SLURM_HET_SIZE": "2"}, {"rdzv_endpoint", "rdzv_id"}, "heterogeneous job of Slurm"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, {"node_name"}, "8 tasks on 2 nodes.*--ntasks-per-node=1"),
    ],
)
def test_a_layout_without_a_meaning_is_refused_unless_options_give_one(
    more: Mapping[str, str], by_hand: set[str], line: str
) -> None:
    with pytest.raises(SlurmError, match=line):
        allocation({**STEP, **more}, cores=16)
    allocation({**STEP, **more}, cores=16, given=by_hand)


@pytest.fixture
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()


@pytest.mark.usefixtures("_script")
def test_a_step_needs_no_option() -> None:
    found = parse(["train.py"], STEP)
    cores = min(4, len(os.sched_getaffinity(0)))
    assert (found.job, found.node_name, found.of_step, found.endpoint) == ("slurm-77", "n2", True, None)
    assert (found.min_nodes, found.max_nodes, found.min_slots, found.slots) == (1, 3, 1, cores)
    assert (found.checkpoint_path, found.cores) == ("/shared/me/.adaptdl/slurm-77", cores)


@pytest.mark.usefixtures("_script")
def test_options_count_before_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    words = ["--nnodes=2", "--rdzv-id=mine", "--node-name=a", "--checkpoint-path=/c", "train.py"]
    found = parse(words, {**STEP, "PET_NPROC_PER_NODE": "3", "ADAPTDL_ETCD": "etcd:2379"})
    assert (found.job, found.node_name, found.checkpoint_path) == ("mine", "a", "/c")
    assert (found.min_nodes, found.max_nodes, found.min_slots, found.slots) == (2, 2, 3, 3)
    assert (found.endpoint, found.of_step) == ("etcd:2379", False)


@pytest.mark.usefixtures("_script")
def test_one_node_is_a_standalone_job() -> None:
    found = parse(
        ["train.py"],
        {**STEP, "SLURM_JOB_NUM_NODES": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"},
    )
    assert (found.standalone, found.of_step) == (True, False)
    assert parse(["--standalone", "train.py"], STEP).job == "train"


@pytest.mark.usefixtures("_script")
def test_a_refusal_is_an_invalid_option() -> None:
    with pytest.raises(OptionError, match="8 tasks"):
        parse(["train.py"], {**STEP, "SLURM_STEP_NUM_TASKS": "8"})
