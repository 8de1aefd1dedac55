"""Translate EC2's answers: pure functions from boto3's dictionaries to the provider's types."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from adaptdl_elastic.autoscaler.providers.base import Instance, InstanceState, Pool, ProviderError
from adaptdl_elastic.autoscaler.providers.ec2.prices import PriceChanges

Answer = Mapping[str, Any]

_RUNNING = frozenset({"InService"})
_PENDING = frozenset({"Pending", "Pending:Wait", "Pending:Proceed"})
_GONE = frozenset({"Terminated", "Detached"})
_NOT_PAID = frozenset({"shutting-down", "terminated", "stopping", "stopped"})
_TERMINATING = "autoscaling:EC2_INSTANCE_TERMINATING"
_LEAST_SECONDS = 60.0  # that AWS charges for an instance with Linux
GROUP_TAG = "aws:autoscaling:groupName"
"""The tag by which EC2 names the group of an instance."""
DEFAULT_HEARTBEAT = 3600.0
"""Seconds that a lifecycle hook waits if its creator gave no time."""


@dataclass(frozen=True)
class Kind:
    """What a group launches: instance types in order of preference, and the share of spot instances."""

    types: tuple[str, ...]
    on_demand_base: int = 0
    on_demand_above_base: float = 1.0  # fraction
    mixed: bool = False
    volumes: tuple[tuple[str, float], ...] = ()  # (type, GB) of each EBS volume; 0 GB: not said

    @property
    def only_spot(self) -> bool:
        """Whether the group launches only spot instances; EC2 may not mark an instance as spot yet."""
        return self.on_demand_base == 0 and self.on_demand_above_base == 0

    def next_is_spot(self, on_demand: int, spot: int) -> bool:
        """Return whether the next instance would be a spot instance, given the numbers of both kinds.

        As in EC2 Auto Scaling: first the on-demand base; above it the fraction, rounded up.
        """
        if on_demand < self.on_demand_base:
            return False
        above = on_demand + spot + 1 - self.on_demand_base
        return on_demand - self.on_demand_base >= math.ceil(above * self.on_demand_above_base - 1e-9)


@dataclass(frozen=True)
class Prices:
    """Prices per hour; `spot` by (type, zone)."""

    on_demand: Mapping[str, float]
    spot: Mapping[tuple[str, str], PriceChanges]
    lacking: Mapping[str, str] = field(default_factory=dict)  # type → why it has no price on demand

    def of(self, instance_type: str, zone: str, preemptible: bool) -> float:
        """Return the price of one instance.

        If the spot price is unknown, return the on-demand price. If the on-demand price is also unknown,
        return the highest spot price of the type in the other zones.
        """
        if preemptible and (instance_type, zone) in self.spot:
            return self.spot[instance_type, zone][-1][1]
        if instance_type in self.on_demand:
            return self.on_demand[instance_type]
        elsewhere = [found[-1][1] for (kind, _), found in self.spot.items() if kind == instance_type]
        if preemptible and elsewhere:
            return max(elsewhere)
        why = f" ({told})" if (told := self.lacking.get(instance_type)) else ""
        raise ProviderError(f"no price is known for {instance_type}: give --price {instance_type}=PRICE{why}")

    def plus(self, more: float) -> Prices:
        """Return prices that are higher by so much an hour."""
        spot = {at: tuple((since, one + more) for since, one in told) for at, told in self.spot.items()}
        return replace(self, on_demand={kind: one + more for kind, one in self.on_demand.items()}, spot=spot)

    def unknown(self, types: Iterable[str], zones: Iterable[str]) -> bool:
        """Return whether no spot price of these types and zones is known."""
        return not any((kind, zone) in self.spot for kind in types for zone in zones)

    def cheapest(self, types: Iterable[str], zones: Iterable[str], preemptible: bool) -> tuple[float, str]:
        """Return the lowest price among the types (and, for spot, zones), and its type."""
        zones = tuple(zones) or ("",)
        return min((self.of(kind, zone, preemptible), kind) for kind in types for zone in zones)

    def dearest(self, types: Iterable[str], zones: Iterable[str], preemptible: bool) -> float:
        """Return the highest price among the types (and, for spot, zones)."""
        zones = tuple(zones) or ("",)
        return max(self.of(kind, zone, preemptible) for kind in types for zone in zones)


def check_group(group: Answer) -> None:
    """Raise ProviderError for a group that cannot be controlled one instance at a time."""
    name = group["AutoScalingGroupName"]
    overrides = _overrides(group)
    if any(override.get("WeightedCapacity", "1") != "1" for override in overrides):
        raise ProviderError(
            f"{name}: counts its capacity in weights; remove WeightedCapacity from its overrides"
        )
    if any("InstanceRequirements" in override for override in overrides):
        raise ProviderError(f"{name}: chooses types by attributes; list the instance types in its overrides")


def _overrides(group: Answer) -> list[Answer]:
    return list(group.get("MixedInstancesPolicy", {}).get("LaunchTemplate", {}).get("Overrides", []))


def template_of(group: Answer) -> Answer | None:
    """Return the launch template specification of a group; None if it has a launch configuration."""
    mixed = group.get("MixedInstancesPolicy", {}).get("LaunchTemplate", {}).get("LaunchTemplateSpecification")
    return mixed or group.get("LaunchTemplate")


def version_of(template: Answer) -> dict[str, Any]:
    """Return the arguments of DescribeLaunchTemplateVersions for a specification of a launch template."""
    name = "LaunchTemplateId" if "LaunchTemplateId" in template else "LaunchTemplateName"
    return {name: template[name], "Versions": [str(template.get("Version") or "$Default")]}


def kind_of(group: Answer, template: Answer) -> Kind:
    """Return what a group launches. `template` is the data of its launch template."""
    own = template.get("InstanceType")
    disks = [one.get("Ebs", {}) for one in template.get("BlockDeviceMappings", [])]
    volumes = tuple((str(d["VolumeType"]), float(d.get("VolumeSize", 0))) for d in disks if "VolumeType" in d)
    if "MixedInstancesPolicy" not in group:
        spot = template.get("InstanceMarketOptions", {}).get("MarketType") == "spot"
        return Kind((own,) if own else (), on_demand_above_base=0.0 if spot else 1.0, volumes=volumes)
    types = tuple(o["InstanceType"] for o in _overrides(group) if "InstanceType" in o)
    distribution = group["MixedInstancesPolicy"].get("InstancesDistribution", {})
    return Kind(
        types or ((own,) if own else ()),
        int(distribution.get("OnDemandBaseCapacity", 0) or 0),
        float(distribution.get("OnDemandPercentageAboveBaseCapacity", 100)) / 100,
        mixed=True,
        volumes=volumes,
    )


def instance_state(lifecycle: str) -> InstanceState | None:
    """Return the state of an instance from its `lifecycle`.

    None: it does not belong to the group any more.
    """
    if lifecycle in _GONE:
        return None
    if lifecycle in _RUNNING:
        return InstanceState.RUNNING
    if lifecycle in _PENDING:
        return InstanceState.PENDING
    return InstanceState.LEAVING  # Terminating*, Detaching, EnteringStandby, Standby, Warmed:*


def instances_of(
    group: Answer, kind: Kind, details: Mapping[str, Answer], prices: Prices, slots: Mapping[str, int]
) -> tuple[tuple[Instance, ...], tuple[Instance, ...]]:
    """Return a group's instances, and those that have ended.

    `details` are those of DescribeInstances by id; a new instance may be missing there.
    """
    there, ended = list[Instance](), list[Instance]()
    for entry in group.get("Instances", []):
        state, detail = instance_state(entry["LifecycleState"]), details.get(entry["InstanceId"], {})
        # even if the instance is gone, its hook must be completed
        held = entry["LifecycleState"] == "Terminating:Wait"
        now = detail.get("State", {}).get("Name")
        paid = now not in _NOT_PAID
        has_ended = state is None or (now == "terminated" and not held)
        if has_ended and (paid or detail["InstanceType"] not in kind.types):
            continue
        name = entry.get("InstanceType") or detail.get("InstanceType", "")
        zone = entry.get("AvailabilityZone") or detail.get("Placement", {}).get("AvailabilityZone", "")
        preemptible = kind.only_spot or detail.get("InstanceLifecycle") == "spot"
        launch = detail.get("LaunchTime")
        (ended if has_ended else there).append(
            Instance(
                entry["InstanceId"],
                group["AutoScalingGroupName"],
                state if state and paid else InstanceState.LEAVING,
                slots=slots.get(name, 1),
                preemptible=preemptible,
                instance_type=name,
                zone=zone,
                hourly_price=prices.of(name, zone, preemptible),
                launched=launch.timestamp() if isinstance(launch, datetime) else 0.0,
                protected=bool(entry.get("ProtectedFromScaleIn", False)),
                held=held,
                price_changes=prices.spot.get((name, zone), ()) if preemptible else (),
                ended=None if paid else _ended(detail),
            )
        )
    return tuple(there), tuple(ended)


def _ended(detail: Answer) -> float:
    """Return until when an instance is paid for; 0: EC2 does not say, as after a spot interruption."""
    found = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) ", detail.get("StateTransitionReason", ""))
    least = detail["LaunchTime"].timestamp() + _LEAST_SECONDS
    return max(least, datetime.fromisoformat(f"{found[1]}+00:00").timestamp()) if found else 0.0


def pool_of(
    group: Answer,
    kind: Kind,
    instances: Iterable[Instance],
    prices: Prices,
    slots: Mapping[str, int],
    trouble: tuple[str, float] = ("", 0.0),
) -> Pool:
    """Return a group as a pool, described by the instance that it would launch next."""
    staying = [i for i in instances if i.state is not InstanceState.LEAVING]
    spot = sum(i.preemptible for i in staying)
    preemptible = kind.next_is_spot(len(staying) - spot, spot)
    zones = tuple(group.get("AvailabilityZones", ()))
    if not kind.types:
        raise ProviderError(f"{group['AutoScalingGroupName']}: its launch template names no instance type")
    price, cheapest = prices.cheapest(kind.types, zones, preemptible)
    return Pool(
        group["AutoScalingGroupName"],
        desired=int(group["DesiredCapacity"]),
        minimum=int(group["MinSize"]),
        maximum=int(group["MaxSize"]),
        slots=min(slots.get(name, 1) for name in kind.types),
        hourly_price=price,
        highest_price=prices.dearest(kind.types, zones, preemptible),
        preemptible=preemptible,
        instance_type=cheapest,
        zones=zones,
        replaces_at_risk=bool(group.get("CapacityRebalance", False)),
        trouble=trouble[0],
        trouble_since=trouble[1],
    )


def trouble_of(activities: Iterable[Answer]) -> tuple[str, float]:
    """Return why and when the group's last launch failed; ("", 0) if it did not.

    `activities` are those of DescribeScalingActivities, newest first.
    """
    for activity in activities:
        status = activity.get("StatusCode")
        if not str(activity.get("Description", "")).startswith("Launching"):
            continue
        if status == "Successful":
            break
        if status in ("Failed", "Cancelled"):
            began = activity["StartTime"]
            text = str(activity.get("StatusMessage") or activity.get("Cause") or "launch failed")
            return text, began.timestamp() if isinstance(began, datetime) else 0.0
    return "", 0.0


def termination_hooks(hooks: Iterable[Answer]) -> dict[str, float]:
    """Return hook → seconds that it waits for a heartbeat, for hooks of leaving instances."""
    return {
        str(hook["LifecycleHookName"]): float(hook.get("HeartbeatTimeout") or DEFAULT_HEARTBEAT)
        for hook in hooks
        if hook.get("LifecycleTransition") == _TERMINATING
    }


def slots_of(types: Iterable[Answer]) -> dict[str, int]:
    """Return instance type → replicas that fit: its GPUs, or one if it has none."""
    found = {}
    for entry in types:
        gpus = sum(int(gpu.get("Count", 0)) for gpu in entry.get("GpuInfo", {}).get("Gpus", []))
        found[str(entry["InstanceType"])] = gpus or 1
    return found
