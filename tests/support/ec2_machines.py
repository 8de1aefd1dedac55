"""A stack of the EC2 template on machines of tests/support/machines.py: each runs its own user data.

`aws` is what they reach of AWS (ec2_aws.py). `head` and the nodes share nothing. They have the interpreter
that the test's environment is made from, and nothing of that environment: what runs in /opt/adaptdl has been
installed there by the user data, from the index on `aws`. Stand-ins are apt-get, systemctl, the instance
metadata service and the wait condition.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloud_template import group_tags, user_data
from ec2_aws import (
    ANSWER_PORT,
    AWS_PORT,
    BUCKET,
    INDEX_PORT,
)
from etcd_server import find_etcd
from machines import PATIENCE, ROOT, Room
from moto_process import REGION
from package_index import served
from polling import until

SUPPORT = ROOT / "tests" / "support"
STACK, JOB = "stack", "train"
TYPES = ("g5.xlarge", "g6.xlarge")
ZONE = f"{REGION}a"
STAND_INS = "/usr/local/lib/stand-ins"
BASE_PYTHON = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
# what Debian's python3-boto3 brings
_BOTO3 = ("boto3", "botocore", "s3transfer", "jmespath", "urllib3", "dateutil", "six.py")
# cloud-init gives a script no HOME
CLOUD_INIT = ("env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
SCRIPT = "/var/lib/cloud/instance/scripts/part-001"
LOG = "/var/log/adaptdl-boot.log"

# `update` and `install -y PACKAGE...`. A file /run/apt-hangs makes it wait for ever.
APT_GET = f"""#!/bin/sh
while [ -e /run/apt-hangs ]; do sleep 1000; done
case " $* " in
    *" update "*) exit 0 ;;
    *" install -y "*) ;;
    *) echo "the stand-in for apt-get does not know: $*"; exit 100 ;;
esac
while [ "$1" != -y ]; do shift; done; shift
for package; do
    case $package in
        etcd-server)
            getent passwd etcd > /dev/null || useradd --system --user-group --home-dir /var/lib/etcd etcd
            cp {STAND_INS}/etcd /usr/bin/etcd ;;
        python3-boto3)
            mkdir -p {STAND_INS}/python3
            for name in {" ".join(_BOTO3)}; do ln -sf {{site}}/$name {STAND_INS}/python3/; done ;;
        python3-venv | openssl) ;;
        *) echo "E: Unable to locate package $package"; exit 100 ;;
    esac
done
"""

# what is on this machine and not on an instance goes; what is on an instance comes
PREPARE = f"""
rm -rf /opt/adaptdl /opt/job /etc/adaptdl /etc/systemd/system /usr/bin/etcd /usr/local/bin/etcd /etc/pip.conf
rm -f /usr/bin/python3 /usr/local/bin/python3* /usr/bin/apt-get /usr/bin/systemctl {LOG}
mkdir -p /etc/systemd/system {STAND_INS} /root/.aws /var/lib/cloud/data /var/lib/cloud/instance/scripts
# the firmware says that this is an instance
if [ -e /sys/class/dmi ]; then place=/sys/class/dmi; else place=/sys/class; fi
mount -t tmpfs tmpfs $place
mkdir -p /sys/class/dmi/id
echo 'Amazon EC2' > /sys/class/dmi/id/sys_vendor
ip addr add 169.254.169.254/32 dev lo
"""


def key_of(kind: str, path: Path) -> str:
    """Return the key under which `adaptdl cloud up` uploads a file."""
    return f"{STACK}/{kind}-{hashlib.sha256(path.read_bytes()).hexdigest()}.tar.gz"


@dataclass(frozen=True)
class Files:
    """What machines of a stack install.

    Args:
        index: A package index, as installed_wheels.py writes it.
        package: What `adaptdl cloud pack` wrote; the parameter `Package` has its SHA-256.
        uploaded: What is in the bucket as the package.
        code: The archive of the training script.
        other_code: One that replaces it.
    """

    index: Path
    package: Path
    uploaded: Path
    code: Path
    other_code: Path


class Stack:
    """A stack whose machines are those of a room: `aws`, `head`, and nodes.

    Args:
        room: The machines.
        folder: An empty folder of this machine.
        files: What they install.
        parameters: Parameters of the template that have no default, or another value.
    """

    def __init__(self, room: Room, folder: Path, files: Files, parameters: Mapping[str, str]) -> None:
        self.room, self.folder = room, folder
        self._aws = f"http://{room.addresses['aws']}"
        log = folder / "aws.log"
        serve = [sys.executable, str(SUPPORT / "ec2_aws.py"), "serve", str(folder), str(files.index)]
        server = room.popen_beside(serve, "aws", log)
        assert server.stdout is not None
        assert server.stdout.readline().startswith("ready"), log.read_text()
        package = key_of("package", files.package)
        keys = {"code": key_of("code", files.code), "other": key_of("code", files.other_code)}
        uploads = [f"{package}={files.uploaded}", f"{keys['code']}={files.code}"]
        uploads.append(f"{keys['other']}={files.other_code}")
        most = parameters.get("MaxNodes", "8")
        tags = json.dumps(group_tags("SpotGroup", {"AWS::StackName": STACK, **parameters}))
        queue = self.aws("make_stack", STACK, ",".join(TYPES), most, tags, *uploads)
        self.code, self.other_code = (f"s3://{BUCKET}/{keys[name]}" for name in ("code", "other"))
        self._values = {
            "AWS::Region": REGION,
            "AWS::StackName": STACK,
            "AWS::AccountId": "123456789012",
            "AWS::Partition": "aws",
            "Job": JOB,
            "Bucket": BUCKET,
            "Code": self.code,
            "Package": f"s3://{BUCKET}/{package}",
            "Notices": queue.replace("127.0.0.1", room.addresses["aws"]),
            "HeadAnswer": f"{self._aws}:{ANSWER_PORT}/answer?signed=a%2Fb&expires=1",
            "HeadInterface.PrimaryPrivateIpAddress": room.addresses["head"],
            **parameters,
        }

    def aws(self, function: str, *arguments: str) -> Any:
        """Call a function of ec2_aws.py."""
        call = [sys.executable, str(SUPPORT / "ec2_aws.py"), "call", function, *arguments]
        process = self.room.popen_beside(call, "aws")
        said, wrong = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, wrong
        return json.loads(said)

    def boot(
        self,
        machine: str,
        instance: str,
        boot_seconds: int | None = None,
        life_cycle: str = "spot",
        index_port: int = INDEX_PORT,
    ) -> subprocess.Popen[str]:
        """Start a machine as this instance: its metadata service, then its user data.

        Args:
            machine: One of the room.
            instance: Its identifier.
            boot_seconds: The limit of its boot instead of the template's.
            life_cycle: `spot` or `on-demand`.
            index_port: Where on `aws` its pip finds packages.
        """
        role = "head" if machine == "head" else "node"
        self._prepare(machine, index_port)
        identity = f"--instance {instance} --type {TYPES[0]} --zone {ZONE} --life-cycle {life_cycle}"
        imds = f"{shlex.quote(str(SUPPORT / 'fake_imds.py'))} --address 169.254.169.254:80"
        # it ends with its input, which nothing ever closes
        command = f"sleep infinity | {shlex.quote(sys.executable)} {imds} --role {STACK}-{role} {identity}"
        service = self.room.popen(["sh", "-c", command], machine)
        assert service.stdout is not None
        assert service.stdout.readline().startswith("http://169.254.169.254")
        self.room.write("/var/lib/cloud/data/instance-id", f"{instance}\n", machine)
        text = user_data("HeadTemplate" if role == "head" else "NodeTemplate", self._values, boot_seconds)
        self.room.write(SCRIPT, text, machine)
        self.room.outside(machine, SCRIPT).chmod(0o700)
        return self.room.popen([*CLOUD_INIT, SCRIPT], machine, log=self.folder / f"{machine}.log")

    def _prepare(self, machine: str, index_port: int) -> None:
        room = self.room
        room.bash(PREPARE, machine)
        site = shlex.quote(sysconfig.get_path("purelib"))
        base = shlex.quote(str(BASE_PYTHON))
        programs = {
            "apt-get": APT_GET.replace("{site}", site),
            "systemctl": f'#!/bin/sh\nexec {base} {STAND_INS}/systemctl.py "$@"\n',
            # only the system's python3 sees what apt-get has installed for it
            "python3": f'#!/bin/sh\nPYTHONPATH={STAND_INS}/python3 exec {base} "$@"\n',
        }
        for name, text in programs.items():
            room.write(f"/usr/bin/{name}", text, machine)
            room.outside(machine, f"/usr/bin/{name}").chmod(0o755)
        room.write(f"{STAND_INS}/systemctl.py", (SUPPORT / "stand_in_systemctl.py").read_text(), machine)
        if machine == "head":
            room.provide(find_etcd(), f"{STAND_INS}/etcd", machine)
        index = f"http://{room.addresses['aws']}:{index_port}/simple"
        trusted = f"trusted-host = {room.addresses['aws']}"
        own = "no-cache-dir = true\ndisable-pip-version-check = true\nno-compile = true"
        room.write("/etc/pip.conf", f"[global]\nindex-url = {index}\n{trusted}\n{own}\n", machine)
        # an address, for which boto3 does not put the bucket's name in front of the host's
        room.write("/root/.aws/config", f"[default]\nendpoint_url = {self._aws}:{AWS_PORT}\n", machine)

    def answer(self, head: subprocess.Popen[str], seconds: float) -> dict[str, str]:
        """Return what the head has answered to the wait condition.

        Raises:
            TimeoutError: it has answered nothing within so many seconds.
        """
        file = self.folder / "answer.json"
        until(f"no answer\n{self.log('head')}", file.exists, seconds, 0.1)
        found: dict[str, str] = json.loads(file.read_text())
        return found

    def log(self, machine: str) -> str:
        """Return what the user data of a machine has said."""
        return (self.folder / f"{machine}.log").read_text()

    def on_head(self, command: str) -> str:
        """Type a command on the head as its page says: as root, with the head's environment."""
        given = "set -a; source /etc/adaptdl/head.env; set +a; PATH=/opt/adaptdl/bin:$PATH"
        return self.room.bash(f"{given}\n{command}", "head")

    def logs(self) -> str:
        """Return the logs of all units of all machines, for the message of a test that fails."""
        found = []
        for machine in set(self.room.addresses) - {"aws"}:
            for log in sorted(self.room.outside(machine, "/var/log").glob("*adaptdl*.log")):
                found.append(f"--- {machine} {log.name}\n{log.read_text(errors='replace')[-4000:]}")
        return "\n".join(found)


def pack_package(target: Path, index: Path) -> None:
    """Run `adaptdl cloud pack` as a user whose index this is."""
    free = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    with served(index) as url:
        subprocess.run(
            [
                *(sys.executable, "-m", "adaptdl_elastic.autoscaler", "cloud", "pack"),
                *("--python", f"3.{sys.version_info.minor}", str(target)),
            ],
            env={
                **free,
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_INDEX_URL": url,
                "UV_DEFAULT_INDEX": url,
                "UV_NO_CONFIG": "1",
                "UV_NO_CACHE": "1",
            },
            check=True,
        )
