"""Head and nodes of the EC2 template run their user data on machines that share nothing, until they train.

The harness is tests/support/ec2_machines.py. Then a head and a node fail: a package does not
install, or a boot hangs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ec2_aws import SILENT_PORT
from ec2_machines import JOB, STACK, Files, Stack, pack_package
from installed_wheels import index_of_installed, spoil
from machines import PATIENCE, ROOT, NoRoomError, Room
from package_index import required_names
from polling import until as look_until

from adaptdl_elastic.autoscaler.provisioning import bundle
from adaptdl_elastic.rendezvous.schema.submissions import STACK_OWNER

until = partial(look_until, pause=4.0)  # a look starts processes, which take a second of CPU time
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.etcd,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0, reason="machines of one's own need root"),
]

NODES = ("node0", "node1")
TRAIN = ROOT / "tests" / "agent" / "scripts" / "train.py"
PKI = "/etc/adaptdl/pki"
# A machine without a GPU has one slot. The last of two options counts.
COMMAND = ("--nproc-per-node=1", "train.py", "60", "0.1")
PARAMETERS = {"MaxNodes": "2", "MaxJobCost": "12.5", "OnDemandPrice": "1.006"}
INSTANCE = "i-0123456789abcdef0"
# seconds of a boot that hangs; the node's is long enough to come to its index
HEAD_LIMIT, NODE_LIMIT = 5, 30
# seconds that a busy machine may need to tell of it
SLACK = 60.0
# seconds in which a boot installs torch while other machines do the same
BOOT_PATIENCE = 400.0

Opened = Callable[..., Stack]


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An index of what this program needs, and of what its wheel is built with; all workers share it."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if folder.name.startswith("popen-") else folder
    names = [*required_names("adaptdl-elastic"), "setuptools"]
    with index_of_installed(folder / "wheels", names) as made:
        yield made


@pytest.fixture(scope="session")
def package(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `adaptdl cloud pack` makes of this checkout, with the real lock files."""
    target = tmp_path_factory.mktemp("package") / "package.tar.gz"
    pack_package(target, index)
    return target


@pytest.fixture
def opened(index: Path, package: Path, tmp_path: Path) -> Iterator[Opened]:
    """Make a stack whose machines are these, with another index or package if one is given."""
    code, other_code = tmp_path / "code.tar.gz", tmp_path / "other-code.tar.gz"
    (tmp_path / "job").mkdir()
    shutil.copy(TRAIN, tmp_path / "job")
    bundle.pack(tmp_path / "job", code, STACK_OWNER, command=COMMAND)
    (tmp_path / "job" / "train.py").write_text(f"{TRAIN.read_text()}\n# changed\n")
    bundle.pack(tmp_path / "job", other_code, STACK_OWNER, command=COMMAND)
    (tmp_path / "stack").mkdir()
    made: list[Stack] = []
    with ExitStack() as stack:

        def make(*machines: str, index: Path = index, uploaded: Path = package) -> Stack:
            try:
                room = stack.enter_context(Room("aws", *machines))
            except NoRoomError as error:
                pytest.skip(f"no machines of one's own: {error}")
            files = Files(index, package, uploaded, code, other_code)
            made.append(Stack(room, tmp_path / "stack", files, PARAMETERS))
            return made[0]

        yield make
        # pytest shows them where a test fails
        for one in made:
            print(one.logs())


def boot_nodes(stack: Stack) -> None:
    """Start a machine for each instance that the autoscaler orders, and wait for the end of their boots."""
    found = until("two instances are not ordered", lambda: two_of(stack.aws("instances")), 60.0)
    assert {one["group"] for one in found} == {f"{STACK}-spot"}
    boots = [stack.boot(node, one["id"]) for node, one in zip(NODES, found, strict=True)]
    assert [boot.wait(BOOT_PATIENCE) for boot in boots] == [0, 0]


def two_of(found: list[dict[str, str]]) -> list[dict[str, str]]:
    return found if len(found) == 2 else []


def job(stack: Stack) -> dict[str, Any]:
    """Return what the head's command says of the job, or nothing while there is none."""
    if JOB not in stack.on_head("adaptdl ls --all"):
        return {}
    found: dict[str, Any] = json.loads(stack.on_head(f"adaptdl status {JOB} --json"))
    return found


def test_two_nodes_of_a_stack_train_one_job_in_one_generation(opened: Opened) -> None:
    stack = opened("head", *NODES)
    room = stack.room
    head = stack.boot("head", "i-0000000000000head", life_cycle="on-demand")
    answer = stack.answer(head, BOOT_PATIENCE)
    assert (answer["Status"], answer["Reason"]) == ("SUCCESS", "it serves"), answer
    assert head.wait(PATIENCE) == 0
    units = Path("/etc/systemd/system")
    unit = room.read(str(units / "adaptdl-autoscale.service"), "head")
    assert f"--job {JOB}\n" in unit

    room.bash("systemctl stop adaptdl-autoscale", "head")
    room.bash(f"sed -i 's/--job/--min-nodes 2 &/' {units}/adaptdl-autoscale.service", "head")
    room.bash("systemctl start adaptdl-autoscale", "head")
    boot_nodes(stack)
    until("no replica trains", lambda: job(stack).get("step"), PATIENCE)
    until("one node has no agent", lambda: both_registered(stack), PATIENCE)
    stack.on_head(f"adaptdl scale {JOB} --replicas 2 --wait")
    now = job(stack)
    assert (now["replicas"], now["placements"], now["failures"]) == (2, dict.fromkeys(NODES, 1), [])
    stack.on_head(f"adaptdl checkpoint {JOB} --wait")
    place = f"{STACK}/checkpoints/{JOB}/"
    assert [key for key in stack.aws("objects") if key.startswith(place) and "-g" in key]
    limits = room.read("/var/log/adaptdl-autoscale.log", "head")
    assert "max_hourly_cost 10, max_job_costs/* 12.5, max_nodes 2" in limits

    # the stack gets other code; a node that comes later joins the run with the run's own
    # (the autoscaler would give back an instance whose agent is stopped, and there are no other machines)
    room.bash("systemctl stop adaptdl-autoscale", "head")
    comes_anew(stack, "node1")
    until("one node has no agent", lambda: both_registered(stack), PATIENCE)
    stack.on_head(f"adaptdl scale {JOB} --replicas 2 --wait")
    assert versions(stack, "node1") == 1
    # the next run takes the other code, and goes on from the checkpoint
    stack.on_head(f"adaptdl stop {JOB} --wait")
    assert "goes on when a node starts" in stack.on_head(f"adaptdl resume {JOB}")
    for node in NODES:
        comes_anew(stack, node)
    until("no replica trains", lambda: job(stack)["state"] == "running", PATIENCE)
    until("one node has no agent", lambda: both_registered(stack), PATIENCE)
    stack.on_head(f"adaptdl scale {JOB} --replicas 2 --wait")
    for node in NODES:
        assert versions(stack, node) == 2
        room.bash("for folder in /opt/job/*/; do touch $folder/hurry; done", node)
    until("the job does not end", lambda: job(stack)["state"] == "done", PATIENCE)
    assert job(stack)["failures"] == []
    # each of the last generation's two replicas has ended the same training
    said = [room.read(f"/var/log/adaptdl@{JOB}.log", node) for node in NODES]
    weights = [re.findall(r"weights (\S+) of rank (\d)", text) for text in said]
    assert sorted(rank for ((_, rank),) in weights) == ["0", "1"], said
    assert len({weight for ((weight, _),) in weights}) == 1
    assert not any("secret" in text.lower() for text in said)

    assert_the_key_of_the_ca_is_on_the_head_alone(stack)
    for machine in ("head", *NODES):
        seen = room.bash(f"/opt/adaptdl/bin/python -c {shlex.quote(IMPORTED)}", machine)
        assert seen.split() == ["/opt/adaptdl", "False"], "the environment is what the lock file has"


IMPORTED = (
    "import importlib.util, sys, boto3, adaptdl_elastic; "
    "assert all(one.__file__.startswith(sys.prefix) for one in (boto3, adaptdl_elastic)); "
    "print(sys.prefix, bool(importlib.util.find_spec('moto')))"
)


def comes_anew(stack: Stack, node: str) -> None:
    """Have the unit of a node start again as that of an instance whose template names other code."""
    unit = "/etc/systemd/system/adaptdl@.service"
    stack.room.bash(f"systemctl stop adaptdl@{JOB}", node)
    text = stack.room.read(unit, node)
    stack.room.write(unit, text.replace(stack.code, stack.other_code), node)
    stack.room.bash(f"systemctl enable --now adaptdl@{JOB}", node)


def versions(stack: Stack, node: str) -> int:
    """Return how many versions of the code a node has fetched."""
    return len(list(stack.room.outside(node, "/opt/job").glob("*.installed")))


def both_registered(stack: Stack) -> bool:
    """Return whether both nodes' agents are in the cluster."""
    listed = stack.on_head("adaptdl nodes")
    return all(node in listed for node in NODES)


def assert_the_key_of_the_ca_is_on_the_head_alone(stack: Stack) -> None:
    """Look for it in SSM and on the nodes, and that nodes have what SSM has."""
    given = ("ca.pem", "node-key.pem", "node.pem")
    key = stack.room.read(f"{PKI}/ca-key.pem", "head")
    stored = stack.aws("parameters")
    assert list(stored) == [f"/adaptdl/{STACK}/{name}" for name in given]
    assert key not in stored.values()
    for node in NODES:
        there = stack.room.outside(node, PKI)
        assert there.stat().st_mode & 0o077 == 0
        assert {path.name: path.read_text() for path in there.iterdir()} == {
            name: stored[f"/adaptdl/{STACK}/{name}"] for name in given
        }


def assert_failed(stack: Stack, head: subprocess.Popen[str], seconds: float) -> str:
    """Return the reason of the head's failure, which it has to give within so many seconds."""
    answer = stack.answer(head, seconds)
    assert answer["Status"] == "FAILURE"
    assert head.wait(PATIENCE) != 0
    assert stack.aws("parameters") == {}
    return answer["Reason"]


def kept_log(stack: Stack, node: subprocess.Popen[str]) -> str:
    """Return what the bucket has of the node's boot, which has to fail."""
    assert node.wait(PATIENCE) != 0
    name = f"{STACK}/boot-failures/{INSTANCE}.log"
    assert stack.aws("objects") == [name]
    found: str = stack.aws("text", name)
    return found


def test_a_package_that_does_not_install_fails_head_and_node(
    opened: Opened, index: Path, tmp_path: Path
) -> None:
    """The index has another file of boto3 than the user's machine has packed."""
    stack = opened("head", "node0", index=spoil(index, tmp_path / "index", "boto3"))
    node = stack.boot("node0", INSTANCE)
    reason = assert_failed(stack, stack.boot("head", "i-0000000000000head"), PATIENCE)
    assert "boto3" in reason
    assert re.search(r"Expected sha256 \w{64} .* Got +\w{64}", reason), reason
    assert "DO NOT MATCH THE HASHES" in kept_log(stack, node)


def test_a_boot_that_hangs_ends_within_its_limit(opened: Opened) -> None:
    """On the head apt-get waits for ever, for the node the index does."""
    stack = opened("head", "node0")
    stack.room.write("/run/apt-hangs", "", "head")
    node = stack.boot("node0", INSTANCE, boot_seconds=NODE_LIMIT, index_port=SILENT_PORT)
    head = stack.boot("head", "i-0000000000000head", boot_seconds=HEAD_LIMIT)
    reason = assert_failed(stack, head, HEAD_LIMIT + SLACK)
    assert "apt-get -o DPkg::Lock::Timeout=300 update" in reason
    assert "timeout: sending signal TERM" in reason
    assert "timeout: sending signal TERM" in kept_log(stack, node)


def test_a_package_that_is_not_what_was_packed_fails_the_stack(
    opened: Opened, package: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.tar.gz"
    other.write_bytes(package.read_bytes() + b"more")
    stack = opened("head", uploaded=other)
    reason = assert_failed(stack, stack.boot("head", "i-0000000000000head"), PATIENCE)
    assert "is not what was packed" in reason
