"""`adaptdl cloud down` against CloudFormation, EC2 and auto-scaling groups of moto, over HTTP."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from typing import Any

import pytest
from click.testing import CliRunner, Result
from moto_process import IMAGE, REGION, Moto
from thin_aws import Pricing, client_error

from adaptdl_elastic.autoscaler.commands.cloud import cloud
from adaptdl_elastic.autoscaler.providers.base import ProviderError
from adaptdl_elastic.autoscaler.providers.ec2.stacks import STACK_TAG, Machine, Stack, Stacks

HEAD = {
    "Head": {"Type": "AWS::EC2::Instance", "Properties": {"ImageId": IMAGE, "InstanceType": "t3.small"}},
}
NODES = {
    "NodeTemplate": {
        "Type": "AWS::EC2::LaunchTemplate",
        "Properties": {
            "LaunchTemplateData": {"ImageId": IMAGE, "InstanceType": {"Ref": "InstanceType"}},
        },
    },
    "Group": {
        "Type": "AWS::AutoScaling::AutoScalingGroup",
        "Properties": {
            "AutoScalingGroupName": {"Fn::Sub": "${AWS::StackName}-on-demand"},
            "MinSize": "0",
            "MaxSize": "4",
            "DesiredCapacity": "2",
            "AvailabilityZones": [f"{REGION}a"],
            "NewInstancesProtectedFromScaleIn": True,
            "LaunchTemplate": {
                "LaunchTemplateId": {"Ref": "NodeTemplate"},
                "Version": {"Fn::GetAtt": ["NodeTemplate", "LatestVersionNumber"]},
            },
        },
    },
}
PARAMETERS = {
    "InstanceType": {"Type": "String", "Default": "g5.xlarge"},
    "OnDemandPrice": {"Type": "Number", "Default": 1.006},
    "Bucket": {"Type": "String", "Default": "lab"},
}


def make_stack(moto: Moto, name: str, tag: Mapping[str, str], nodes: bool = False, **more: Any) -> None:
    """A stack with a head, with two protected nodes if `nodes`."""
    resources = HEAD | NODES if nodes else HEAD
    moto.client("cloudformation").create_stack(
        StackName=name,
        TemplateBody=json.dumps({"Parameters": PARAMETERS, "Resources": resources}),
        Tags=[{"Key": key, "Value": value} for key, value in tag.items()],
        **more,
    )


def left(moto: Moto) -> tuple[set[str], int]:
    """The stacks that are left, and the number of running instances."""
    stacks = {one["StackName"] for one in moto.client("cloudformation").describe_stacks()["Stacks"]}
    answer = moto.client("ec2").describe_instances(
        Filters=[{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    )
    return stacks, sum(len(kept["Instances"]) for kept in answer["Reservations"])


def down(*arguments: str, answer: str = "") -> Result:
    return CliRunner().invoke(cloud, ["down", *arguments], input=answer)


def finds(monkeypatch: pytest.MonkeyPatch, *stacks: Stack) -> None:
    """Let these be the stacks of the region."""
    monkeypatch.setattr(Stacks, "__init__", lambda *_: None)
    monkeypatch.setattr(Stacks, "region", REGION)
    monkeypatch.setattr(Stacks, "find", lambda _: stacks)


@pytest.mark.processes
def test_stacks_of_ours_go_after_a_yes_and_no_others(moto: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stacks, "interval", 0.0)
    make_stack(moto, "train", {STACK_TAG: "train"}, nodes=True)
    make_stack(moto, "kept", {STACK_TAG: "kept"}, EnableTerminationProtection=True)
    make_stack(moto, "theirs", {"team": "vision"})
    make_stack(moto, "copied", {STACK_TAG: "train"})  # the tag of another stack: not this one's
    for name in ("train", "theirs"):
        moto.client("ssm").put_parameter(Name=f"/adaptdl/{name}/ca.pem", Value="x", Type="SecureString")
    before = left(moto)
    assert before == ({"train", "kept", "theirs", "copied"}, 6)

    done = down("--all", answer="n\n")
    assert done.exit_code == 1
    assert [line.split()[:3] for line in done.output.splitlines()[1:3]] == [
        ["kept", "CREATE_COMPLETE", "0.00"],
        ["train", "CREATE_COMPLETE", "2.01"],
    ]
    assert left(moto) == before

    done = down("--all", answer="y\n")
    assert done.exit_code == 1, "one stays"
    assert "stack kept has termination protection, and is left as it is" in done.output
    assert f"in {REGION}, together 2.01 per hour; t3.small come to that" in done.output
    assert "2 × g5.xlarge, 1 × t3.small" in done.output
    assert left(moto) == ({"kept", "theirs", "copied"}, 3)
    parameters = moto.client("ssm").describe_parameters()["Parameters"]
    assert [one["Name"] for one in parameters] == ["/adaptdl/theirs/ca.pem"]
    assert "train: deleted; checkpoints are in s3://lab/train/checkpoints" in done.output


@pytest.mark.processes
def test_prices_are_those_of_the_list_and_the_head_is_among_them(moto: Moto) -> None:
    make_stack(moto, "train", {STACK_TAG: "train"}, nodes=True)
    services = ("cloudformation", "autoscaling", "ec2", "ssm")
    pricing = Pricing(g5_xlarge="1.2580000000", t3_small="0.0240000000")
    clients = {**{service: moto.client(service) for service in services}, "pricing": pricing}
    (stack,) = Stacks(clients=clients).find()
    assert stack.hourly_cost == pytest.approx(2 * 1.258 + 0.024)
    assert pricing.filters["regionCode"] == REGION
    assert sorted(pricing.asked) == ["g5.xlarge", "t3.small"]

    pricing.fault = client_error("AccessDeniedException", "no", "GetProducts")
    (stack,) = Stacks(clients=clients).find()
    prices = {one.type: one.price for one in stack.machines}
    assert prices == {"g5.xlarge": 1.006, "t3.small": None}, "what the parameter says"
    moto.client("cloudformation").update_stack(
        StackName="train",
        UsePreviousTemplate=True,
        Parameters=[{"ParameterKey": "OnDemandPrice", "ParameterValue": "0"}],
    )
    (stack,) = Stacks(clients=clients).find()
    assert {one.price for one in stack.machines} == {None}, "0 is no price"


@pytest.mark.parametrize(
    ("prices", "end"),
    [
        ((0.024, 1.25), "together 1.27 per hour\n"),
        ((None, 1.25), "together 1.25 per hour; t3.small come to that: AWS's price list cannot be read\n"),
        ((None, None), "0.00 per hour; g5.xlarge, t3.small come to that: AWS's price list cannot be read\n"),
    ],
)
def test_machines_without_a_price_are_named(
    prices: tuple[float | None, ...], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = zip(("t3.small", "g5.xlarge"), prices, strict=True)
    machines = tuple(Machine("i-1", kind, False, price) for kind, price in kinds)
    finds(monkeypatch, Stack("train", "arn", "CREATE_COMPLETE", machines))
    said = down("train", answer="n\n").output
    assert end in said


def test_a_stack_that_is_not_ours_cannot_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    finds(monkeypatch, Stack("train", "arn", "CREATE_COMPLETE"))
    done = down("train", "theirs", "--yes")
    said = f"adaptdl: no stack 'theirs' of ours in {REGION}; ours there: train\n"
    assert (done.exit_code, done.output) == (1, said)
    finds(monkeypatch)
    done = down("--all", "--yes")
    said = f"no stack of ours in {REGION}: nothing to take down there (--region looks elsewhere)\n"
    assert (done.exit_code, done.output) == (0, said)


@pytest.mark.parametrize("arguments", [(), ("--all", "train")])
def test_names_or_all(arguments: tuple[str, ...]) -> None:
    done = down(*arguments)
    assert (done.exit_code, "give names of stacks, or --all" in done.output) == (2, True)


class Group:
    """A group in which terminated instances wait in their hook, and in which one was still being launched."""

    meta = types.SimpleNamespace(region_name=REGION)

    def __init__(self, members: dict[str, str]) -> None:
        self.members = members
        self.terminated: list[str] = []
        self.bounds: dict[str, Any] = {}

    def get_paginator(self, name: str) -> Group:
        assert name == "describe_auto_scaling_groups"
        return self

    def paginate(self, AutoScalingGroupNames: list[str]) -> list[dict[str, Any]]:
        instances = [{"InstanceId": one, "LifecycleState": state} for one, state in self.members.items()]
        return [{"AutoScalingGroups": [{"AutoScalingGroupName": "g", "Instances": instances}]}]

    def update_auto_scaling_group(self, **arguments: Any) -> None:
        self.bounds = arguments

    def terminate_instance_in_auto_scaling_group(self, **arguments: Any) -> None:
        assert not arguments["ShouldDecrementDesiredCapacity"]
        self.terminated.append(arguments["InstanceId"])
        self.members[arguments["InstanceId"]] = "Terminating:Wait"


def emptied(group: Group, steps: list[dict[str, str]]) -> bool:
    """Empty the group of a stack; `steps`: what happens to its members in each time between two looks."""
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds
        for member, state in (steps.pop(0) if steps else {}).items():
            group.members[member] = state
        for member in [one for one, state in group.members.items() if state == "gone"]:
            del group.members[member]

    clients = {"autoscaling": group, "cloudformation": group, "ec2": group, "ssm": group}
    stacks = Stacks(clients=clients, clock=lambda: now[0], wait=wait)
    return stacks.empty(Stack("s", "arn", "CREATE_COMPLETE", groups=("g",)), 20.0)


def test_an_instance_that_came_late_leaves_too_and_each_is_told_once() -> None:
    group = Group({"i-1": "InService"})
    assert emptied(group, [{"i-2": "Pending"}, {"i-1": "gone"}, {"i-2": "gone"}])
    assert group.terminated == ["i-1", "i-2"]
    assert (group.bounds["MinSize"], group.bounds["MaxSize"], group.bounds["DesiredCapacity"]) == (0, 0, 0)


def test_nodes_that_do_not_leave_are_waited_for_only_so_long() -> None:
    group = Group({"i-1": "InService"})
    assert not emptied(group, [])
    assert group.terminated == ["i-1"]


class CloudFormation:
    """A service that says one status after another."""

    meta = types.SimpleNamespace(region_name=REGION)

    def __init__(self, *statuses: str) -> None:
        self.statuses = list(statuses)

    def delete_stack(self, StackName: str) -> None:
        assert StackName == "arn"

    def describe_stacks(self, StackName: str) -> dict[str, Any]:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return {"Stacks": [{"StackStatus": status, "StackStatusReason": "it is in use"}]}


def delete(before: str, *statuses: str) -> None:
    now = [0.0]
    clients: dict[str, Any] = {"cloudformation": CloudFormation(*statuses), "autoscaling": "-", "ec2": "-"}
    clients["ssm"] = Parameters()

    def wait(seconds: float) -> None:
        now[0] += seconds

    Stacks(clients=clients, clock=lambda: now[0], wait=wait).delete(Stack("s", "arn", before), 60.0)


class Parameters:
    """A parameter store without parameters."""

    def delete_parameters(self, Names: list[str]) -> None:
        assert len(Names) == 3


def test_a_failed_deletion_of_a_stack_gives_its_reason() -> None:
    with pytest.raises(ProviderError, match="stack s could not be deleted: it is in use"):
        delete("CREATE_COMPLETE", "DELETE_IN_PROGRESS", "DELETE_FAILED")
    with pytest.raises(ProviderError, match="still DELETE_IN_PROGRESS after 60 s"):
        delete("CREATE_COMPLETE", "DELETE_IN_PROGRESS")


def test_an_earlier_failure_that_is_still_shown_is_no_new_one() -> None:
    delete("DELETE_FAILED", "DELETE_FAILED", "DELETE_IN_PROGRESS", "DELETE_COMPLETE")
