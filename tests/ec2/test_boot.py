"""The head's user data as CloudFormation hands it over, run as a shell runs it, against S3 and SSM over HTTP.

It runs as root in namespaces of its own: /etc is a copy, /opt and /var/log are empty, and there is no network
but loopback. Stand-ins are apt-get, and a systemctl that starts the units' commands.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from etcd_server import find_etcd
from program_head import PYTHON_HEAD

from adaptdl_elastic.autoscaler.provisioning import wheel
from adaptdl_elastic.autoscaler.provisioning.lock import locked

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces, /etc and /opt of its own need root"),
]

NAMESPACES = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
TEMPLATE = Path(__file__).resolve().parents[2] / "autoscaler" / "providers" / "ec2" / "stack.yaml"
VALUES = {
    "AWS::Region": "eu-west-1", "AWS::StackName": "stack", "Address": "127.0.0.2", "Job": "train",
    "InstanceType": "m7i.large", "SecondType": "m6i.large", "OnDemandPrice": "0.1", "MaxNodes": "2",
    "MaxHourlyCost": "1", "MaxJobCost": "12.5",
    "Notices": "http://127.0.0.1:5000/queue", "HeadAnswer": "http://127.0.0.1:5001/answer",
}  # fmt: skip

# loopback, S3 and SSM by moto, the place where CloudFormation would wait; then the user data
BOOT = """
set -e
ip link set lo up
mount -t tmpfs none /opt
mount -t tmpfs none /var/log
cp -a /etc "$WORK/etc"
grep -q '^etcd:' "$WORK/etc/group" || echo 'etcd:x:987:' >> "$WORK/etc/group"
mount --bind "$WORK/etc" /etc
"$PYTHON" "$WORK/world.py" serve &
"$PYTHON" "$WORK/world.py" seed
code=0
env PATH="$WORK/bin:$PATH" PYTHONPATH="$SITE" bash "$WORK/user-data.sh" || code=$?
"$PYTHON" "$WORK/world.py" report "$code"
"""

WORLD = """
import http.server, json, os, sys, threading, time, urllib.request
from pathlib import Path
import boto3
work = Path(os.environ["WORK"])

class Answer(http.server.BaseHTTPRequestHandler):
    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        (work / "answer.json").write_bytes(body)
        self.send_response(200)
        self.end_headers()

if sys.argv[1] == "serve":
    from moto.server import ThreadedMotoServer
    ThreadedMotoServer(ip_address="127.0.0.1", port=5000).start()
    http.server.HTTPServer(("127.0.0.1", 5001), Answer).serve_forever()
elif sys.argv[1] == "seed":
    while True:
        try:
            urllib.request.urlopen("http://127.0.0.1:5000/moto-api/", timeout=5)
            break
        except OSError:
            time.sleep(0.1)
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    s3.upload_file(str(work / "package.tar.gz"), "bucket", os.environ["KEY"])
else:
    found = boto3.client("ssm").describe_parameters()["Parameters"]
    answer = work / "answer.json"
    report = {"code": int(sys.argv[2]), "parameters": sorted(one["Name"] for one in found),
              "answer": json.loads(answer.read_text()) if answer.exists() else None}
    (work / "report.json").write_text(json.dumps(report))
"""

# `enable --now UNIT ...`: starts each unit's command with its environment, and returns when etcd answers
SYSTEMCTL = f"""{PYTHON_HEAD}
import os, re, shlex, socket, subprocess, sys, time
if sys.argv[1:3] != ["enable", "--now"]:
    sys.exit(0)
for unit in sys.argv[3:]:
    text = open(f"/etc/systemd/system/{{unit}}.service").read().replace("\\\\\\n", " ")
    command = shlex.split(re.search(r"^ExecStart=(.*)$", text, re.M)[1])
    command[0] = os.environ["ETCD"] if command[0] == "/usr/bin/etcd" else command[0]
    environment = dict(os.environ)
    for file in re.findall(r"^EnvironmentFile=(.*)$", text, re.M):
        environment.update(line.split("=", 1) for line in open(file).read().split())
    state = re.search(r"^StateDirectory=(.*)$", text, re.M)
    if state:
        os.makedirs(f"/var/lib/{{state[1]}}", mode=0o700, exist_ok=True)
    folder = re.search(r"^WorkingDirectory=(.*)$", text, re.M)
    with open(f"/var/log/{{unit}}.log", "w") as log:
        given = {{"stdout": log, "stderr": log, "cwd": folder and folder[1], "env": environment}}
        subprocess.Popen(command, start_new_session=True, **given)
    while "etcd" in unit:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 2379)) == 0:
                break
        time.sleep(0.1)
"""


class _Loader(yaml.SafeLoader):
    """CloudFormation's short forms as their values."""


_Loader.add_multi_constructor("!", lambda loader, _suffix, node: _plain(loader, node))


def _plain(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return loader.construct_scalar(node)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    assert isinstance(node, yaml.MappingNode)
    return loader.construct_mapping(node, deep=True)


def user_data(package: str) -> str:
    template = yaml.load(TEMPLATE.read_text(), _Loader)
    data = template["Resources"]["HeadTemplate"]["Properties"]["LaunchTemplateData"]["UserData"]
    values = {**VALUES, "Package": package}
    return re.sub(r"\$\{([A-Za-z:]+)\}", lambda found: values[found[1]], data["Fn::Base64"][0])


def boot(folder: Path, package: bytes, key: str) -> dict[str, Any]:
    """Run the head's user data; return its exit code, the parameters it stored, and what it answered."""
    (folder / "bin").mkdir()
    programs = {
        "apt-get": "#!/bin/sh\n",
        "systemctl": SYSTEMCTL,
        "python3": f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n',
    }
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "package.tar.gz").write_bytes(package)
    (folder / "world.py").write_text(WORLD)
    (folder / "boot.sh").write_text(BOOT)
    (folder / "user-data.sh").write_text(user_data(f"s3://bucket/{key}"))
    credentials = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    environment = {
        **os.environ, **credentials, "WORK": str(folder), "PYTHON": sys.executable, "KEY": key,
        "SITE": sysconfig.get_path("purelib"), "ETCD": str(find_etcd()),
        "AWS_ENDPOINT_URL": "http://127.0.0.1:5000", "AWS_DEFAULT_REGION": "eu-west-1",
    }  # fmt: skip
    done = subprocess.run(
        [*NAMESPACES, "bash", folder / "boot.sh"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (folder / "report.json").exists(), done.stdout + done.stderr
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    report["output"] = done.stdout + done.stderr
    return report


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """This program's own wheel and a lock file of nothing else; the rest is on PYTHONPATH."""
    probe = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no namespaces here: {probe.stderr.strip()}")
    folder = tmp_path_factory.mktemp("package")
    own = wheel.own_wheel(folder)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(own, own.name)
        lock = locked([own]).encode()
        member = tarfile.TarInfo("head.txt")
        member.size = len(lock)
        archive.addfile(member, io.BytesIO(lock))
    return packed.getvalue()


def key_of(package: bytes) -> str:
    return f"adaptdl/stack/package-{hashlib.sha256(package).hexdigest()}.tar.gz"


@pytest.mark.exhaustive
def test_a_head_that_serves_says_so(package: bytes, tmp_path: Path) -> None:
    report = boot(tmp_path, package, key_of(package))
    assert report["code"] == 0, report["output"]
    assert (report["answer"]["Status"], report["answer"]["Reason"]) == ("SUCCESS", "it serves")
    names = [f"/adaptdl/stack/{name}" for name in ("ca.pem", "node-key.pem", "node.pem")]
    assert report["parameters"] == names
    unit = (tmp_path / "etc/systemd/system/adaptdl-autoscale.service").read_text()
    assert "--max-hourly-cost 1 " in unit
    assert "--job train --max-job-cost 12.5\n" in unit


@pytest.mark.exhaustive
def test_a_package_that_is_not_what_was_packed_fails_the_stack(package: bytes, tmp_path: Path) -> None:
    report = boot(tmp_path, package + b"more", key_of(package))
    assert report["code"] != 0
    assert report["answer"]["Status"] == "FAILURE"
    assert "is not what was packed" in report["answer"]["Reason"]
    assert report["parameters"] == []
