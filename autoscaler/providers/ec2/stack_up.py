"""Create a stack or change it: upload what its machines run, have CloudFormation do the rest, and wait.

The account is looked at first: a stack whose nodes could never be bought would cost its head for nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from adaptdl_elastic.autoscaler.providers.base import ProviderError
from adaptdl_elastic.autoscaler.providers.ec2.errors import explained
from adaptdl_elastic.autoscaler.providers.ec2.provider import connect
from adaptdl_elastic.autoscaler.providers.ec2.responses import slots_of
from adaptdl_elastic.autoscaler.providers.ec2.stacks import STACK_TAG, Stacks, is_ours

IMAGE = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
"""The public parameter with the image of the head: Ubuntu 24.04, x86-64."""

QUOTAS = {
    **dict.fromkeys("acdhimrtz", ("L-1216C47A", "L-34B43A08")),
    "g": ("L-DB2E81BA", "L-3819A6DF"),
    "p": ("L-417A185B", "L-7212CCBC"),
    "p5": ("L-417A185B", "L-C4BD4855"),
}
"""First letters of an instance type: the codes of its quotas of vCPUs, on-demand and spot.

Source: Service Quotas, "Amazon EC2", November 2026.
"""

_POLICY = (
    ("Allow", "Update:*", "*"),
    ("Deny", ["Update:Replace", "Update:Delete"], "LogicalResourceId/Head"),
)
HEAD_STAYS = [{"Effect": one, "Action": act, "Principal": "*", "Resource": res} for one, act, res in _POLICY]
"""The stack's policy: no update replaces the head, whose disk has etcd's data and the CA."""

# CloudFormation can only delete a stack in one of these states
_REMAINS = ("CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED", "REVIEW_IN_PROGRESS")
_BEGUN = ("CREATE_IN_PROGRESS", "UPDATE_IN_PROGRESS")
_ENDED_WELL = ("CREATE_COMPLETE", "UPDATE_COMPLETE")
_A_DAY = {"DaysAfterInitiation": 1}
_RULE = {"ID": "unfinished", "Status": "Enabled", "Filter": {}, "AbortIncompleteMultipartUpload": _A_DAY}


class StackUp(Stacks):
    """Creates and changes stacks of one account and region.

    Args:
        region: AWS region; None: as boto3 finds it.
        profile: AWS profile; None: as boto3 finds it.
        say: Prints a line for the user.
        clients: Service → boto3 client, instead of new ones.
        clock: Monotonic seconds.
        wait: Called with the seconds between two looks.
    """

    patience = 3600.0
    """Seconds to wait for CloudFormation; the template limits what it waits for."""

    def __init__(
        self,
        region: str | None,
        profile: str | None,
        say: Callable[[str], None],
        clients: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(region, profile, clients=clients, clock=clock, wait=wait)
        given = clients or {}
        self._s3, self._sts, self._quotas = (
            given.get(service) or connect(service, region, profile)
            for service in ("s3", "sts", "service-quotas")
        )
        self._say = say
        self._template = resources.files(__package__).joinpath("stack.yaml").read_text()
        default = re.compile(r"^  (\w+):\n    Type: .*\n    Default: (.*)$", re.MULTILINE)
        self._own_values = dict(default.findall(self._template))

    def up(
        self,
        name: str,
        values: Mapping[str, str],
        bucket: str | None,
        code: Callable[[Path], object] | None,
        package: Callable[[Path], None],
    ) -> dict[str, str]:
        """Create the stack, or change it if it exists, and wait; return its outputs.

        Args:
            name: The stack's name.
            values: Parameters of the template; others keep their values, or have their defaults.
            bucket: That of code and checkpoints; None: the account's own, which is made where it lacks.
            code: Writes the archive of the job's code; None: the stack keeps the code that it has.
            package: Writes the archive that machines install.

        Raises:
            ProviderError: the account cannot have such a stack, a right is missing, or the stack failed.
        """
        before = self._before(name)
        chosen = {**(before or {}), **values}
        if before is None:
            if code is None:
                raise ProviderError(f"there is no stack {name} yet: give the directory and the command, too")
            self._choose(chosen)
            chosen["Bucket"] = bucket or self._own_bucket()
            job = chosen.get("Job") or self._own_values["Job"]
            self._check_unfinished(chosen["Bucket"], f"{name}/checkpoints/{job}")
            chosen["Package"] = self._upload(chosen["Bucket"], f"{name}/package", package)
        elif chosen.get("Bucket") is None or bucket not in (None, chosen["Bucket"]):
            raise ProviderError(f"stack {name} has the bucket {chosen.get('Bucket')}, and keeps it")
        if code is not None:
            chosen["Code"] = self._upload(chosen["Bucket"], f"{name}/code", code)
        request = {
            "StackName": name,
            # what another version of the template says of the head would replace it
            **({"TemplateBody": self._template} if before is None else {"UsePreviousTemplate": True}),
            "Parameters": [{"ParameterKey": key, "ParameterValue": text} for key, text in chosen.items()],
            "Capabilities": ["CAPABILITY_IAM"],
            "StackPolicyBody": json.dumps({"Statement": HEAD_STAYS}),
            "Tags": [{"Key": STACK_TAG, "Value": name}],
        }
        if before is None:
            self._say(f"{name}: CloudFormation creates it, which takes some ten minutes")
            with explained("cloudformation:CreateStack", name):
                # what a failed stack leaves behind would cost, and be in the way of the next try
                return self._done(self._cloudformation.create_stack(**request, OnFailure="DELETE"), name)
        with explained("cloudformation:UpdateStack", name):
            try:
                changed = self._cloudformation.update_stack(**request)
            except ClientError as error:
                if "No updates are to be performed" not in str(error):
                    raise
                self._say(f"{name}: nothing changes")
                return _outputs(self._describe_stack(name) or {})
        return self._done(changed, name)

    # Looking first

    def _describe_stack(self, name: str) -> dict[str, Any] | None:
        """Return a stack as CloudFormation describes it; None if there is none."""
        try:
            return self._look(name)
        except ProviderError as error:
            if "does not exist" not in str(error):
                raise
        return None

    def _before(self, name: str) -> dict[str, str] | None:
        """Return the parameters of a stack; None if it is to be created.

        What a failed try has left is deleted.
        """
        found = self._describe_stack(name)
        if found is None:
            return None
        status = str(found["StackStatus"])
        if not is_ours(found):
            raise ProviderError(f"stack {name} was not made by this program: choose another name")
        if status in _REMAINS:
            self._say(f"{name}: what is left of a try that failed ({status}) is deleted first")
            left = self._read(found)
            self.empty(left, self.patience)
            self.delete(left, self.patience)
            return None
        if status.endswith("_IN_PROGRESS"):
            raise ProviderError(f"stack {name} is {status}: wait until that has ended")
        return {one["ParameterKey"]: one["ParameterValue"] for one in found["Parameters"]}

    def _choose(self, chosen: dict[str, str]) -> None:
        """Add what a new stack needs and the account tells; ProviderError if no node could be bought."""
        types = [chosen.get(key) or self._own_values[key] for key in ("InstanceType", "SecondType")]
        with explained("ec2:DescribeInstanceTypes", ", ".join(types)):
            found = self._ec2.describe_instance_types(InstanceTypes=sorted(set(types)))["InstanceTypes"]
        if len(set((slots := slots_of(found)).values())) > 1:
            given = ", ".join(f"{kind} {count}" for kind, count in slots.items())
            raise ProviderError(f"nodes need equally many GPUs ({given}): give --set SecondType=TYPE")
        cores = {one["InstanceType"]: int(one["VCpuInfo"]["DefaultVCpus"]) for one in found}
        self._check_quotas(types[0], cores[types[0]])
        zones = self._zones(types)
        if "Vpc" not in chosen:
            # traffic between zones costs $0.01 a GB each way
            chosen.setdefault("Zones", f"{zones[0]},{zones[0]}")
        elif "HeadIsPublic" not in chosen and (subnet := chosen.get("HeadSubnet")):
            with explained("ec2:DescribeSubnets", subnet):
                (there,) = self._ec2.describe_subnets(SubnetIds=[subnet])["Subnets"]
            chosen["HeadIsPublic"] = "yes" if there["MapPublicIpOnLaunch"] else "no"
        if "HeadImage" not in chosen:
            with explained("ssm:GetParameter", IMAGE):
                chosen["HeadImage"] = str(self._ssm.get_parameter(Name=IMAGE)["Parameter"]["Value"])

    def _zones(self, types: list[str]) -> list[str]:
        """Return the zones that have the first type, those with the second one first."""
        with explained("ec2:DescribeInstanceTypeOfferings", ", ".join(types)):
            offers = self._ec2.describe_instance_type_offerings(
                LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": types}]
            )["InstanceTypeOfferings"]
        first, second = ({one["Location"] for one in offers if one["InstanceType"] == kind} for kind in types)
        if not first:
            raise ProviderError(f"{self.region} has no {types[0]}: give --set InstanceType=TYPE or --region")
        # not what belongs to a region and is elsewhere, such as Local Zones
        usual = [zone for zone in first if re.fullmatch(f"{self.region}[a-z]", zone)]
        return sorted(usual or first, key=lambda zone: (zone not in second, zone))

    def _check_quotas(self, kind: str, cores: int) -> None:
        """Raise ProviderError if the account may run no instance of a type; say what it may run."""
        codes = QUOTAS.get(kind[:2], QUOTAS.get(kind[0])) if re.match("[a-z][0-9]", kind) else None
        if codes is None:
            return
        most = []
        for what, code in zip(("on-demand", "spot"), codes, strict=True):
            try:
                with explained("servicequotas:GetServiceQuota", code):
                    quota = self._quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"][
                        "Value"
                    ]
            except ProviderError as error:
                self._say(f"how many {what} instances the account may run is not known: {error}")
                return
            most.append(int(quota // cores))
            self._say(f"{what}: the account may run {most[-1]} × {kind} (quota {code}: {quota:g} vCPUs)")
        if not any(most):
            raise ProviderError(
                f"no {kind} can be bought in {self.region}: ask for more of quota {codes[1]} (spot) or "
                f"{codes[0]} at https://console.aws.amazon.com/servicequotas/home/services/ec2/quotas, which "
                f"takes hours to days, or choose another type with --set InstanceType=TYPE"
            )

    # Uploading

    def _own_bucket(self) -> str:
        """Return the bucket of the account for all stacks of the region; make it where it lacks."""
        with explained("sts:GetCallerIdentity"):
            account = str(self._sts.get_caller_identity()["Account"])
        bucket, place = f"adaptdl-{account}-{self.region}", {"LocationConstraint": self.region}
        # us-east-1 is no value of LocationConstraint
        given = {} if self.region == "us-east-1" else {"CreateBucketConfiguration": place}
        with explained("s3:ListBucket, s3:CreateBucket, s3:PutLifecycleConfiguration", bucket):
            try:
                # one of another account, of the same name, would get the code
                self._s3.head_bucket(Bucket=bucket, ExpectedBucketOwner=account)
            except ClientError as error:
                if error.response["Error"]["Code"] not in ("404", "NoSuchBucket"):
                    raise
                self._s3.create_bucket(Bucket=bucket, **given)
                self._s3.put_bucket_lifecycle_configuration(
                    Bucket=bucket, LifecycleConfiguration={"Rules": [_RULE]}
                )
                self._say(f"made the bucket {bucket}, for code and checkpoints of all stacks there")
        return bucket

    def _check_unfinished(self, bucket: str, place: str) -> None:
        """Raise ProviderError if a place has the checkpoints of a job that is done: its nodes would exit."""
        # the note that agents leave beside the checkpoints (agent/cluster/checkpoint_archive.py)
        note, where = b"{}", f"s3://{bucket}/{place}"
        with suppress(ClientError):
            note = self._s3.get_object(Bucket=bucket, Key=f"{place}/finished.json")["Body"].read()
        try:
            done = json.loads(note).get("state") == "done"
        except (ValueError, AttributeError):
            raise ProviderError(f"{where}/finished.json is damaged: move it away to go on") from None
        if done:
            what = f"the job of {where} is done"
            raise ProviderError(f"{what}: give --set Job=ANOTHER, or delete its finished.json")

    def _upload(self, bucket: str, key: str, write: Callable[[Path], object]) -> str:
        """Upload what `write` writes, under its SHA-256; return its URL."""
        with tempfile.TemporaryDirectory(prefix="adaptdl-stack-") as folder:
            path = Path(folder) / "archive.tar.gz"
            write(path)
            data = path.read_bytes()
        name = f"{key}-{hashlib.sha256(data).hexdigest()}.tar.gz"
        with explained("s3:PutObject", f"{bucket}/{name}"):
            self._s3.put_object(Bucket=bucket, Key=name, Body=data)
        return f"s3://{bucket}/{name}"

    # Waiting

    def _done(self, begun: Mapping[str, Any], name: str) -> dict[str, str]:
        """Wait until a stack is not in progress; return its outputs. ProviderError if it failed."""
        identifier, end = str(begun["StackId"]), self._clock() + self.patience
        while True:
            found = self._look(identifier)
            status = str(found["StackStatus"])
            if not status.endswith("_IN_PROGRESS") or self._clock() >= end:
                break
            self._wait(self.interval)
        if status not in _ENDED_WELL:
            if status == "DELETE_COMPLETE":
                self.forget_certificates(name)
            failed = f"stack {name} failed, and is {status}:"
            raise ProviderError("\n  ".join([failed, *self._reasons(identifier)]))
        return _outputs(found)

    def _reasons(self, identifier: str) -> list[str]:
        """Return the first failures of a stack's last change; that of the head has the end of its log."""
        with explained("cloudformation:DescribeStackEvents"):
            pages = self._cloudformation.get_paginator("describe_stack_events").paginate(StackName=identifier)
            events = [event for page in pages for event in page["StackEvents"]]
        told: list[str] = []
        # the newest comes first
        for one in events:
            status = str(one.get("ResourceStatus"))
            if one.get("PhysicalResourceId") == identifier and status in _BEGUN:
                break
            text = f"{one['LogicalResourceId']}: {one.get('ResourceStatusReason', '')}"
            if status.endswith("_FAILED") and "cancelled" not in text:
                told.insert(0, text)
        return told[:5]


def _outputs(stack: Mapping[str, Any]) -> dict[str, str]:
    return {one["OutputKey"]: one["OutputValue"] for one in stack.get("Outputs", [])}
