"""Real runs in which something goes wrong. ElasticRun asserts that no process is left behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from cluster import EPOCHS, LONG, PLAIN, TRAIN
from elastic_run import ElasticRun, run_agent

pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.timeout(600)]

ELASTIC = ("--standalone", "--no-autoscale", "--nproc-per-node=2", "--checkpoint-path=saved")


def lines_of_ours(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("adaptdl-run:")]


@pytest.mark.essential
def test_a_script_that_raises_is_tried_again_and_then_reported(tmp_path: Path) -> None:
    arguments = ["--standalone", "--max-restarts=1", "--log-dir=logs", "--tee=3", PLAIN, "raise"]
    with ElasticRun(arguments, tmp_path) as run:
        assert run.wait() == 1
        text = run.text()
        assert text.count("Traceback") == 1
        assert "fork_server" not in text
        assert [f["message"] for f in run.of("failure")] == ["ValueError: boom"] * 2
        last = lines_of_ours(text)[-1]
        assert "ValueError: boom" in last
        assert "logs" in last
    attempts = sorted(tmp_path.glob("logs/plain_*/attempt_*/0/stderr.log"))
    assert len(attempts) == 2, "the logs of both generations are kept"
    assert all("ValueError: boom" in path.read_text() for path in attempts)
    assert "[default0]:ValueError: boom" in text


TOGETHER = """
import os, sys, time
from pathlib import Path
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("begins", attempt, flush=True)
Path(f"{attempt}-{rank}").touch()
while not all(Path(f"{attempt}-{other}").exists() for other in range(2)):
    time.sleep(0.01)
undefined_name
"""


def test_of_replicas_that_fail_together_one_traceback_is_shown_and_one_restart_made(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TOGETHER)
    options = ["--standalone", "--nproc-per-node=2", "--no-autoscale", "--log-dir=logs", "--rdzv-id=job"]
    done = run_agent(tmp_path, *options, "script.py")
    assert done.returncode == 1
    begun = [f"[rank{rank}]: begins {attempt}" for rank in (0, 1) for attempt in (0, 1)]
    assert sorted(done.stdout.splitlines()) == begun
    *lines, last = done.stderr.splitlines()
    what, mark = "NameError: name 'undefined_name' is not defined", done.stderr[: len("[rank0]:")]
    rank = mark.removeprefix("[rank").removesuffix("]:")
    assert lines[:6] == [
        f"{mark} Traceback (most recent call last):",
        f'{mark}   File "{tmp_path / "script.py"}", line 9, in <module>',
        f"{mark}     undefined_name",
        f"{mark} {what}",
        f"adaptdl-run: replica {rank} failed (exit code 1): {what}",
        "adaptdl-run: restart 1 of 3, from the beginning, because no checkpoint had been saved yet",
    ]
    (again,) = lines[6:]
    assert re.fullmatch(r"adaptdl-run: replica [01] failed in the same way again \(exit code 1\): .*", again)
    assert f"failed twice in the same way before its first step: rank {again[21]}: {what}" in last
    kept = list((tmp_path / "logs").glob("job_*/attempt_*/*/traceback.log"))
    assert len(kept) >= 2, "of the second of an attempt there is none if it was killed before it raised"
    assert all(what in path.read_text() for path in kept)


CRASHES = """
import sys
import torch
import adaptdl_elastic.torch as adl
from torch.utils.data import TensorDataset
adl.init_process_group("gloo")
inner = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(inner.parameters(), lr=0.01)
model = adl.AdaptiveDataParallel(inner, optimizer)
loader = adl.AdaptiveDataLoader(TensorDataset(torch.ones(4000, 2)), batch_size=4, shuffle=True)
print("begins", flush=True)
steps = 0
for epoch in adl.remaining_epochs_until(1):
    for (x,) in loader:
        if steps == 100:
            raise IndexError('no row 10')
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        steps += 1
"""


def test_an_error_after_the_same_step_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CRASHES)
    done = run_agent(tmp_path, "--standalone", "--no-autoscale", "--max-restarts=2", "script.py")
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["begins"] * 2, done.stderr
    certain = "failed twice in the same way after step 100: rank 0: IndexError: no row 10"
    assert certain in lines_of_ours(done.stderr)[-1], done.stderr
    assert done.stderr.count("Traceback") == 1


def test_a_script_that_cannot_be_loaded_is_tried_once_and_with_once_never_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('never')\nx = (\n")
    done = run_agent(tmp_path, "--standalone", "--once", "script.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\nSyntaxError: ") == 1, done.stderr
    failed, end = lines_of_ours(done.stderr)
    assert failed.startswith("adaptdl-run: replica 0 failed (exit code 1): SyntaxError: ")
    assert end.startswith("adaptdl-run: failed, and a restart would not help: rank 0: SyntaxError: ")
    done = run_agent(tmp_path, "--standalone", "--once", "script.py")
    assert done.returncode == 1
    (end,) = lines_of_ours(done.stderr)
    assert "has failed: failed, and a restart would not help: rank 0: SyntaxError: " in end


def test_the_survivors_of_a_killed_replica_show_no_traceback(tmp_path: Path) -> None:
    with ElasticRun(["--standalone", "--nproc-per-node=2", "--log-dir=logs", PLAIN, "peer"], tmp_path) as run:
        assert run.wait() == 0
        text = run.text()
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if line.startswith("adaptdl-run")]
    assert lines[0].startswith("adaptdl-run: replica 1 failed: SIGKILL")
    assert (
        lines[1]
        == "adaptdl-run: restart 1 of 3, from the beginning, because no checkpoint had been saved yet"
    )


def test_a_crash_has_its_signal_as_exit_code(tmp_path: Path) -> None:
    with ElasticRun(["--standalone", "--max-restarts=0", PLAIN, "kill"], tmp_path) as run:
        assert run.wait() == 137
        assert "SIGKILL" in run.text()


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "deaf")
    script = f"trap '' TERM; echo > {tmp_path / 'deaf'}; sleep 1000"
    with ElasticRun(["--standalone", "--no-python", "sh", "-c", script], tmp_path) as run:
        (tmp_path / "deaf").read_text()  # from now on it does not hear the first
        run.process.send_signal(signal.SIGTERM)
        run.wait_for_event("drain", reason="SIGTERM")
        with pytest.raises(subprocess.TimeoutExpired):  # at once behind the first it would be the same
            run.process.wait(0.5)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(60) == 143


def test_signals_that_come_when_all_is_over_change_nothing(tmp_path: Path) -> None:
    with ElasticRun(["--standalone", PLAIN], tmp_path) as run:
        run.wait_for_event("exit")
        while run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0


# Elastic jobs ------------------------------------------------------------------------------------


def test_interrupted_it_saves_and_the_next_run_goes_on(tmp_path: Path) -> None:
    command = [*ELASTIC, TRAIN, *LONG]
    with ElasticRun(command, tmp_path) as run:
        run.wait_for_event("epoch", epoch=0)
        run.interrupt()
        run.wait_for_event("drain")
        run.interrupt()  # at once: delivered twice, as `timeout` does it
        assert run.wait() == 143
        assert run.of("checkpoint")[-1]["kind"] == "stop"
        assert EPOCHS - 1 not in run.samples()
    run.hurry()
    with ElasticRun(command, tmp_path) as run:
        assert run.wait() == 0
        assert 0 not in run.samples()
        assert run.samples()[EPOCHS - 1] == 200
    with ElasticRun(command, tmp_path) as run:
        assert run.wait() == 0
        assert "job 'train' is done: every replica ended well" in run.text()
        assert [event["event"] for event in run.events] == ["exit"]
    with ElasticRun([*ELASTIC, TRAIN, "1", "0"], tmp_path) as run:
        assert run.wait() == 1
        ran, this = (shlex.join([str(TRAIN), *given]) for given in (LONG, ("1", "0")))
        assert f"it ran `{ran}`, and this is `{this}`: --extend continues" in run.text()
    with ElasticRun([*ELASTIC, "--anew", TRAIN, "1", "0"], tmp_path) as run:
        assert run.wait() == 0
        assert f"--anew: what was in {tmp_path / 'saved'} is kept in" in run.text()
        assert run.samples() == {0: 200}


def test_of_two_that_are_started_at_once_one_runs(tmp_path: Path) -> None:
    from adaptdl_elastic._private import private_directory
    from adaptdl_elastic.rendezvous.local import file_lock

    with file_lock.held(
        private_directory(tmp_path / f"adaptdl-{os.getuid()}") / "twice.lock", "twice"
    ) as other:
        assert not other
        done = run_agent(tmp_path, "--standalone", "--rdzv-id=twice", PLAIN)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "a standalone job 'twice' runs already: `adaptdl stop twice` ends it" in line
    assert not (tmp_path / ".adaptdl").exists()


ONE_SAMPLE = """
import torch
import adaptdl_elastic.torch as adl

class Net(torch.nn.Linear):
    def forward(self, inputs):
        raise torch.OutOfMemoryError(f"no room for {len(inputs)}")

adl.init_process_group("gloo")
net = Net(1, 1)
model = adl.AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
for epoch in adl.remaining_epochs_until(1):
    for batch in adl.AdaptiveDataLoader(torch.zeros(8, 1), batch_size=4):
        model(batch)
"""


def test_a_script_of_which_not_one_sample_fits_into_memory_is_not_restarted(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ONE_SAMPLE)
    done = run_agent(tmp_path, "--standalone", "--max-restarts=3", "script.py")
    assert done.returncode == 1
    assert "restart 1 of" not in done.stderr
    last = done.stderr.splitlines()[-1]
    what = "OneSampleError: not even one sample fits into memory (no room for 1)"
    assert f"failed, and a restart would not help: rank 0: {what}" in last


def test_a_restart_names_the_checkpoint_of_an_earlier_run(tmp_path: Path) -> None:
    """The run goes on from it, and has saved none itself."""
    script = """
import os, sys
import torch
import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint

adl.init_process_group("gloo")
if not os.path.exists("first"):
    open("first", "w").close()
    checkpoint.save_all_states()
    sys.exit(3)
elif not os.path.exists("second"):
    open("second", "w").close()
    os.kill(os.getpid(), 9)
"""
    (tmp_path / "script.py").write_text(script)
    options = ["--standalone", "--checkpoint-path=saved", "--rdzv-id=job"]
    assert run_agent(tmp_path, *options, "--max-restarts=0", "script.py").returncode == 3
    done = run_agent(tmp_path, *options, "script.py")
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 3, from the newest checkpoint in " in done.stderr
