"""Stops and saves, agreed among real replicas; and what must not hang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import generations
import pytest
from loop_script_path import PATH
from ports import free_port

pytestmark = pytest.mark.processes

SCRIPT = """
import os, signal, sys, threading, time
import torch, adaptdl_elastic.torch as adl
from adaptdl_elastic import _session
adl.init_process_group("gloo")
loader = adl.AdaptiveDataLoader(range(1000), batch_size=4)
control = _session.current().consensus
for epoch in adl.remaining_epochs_until(1):
    for number, batch in enumerate(loader):
{body}
print("ended", flush=True)
"""


@pytest.fixture
def run(tmp_path: Path) -> Any:
    def start(body: str, replicas: int = 1, **environment: str) -> list[generations.Ended]:
        script = tmp_path / "script.py"
        indented = "\n".join(" " * 8 + line for line in body.strip().splitlines())
        script.write_text(SCRIPT.format(body=indented))
        environment.setdefault("ADAPTDL_CHECKPOINT_PATH", str(tmp_path / "checkpoints"))
        return generations.run(script, replicas, tmp_path, **environment)

    return start


WAIT_FOR_ROUND = """
deadline = time.monotonic() + 150
while number == 3 and not control.round_open and time.monotonic() < deadline:
    time.sleep(0.001)
"""


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_to_one_replica_stops_all_at_the_same_step(run: Any, number: str, tmp_path: Path) -> None:
    body = f"""
if number == 3 and adl.rank() == 1:
    os.kill(os.getpid(), signal.{number})
{WAIT_FOR_ROUND}
print("step", number, flush=True)
"""
    ended = run(body, 3)
    assert [replica.code for replica in ended] == [143] * 3, ended
    assert len({replica.output.split("step")[-1].split()[0] for replica in ended}) == 1
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_the_second_interrupt_stops_at_once_even_a_blocked_main_thread(run: Any) -> None:
    body = """
def interrupt():
    while True:  # two that are read together are one
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.5)  # at once behind the first it would be the same
threading.Timer(0.1, interrupt).start()
import ctypes
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_lock(mutex)
library.pthread_mutex_lock(mutex)  # never returns: no Python handler can run any more
"""
    (replica,) = run(body)
    assert replica.code == 130
    assert "stopped at once" in replica.output


def test_a_double_delivery_of_one_interrupt_is_one(run: Any) -> None:
    body = f"""
if number == 3:
    os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT)
{WAIT_FOR_ROUND}
"""
    (replica,) = run(body)
    assert replica.code == 143


def test_a_killed_replica_leaves_no_other_waiting(run: Any) -> None:
    body = """
if number == 3 and adl.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
from adaptdl_elastic import collective
collective.allreduce(1)
"""
    ended = run(body, 3)
    assert ended[1].code == -9
    for replica in (ended[0], ended[2]):
        assert replica.code == 1
        assert "rank 1 is gone" in replica.output


def test_a_stop_that_a_lost_replica_can_not_agree_to_ends_in_an_error(run: Any) -> None:
    body = """
if number == 3:
    if adl.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGINT)
    while not control.round_open and control.lost is None:
        time.sleep(0.001)
    while control.lost is None:
        time.sleep(0.001)
    control.on_message(0, ("prepare", 99, control.session.generation))
"""
    ended = run(body, 2)
    assert ended[0].code == 1
    assert "PeerLostError: rank 1 is gone" in ended[0].output


def test_periodic_checkpoints(run: Any, tmp_path: Path) -> None:
    body = """
saved = os.path.join(os.environ["ADAPTDL_CHECKPOINT_PATH"])
deadline = time.monotonic() + 150
while number % 10 == 9 and adl.rank() == 0 and not control.round_open and time.monotonic() < deadline:
    time.sleep(0.001)
if number == 40:
    break
"""
    log = tmp_path / "events"
    (replica,) = run(body, ADAPTDL_CHECKPOINT_INTERVAL="0.05", ADAPTDL_EVENT_LOG=str(log))
    assert replica.code == 0, replica.output
    kinds = [json.loads(line).get("kind") for line in log.read_text().splitlines()]
    assert "periodic" in kinds


def test_alone_it_says_where_it_was_saved_and_that_nothing_is_left(run: Any, tmp_path: Path) -> None:
    (replica,) = run(f"os.kill(os.getpid(), signal.SIGINT)\n{WAIT_FOR_ROUND.replace('number == 3 and', '')}")
    assert replica.code == 143
    assert f"to go on from {tmp_path / 'checkpoints'}, start it again" in replica.output
    for said in ("ended", "all 1 epochs are finished in"):
        (replica,) = run("pass")
        assert (replica.code, said in replica.output) == (0, True), replica


def test_outside_of_loops_an_interrupt_is_pythons(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, adaptdl_elastic.torch as adl\n"
        "adl.init_process_group('gloo')\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    [None for _ in range(10**6)]\n"
        "except KeyboardInterrupt:\n    print('python')\n"
    )
    (replica,) = generations.run(script, 1, tmp_path)
    assert (replica.code, replica.output) == (0, "python\n")


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "torchrun.py").write_text("from torch.distributed.run import main\nmain()\n")
    options = ["--run-path", "--start-method=fork", "--nproc-per-node=2", f"--master-port={free_port()}"]
    variables = {"OUT": str(tmp_path), "LOOP": '{"evaluate": 1}'}
    # it forks its replicas, which do not import torch again
    done = generations.run_alone(tmp_path / "torchrun.py", tmp_path, *options, str(PATH), **variables)
    assert done.code == 0, done.output
    lines = [line for line in generations.records(tmp_path) if line["loop"] == "train"]
    assert sorted(sample for line in lines for sample in line["samples"]) == list(range(61))
    assert {line["replicas"] for line in lines} == {2}


def test_by_hand_without_a_port_says_what_is_missing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os; os.environ.pop('ADAPTDL_MASTER_PORT')\n"
        "import adaptdl_elastic.torch as adl; adl.init_process_group('gloo')\n"
    )
    (_, replica) = generations.run(script, 2, tmp_path)
    assert replica.code == 1
    assert "say where rank 0 listens by ADAPTDL_MASTER_ADDR and ADAPTDL_MASTER_PORT" in replica.output


BEHIND = """
import os, time, adaptdl_elastic.torch as adl
from adaptdl_elastic import _session
def until(condition):
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
def sign(name):
    open(os.path.join(os.environ["OUT"], name), "w").close()
def seen(name):
    return os.path.exists(os.path.join(os.environ["OUT"], name))
adl.init_process_group("gloo")
loader = adl.AdaptiveDataLoader(range(12), batch_size=3)
session, control, rank = _session.current(), _session.current().consensus, adl.rank()
for epoch in adl.remaining_epochs_until(1):
    for batch in loader:
        pass
for number, batch in enumerate(loader):
    if rank == {first}:
        break
    if number == 0:
{body}
if rank == {first}:
    sign("left")
    until(lambda: {ends})
print("ended", flush=True)
"""
ENDED = "until(lambda: seen('left') and session.reducer.finished)"


@pytest.mark.parametrize(
    ("replicas", "first", "ends", "body"),
    [
        # The other has ended already when something is to be agreed on.
        (2, 1, "True", f"{ENDED}\ncontrol.on_message(0, ('prepare', 99, session.generation))"),
        (2, 0, "True", f"{ENDED}\ncontrol.on_message(0, ('prepare', 99, session.generation))"),
        # It ends while the others wait for its answer.
        (3, 0, "seen('asked')", "control.on_message(0, ('prepare', 99, session.generation))\nsign('asked')"),
        (
            3,
            1,
            "seen('asked')",
            "until(lambda: seen('left'))\n"
            "if rank == 0:\n"
            "    control.leader._number, control.leader.running = 99, []\n"
            "    control.tell(2, ('prepare', 99, session.generation))\n"
            "until(lambda: rank == 0 or control.round_open)\n"
            "sign('asked')",
        ),
        # All have answered, and it ends without coming to the boundary at which the others act.
        (
            3,
            1,
            "seen('asked')",
            "until(lambda: seen('left'))\n"
            "if rank == 0: control.request({'kind': 'checkpoint'})\n"
            "until(lambda: control.round_open and control._decision is not None)\nsign('asked')",
        ),
    ],
)
def test_a_replica_that_ends_before_the_others_leaves_none_waiting(
    tmp_path: Path, replicas: int, first: int, ends: str, body: str
) -> None:
    script = tmp_path / "script.py"
    indented = "\n".join(" " * 8 + line for line in body.splitlines())
    script.write_text(BEHIND.format(first=first, ends=ends, body=indented))
    found = generations.run(
        script, replicas, tmp_path, OUT=str(tmp_path), ADAPTDL_CHECKPOINT_PATH=str(tmp_path)
    )
    assert [(one.code, one.output) for one in found] == [(0, "ended\n")] * replicas
