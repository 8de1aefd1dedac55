"""`adaptdl cloud up`: against moto over HTTP, and against answers that moto does not give."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shlex
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.exceptions import ClientError
from click.testing import CliRunner, Result
from moto_process import IMAGE, REGION, Moto

from adaptdl_elastic.autoscaler.commands.cloud import cloud
from adaptdl_elastic.autoscaler.providers.base import ProviderError
from adaptdl_elastic.autoscaler.providers.ec2 import stack_up
from adaptdl_elastic.autoscaler.providers.ec2.stack_up import HEAD_STAYS, StackUp
from adaptdl_elastic.autoscaler.providers.ec2.stacks import STACK_TAG
from adaptdl_elastic.autoscaler.provisioning import lock
from adaptdl_elastic.rendezvous.schema.submissions import STACK_COMMAND

TEMPLATE = Path(stack_up.__file__).with_name("stack.yaml")
BUCKET = f"adaptdl-123456789012-{REGION}"
# moto looks a public parameter up under its default, and has not this one
NODE_IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"


def up(*arguments: str) -> Result:
    return CliRunner().invoke(cloud, ["up", *arguments])


def objects(moto: Moto) -> dict[str, bytes]:
    s3 = moto.client("s3")
    keys = [one["Key"] for one in s3.list_objects_v2(Bucket=BUCKET).get("Contents", [])]
    return {key: s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}


def group_tags(moto: Moto) -> list[dict[str, str]]:
    groups = moto.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    assert sorted(one["AutoScalingGroupName"] for one in groups) == ["train-on-demand", "train-spot"]
    return [{tag["Key"]: tag["Value"] for tag in group["Tags"]} for group in groups]


@pytest.mark.processes
def test_a_stack_is_made_in_an_empty_account(
    moto: Moto, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moto.client("ssm").put_parameter(Name="/image", Value=IMAGE, Type="String")
    text = TEMPLATE.read_text()
    assert NODE_IMAGE in text
    monkeypatch.setattr(stack_up.resources, "files", lambda _: tmp_path)
    (tmp_path / "stack.yaml").write_text(text.replace(NODE_IMAGE, "/image"))
    monkeypatch.setattr(StackUp, "interval", 0.0)
    monkeypatch.setattr(lock, "pack", lambda target: target.write_bytes(b"package"))
    job = tmp_path / "job"
    job.mkdir()
    (job / "train.py").write_text("print()")
    (job / "notes.txt").write_text("private")
    (job / ".gitignore").write_text("notes.txt")

    done = up("--set", f"HeadImage={IMAGE}", "train", str(job), "train.py", "--epochs", "9", "--name", "a b")
    assert done.exit_code == 0, done.output
    assert f"made the bucket {BUCKET}" in done.output
    assert f"train is up; its checkpoints: s3://{BUCKET}/train/checkpoints/train" in done.output
    assert re.search(r"aws ssm start-session --target i-\w+\n", done.output)
    kept = objects(moto)
    for key, data in kept.items():
        assert re.fullmatch(r"train/(code|package)-[0-9a-f]{64}\.tar\.gz", key)
        assert hashlib.sha256(data).hexdigest() in key
    (code,) = (data for key, data in kept.items() if "code" in key)
    (tmp_path / "code.tar.gz").write_bytes(code)
    with tarfile.open(tmp_path / "code.tar.gz") as archive:
        assert sorted(archive.getnames()) == [".adaptdl/command", ".gitignore", "train.py"]
        command = archive.extractfile(STACK_COMMAND)
        assert command is not None
        assert shlex.split(command.read().decode()) == ["train.py", "--epochs", "9", "--name", "a b"]
    for tags in group_tags(moto):
        assert (
            tags["adaptdl-elastic:settings"]
            == "max-nodes=8 max-hourly-cost=10 max-job-cost= boot-timeout=1200"
        )
        assert tags["adaptdl-elastic:prices"] == ""
    # nodes are in one zone of the stack's own network
    ec2 = moto.client("ec2")
    groups = moto.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    subnets = ec2.describe_subnets(SubnetIds=groups[0]["VPCZoneIdentifier"].split(","))["Subnets"]
    assert len(subnets) == 1, "traffic between zones costs"


def refusal(code: str, text: str = "") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": text}}, "Operation")


class Account:
    """Every client of an account with one stack, and what was called.

    Attributes:
        stack: How CloudFormation describes the stack; None: there is none.
        later: Statuses of the stack after a change, one for each look.
        quotas: vCPUs by code.
        events: Those of the stack, the newest first.
    """

    def __init__(self, status: str | None = None, *later: str) -> None:
        tags = [{"Key": STACK_TAG, "Value": "train"}]
        parameters = {"Bucket": "lab", "Code": "s3://lab/train/code", "MaxNodes": "8"}
        listed = [{"ParameterKey": key, "ParameterValue": text} for key, text in parameters.items()]
        self.stack: dict[str, Any] | None = {"StackName": "train", "StackId": "arn", "Tags": tags}
        self.stack |= {"StackStatus": status, "Parameters": listed, "Outputs": []}
        self.stack = self.stack if status else None
        self.later = list(later)
        self.quotas = {"L-DB2E81BA": 8.0, "L-3819A6DF": 0.0}
        self.events: list[dict[str, str]] = []
        self.called: dict[str, dict[str, Any]] = {}
        self.said: list[str] = []
        self.closed: set[str] = set()
        self.notes: dict[str, bytes] = {}
        self.meta = type("Meta", (), {"region_name": REGION})

    def up(
        self, values: dict[str, str] | None = None, new: bool = True, bucket: str | None = None
    ) -> Account:
        services = ("cloudformation", "autoscaling", "ec2", "s3", "ssm", "sts", "service-quotas")
        clients = dict.fromkeys(services, self)
        made = StackUp(REGION, None, self.said.append, clients, clock=lambda: 0.0, wait=lambda _: None)

        def write(path: Path) -> None:
            path.write_bytes(b"content")

        made.up("train", values or {}, bucket, write if new else None, write)
        return self

    def __getattr__(self, name: str) -> Any:
        def call(**given: Any) -> Any:
            self.called[name] = given
            return {"StackId": "arn"}

        return call

    def describe_stacks(self, StackName: str) -> Any:
        if self.later and self.called.keys() & {"create_stack", "update_stack", "delete_stack"}:
            self.stack = {**(self.stack or {"Outputs": []}), "StackStatus": self.later.pop(0)}
        if self.stack is None:
            raise refusal("ValidationError", f"Stack with id {StackName} does not exist")
        return {"Stacks": [self.stack]}

    def get_paginator(self, name: str) -> Any:
        assert name in ("describe_stack_events", "list_stack_resources")
        page = {"StackEvents": self.events, "StackResourceSummaries": []}
        return type("Pages", (), {"paginate": lambda _, StackName: [page]})()

    def describe_instance_type_offerings(self, **_: Any) -> Any:
        both = ("g5.xlarge", "g6.xlarge")
        offers = [("a", both[:1]), ("b", both), ("c", both), ("-muc-1a", both)]
        listed = [(f"{REGION}{place}", kind) for place, kinds in offers for kind in kinds]
        return {"InstanceTypeOfferings": [{"Location": a, "InstanceType": b} for a, b in listed]}

    def describe_instance_types(self, InstanceTypes: list[str]) -> Any:
        kinds = [
            {
                "InstanceType": kind,
                "VCpuInfo": {"DefaultVCpus": 4},
                "GpuInfo": {"Gpus": [{"Count": 4 if "12x" in kind else 1}]},
            }
            for kind in InstanceTypes
        ]
        return {"InstanceTypes": kinds}

    def get_service_quota(self, ServiceCode: str, QuotaCode: str) -> Any:
        if QuotaCode not in self.quotas:
            raise refusal("AccessDeniedException")
        return {"Quota": {"Value": self.quotas[QuotaCode]}}

    def get_caller_identity(self) -> Any:
        return {"Account": "123456789012"}

    def get_parameter(self, **_: Any) -> Any:
        return {"Parameter": {"Value": "ami-today"}}

    def describe_subnets(self, SubnetIds: list[str]) -> Any:
        return {"Subnets": [{"MapPublicIpOnLaunch": SubnetIds == ["subnet-open"]}]}

    def put_object(self, Bucket: str, Key: str, Body: bytes) -> None:
        if Bucket in self.closed:
            raise refusal("AccessDenied", "no")
        self.called[f"upload {Key.rpartition('-')[0]}"] = {"bucket": Bucket}

    def get_object(self, Bucket: str, Key: str) -> Any:
        if Key not in self.notes:
            raise refusal("NoSuchKey")
        return {"Body": io.BytesIO(self.notes[Key])}

    @property
    def parameters(self) -> dict[str, str]:
        """What CloudFormation was asked for last."""
        request = self.called.get("update_stack") or self.called["create_stack"]
        return {one["ParameterKey"]: one["ParameterValue"] for one in request["Parameters"]}


def test_a_new_stack_gets_zones_that_have_its_types_and_todays_image() -> None:
    account = Account(None, "CREATE_IN_PROGRESS", "CREATE_COMPLETE").up()
    # the first that has both types; a Local Zone is none of the region's own
    assert account.parameters["Zones"] == f"{REGION}b,{REGION}b"
    assert account.parameters["HeadImage"] == "ami-today"
    assert account.called["create_stack"]["OnFailure"] == "DELETE"
    assert any("spot: the account may run 0 × g5.xlarge" in line for line in account.said)
    (deny,) = (one for one in HEAD_STAYS if one["Effect"] == "Deny")
    assert deny["Resource"] == "LogicalResourceId/Head"
    assert json.loads(account.called["create_stack"]["StackPolicyBody"])["Statement"] == HEAD_STAYS


@pytest.mark.parametrize(("subnet", "public"), [("subnet-open", "yes"), ("subnet-private", "no")])
def test_the_head_gets_an_address_where_the_subnet_gives_instances_one(subnet: str, public: str) -> None:
    account = Account(None, "CREATE_COMPLETE").up(
        {"Vpc": "vpc-1", "HeadSubnet": subnet, "Subnets": "subnet-1"}
    )
    assert account.parameters["HeadIsPublic"] == public
    assert "Zones" not in account.parameters


def test_an_account_that_may_buy_no_node_is_told_before_anything_is_made() -> None:
    account = Account()
    account.quotas["L-DB2E81BA"] = 3.0
    with pytest.raises(ProviderError, match=r"no g5\.xlarge can be bought .* quota L-3819A6DF \(spot\)"):
        account.up()
    assert not account.called
    # what cannot be read is no reason to stop
    account = Account(None, "CREATE_COMPLETE")
    account.quotas.clear()
    account.up()
    assert "how many on-demand instances the account may run is not known" in account.said[0]


def test_missing_aws_credentials_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "train.py").touch()
    done = up("--region", REGION, "train", str(tmp_path), "train.py")
    assert done.exit_code == 1
    assert done.output.count("\n") == 1
    assert "no AWS credentials" in done.output


def test_an_update_keeps_what_it_does_not_name() -> None:
    account = Account("CREATE_COMPLETE", "UPDATE_COMPLETE").up({"MaxNodes": "3"}, new=False)
    assert account.parameters == {"Bucket": "lab", "Code": "s3://lab/train/code", "MaxNodes": "3"}
    # a later version of this program may have another template, with another head
    assert account.called["update_stack"]["UsePreviousTemplate"]
    assert "TemplateBody" not in account.called["update_stack"]
    account = Account("UPDATE_COMPLETE", "UPDATE_COMPLETE").up()
    assert account.parameters["Code"].startswith("s3://lab/train/code-")
    assert "upload train/package" not in account.called


def test_an_update_without_changes_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:

    def refuse(_: Account, **__: Any) -> None:
        raise refusal("ValidationError", "No updates are to be performed.")

    monkeypatch.setattr(Account, "update_stack", refuse, raising=False)
    # an earlier change that was undone is no failure of this one
    for status in ("CREATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE"):
        assert Account(status).up(new=False).said == ["train: nothing changes"]


@pytest.mark.parametrize("status", ["ROLLBACK_COMPLETE", "CREATE_FAILED", "DELETE_FAILED"])
def test_the_remains_of_a_failed_stack_are_deleted_first(status: str) -> None:
    account = Account(status, "DELETE_IN_PROGRESS", "DELETE_COMPLETE", "CREATE_COMPLETE").up()
    names = list(account.called)
    assert names.index("delete_stack") < names.index("create_stack")
    assert "delete_parameters" in names
    assert "update_stack" not in account.called


def test_a_stack_of_others_and_one_that_changes_are_left_alone() -> None:
    with pytest.raises(ProviderError, match="is UPDATE_IN_PROGRESS: wait"):
        Account("UPDATE_IN_PROGRESS").up()
    account = Account("ROLLBACK_COMPLETE")
    assert account.stack is not None
    account.stack["Tags"] = []
    with pytest.raises(ProviderError, match="was not made by this program"):
        account.up()
    assert not account.called


def test_a_failure_shows_the_end_of_the_heads_log() -> None:
    account = Account(None, "CREATE_IN_PROGRESS", "DELETE_COMPLETE")
    log = "the head did not come up: pip: no such file | exit 1"

    def event(name: str, status: str, reason: str, resource: str = "") -> dict[str, str]:
        told = {"LogicalResourceId": name, "ResourceStatus": status, "ResourceStatusReason": reason}
        return {**told, "PhysicalResourceId": resource}

    account.events = [
        event("Routes", "CREATE_FAILED", "Resource creation cancelled"),
        event("HeadServes", "CREATE_FAILED", log),
        event("train", "CREATE_IN_PROGRESS", "User Initiated", "arn"),
        event("Head", "CREATE_FAILED", "an earlier try"),
    ]
    with pytest.raises(ProviderError) as failed:
        account.up()
    assert str(failed.value) == f"stack train failed, and is DELETE_COMPLETE:\n  HeadServes: {log}"
    # the head may have published its certificates before
    assert account.called["delete_parameters"]["Names"][0] == "/adaptdl/train/ca.pem"


def test_a_bucket_that_is_named_is_used_and_never_made() -> None:
    account = Account(None, "CREATE_COMPLETE").up(bucket="data")
    assert account.parameters["Bucket"] == "data"
    assert account.called["upload train/code"] == {"bucket": "data"}
    assert "create_bucket" not in account.called
    with pytest.raises(ProviderError, match="has the bucket lab, and keeps it"):
        Account("CREATE_COMPLETE").up(bucket="data")


@pytest.mark.parametrize("code", ["404", "403"])
def test_the_accounts_own_bucket_is_made_once_and_another_persons_gets_nothing(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = Account(None, "CREATE_COMPLETE").up()
    assert account.called["head_bucket"] == {"Bucket": BUCKET, "ExpectedBucketOwner": "123456789012"}
    # what people have set for their bucket stays
    assert "put_bucket_lifecycle_configuration" not in account.called

    def asked(_: Account, **__: Any) -> None:
        raise refusal(code)

    monkeypatch.setattr(Account, "head_bucket", asked, raising=False)
    account = Account(None, "CREATE_COMPLETE")
    if code == "404":
        account.up()
        assert account.called["create_bucket"]["Bucket"] == BUCKET
        assert "put_bucket_lifecycle_configuration" in account.called
        return
    with pytest.raises(ProviderError, match=f"on {BUCKET}"):
        account.up()
    assert not [name for name in account.called if name.startswith("upload")]


def test_a_bucket_that_takes_nothing_is_one_line() -> None:
    account = Account()
    account.closed.add("data")
    with pytest.raises(ProviderError, match="s3:PutObject"):
        account.up(bucket="data")


def test_types_of_different_sizes_are_refused() -> None:
    with pytest.raises(ProviderError, match=r"equally many GPUs \(g5\.12xlarge 4, g6\.xlarge 1\)"):
        Account().up({"InstanceType": "g5.12xlarge"})


def test_a_new_stack_for_a_job_that_is_done_buys_nothing() -> None:
    account = Account()
    account.notes["train/checkpoints/train/finished.json"] = b'{"state": "done"}'
    with pytest.raises(ProviderError, match="is done: give --set Job=ANOTHER"):
        account.up()
    account.notes["train/checkpoints/train/finished.json"] = b'{"state": "do'
    with pytest.raises(ProviderError, match="is damaged: move it away"):
        account.up()
    account = Account(None, "CREATE_COMPLETE")
    account.notes["train/checkpoints/train/finished.json"] = b'{"state": "failed"}'
    account.up()
    assert "create_stack" in account.called


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "{job}", "other.py"), "give a script of"),
        (("train", "{job}"), "give a script of"),
        (("--set", "MaxNodes", "train"), "give KEY=VALUE"),
        (("--set", "Bucket=other", "train"), "Bucket, Code and Package are set"),
    ],
)
def test_a_command_line_that_cannot_be_right(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = up(*(word.format(job=tmp_path) for word in arguments))
    assert (done.exit_code, words in done.output) == (2, True)


def parameters() -> dict[str, Any]:
    text = TEMPLATE.read_text()
    found: dict[str, Any] = yaml.safe_load(text[text.index("Parameters:") : text.index("Rules:")])
    return found["Parameters"]


def test_machines_install_only_what_the_user_has_packed() -> None:
    """A name that an index resolves lets whoever publishes under it run code as root on every machine."""
    for name in ("Package", "Code"):
        one = parameters()[name]
        assert "Default" not in one
        pattern = re.compile(one["AllowedPattern"])
        assert not pattern.fullmatch("adaptdl-elastic")
        assert not pattern.fullmatch("s3://bucket/package.tar.gz")
        assert pattern.fullmatch(f"s3://bucket/s/package-{'0' * 64}.tar.gz")
    installed = re.findall(r"pip install (.*)", TEMPLATE.read_text())
    assert installed == ["--no-deps --require-hashes -r head.txt", "--no-deps --require-hashes -r node.txt"]


def test_no_update_asks_for_another_image_by_itself() -> None:
    image = parameters()["HeadImage"]
    assert image["Type"] == "AWS::EC2::Image::Id"
    assert "Default" not in image
    assert TEMPLATE.stat().st_size < 51_200, "CloudFormation takes no longer text"
