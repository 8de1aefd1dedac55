"""examples/ec2/deploy.sh against an `aws` that answers from a file: what it calls, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from program_head import PYTHON_HEAD

from adaptdl_elastic.autoscaler.providers.ec2.stacks import STACK_TAG

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "ec2"
CHANGES = "arn:aws:cloudformation:eu-west-1:1:changeSet/awscli-1/2"

AWS = f"""{PYTHON_HEAD}
import json, os, sys
import jmespath
arguments = sys.argv[1:]
with open(os.environ["AWS_LOG"], "a+") as log:
    log.seek(0)
    made = "execute-change-set" in log.read()
    log.write(json.dumps(arguments) + "\\n")
world = json.loads(os.environ["AWS_WORLD"])
answers = {{
    "describe-stacks": {{"Stacks": [{{"Outputs": world["outputs"]}}]}} if made else world["stack"],
    "describe-change-set": {{"Changes": world["changes"]}},
    "get-parameter": {{"Parameter": {{"Value": "ami-today"}}}},
}}
if arguments[1] == "deploy":
    print(world["said"])
elif arguments[1] in answers:
    if answers[arguments[1]] is None:
        sys.exit(254)
    query = arguments[arguments.index("--query") + 1] if "--query" in arguments else "@"
    found = jmespath.search(query, answers[arguments[1]])
    rows = found if isinstance(found, list) else [found]
    print("\\n".join("\\t".join(row) if isinstance(row, list) else str(row) for row in rows))
"""

ADAPTDL = """#!/bin/bash
[ "$1 $2" = "cloud pack" ] && echo package > "$3"
"""

Deploy = Callable[..., tuple[subprocess.CompletedProcess[str], list[list[str]]]]


def change(resource: str, replacement: str) -> dict[str, Any]:
    change = {"LogicalResourceId": resource, "Action": "Modify", "Replacement": replacement}
    return {"Type": "Resource", "ResourceChange": change}


@pytest.fixture
def deploy(tmp_path: Path) -> Deploy:
    (tmp_path / "bin").mkdir()
    for name, text in (("aws", AWS), ("adaptdl", ADAPTDL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("")
    log = tmp_path / "log"

    def run(
        *parameters: str, exists: bool, changes: list[dict[str, Any]], said: str = f"review: {CHANGES}"
    ) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
        world = {"stack": {"Stacks": []} if exists else None, "changes": changes, "said": said}
        world["outputs"] = [{"OutputKey": "HeadInstance", "OutputValue": "i-1"}]
        done = subprocess.run(
            ["bash", EXAMPLES / "deploy.sh", "s", code, "bucket", "vpc", "subnet", "a,b", *parameters],
            env={
                **os.environ,
                "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
                "TMPDIR": str(tmp_path),
                "AWS_LOG": str(log),
                "AWS_WORLD": json.dumps(world),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        return done, [json.loads(line) for line in log.read_text().splitlines()]

    return run


def called(calls: list[list[str]]) -> list[str]:
    return [call[1] for call in calls]


def test_a_new_stack_gets_todays_image_and_is_waited_for(deploy: Deploy) -> None:
    done, calls = deploy(exists=False, changes=[])
    assert done.returncode == 0, done.stderr
    assert called(calls)[-3:] == ["execute-change-set", "wait", "describe-stacks"]
    assert calls[-2][2] == "stack-create-complete"
    assert done.stdout == "HeadInstance\ti-1\n"
    (made,) = [call for call in calls if call[1] == "deploy"]
    assert "HeadImage=ami-today" in made
    assert made[made.index("--tags") + 1] == f"{STACK_TAG}=s", "by which `adaptdl cloud down` finds it"
    digest = hashlib.sha256(b"package\n").hexdigest()
    package = f"s3://bucket/adaptdl/s/package-{digest}.tar.gz"
    assert f"Package={package}" in made
    assert [call[-1] for call in calls if call[:2] == ["s3", "cp"]][-1] == package


def test_an_update_leaves_the_head_and_its_image_alone(deploy: Deploy) -> None:
    changes = [change("NodeTemplate", "False"), change("SpotGroup", "False")]
    done, calls = deploy("Command=other.py", exists=True, changes=changes)
    assert done.returncode == 0, done.stderr
    assert calls[-2][2] == "stack-update-complete"
    (made,) = [call for call in calls if call[1] == "deploy"]
    assert made[-1] == "Command=other.py"
    assert not [word for word in made if word.startswith(("HeadImage", "Package"))]


@pytest.mark.parametrize("replacement", ["True", "Conditional"])
def test_an_update_that_would_replace_the_head_is_refused(deploy: Deploy, replacement: str) -> None:
    done, calls = deploy("Package=x", exists=True, changes=[change("Head", replacement)])
    assert done.returncode == 3
    assert "would replace the head" in done.stderr
    assert called(calls)[-1] == "delete-change-set"
    assert "execute-change-set" not in called(calls)


def test_nothing_to_change_is_no_failure(deploy: Deploy) -> None:
    said = "No changes to deploy. Stack s is up to date"
    done, calls = deploy(exists=True, changes=[], said=said)
    assert (done.returncode, done.stdout.strip()) == (0, said)
    assert called(calls)[-1] == "deploy"


def test_machines_install_only_what_the_user_has_packed() -> None:
    """A name that an index resolves lets whoever publishes under it run code as root on every machine."""
    text = (EXAMPLES / "template.yaml").read_text()
    parameters = yaml.safe_load(text[text.index("Parameters:") : text.index("Resources:")])["Parameters"]
    assert "Default" not in parameters["Package"]
    pattern = re.compile(parameters["Package"]["AllowedPattern"])
    assert not pattern.fullmatch("adaptdl-elastic")
    assert not pattern.fullmatch("s3://bucket/package.tar.gz")
    assert pattern.fullmatch(f"s3://bucket/adaptdl/s/package-{'0' * 64}.tar.gz")
    installed = re.findall(r"pip install (.*)", text)
    assert installed == [
        "--no-deps --require-hashes -r head.txt",
        "--no-deps --require-hashes -r node.txt",
        "-r /opt/job/requirements.txt; fi",
    ], "the last is the user's own, from the archive with the code"


def test_no_update_asks_for_another_image_by_itself() -> None:
    text = (EXAMPLES / "template.yaml").read_text()
    parameters = text[text.index("Parameters:") : text.index("Resources:")]
    image = yaml.safe_load(parameters)["Parameters"]["HeadImage"]
    assert image["Type"] == "AWS::EC2::Image::Id"
    assert "Default" not in image
