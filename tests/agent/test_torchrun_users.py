"""What torchrun's users type, word for word: `adaptdl-run` in the place of `torchrun`."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from cluster import LONG, TRAIN, Cluster
from commands import ended
from elastic_run import PATIENCE, ElasticRun, environment, run_agent
from ports import free_port
from torch.distributed.run import determine_local_world_size

from adaptdl_elastic.agent.terminal import run_options, run_parser

SCRIPTS = Path(__file__).parent / "scripts"
USER = str(SCRIPTS / "torchrun_user.py")
pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]


def launch(
    launcher: str, directory: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`adaptdl-run` or `torchrun` in `directory`, to its end."""
    if launcher == "adaptdl-run":
        return run_agent(directory, *arguments, **variables)
    return ended(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        directory,
        env=environment(TMPDIR=str(directory), **variables),
        timeout=PATIENCE,
    )


def said(done: subprocess.CompletedProcess[str], code: int = 0) -> str:
    """Return what replicas wrote to stdout, without the rank before each line."""
    assert done.returncode == code, done.stdout + done.stderr
    return without_ranks(done.stdout)


def without_ranks(text: str) -> str:
    """Return output without the rank before each line."""
    return re.sub(r"^\[rank\d+\]: ", "", text, flags=re.MULTILINE)


def given(text: str) -> list[dict[str, str]]:
    """What each replica of each generation was given, as the script has printed it."""
    return [json.loads(line) for line in without_ranks(text).splitlines() if line.startswith('{"RANK"')]


def ours(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("adaptdl-run:")]


# Where replicas meet -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "method"),
    [
        ("adaptdl-run", "tcp://localhost:{port}"),
        ("adaptdl-run", "env://"),
        ("torchrun", "tcp://127.0.0.1:{port}"),
    ],
)
def test_a_script_that_names_where_it_meets(launcher: str, method: str, tmp_path: Path) -> None:
    """Before, every replica of ours was a client of a store that nobody kept, and hung."""
    port = free_port()
    options = ("--nnodes=1", "--nproc-per-node=2", "--master-addr=localhost", f"--master-port={port}")
    text = said(launch(launcher, tmp_path, *options, USER, method.format(port=port)))
    assert text.count("sum 3 launched True") == 2
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in given(text)} == {("localhost", str(port))}


@pytest.mark.exhaustive
def test_after_a_failure_replicas_meet_at_the_same_port(tmp_path: Path) -> None:
    port = free_port()
    options = ("--nproc-per-node=2", "--max-restarts=1")
    done = run_agent(
        tmp_path, *options, USER, f"tcp://127.0.0.1:{port}", "fail-once", PET_MASTER_PORT=str(port)
    )
    text = said(done)
    assert text.count("sum 3") == 4
    assert [one["MASTER_PORT"] for one in given(text)] == [str(port)] * 4
    assert sorted(one["TORCHELASTIC_RESTART_COUNT"] for one in given(text)) == ["0", "0", "1", "1"]


def test_a_port_that_is_taken_is_told_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_agent(tmp_path, f"--master-port={port}", USER)
    assert done.returncode == 1
    (line,) = ours(done)
    assert f"--master-port={port}: cannot listen on 127.0.0.1" in line


def test_an_address_of_another_machine_is_told_at_once(tmp_path: Path) -> None:
    done = run_agent(tmp_path, "--master-addr=192.0.2.1", "--master-port=29500", USER)
    assert done.returncode == 1
    (line,) = ours(done)
    assert "--master-addr=192.0.2.1 --master-port=29500: 192.0.2.1 is not an address of this" in line


@pytest.mark.exhaustive
def test_a_change_in_place_beside_a_named_port(tmp_path: Path) -> None:
    """The next generation's store is opened while the port is taken; a restart is at the port again."""
    port = free_port()
    arguments = ("--standalone", "--no-autoscale", "--nproc-per-node=1:2", "--rdzv-id=job")
    more = (f"--master-port={port}", "--checkpoint-path=saved", TRAIN, *LONG)
    with ElasticRun([*arguments, *more], tmp_path) as run:
        run.wait_for_event("generation")
        assert port in listening(run)
        assert run.adaptdl("scale", "job", "--replicas", "2").returncode == 0
        grown = run.wait_for_event("generation", replicas=2)
        assert grown["transition"] == "inplace"
        assert port not in listening(run)
        started = run.wait_for_event("started", generation=grown["generation"])
        both = [psutil.Process(pid) for pid in started["pids"].values()]
        # both stand still before one is killed, so that the other one does not go on alone
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in both:
                process.send_signal(number)
        # one may have been planned for the second replica before its death
        again = run.wait_for_event("generation", cause="failure")
        assert again["transition"] == "abort"
        assert port in listening(run)
        (tmp_path / "hurry").touch()
        assert run.wait() == 0, run.text()


def test_nodes_meet_at_the_named_place_if_rank_0_is_there(cluster: Cluster, tmp_path: Path) -> None:
    port = free_port()
    script = (USER, f"tcp://127.0.0.1:{port}")
    place = ("--master-addr=127.0.0.1", f"--master-port={port}")
    runs = [cluster.start(node, *place, *script, nodes="2:2") for node in ("a", "b")]
    assert [run.wait() for run in runs] == [0, 0], [run.text() for run in runs]
    assert all("sum 3" in run.text() for run in runs)


@pytest.mark.exhaustive
def test_an_address_without_the_node_of_rank_0_is_passed_over_and_told(cluster: Cluster) -> None:
    place = ("--master-addr=192.0.2.1", f"--master-port={free_port()}")
    runs = [cluster.start(node, *place, USER, nodes="2:2") for node in ("a", "b")]
    assert [run.wait() for run in runs] == [0, 0], [run.text() for run in runs]
    told = [
        line for run in runs for line in run.text().splitlines() if "is not here, where rank 0 is" in line
    ]
    assert len(told) == 1


def listening(run: ElasticRun) -> set[int]:
    """The ports that the agent listens on."""
    found = psutil.Process(run.process.pid).net_connections("inet")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


# How users write it ------------------------------------------------------------------------------


def test_everything_from_torchruns_variables(tmp_path: Path) -> None:
    script = tmp_path / "say.sh"
    script.write_text('#!/bin/sh\necho "rank $RANK of $WORLD_SIZE as $ROLE_NAME" > "out$RANK"\n')
    script.chmod(0o755)
    variables = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_RDZV_ID": "night", "PET_NO_PYTHON": "1"}
    variables |= {"PET_MODULE": "0", "PET_ROLE": "trainer"}
    refused = run_agent(tmp_path, str(script), **{**variables, "PET_MODULE": "1"})
    assert refused.returncode == 2
    assert "--no-python and --module exclude each other" in refused.stderr
    said(run_agent(tmp_path, str(script), **variables))
    assert [(tmp_path / f"out{rank}").read_text() for rank in (0, 1)] == [
        "rank 0 of 2 as trainer\n",
        "rank 1 of 2 as trainer\n",
    ]


def test_a_module_and_a_path(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "main.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    done = run_agent(tmp_path, "-m", "package.main", "--lr", "0.1")
    assert said(done) == "__main__ package ['--lr', '0.1']\n"
    (tmp_path / "main.py").write_text("print(__name__, __file__)\n")
    path = tmp_path / "main.py"
    assert said(run_agent(tmp_path, "--run-path", str(path))) == f"__main__ {path}\n"


@pytest.mark.exhaustive
def test_as_many_replicas_as_torchrun_counts() -> None:
    found = run_options.parse(["--nproc-per-node=auto", USER], {})
    assert found.slots == int(determine_local_world_size("auto"))


def test_as_many_replicas_as_there_are_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # in the process that asks torch
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    gpus = "torch.cuda.is_available, torch.cuda.device_count = lambda: {}, lambda: 3\n"
    (tmp_path / "sitecustomize.py").write_text(f"import torch\n{gpus.format(True)}")
    assert run_options.parse(["--nproc-per-node=gpu", USER], {}).slots == 3
    (tmp_path / "sitecustomize.py").write_text(f"import torch\n{gpus.format(False)}")
    with pytest.raises(run_parser.OptionError, match="--nproc-per-node=gpu: Cuda is not available"):
        run_options.parse(["--nproc-per-node=gpu", USER], {})


def test_a_signal_that_was_named_saves_and_stops(tmp_path: Path) -> None:
    """Slurm sends SIGUSR1 before the time of a job is over, if it is asked to."""
    arguments = ("--standalone", "--rdzv-id=job", "--signals-to-handle=SIGTERM,SIGUSR1")
    with ElasticRun([*arguments, "--checkpoint-path=saved", TRAIN, *LONG], tmp_path) as run:
        run.wait_for_event("generation")
        run.process.send_signal(signal.SIGUSR1)
        assert run.wait() == 143, run.text()
        assert "SIGUSR1: saving and stopping" in run.text()
        assert list((tmp_path / "saved").glob("*-g00000-*"))


# What is written ---------------------------------------------------------------------------------


def test_logs_are_where_torchrun_writes_them_and_lines_have_its_prefixes(tmp_path: Path) -> None:
    options = ("--nproc-per-node=2", "--role=trainer", "--log-dir=logs", "--redirect=1", "--tee=0:2")
    done = run_agent(tmp_path, *options, "--rdzv-id=job", USER)
    assert said(done) == ""
    (run,) = (tmp_path / "logs").glob("job_*")
    for rank in ("0", "1"):
        assert (
            json.loads((run / "attempt_0" / rank / "stdout.log").read_text().splitlines()[0])["RANK"] == rank
        )
    assert (run / "attempt_0" / "0" / "stderr.log").read_text() == "to stderr from 0\n"
    assert "[trainer0]:to stderr from 0" in done.stderr.splitlines()
    assert "[rank1]: to stderr from 1" in done.stderr.splitlines()


def test_a_template_for_the_prefix_and_a_filter(tmp_path: Path) -> None:
    options = ("--nproc-per-node=2", "--redirect=3", "--tee=3", "--local-ranks-filter=1")
    done = run_agent(tmp_path, *options, USER, TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[no. ${rank}] ")
    text = said(done)
    assert "[no. 1] sum 3 launched True" in text.splitlines()
    assert "no. 0" not in text


@pytest.mark.exhaustive
def test_the_end_of_a_script_is_the_end_of_the_command(tmp_path: Path) -> None:
    done = run_agent(tmp_path, "--nproc-per-node=2", "--max-restarts=0", USER, "env://", "fail")
    assert done.returncode == 3
    assert {one["TORCHELASTIC_MAX_RESTARTS"] for one in given(done.stdout)} == {"0"}


def test_torchs_record_writes_the_file_that_tells_why(tmp_path: Path) -> None:
    script = tmp_path / "recorded.py"
    script.write_text(
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise ValueError('what the user did')\nmain()\n"
    )
    done = run_agent(tmp_path, "--max-restarts=0", "--log-dir=logs", "--rdzv-id=job", str(script))
    assert done.returncode == 1
    assert any("what the user did" in line for line in ours(done))
    (file,) = (tmp_path / "logs").glob("job_*/attempt_0/0/error.json")
    assert "what the user did" in file.read_text()
