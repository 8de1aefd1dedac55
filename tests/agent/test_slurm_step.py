"""What a task of a Slurm step is given, from the variables that Slurm 22.05 sets; no Slurm is needed."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import pytest

from adaptdl_elastic.agent.cluster import allocation_store
from adaptdl_elastic.agent.machine import slurm_end
from adaptdl_elastic.agent.machine.interruption import NoticeKind
from adaptdl_elastic.agent.machine.slurm import SlurmError, allocation, is_to_requeue, notice_time, parse_job
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

SHOWN = """JobId=77 JobName=train
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   StartTime=1000 EndTime=5000 Deadline=N/A
   PreemptEligibleTime=1000 PreemptTime=None
"""
"""What `scontrol show job` of Slurm 22.05 says while a job runs, without most lines."""

PREEMPTED = {"PreemptTime=None": "PreemptTime=2000"}
COMPLETING = {"JobState=RUNNING": "JobState=COMPLETING"}
TIME_LIMIT = {**COMPLETING, "Reason=None": "Reason=TimeLimit"}
NO_LIMIT = {"EndTime=5000": "EndTime=Unknown"}
REQUEUED = {"Restarts=0": "Restarts=1"}

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


def shown(changes: Mapping[str, str]) -> str:
    text = SHOWN
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    return text


@pytest.mark.parametrize(
    ("changes", "now", "expected"),
    [
        pytest.param({}, 2000, False, id="the agent got a signal from a person"),
        pytest.param({}, 4850, True, id="the agent left before the limit"),
        pytest.param({}, 4795, True, id="Slurm sent the signal of --signal early"),
        pytest.param(NO_LIMIT, 4850, False, id="no limit is near"),
        pytest.param(TIME_LIMIT, 5010, True, id="the limit is over"),
        pytest.param({**COMPLETING, "EndTime=5000": "EndTime=2000"}, 2001, False, id="scancel"),
        pytest.param(
            {**COMPLETING, "EndTime=5000": "EndTime=4900"}, 4901, False, id="scancel near the limit"
        ),
        pytest.param(
            {"JobState=RUNNING": "JobState=CANCELLED"}, 4901, False, id="scancel, and all has ended"
        ),
        pytest.param({**PREEMPTED, **NO_LIMIT}, 2001, True, id="preemption with GraceTime"),
        pytest.param({**PREEMPTED, **COMPLETING}, 2001, True, id="PreemptMode=CANCEL"),
        pytest.param({**COMPLETING, **REQUEUED}, 2001, False, id="Slurm itself has requeued it"),
        pytest.param({**TIME_LIMIT, **REQUEUED}, 5010, False, id="it was requeued already"),
    ],
)
def test_a_job_is_requeued_unless_a_person_has_ended_it(
    changes: Mapping[str, str], now: float, expected: bool
) -> None:
    assert is_to_requeue(parse_job(shown(changes)), restarts=0, seconds=150, now=now) is expected


def test_a_short_job_trains_for_half_of_its_time() -> None:
    assert notice_time(1000, 5000, 150) == 4850
    assert notice_time(1000, 1060, 150) == 1030


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `scontrol` that shows one file after another, and refuses to requeue; it notes its calls."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\ncd {tmp_path}\necho $1 $SLURM_TIME_FORMAT >>calls\n"
        "[ $1 = show ] || { echo 'it is disabled' >&2; exit 1; }\n"
        "set -- shown*; cat $1; [ $# = 1 ] || rm $1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return tmp_path


def limited(end: float) -> str:
    """Return what `scontrol` says of a job whose time limit ends then."""
    return shown({"EndTime=5000": f"EndTime={end:.0f}"})


@pytest.mark.processes
def test_a_limit_that_was_put_off_meanwhile_is_waited_for(scontrol: Path) -> None:
    now, told = int(time.time()), Queue()
    (scontrol / "shown1").write_text(limited(now + 5))
    (scontrol / "shown2").write_text(limited(now))
    found = allocation({**STEP, "SLURM_JOB_END_TIME": str(now)}, cores=4)
    slurm_end.watch(found, 120, told.put)
    notice = told.get(timeout=60)
    assert (notice.kind, notice.drain, notice.deadline) == (NoticeKind.TIME_LIMIT, True, now)
    assert (scontrol / "calls").read_text() == "show %s\n" * 2


@pytest.mark.processes
def test_one_line_says_why_slurm_refuses_a_requeue(scontrol: Path) -> None:
    (scontrol / "shown").write_text(limited(time.time()))
    said: list[str] = []
    slurm_end.requeue(allocation(STEP, cores=4), "train", 120, said.append)
    assert said == [
        "not requeued: it is disabled; --rdzv-id=train in another job goes on from its checkpoint"
    ]


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


@pytest.mark.processes
@pytest.mark.parametrize(
    ("here", "wheel", "chosen", "said"),
    [
        ("3.4.23", "3.5.1", "here", ""),
        ("3.5.1", "3.5.9", "wheel", ""),
        ("3.5.1", None, "here", "etcd 3.5.1 can lose data"),
        ("?", "3.5.1", "here", "does not say its version"),
        (None, "3.5.1", "wheel", "can lose data"),
    ],
)
def test_an_etcd_without_known_faults_comes_first(
    here: str | None,
    wheel: str | None,
    chosen: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for folder, version in ((tmp_path / "here", here), (tmp_path / "wheel" / "etcdbin", wheel)):
        folder.mkdir(parents=True)
        if version is not None:
            (folder / "etcd").write_text(f"#!/bin/sh\necho etcd Version: {version}\n")
            (folder / "etcd").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'here'}:/bin")
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path / "wheel")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    etcd = allocation_store.find_etcd()
    assert etcd is not None
    assert chosen in etcd[0]
    assert said in etcd[1]
    assert bool(said) == bool(etcd[1])
