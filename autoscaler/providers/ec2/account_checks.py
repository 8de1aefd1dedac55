"""The checks of `adaptdl doctor --aws`: credentials, permissions, and the setup of the groups.

Every permission is tried, because policies cannot be read reliably. Calls that read are made. Calls that
write are made so that they change nothing (EC2 Auto Scaling has no dry run), as a tag that is removed again.
Where that is impossible, the call names something that does not exist (a process, an instance, a hook, a
receipt): AWS checks the permission first, and then refuses the content.

Two permissions are not tried: SetDesiredCapacity could undo what somebody else has just asked for, and
TerminateInstanceInAutoScalingGroup names no group, so for an instance that does not exist AWS cannot tell
whether a policy for some groups covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from botocore import xform_name
from botocore.exceptions import ClientError

from adaptdl_elastic.autoscaler.providers.base import ProviderError
from adaptdl_elastic.autoscaler.providers.ec2 import responses as read
from adaptdl_elastic.autoscaler.providers.ec2.errors import explained
from adaptdl_elastic.autoscaler.providers.ec2.provider import connect

_TAG = "adaptdl-elastic:doctor"
_NOBODY = "i-00000000000000000"
_NOTHING = "adaptdl-doctor"  # name of a process, a hook and a receipt that do not exist
_CONTENTS = (
    *("ValidationError", "InvalidParameterValue", "InvalidInstanceID", "ReceiptHandleIsInvalid"),
    "ResourceContention",
)


@dataclass(frozen=True)
class Check:
    """The result of one check; `detail` says what was found, or what to do."""

    name: str
    ok: bool
    detail: str


def check_aws(
    asgs: Sequence[str],
    region: str | None = None,
    profile: str | None = None,
    queue_url: str | None = None,
    connect_to: Callable[[str, str | None, str | None], Any] = connect,
) -> list[Check]:
    """Check everything that `adaptdl autoscale` needs for these groups; problems raise no errors."""
    clients: dict[str, Any] = {}
    try:
        for service in ("sts", "autoscaling", "ec2", "sqs"):
            clients[service] = connect_to(service, region, profile)
        with explained("sts:GetCallerIdentity"):
            who = clients["sts"].get_caller_identity()
    except ProviderError as error:
        return [Check("aws credentials", False, str(error))]
    checks = [Check("aws credentials", True, f"{who['Arn']} in {clients['ec2'].meta.region_name}")]
    for name in asgs:
        checks += _group(clients, name)
    some = {"InstanceTypes": ["m5.large"], "MaxResults": 5}
    checks.append(_try(clients, "spot prices", "ec2:DescribeSpotPriceHistory", some))
    if queue_url:
        checks += _queue(clients, queue_url)
    else:
        none = "none given: notices come from the nodes themselves only (--queue-url)"
        checks.append(Check("notice queue", True, none))
    return checks


def _group(clients: dict[str, Any], name: str) -> list[Check]:
    autoscaling = clients["autoscaling"]
    try:
        with explained("autoscaling:DescribeAutoScalingGroups", name):
            answer = autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[name])
    except ProviderError as error:
        return [Check(name, False, str(error))]
    found = answer["AutoScalingGroups"]
    if not found:
        region = autoscaling.meta.region_name
        missing = f"no auto-scaling group {name!r} in {region}: check its name and --region"
        return [Check(name, False, missing)]
    (group,) = found
    return [
        _set_up(group),
        *(_try(clients, name, action, given) for action, given in _attempts(group).items()),
        _policies(autoscaling, name),
    ]


def _attempts(group: read.Answer) -> dict[str, dict[str, Any]]:
    """Return the arguments with which each action is tried; they change nothing, or cannot succeed."""
    name, template = group["AutoScalingGroupName"], read.template_of(group)
    this = {"AutoScalingGroupName": name}
    tag = {"ResourceId": name, "ResourceType": "auto-scaling-group", "Key": _TAG}
    those = {**this, "InstanceIds": [_NOBODY]}
    process = {**this, "ScalingProcesses": [_NOTHING]}
    hook = {**this, "LifecycleHookName": _NOTHING, "InstanceId": _NOBODY}
    launched = {} if template is None else {"ec2:DescribeLaunchTemplateVersions": read.version_of(template)}
    return {
        "autoscaling:CreateOrUpdateTags": {"Tags": [{**tag, "Value": "", "PropagateAtLaunch": False}]},
        "autoscaling:DeleteTags": {"Tags": [tag]},
        # without arguments it changes nothing; a value that was just read may have been changed since
        "autoscaling:UpdateAutoScalingGroup": this,
        "autoscaling:SuspendProcesses": process,
        "autoscaling:ResumeProcesses": process,
        "autoscaling:SetInstanceProtection": {**those, "ProtectedFromScaleIn": True},
        "autoscaling:RecordLifecycleActionHeartbeat": hook,
        "autoscaling:CompleteLifecycleAction": {**hook, "LifecycleActionResult": "CONTINUE"},
        "autoscaling:DescribeScalingActivities": {**this, "MaxRecords": 1},
        "autoscaling:DescribeLifecycleHooks": this,
        **launched,
        "ec2:DescribeInstances": {"MaxResults": 5},
        "ec2:DescribeInstanceTypes": {"InstanceTypes": ["t3.micro"]},
    }


def _set_up(group: read.Answer) -> Check:
    name, low, high = group["AutoScalingGroupName"], int(group["MinSize"]), int(group["MaxSize"])
    problems = []
    try:
        read.check_group(group)
    except ProviderError as error:
        problems.append(str(error))
    if high == 0:
        problems.append("its Max is 0: nothing can be had of it")
    if read.template_of(group) is None:
        problems.append("it has no launch template")
    notes = f"{low} to {high} nodes, {group['DesiredCapacity']} wanted"
    return Check(name, not problems, "; ".join(problems) or notes)


def _policies(autoscaling: Any, name: str) -> Check:
    """Check whether a scaling policy also decides the group's size."""
    action = "autoscaling:DescribePolicies"
    try:
        with explained(action, name):
            found = autoscaling.describe_policies(AutoScalingGroupName=name)["ScalingPolicies"]
    except ProviderError as error:
        return Check(f"{name}: {action}", False, str(error))
    others = ", ".join(sorted(policy["PolicyName"] for policy in found))
    if others:
        detail = f"it has scaling policies of its own ({others}), which undo the autoscaler's: delete them"
        return Check(f"{name}: scaling policies", False, detail)
    return Check(f"{name}: scaling policies", True, "none but the autoscaler decides its size")


def _try(clients: Mapping[str, Any], name: str, action: str, given: Mapping[str, Any]) -> Check:
    """Call an action; a refusal of its content shows that the permission is there."""
    service, _, call = action.partition(":")
    try:
        with explained(action, name):
            try:
                getattr(clients[service], xform_name(call))(**given)
            except ClientError as error:
                if str(error.response.get("Error", {}).get("Code", "")) not in _CONTENTS:
                    raise
    except ProviderError as error:
        return Check(f"{name}: {action}", False, str(error))
    return Check(f"{name}: {action}", True, "allowed")


def _queue(clients: Mapping[str, Any], url: str) -> list[Check]:
    try:
        with explained("sqs:GetQueueAttributes", url):
            answer = clients["sqs"].get_queue_attributes(
                QueueUrl=url, AttributeNames=["ApproximateNumberOfMessages"]
            )
    except ProviderError as error:
        return [Check("notice queue", False, str(error))]
    waiting = answer["Attributes"]["ApproximateNumberOfMessages"]
    return [
        Check("notice queue", True, f"{waiting} messages wait"),
        # the messages are visible again at once, for the autoscaler
        _try(clients, url, "sqs:ReceiveMessage", {"QueueUrl": url, "VisibilityTimeout": 0}),
        _try(clients, url, "sqs:DeleteMessage", {"QueueUrl": url, "ReceiptHandle": _NOTHING}),
    ]
