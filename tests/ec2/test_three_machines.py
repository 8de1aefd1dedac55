"""Head and nodes of the EC2 template run their user data on machines that share nothing, until they train.

The harness is tests/support/ec2_machines.py. Two failures follow, each on the head and on a node: a package
that does not install, and a boot that hangs.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ec2_aws import SILENT_PORT
from ec2_machines import JOB, Stack, pack_package, until
from installed_wheels import index_of_installed, spoil
from machines import PATIENCE, ROOT, NoRoomError, Room
from package_index import required_names

pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(500)]

NODES = ("node0", "node1")
TRAIN = ROOT / "tests" / "agent" / "scripts" / "train.py"
PKI = "/etc/adaptdl/pki"
# A machine without a GPU has one slot. The last of two options counts.
PARAMETERS = {"Command": "--nproc-per-node=1 train.py 60 0.1", "MaxNodes": "2", "MaxJobCost": "12.5"}
LIMIT = 8  # seconds of a boot that hangs

Opened = Callable[..., Stack]


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of what this program needs, and of what its wheel is built with; all workers share it."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if folder.name.startswith("popen-") else folder
    return index_of_installed(folder / "wheels", [*required_names("adaptdl-elastic"), "setuptools"])


@pytest.fixture(scope="session")
def package(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `adaptdl cloud pack` makes of this checkout, with the real lock files."""
    target = tmp_path_factory.mktemp("package") / "package.tar.gz"
    pack_package(target, index)
    return target


@pytest.fixture
def opened(index: Path, package: Path, tmp_path: Path) -> Iterator[Opened]:
    """Make a stack whose machines are these, with another index if there is one."""
    code = tmp_path / "code.tar.gz"
    with tarfile.open(code, "w:gz") as archive:
        archive.add(TRAIN, "./train.py")
    with ExitStack() as stack:

        def make(*machines: str, index: Path = index) -> Stack:
            try:
                room = stack.enter_context(Room("aws", *machines))
            except NoRoomError as error:
                pytest.skip(f"no machines of one's own: {error}")
            (tmp_path / "stack").mkdir()
            return Stack(room, tmp_path / "stack", index, package, code, PARAMETERS)

        yield make


def boot_nodes(stack: Stack) -> list[str]:
    """Start a machine for each instance that the autoscaler orders; return what the instances are called."""
    begun: list[str] = []
    for node in NODES:

        def ordered() -> list[str]:
            return [one["id"] for one in stack.aws("instances") if one["id"] not in begun]

        (instance, *_) = until("no instance is ordered", ordered, 60.0)
        stack.boot(node, instance)
        begun.append(instance)
    return begun


def status(stack: Stack) -> dict[str, object]:
    found: dict[str, object] = json.loads(stack.on_head(f"adaptdl status {JOB} --json"))
    return found


def test_two_nodes_of_a_stack_train_one_job_in_one_generation(opened: Opened) -> None:
    stack = opened("head", *NODES)
    room = stack.room
    head = stack.boot("head", "i-0000000000000head", life_cycle="on-demand")
    answer = stack.answer(head, 120.0)
    assert (answer["Status"], answer["Reason"]) == ("SUCCESS", "it serves"), answer
    stack.on_head("adaptdl autoscale --set min-nodes=2")
    instances = boot_nodes(stack)
    print(instances)
    until("x", lambda: "train" in stack.on_head("adaptdl ls"), 120)
    print(stack.on_head("adaptdl ls; adaptdl status train; adaptdl status train --json"))
    print(stack.logs())
    assert 0
