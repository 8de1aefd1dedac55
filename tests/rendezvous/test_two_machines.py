"""One job on two machines that share an etcd, and a folder, a bucket or nothing: README's line, EC2's node.

The machines are those of tests/support/machines.py. The test itself is on neither of them.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_server import find_etcd
from machines import PATIENCE, ROOT, NoRoomError, Room

pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]

TRAIN = ROOT / "tests" / "agent" / "scripts" / "train.py"
TEMPLATE = (ROOT / "autoscaler" / "providers" / "ec2" / "stack.yaml").read_text()
NODES = ("node0", "node1")
# the commands wait as long as a busy machine needs to start an etcd; more threads than cores would spin
PATH = "/opt/adaptdl/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ON_PATH = {"PATH": PATH, "ADAPTDL_ETCD_TIMEOUT": "60", "OMP_NUM_THREADS": "1"}
STEPPED = "'\"first_step\":1'"  # a time, and not null
WAITER = shlex.quote(str(ROOT / "tests" / "support" / "store_waiter.py"))
# returns when a job's replicas have started, and both machines are registered
TRAINS = "\n".join(
    [f"python {WAITER} /adaptdl/v1/default/reports/$JOB/ /node {STEPPED} > /dev/null"]
    + [f"python {WAITER} /adaptdl/v1/default/nodes/ {node}/$JOB '' > /dev/null" for node in NODES]
)

Opened = Callable[..., Room]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Open a room of etcd0, node0 and node1 that share folders, with a user `trainer` and our program."""
    with ExitStack() as stack:

        def open_room(*shared: str) -> Room:
            try:
                room = stack.enter_context(Room("etcd0", *NODES, shared=shared))
                room.install_ourselves("/opt/adaptdl")
            except NoRoomError as error:
                pytest.skip(f"no machines of one's own: {error}")
            room.provide(find_etcd(), "/usr/bin/etcd", "etcd0")
            room.everywhere("useradd --create-home --shell /bin/bash trainer")
            return room

        yield open_room


def start_etcd(room: Room) -> None:
    """Start an etcd without any protection. Who connects waits for it."""
    urls = "--listen-client-urls=http://0.0.0.0:2379 --advertise-client-urls=http://etcd0:2379"
    room.popen(["etcd", *urls.split(), "--data-dir=/var/tmp/etcd"], "etcd0")


def ask(room: Room, command: str, code: int = 0, machine: str = "node1") -> str:
    """Type a command on a node, as the user."""
    environment = {**ON_PATH, "ADAPTDL_ETCD": "etcd0:2379"}
    return room.bash(command, machine, "trainer", "/home/trainer", environment, code)


def start(
    room: Room, command: str, machine: str, folder: str, log: Path | None = None
) -> subprocess.Popen[str]:
    """Start a command on a node, as the user; without a log its output is a pipe."""
    line = ["bash", "-c", f"cd {shlex.quote(folder)}\nexec {command}"]
    return room.popen(line, machine, "trainer", ON_PATH, log)


def readme(word: str) -> str:
    """Return the block of the README that has this word."""
    found = re.findall(r"^```bash[^\n]*\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    (block,) = (text for text in found if word in text)
    return str(block)


def codes(processes: list[subprocess.Popen[str]], logs: list[Path]) -> list[int]:
    """Return the exit codes; print the logs, which pytest shows where a test fails."""
    found = [process.wait(PATIENCE) for process in processes]
    for log in logs:
        print(f"--- {log.name}\n{log.read_text()}")
    return found


@pytest.mark.essential
def test_the_readmes_line_typed_at_the_same_moment_on_two_machines(opened: Opened, tmp_path: Path) -> None:
    room = opened("/shared")
    room.bash("chown trainer /shared", "node0")
    start_etcd(room)
    line = "adaptdl-run --nnodes=1:8" + readme("--nnodes=1:8").partition("adaptdl-run --nnodes=1:8")[2]
    logs = [tmp_path / f"{node}.log" for node in NODES]
    typed = line.replace("--epochs 2", "--epochs 2000")
    long = [start(room, typed, node, str(ROOT), log) for node, log in zip(NODES, logs, strict=True)]
    ask(room, f"JOB=images\n{TRAINS}\nadaptdl scale images --replicas 2 --wait")
    # both train: before the first step there is nothing to save
    ask(room, "adaptdl checkpoint images --wait")
    # the README's commands from another terminal, as they stand
    said = ask(room, readme("adaptdl ls"))
    assert [word for word in ("images", *NODES) if word not in said] == []
    assert codes(long, logs) == [143, 143]
    assert len(list(room.outside("node1", "/shared/images").glob("*-g*"))) >= 1
    (secret,) = room.outside("node0", "/shared/images/.secret").glob("*/secret")
    assert secret.stat().st_mode & 0o077 == 0
    # nothing of a secret is in the store or in a log
    text = "".join(log.read_text() for log in logs)
    assert secret.read_text() not in text + ask(room, DUMP)


DUMP = (
    "python -c 'import os\n"
    "from adaptdl_elastic.rendezvous.store.connect import connect\n"
    'print(connect(os.environ["ADAPTDL_ETCD"]).range("/").items)\''
)


def test_machines_without_a_common_folder_join_by_the_line_that_the_first_one_prints(
    opened: Opened, tmp_path: Path
) -> None:
    room = opened()
    start_etcd(room)
    for node in NODES:
        room.write("/home/trainer/train.py", TRAIN.read_text(), node)
    line = "adaptdl-run --nnodes=1:2 --nproc-per-node=1 --rdzv-endpoint=etcd0:2379 train.py 60 0.1"
    logs = [tmp_path / "node0.log", tmp_path / "node1.log"]
    # on a terminal
    first = start(room, f"script -qefc {shlex.quote(line)} /dev/null", "node0", "/home/trainer", logs[0])
    begun = f"python {WAITER} /adaptdl/v1/default/reports/train/ /node {STEPPED}"
    ask(room, begun)
    refused = ask(room, line, code=1)
    assert refused.count("\n") == 1
    assert "runs on node0 with a secret that is not in /home/trainer/.adaptdl/train here" in refused
    assert "the command that node0 printed" in refused
    (told,) = re.findall(r"joins by: (ADAPTDL_SECRET=\w{64} adaptdl-run [^\r\n\x1b]*)", logs[0].read_text())
    assert told.endswith(line)
    second = start(room, f"env {told}", "node1", "/home/trainer", logs[1])
    ask(room, f"JOB=train\n{TRAINS}\nadaptdl scale train --replicas 2 --wait")
    assert "node1" in ask(room, "adaptdl status train")
    ask(room, "adaptdl stop train")
    assert codes([first, second], logs) == [143, 143]
    # an agent that does not write to a terminal prints no secret
    quiet = start(room, line, "node0", "/home/trainer")
    assert quiet.stdout is not None
    said = next(line for line in quiet.stdout if "joins by" in line)
    shown = r"ssh node0 cat /home/trainer/\.adaptdl/train/\.secret/\d+-\d+/secret"
    assert re.search(rf'ADAPTDL_SECRET="\$\({shown}\)" adaptdl-run', said)
    ask(room, "adaptdl stop train")
    rest, _ = quiet.communicate(timeout=PATIENCE)
    assert told.partition(" ")[0] not in said + rest
    assert quiet.returncode == 143
