"""EC2 auto-scaling groups through boto3. Each group is a pool.

While it rules a group (`take_over` to `hand_back`), AZRebalance is suspended, because it terminates
instances to even out zones, and new instances are born protected from scale-in, so that lowering the
desired capacity by hand can not hit a node at work. What was so before is noted in a tag of the group
and put back, also when the one who took over did not live to do it.

Region, profile and role come from where boto3 users expect them; retries are boto3's adaptive mode.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import boto3
import botocore.exceptions
from botocore.config import Config

from adaptdl_elastic.autoscaler.providers import ec2_read as read
from adaptdl_elastic.autoscaler.providers.base import (
    Capacity,
    Instance,
    InstanceState,
    Pool,
    Provider,
    ProviderError,
    Signal,
    UnknownInstanceError,
    UnknownPoolError,
)
from adaptdl_elastic.autoscaler.providers.ec2_errors import explain, explained
from adaptdl_elastic.autoscaler.providers.notices import NoticeQueue
from adaptdl_elastic.autoscaler.providers.prices import latest_spot_prices

logger = logging.getLogger(__name__)

RULED_TAG = "adaptdl-elastic:before"
_PER_CALL = 50  # instances per SetInstanceProtection
_HOOK = "autoscaling:EC2_INSTANCE_TERMINATING"


def connect(service: str, region: str | None = None, profile: str | None = None) -> Any:
    """A client with adaptive retries; ProviderError says what is missing."""
    config = Config(
        retries={"mode": "adaptive", "max_attempts": 8},
        connect_timeout=5,
        read_timeout=30,
        tcp_keepalive=True,
    )
    with explained(f"connect to {service}"):
        return boto3.session.Session(region_name=region, profile_name=profile).client(service, config=config)


class Ec2Provider(Provider):
    """Rules the auto-scaling groups it is given, and no other.

    Args:
        groups: names of the groups.
        on_demand: instance type → price per hour.
        slots: replicas per node; None: the GPUs of its type.
        queue_url: the SQS queue into which EventBridge puts notices.
        spot_prices: (type, zone) → price, instead of EC2's history.
        clients: service → boto3 client, instead of new ones.
    """

    name = "ec2"
    price_seconds = 300.0  # that spot prices are good for

    def __init__(
        self,
        groups: Sequence[str],
        on_demand: Mapping[str, float],
        *,
        slots: int | None = None,
        region: str | None = None,
        profile: str | None = None,
        queue_url: str | None = None,
        spot_prices: Callable[[], Mapping[tuple[str, str], float]] | None = None,
        clients: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not groups:
            raise ProviderError("no auto-scaling group is named: give --asg NAME")
        given = dict(clients or {})
        self._groups = tuple(dict.fromkeys(groups))
        self._autoscaling = given.get("autoscaling") or connect("autoscaling", region, profile)
        self._ec2 = given.get("ec2") or connect("ec2", region, profile)
        sqs = (given.get("sqs") or connect("sqs", region, profile)) if queue_url else None
        self._queue = NoticeQueue(sqs, queue_url) if queue_url else None
        self._on_demand = dict(on_demand)
        self._fixed_slots = slots
        self._slots: dict[str, int] = {}
        self._spot_prices = spot_prices or self._history
        self._spot: Mapping[tuple[str, str], float] = {}
        self._spot_until = float("-inf")
        self._clock = clock
        self._kinds: dict[str, tuple[object, read.Kind]] = {}
        self._ours: dict[str, str] = {}  # instance → group, every one ever seen
        self._hooks: dict[str, tuple[str, ...]] = {}
        self._last: Capacity = Capacity()

    # -- reading

    def capacity(self) -> Capacity:
        """The groups and their instances."""
        groups = self._describe()
        kinds = {name: self._kind(group) for name, group in groups.items()}
        self._learn_slots([t for kind in kinds.values() for t in kind.types])
        details = self._details([i["InstanceId"] for g in groups.values() for i in g.get("Instances", [])])
        self._learn_slots([str(detail["InstanceType"]) for detail in details.values()])
        prices = self._prices([t for kind in kinds.values() for t in kind.types])
        pools: list[Pool] = []
        instances: list[Instance] = []
        warnings: list[str] = []
        for name, group in groups.items():
            members = read.instances_of(group, kinds[name], details, prices, self._slots)
            trouble, warning = self._trouble(name)
            warnings += [warning] if warning else []
            pools.append(read.pool_of(group, kinds[name], members, prices, self._slots, trouble))
            instances += members
        self._ours |= {i.id: i.pool for i in instances}
        self._last = Capacity(tuple(pools), tuple(instances), tuple(warnings))
        return self._last

    def signals(self) -> tuple[Signal, ...]:
        """Notices about our instances from the queue; none where there is no queue."""
        if self._queue is None:
            return ()
        with explained("sqs:ReceiveMessage"):
            told = self._queue.read()
        return tuple(signal for signal in told if signal.instance in self._ours)

    def _describe(self) -> dict[str, read.Answer]:
        with explained("autoscaling:DescribeAutoScalingGroups", ", ".join(self._groups)):
            pages = self._autoscaling.get_paginator("describe_auto_scaling_groups").paginate(
                AutoScalingGroupNames=list(self._groups)
            )
            found = {g["AutoScalingGroupName"]: g for page in pages for g in page["AutoScalingGroups"]}
        for name in self._groups:
            if name not in found:
                region = self._autoscaling.meta.region_name
                raise UnknownPoolError(
                    f"no auto-scaling group {name!r} in {region}: check its name, --region and --profile"
                )
            if str(found[name].get("Status", "")).startswith("Delete"):
                raise UnknownPoolError(f"auto-scaling group {name!r} is being deleted")
            read.check_group(found[name])
        return {name: found[name] for name in self._groups}

    def _kind(self, group: read.Answer) -> read.Kind:
        """What the group launches; its template is read again only when the group's pointer to it changes."""
        name, template = str(group["AutoScalingGroupName"]), read.template_of(group)
        if template is None:
            raise ProviderError(f"{name}: has a launch configuration; give the group a launch template")
        key = (repr(template), repr(group.get("MixedInstancesPolicy")))
        if self._kinds.get(name, (None,))[0] != key:
            which = (
                {"LaunchTemplateId": template["LaunchTemplateId"]}
                if "LaunchTemplateId" in template
                else {"LaunchTemplateName": template["LaunchTemplateName"]}
            )
            with explained("ec2:DescribeLaunchTemplateVersions", name):
                answer = self._ec2.describe_launch_template_versions(
                    **which, Versions=[str(template.get("Version") or "$Default")]
                )
            versions = answer["LaunchTemplateVersions"]
            if not versions:
                raise ProviderError(f"{name}: its launch template has no version {template.get('Version')}")
            self._kinds[name] = (key, read.kind_of(group, versions[0]["LaunchTemplateData"]))
        return self._kinds[name][1]

    def _learn_slots(self, types: Sequence[str]) -> None:
        unknown = sorted(set(types) - set(self._slots))
        if not unknown:
            return
        if self._fixed_slots is not None:
            self._slots |= dict.fromkeys(unknown, self._fixed_slots)
            return
        with explained("ec2:DescribeInstanceTypes", ", ".join(unknown)):
            answer = self._ec2.describe_instance_types(InstanceTypes=unknown)
        self._slots |= read.slots_of(answer["InstanceTypes"])

    def _details(self, identifiers: Sequence[str]) -> dict[str, read.Answer]:
        """By id. By filter, not by id: an instance that EC2 does not know yet, or no more, is no error."""
        found: dict[str, read.Answer] = {}
        for first in range(0, len(identifiers), 200):  # EC2's limit of values per filter
            chunk = list(identifiers[first : first + 200])
            with explained("ec2:DescribeInstances"):
                pages = self._ec2.get_paginator("describe_instances").paginate(
                    Filters=[{"Name": "instance-id", "Values": chunk}]
                )
                for page in pages:
                    for reservation in page["Reservations"]:
                        found |= {i["InstanceId"]: i for i in reservation["Instances"]}
        return found

    def _prices(self, types: Sequence[str]) -> read.Prices:
        if self._clock() >= self._spot_until:
            self._wanted_types = sorted(set(types))
            self._spot = self._spot_prices()
            self._spot_until = self._clock() + self.price_seconds
        return read.Prices(self._on_demand, self._spot)

    def _history(self) -> Mapping[tuple[str, str], float]:
        with explained("ec2:DescribeSpotPriceHistory"):
            pages = self._ec2.get_paginator("describe_spot_price_history").paginate(
                InstanceTypes=self._wanted_types,
                ProductDescriptions=["Linux/UNIX", "Linux/UNIX (Amazon VPC)"],
                StartTime=time.time(),  # EC2 answers with the prices in force at that moment
            )
            return latest_spot_prices(entry for page in pages for entry in page["SpotPriceHistory"])

    def _trouble(self, group: str) -> tuple[tuple[str, float], str]:
        """Why its last launch failed; where that can not be read, a warning (it is not worth failing for)."""
        try:
            answer = self._autoscaling.describe_scaling_activities(AutoScalingGroupName=group, MaxRecords=20)
        except botocore.exceptions.ClientError as error:
            return ("", 0.0), str(explain(error, "autoscaling:DescribeScalingActivities", group))
        return read.trouble_of(answer.get("Activities", [])), ""

    # -- acting

    def request(self, pool: str, desired: int) -> None:
        """SetDesiredCapacity; lowered only as far as there are instances."""
        group = self._describe_one(pool)
        low, high = int(group["MinSize"]), int(group["MaxSize"])
        if not low <= desired <= high:
            raise ProviderError(
                f"{pool}: {desired} is outside its Min {low} and Max {high}; change the group"
            )
        there = sum(
            read.instance_state(i["LifecycleState"]) in (InstanceState.RUNNING, InstanceState.PENDING)
            for i in group.get("Instances", [])
        )
        current = int(group["DesiredCapacity"])
        wanted = desired if desired >= current else min(current, max(desired, there))
        if wanted != current:
            with explained("autoscaling:SetDesiredCapacity", pool):
                self._autoscaling.set_desired_capacity(
                    AutoScalingGroupName=pool, DesiredCapacity=wanted, HonorCooldown=False
                )

    def release(self, instance: str, replace: bool = False) -> None:
        """TerminateInstanceInAutoScalingGroup, lowering the desired capacity unless it is to be replaced."""
        group = self._group_of(instance)
        found = next(
            (i for i in self._describe_one(group).get("Instances", []) if i["InstanceId"] == instance), None
        )
        if found is None or read.instance_state(found["LifecycleState"]) in (
            None,
            InstanceState.LEAVING,
        ):
            return
        with explained("autoscaling:TerminateInstanceInAutoScalingGroup", instance):
            self._autoscaling.terminate_instance_in_auto_scaling_group(
                InstanceId=instance, ShouldDecrementDesiredCapacity=not replace
            )

    def protect(self, instances: Collection[str], protected: bool) -> None:
        """SetInstanceProtection on those that do not have it so already."""
        by_group: dict[str, list[str]] = {}
        for known in self._last.instances:
            if known.id in instances and known.protected != protected and _settled(known):
                by_group.setdefault(known.pool, []).append(known.id)
        for group, members in by_group.items():
            for first in range(0, len(members), _PER_CALL):
                with explained("autoscaling:SetInstanceProtection", group):
                    self._autoscaling.set_instance_protection(
                        AutoScalingGroupName=group,
                        InstanceIds=members[first : first + _PER_CALL],
                        ProtectedFromScaleIn=protected,
                    )

    def hold(self, instance: str) -> None:
        """A heartbeat on every termination hook that the instance may be waiting in."""
        group = self._group_of(instance)
        for hook in self._termination_hooks(group):
            with explained("autoscaling:RecordLifecycleActionHeartbeat", f"{group}/{hook}"):
                self._autoscaling.record_lifecycle_action_heartbeat(
                    AutoScalingGroupName=group, LifecycleHookName=hook, InstanceId=instance
                )

    def let_go(self, instance: str) -> None:
        """Complete the termination hooks: the instance is it is terminated now, not at their time-out."""
        group = self._group_of(instance)
        for hook in self._termination_hooks(group):
            with explained("autoscaling:CompleteLifecycleAction", f"{group}/{hook}"):
                self._autoscaling.complete_lifecycle_action(
                    AutoScalingGroupName=group,
                    LifecycleHookName=hook,
                    InstanceId=instance,
                    LifecycleActionResult="CONTINUE",
                )

    def _describe_one(self, pool: str) -> read.Answer:
        if pool not in self._groups:
            raise UnknownPoolError(f"{pool!r} is not one of: {', '.join(self._groups)}")
        return self._describe()[pool]

    def _group_of(self, instance: str) -> str:
        if instance not in self._ours:
            self.capacity()
        if instance not in self._ours:
            raise UnknownInstanceError(f"{instance!r} is not an instance of {', '.join(self._groups)}")
        return self._ours[instance]

    def _termination_hooks(self, group: str) -> tuple[str, ...]:
        if group not in self._hooks:
            with explained("autoscaling:DescribeLifecycleHooks", group):
                answer = self._autoscaling.describe_lifecycle_hooks(AutoScalingGroupName=group)
            hooks = answer.get("LifecycleHooks", [])
            self._hooks[group] = tuple(
                h["LifecycleHookName"] for h in hooks if h.get("LifecycleTransition") == _HOOK
            )
        return self._hooks[group]

    # -- ruling

    def take_over(self) -> None:
        """Suspend AZRebalance, protect newcomers; note in a tag what was so before."""
        for name, group in self._describe().items():
            tags = {tag["Key"]: tag["Value"] for tag in group.get("Tags", [])}
            if (
                RULED_TAG not in tags
            ):  # else somebody who ruled before us could not hand back: his note counts
                self._tag(name, _before(group))
            if not _suspended(group):
                with explained("autoscaling:SuspendProcesses", name):
                    self._autoscaling.suspend_processes(
                        AutoScalingGroupName=name, ScalingProcesses=["AZRebalance"]
                    )
            if not group.get("NewInstancesProtectedFromScaleIn", False):
                with explained("autoscaling:UpdateAutoScalingGroup", name):
                    self._autoscaling.update_auto_scaling_group(
                        AutoScalingGroupName=name, NewInstancesProtectedFromScaleIn=True
                    )

    def hand_back(self) -> None:
        """Put back what `take_over` changed. Protection of nodes at work stays."""
        for name, group in self._describe().items():
            tags = {tag["Key"]: tag["Value"] for tag in group.get("Tags", [])}
            before = tags.get(RULED_TAG)
            if before is None:
                continue
            if "rebalance" in before.split("+"):
                with explained("autoscaling:ResumeProcesses", name):
                    self._autoscaling.resume_processes(
                        AutoScalingGroupName=name, ScalingProcesses=["AZRebalance"]
                    )
            if "unprotected" in before.split("+"):
                with explained("autoscaling:UpdateAutoScalingGroup", name):
                    self._autoscaling.update_auto_scaling_group(
                        AutoScalingGroupName=name, NewInstancesProtectedFromScaleIn=False
                    )
            with explained("autoscaling:DeleteTags", name):
                self._autoscaling.delete_tags(Tags=[_tag(name, before)])

    def _tag(self, group: str, value: str) -> None:
        with explained("autoscaling:CreateOrUpdateTags", group):
            self._autoscaling.create_or_update_tags(Tags=[_tag(group, value)])


def _settled(instance: Instance) -> bool:
    """SetInstanceProtection is refused for instances that are on their way in or out."""
    return instance.state is InstanceState.RUNNING


def _suspended(group: read.Answer) -> bool:
    return any(process["ProcessName"] == "AZRebalance" for process in group.get("SuspendedProcesses", []))


def _before(group: read.Answer) -> str:
    """What `hand_back` has to put back, joined by plus signs."""
    parts = [] if _suspended(group) else ["rebalance"]
    parts += [] if group.get("NewInstancesProtectedFromScaleIn", False) else ["unprotected"]
    return "+".join(parts) or "nothing"


def _tag(group: str, value: str) -> dict[str, object]:
    return {
        "ResourceId": group,
        "ResourceType": "auto-scaling-group",
        "Key": RULED_TAG,
        "Value": value,
        "PropagateAtLaunch": False,
    }
