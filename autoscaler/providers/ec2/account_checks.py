"""The checks of `adaptdl doctor --aws`: credentials, permissions, and the setup of the groups.

Every permission is tried, because policies cannot be read reliably. Calls that read are made. Calls that
write are made so that they change nothing (EC2 Auto Scaling has no dry run): a request for the capacity that
a group has, a tag that is removed again. Where that is impossible, the call names something that does not
exist (a process, an instance, a hook, a receipt): AWS checks the permission first, and then refuses the
content.

One permission cannot be tried: TerminateInstanceInAutoScalingGroup names no group, so for an instance that
does not exist AWS cannot tell whether a policy for some groups covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from adaptdl_elastic.autoscaler.providers.base import ProviderError
from adaptdl_elastic.autoscaler.providers.ec2 import responses as read
from adaptdl_elastic.autoscaler.providers.ec2.errors import explained
from adaptdl_elastic.autoscaler.providers.ec2.ownership import OWNER_TAG, tags_of
from adaptdl_elastic.autoscaler.providers.ec2.provider import connect

LEAST_HEARTBEAT = 30.0
"""Fewest seconds that a hook should wait for a heartbeat: EC2's minimum, and enough for checks every 10 s."""
_TAG = "adaptdl-elastic:doctor"
_NOBODY = "i-00000000000000000"
_NOT_TRIED = "autoscaling:SetDesiredCapacity"
_NOTHING = "adaptdl-doctor"  # name of a process, a hook and a receipt that do not exist
_CONTENTS = frozenset(
    {
        "ValidationError",
        "InvalidParameterValue",
        "InvalidInstanceID",
        "ReceiptHandleIsInvalid",
        "ResourceContention",
    }
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
    checks.append(_try("spot prices", "ec2:DescribeSpotPriceHistory", lambda: _spot_prices(clients["ec2"])))
    if queue_url:
        checks += _queue(clients["sqs"], queue_url)
    else:
        checks.append(
            Check(
                "notice queue", True, "none given: notices come from the nodes themselves only (--queue-url)"
            )
        )
    return checks


def _group(clients: dict[str, Any], name: str) -> list[Check]:
    autoscaling, ec2 = clients["autoscaling"], clients["ec2"]
    try:
        with explained("autoscaling:DescribeAutoScalingGroups", name):
            found = autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[name])[
                "AutoScalingGroups"
            ]
    except ProviderError as error:
        return [Check(name, False, str(error))]
    if not found:
        region = autoscaling.meta.region_name
        return [
            Check(name, False, f"no auto-scaling group {name!r} in {region}: check its name and --region")
        ]
    (group,) = found
    checks = [_set_up(group), _owner(group), *_hooks(autoscaling, name)]
    tag = {"ResourceId": name, "ResourceType": "auto-scaling-group", "Key": _TAG}
    attempts: list[tuple[str, Callable[[], Any]]] = [
        (
            "autoscaling:CreateOrUpdateTags",
            lambda: autoscaling.create_or_update_tags(
                Tags=[{**tag, "Value": "", "PropagateAtLaunch": False}]
            ),
        ),
        ("autoscaling:DeleteTags", lambda: autoscaling.delete_tags(Tags=[tag])),
        (
            "autoscaling:UpdateAutoScalingGroup",
            # without arguments it changes nothing; a value that was just read may have been changed since
            lambda: autoscaling.update_auto_scaling_group(AutoScalingGroupName=name),
        ),
        *_refused(autoscaling, name),
        (
            "autoscaling:DescribeScalingActivities",
            lambda: autoscaling.describe_scaling_activities(AutoScalingGroupName=name, MaxRecords=1),
        ),
        (
            "autoscaling:DescribeLifecycleHooks",
            lambda: autoscaling.describe_lifecycle_hooks(AutoScalingGroupName=name),
        ),
        ("ec2:DescribeLaunchTemplateVersions", lambda: _template(ec2, group)),
        ("ec2:DescribeInstances", lambda: ec2.describe_instances(MaxResults=5)),
        ("ec2:DescribeInstanceTypes", lambda: ec2.describe_instance_types(InstanceTypes=["t3.micro"])),
    ]
    return [
        *checks,
        *(_try(name, action, attempt) for action, attempt in attempts),
        _policies(autoscaling, name),
        Check(
            f"{name}: {_NOT_TRIED}",
            True,
            "not tried, for it could undo what somebody else has just asked for: "
            f"see to it that {_NOT_TRIED} is allowed",
        ),
        _termination(clients, name),
    ]


def _refused(autoscaling: Any, name: str) -> list[tuple[str, Callable[[], Any]]]:
    """Return calls that cannot succeed, but fail for another reason than a missing permission."""
    hook = {"AutoScalingGroupName": name, "LifecycleHookName": _NOTHING, "InstanceId": _NOBODY}
    process = {"AutoScalingGroupName": name, "ScalingProcesses": [_NOTHING]}
    return [
        ("autoscaling:SuspendProcesses", _expect(lambda: autoscaling.suspend_processes(**process))),
        ("autoscaling:ResumeProcesses", _expect(lambda: autoscaling.resume_processes(**process))),
        (
            "autoscaling:SetInstanceProtection",
            _expect(
                lambda: autoscaling.set_instance_protection(
                    AutoScalingGroupName=name, InstanceIds=[_NOBODY], ProtectedFromScaleIn=True
                )
            ),
        ),
        (
            "autoscaling:RecordLifecycleActionHeartbeat",
            _expect(lambda: autoscaling.record_lifecycle_action_heartbeat(**hook)),
        ),
        (
            "autoscaling:CompleteLifecycleAction",
            _expect(lambda: autoscaling.complete_lifecycle_action(**hook, LifecycleActionResult="CONTINUE")),
        ),
    ]


def _expect(attempt: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call that accepts the refusal of its content as success."""

    def call() -> None:
        try:
            attempt()
        except ClientError as error:
            if str(error.response.get("Error", {}).get("Code", "")) not in _CONTENTS:
                raise

    return call


def _termination(clients: dict[str, Any], name: str) -> Check:
    action = "autoscaling:TerminateInstanceInAutoScalingGroup"
    found = _try(
        name,
        action,
        _expect(
            lambda: clients["autoscaling"].terminate_instance_in_auto_scaling_group(
                InstanceId=_NOBODY, ShouldDecrementDesiredCapacity=False
            )
        ),
    )
    if found.ok or "no permission" not in found.detail:
        return found
    return Check(
        found.name, True, f"could not be tried without an instance: see to it that {action} is allowed"
    )


def _set_up(group: read.Answer) -> Check:
    name, low, high = group["AutoScalingGroupName"], int(group["MinSize"]), int(group["MaxSize"])
    problems = []
    try:
        read.check_group(group)
    except ProviderError as error:
        problems.append(str(error))
    if low > high:
        problems.append(f"its Min {low} is above its Max {high}")
    if high == 0:
        problems.append("its Max is 0: nothing can be had of it")
    if read.template_of(group) is None:
        problems.append("it has no launch template")
    notes = f"{low} to {high} nodes, {group['DesiredCapacity']} wanted"
    if low > 0:
        notes += "; with a Min above 0 it never shrinks to nothing"
    return Check(name, not problems, "; ".join(problems) or notes)


def _owner(group: read.Answer) -> Check:
    name, owner = group["AutoScalingGroupName"], tags_of(group).get(OWNER_TAG)
    if owner is None:
        return Check(f"{name}: owner", True, "no cluster rules it")
    detail = f"cluster {owner} rules it; `adaptdl autoscale` of another one needs --take-over"
    return Check(f"{name}: owner", True, detail)


def _hooks(autoscaling: Any, name: str) -> list[Check]:
    """Check whether hooks of leaving instances wait long enough between two heartbeats."""
    try:
        with explained("autoscaling:DescribeLifecycleHooks", name):
            answer = autoscaling.describe_lifecycle_hooks(AutoScalingGroupName=name)
    except ProviderError:
        return []  # reported where the permission is tried
    hooks = read.termination_hooks(answer.get("LifecycleHooks", []))
    if not hooks:
        none = (
            "none for instances that leave: they may be gone before their replicas have moved, 2 min at most"
        )
        return [Check(f"{name}: hooks", True, none)]
    return [
        Check(
            f"{name}: hook {hook}",
            timeout >= LEAST_HEARTBEAT,
            f"waits {timeout:g} s for a heartbeat"
            + (
                ""
                if timeout >= LEAST_HEARTBEAT
                else f", which is soon over: give it a HeartbeatTimeout of {LEAST_HEARTBEAT:g} or more"
            ),
        )
        for hook, timeout in hooks.items()
    ]


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


def _template(ec2: Any, group: read.Answer) -> Any:
    template = read.template_of(group)
    if template is None:
        return None
    name = template.get("LaunchTemplateName")
    pointer = {"LaunchTemplateName": name} if name else {"LaunchTemplateId": template["LaunchTemplateId"]}
    version = str(template.get("Version") or "$Default")
    return ec2.describe_launch_template_versions(**pointer, Versions=[version])


def _spot_prices(ec2: Any) -> Any:
    return ec2.describe_spot_price_history(InstanceTypes=["m5.large"], MaxResults=5)


def _try(name: str, action: str, attempt: Callable[[], Any]) -> Check:
    try:
        with explained(action, name):
            attempt()
    except ProviderError as error:
        return Check(f"{name}: {action}", False, str(error))
    return Check(f"{name}: {action}", True, "allowed")


def _queue(sqs: Any, url: str) -> list[Check]:
    try:
        with explained("sqs:GetQueueAttributes", url):
            answer = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["ApproximateNumberOfMessages"])
    except ProviderError as error:
        return [Check("notice queue", False, str(error))]
    waiting = answer["Attributes"]["ApproximateNumberOfMessages"]
    nothing = {"QueueUrl": url, "ReceiptHandle": _NOTHING}
    return [
        Check("notice queue", True, f"{waiting} messages wait"),
        # the messages are visible again at once, for the autoscaler
        _try(url, "sqs:ReceiveMessage", lambda: sqs.receive_message(QueueUrl=url, VisibilityTimeout=0)),
        _try(url, "sqs:DeleteMessage", _expect(lambda: sqs.delete_message(**nothing))),
    ]
