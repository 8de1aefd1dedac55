"""EC2 auto-scaling groups through boto3. Each group is a pool.

While the autoscaler controls a group (`take_over` to `hand_back`), a tag names its cluster; AZRebalance is
suspended, because it terminates instances to balance zones; and new instances are protected from scale-in, so
that a manually lowered capacity cannot hit a busy node. The former settings are noted in a tag and restored,
if necessary by the next autoscaler.

Region, profile and role are found as usual for boto3; retries use boto3's adaptive mode.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import boto3
from botocore.config import Config

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
from adaptdl_elastic.autoscaler.providers.ec2 import responses as read
from adaptdl_elastic.autoscaler.providers.ec2.errors import FAILURES, NotWaitingError, explain, explained
from adaptdl_elastic.autoscaler.providers.ec2.notice_queue import NoticeQueue
from adaptdl_elastic.autoscaler.providers.ec2.ownership import OWNER_TAG, another, refuse, tag, tags_of
from adaptdl_elastic.autoscaler.providers.ec2.prices import (
    PriceChanges,
    PriceList,
    parse_price_option,
    read_spot_prices,
)
from adaptdl_elastic.autoscaler.providers.registry import ProviderRequest

logger = logging.getLogger(__name__)

RULED_TAG = "adaptdl-elastic:before"
PRICES_TAG, SETTINGS_TAG = "adaptdl-elastic:prices", "adaptdl-elastic:settings"
"""Tags of a group with on-demand prices, and with settings of the autoscaler, as KEY=VALUE KEY=VALUE."""

_PER_CALL = 50  # most instances per call of SetInstanceProtection
_AGAIN = 60.0  # seconds before a release is repeated: until then the listing may not show it
_RETRY = 30.0  # seconds before prices are read again after an error


def connect(service: str, region: str | None = None, profile: str | None = None, retries: int = 8) -> Any:
    """Return a client with adaptive retries; ProviderError says what is missing."""
    config = Config(
        retries={"mode": "adaptive", "max_attempts": retries},
        connect_timeout=5,
        read_timeout=30,
        tcp_keepalive=True,
    )
    with explained(f"connect to {service}"):
        return boto3.session.Session(region_name=region, profile_name=profile).client(service, config=config)


def from_request(request: ProviderRequest) -> Ec2Provider:
    """Return a provider for the groups in option `groups` (names, separated by commas).

    Further options: `region`, `profile`, `queue_url`.

    Raises:
        ProviderError: no group is named, or the account cannot be reached.
    """
    options = request.known("groups", "region", "profile", "queue_url")
    return Ec2Provider(
        [name for name in options.get("groups", "").split(",") if name],
        request.prices,
        slots=request.slots,
        region=options.get("region"),
        profile=options.get("profile"),
        queue_url=options.get("queue_url"),
        owner=request.owner,
        seize=request.seize,
    )


class Ec2Provider(Provider):
    """Controls the given auto-scaling groups, and no others.

    Args:
        groups: names of the groups.
        on_demand: instance type → price per hour, before the prices of tags and of AWS's list.
        slots: replicas per node; None: the GPUs of its type.
        region: AWS region; None: as boto3 finds it.
        profile: AWS profile; None: as boto3 finds it.
        queue_url: SQS queue into which EventBridge puts notices.
        spot_prices: returns (type, zone) → price changes, instead of EC2's history.
        owner: cluster that controls the groups; "": ownership is not checked.
        seize: take the groups even if they belong to another cluster, which will notice and end.
        clients: service → boto3 client, instead of new ones.
        clock: monotonic seconds.
    """

    name = "ec2"
    price_seconds = 300.0  # cache lifetime of spot prices, launch templates and hooks, in seconds

    def __init__(
        self,
        groups: Sequence[str],
        on_demand: Mapping[str, float],
        *,
        slots: int | None = None,
        region: str | None = None,
        profile: str | None = None,
        queue_url: str | None = None,
        spot_prices: Callable[[], Mapping[tuple[str, str], PriceChanges]] | None = None,
        owner: str = "",
        seize: bool = False,
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
        self._on_demand, self._tagged = dict(on_demand), dict[str, float]()
        # few retries, since decisions wait for the answer
        pricing = given.get("pricing") or connect("pricing", PriceList.home, profile, retries=1)
        self._price_list = PriceList(pricing, self._autoscaling.meta.region_name, clock)
        self._owner, self._seize, self._rules = owner, seize, False
        self._fixed_slots = slots
        self._slots: dict[str, int] = {}
        self._spot_prices = spot_prices or self._history
        self._spot: Mapping[tuple[str, str], PriceChanges] = {}
        self._priced = 0.0  # when spot prices were read, in seconds since the epoch
        self._spot_until = float("-inf")
        self._clock = clock
        self._price_trouble = ""
        self._met: set[str] = set()  # groups that have existed
        self._kinds: dict[str, tuple[object, float, read.Kind]] = {}  # group → (source, expiry, kind)
        self._ours: dict[str, str] = {}  # every instance ever seen → group
        self._released: dict[str, float] = {}  # instance → when a release may be repeated
        self._hooks: dict[str, tuple[float, Mapping[str, float]]] = {}  # group → (expiry, hook → seconds)
        self._last: Capacity = Capacity()
        self._queue_trouble: ProviderError | None = None

    # Reading

    def capacity(self) -> Capacity:
        """Return the groups and their instances."""
        groups, missing = self._describe()
        kinds = {name: self._kind(group) for name, group in groups.items()}
        here = {i["InstanceId"] for g in groups.values() for i in g.get("Instances", [])}
        details = self._details([*here.union(i.id for i in (*self._last.instances, *self._last.ended))])
        # the tag of an instance may be gone some time after its end
        left = {i: tags_of(details[i]).get(read.GROUP_TAG, self._ours.get(i)) for i in details.keys() - here}
        types = [t for kind in kinds.values() for t in kind.types]
        types += [str(detail["InstanceType"]) for detail in details.values()]
        self._learn_slots(types)
        told = {name: tags_of(group) for name, group in groups.items()}
        odd = self._read_price_tags(told.values())
        volumes = sorted({t for kind in kinds.values() for t, _ in kind.volumes})
        storage, bare = self._price_list.of(volumes), self._prices(types)
        pools, instances, ended = list[Pool](), list[Instance](), list[Instance]()
        warnings = [*odd, *missing, *([self._price_trouble] if self._price_trouble else [])]
        warnings += [str(self._queue_trouble)] if self._queue_trouble is not None else []
        warnings += [f"no {t} volume is on the bill: {bare.lacking[t]}" for t in volumes if t not in storage]
        for name, group in groups.items():
            if not self._rules and not self._seize and (owner := another(group, self._owner)):
                warnings.append(f"{name}: belongs to cluster {owner}: it is not ours to rule (--take-over)")
            gone = [{"InstanceId": i, "LifecycleState": "Terminated"} for i in left if left[i] == name]
            group = {**group, "Instances": [*group.get("Instances", []), *gone]}
            prices = bare.plus(sum(storage.get(t, 0.0) * size for t, size in kinds[name].volumes))
            members, over = read.instances_of(group, kinds[name], details, prices, self._slots)
            trouble, warning = self._trouble(name)
            warnings += [warning] if warning else []
            pool = read.pool_of(group, kinds[name], members, prices, self._slots, trouble)
            pools.append(replace(pool, hook_timeout=self._hook_timeout(name, warnings)))
            instances += members
            ended += over
            if pools[-1].preemptible and prices.unknown(kinds[name].types, pools[-1].zones):
                where = ", ".join(pools[-1].zones)
                warnings.append(
                    f"{name}: EC2 tells no spot price of {', '.join(kinds[name].types)} in {where}: "
                    "on-demand's price is taken for it"
                )
        self._ours |= {i.id: i.pool for i in (*instances, *ended)}
        settings = " ".join(tags.get(SETTINGS_TAG, "") for tags in told.values()).split()
        self._last = Capacity(
            tuple(pools), tuple(instances), tuple(warnings), tuple(ended), self._priced, tuple(settings)
        )
        return self._last

    def _read_price_tags(self, groups: Iterable[Mapping[str, str]]) -> list[str]:
        """Take over the prices in tags of groups; return warnings about those that are none."""
        self._tagged, odd = {}, []
        for text in " ".join(tags.get(PRICES_TAG, "") for tags in groups).split():
            try:
                self._tagged |= [parse_price_option(text)]
            except ProviderError as error:
                odd.append(f"tag {PRICES_TAG}: {error}")
        return odd

    def signals(self) -> tuple[Signal, ...]:
        """Return notices about this provider's instances from the queue, if there is one."""
        if self._queue is None:
            return ()
        told, self._queue_trouble = self._queue.read()
        if self._queue_trouble is not None and not told:
            raise self._queue_trouble
        return tuple(signal for signal in told if signal.instance in self._ours)

    def _describe(self) -> tuple[dict[str, read.Answer], list[str]]:
        """Return the existing groups by name, and messages about deleted ones.

        Raises:
            UnknownPoolError: a group never existed, or no group is left.
        """
        with explained("autoscaling:DescribeAutoScalingGroups", ", ".join(self._groups)):
            pages = self._autoscaling.get_paginator("describe_auto_scaling_groups").paginate(
                AutoScalingGroupNames=list(self._groups)
            )
            found = {g["AutoScalingGroupName"]: g for page in pages for g in page["AutoScalingGroups"]}
        region = self._autoscaling.meta.region_name
        there: dict[str, read.Answer] = {}
        missing: list[str] = []
        for name in self._groups:
            if name in found and not str(found[name].get("Status", "")).startswith("Delete"):
                read.check_group(found[name])
                if self._rules:
                    refuse(found[name], self._owner, ruling=True)
                there[name] = found[name]
            elif name in self._met:
                missing.append(f"auto-scaling group {name!r} has been deleted: going on without it")
            elif name in found:
                raise UnknownPoolError(f"auto-scaling group {name!r} is being deleted")
            else:
                raise UnknownPoolError(
                    f"no auto-scaling group {name!r} in {region}: check its name, --region and --profile"
                )
        if not there:
            raise UnknownPoolError(f"no auto-scaling group is left: {', '.join(self._groups)} deleted")
        self._met |= set(there)
        return there, missing

    def _kind(self, group: read.Answer) -> read.Kind:
        """Return what the group launches.

        Read again when the template changes, and regularly, for $Latest.
        """
        name, template = str(group["AutoScalingGroupName"]), read.template_of(group)
        if template is None:
            raise ProviderError(f"{name}: has a launch configuration; give the group a launch template")
        key = (repr(template), repr(group.get("MixedInstancesPolicy")))
        known = self._kinds.get(name)
        if known is None or known[0] != key or self._clock() >= known[1]:
            with explained("ec2:DescribeLaunchTemplateVersions", name):
                answer = self._ec2.describe_launch_template_versions(**read.version_of(template))
            versions = answer["LaunchTemplateVersions"]
            if not versions:
                raise ProviderError(f"{name}: its launch template has no version {template.get('Version')}")
            kind = read.kind_of(group, versions[0]["LaunchTemplateData"])
            self._kinds[name] = (key, self._clock() + self.price_seconds, kind)
        return self._kinds[name][2]

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
        """Return details of these instances, and of others that EC2 names the groups for, by id.

        A filter is used, so that instances that EC2 does not know yet, or any more, cause no error.
        """
        found: dict[str, read.Answer] = {}
        # EC2 takes at most 200 values per filter
        parts = [("instance-id", identifiers[i : i + 200]) for i in range(0, len(identifiers), 200)]
        for name, values in [(f"tag:{read.GROUP_TAG}", self._groups), *parts]:
            with explained("ec2:DescribeInstances"):
                pages = self._ec2.get_paginator("describe_instances").paginate(
                    Filters=[{"Name": name, "Values": list(values)}]
                )
                there = (i for page in pages for r in page["Reservations"] for i in r["Instances"])
                found |= {instance["InstanceId"]: instance for instance in there}
        return found

    def _prices(self, types: Sequence[str]) -> read.Prices:
        """Return the prices without disks; if they cannot be read now, the last ones.

        Raises:
            ProviderError: spot prices cannot be read, and never could.
        """
        if self._clock() >= self._spot_until:
            self._wanted_types = sorted(set(types))
            try:
                self._priced, self._spot = time.time(), self._spot_prices()
            except ProviderError as error:
                if self._spot_until == float("-inf"):
                    raise
                self._price_trouble = f"{error}; spot prices are those of some minutes ago"
                self._spot_until = self._clock() + _RETRY
            else:
                self._price_trouble = ""
                self._spot_until = self._clock() + self.price_seconds
        listed = self._price_list.of({*types} - self._tagged.keys() - self._on_demand.keys())
        table = {**listed, **self._tagged, **self._on_demand}
        return read.Prices(table, self._spot, self._price_list.lacking)

    def _history(self) -> Mapping[tuple[str, str], PriceChanges]:
        # a day, since the autoscaler may not have run; the prices in force at its start come too
        return read_spot_prices(self._ec2, self._wanted_types, 86400.0)

    def _trouble(self, group: str) -> tuple[tuple[str, float], str]:
        """Return why the last launch failed, and a warning if that cannot be read."""
        try:
            answer = self._autoscaling.describe_scaling_activities(AutoScalingGroupName=group, MaxRecords=20)
        except FAILURES as error:
            return ("", 0.0), str(explain(error, "autoscaling:DescribeScalingActivities", group))
        return read.trouble_of(answer.get("Activities", [])), ""

    # Acting

    def request(self, pool: str, desired: int) -> None:
        """Set the desired capacity; lower it at most to the number of instances."""
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
        """Terminate the instance, and lower the desired capacity unless it is to be replaced."""
        group = self._group_of(instance)
        found = next(
            (i for i in self._describe_one(group).get("Instances", []) if i["InstanceId"] == instance), None
        )
        if found is None or read.instance_state(found["LifecycleState"]) in (None, InstanceState.LEAVING):
            return
        if self._clock() < self._released.get(instance, 0.0):
            return  # not visible yet; a second call would lower the desired capacity again
        with explained("autoscaling:TerminateInstanceInAutoScalingGroup", instance):
            self._autoscaling.terminate_instance_in_auto_scaling_group(
                InstanceId=instance, ShouldDecrementDesiredCapacity=not replace
            )
        self._released[instance] = self._clock() + _AGAIN

    def protect(self, instances: Collection[str], protected: bool) -> None:
        """Set the protection of those instances that do not have it so already."""
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
        """Send a heartbeat to the termination hook that the instance waits in."""
        call = self._autoscaling.record_lifecycle_action_heartbeat
        self._in_hooks(instance, "autoscaling:RecordLifecycleActionHeartbeat", call)

    def let_go(self, instance: str) -> None:
        """Complete the termination hook: the instance is terminated before its time-out."""
        call = partial(self._autoscaling.complete_lifecycle_action, LifecycleActionResult="CONTINUE")
        self._in_hooks(instance, "autoscaling:CompleteLifecycleAction", call)

    def _in_hooks(self, instance: str, action: str, call: Callable[..., Any]) -> None:
        """Call an action for every termination hook; hooks that the instance does not wait in are ignored.

        Args:
            instance: the instance.
            action: name of the action in IAM's terms.
            call: makes the call.
        """
        group = self._group_of(instance)
        for hook in self._termination_hooks(group):  # hook names; the seconds do not matter here
            with contextlib.suppress(NotWaitingError), explained(action, f"{group}/{hook}"):
                call(AutoScalingGroupName=group, LifecycleHookName=hook, InstanceId=instance)

    def _describe_one(self, pool: str) -> read.Answer:
        if pool not in self._groups:
            raise UnknownPoolError(f"{pool!r} is not one of: {', '.join(self._groups)}")
        there, _ = self._describe()
        if pool not in there:
            raise UnknownPoolError(f"auto-scaling group {pool!r} has been deleted")
        return there[pool]

    def _group_of(self, instance: str) -> str:
        if instance not in self._ours:
            self.capacity()
        if instance not in self._ours:
            raise UnknownInstanceError(f"{instance!r} is not an instance of {', '.join(self._groups)}")
        return self._ours[instance]

    def _hook_timeout(self, group: str, warnings: list[str]) -> float:
        """Return the seconds within which a leaving instance needs a heartbeat.

        Warn if that cannot be read.
        """
        try:
            return min(self._termination_hooks(group).values(), default=math.inf)
        except ProviderError as error:
            warnings.append(str(error))
            return math.inf

    def _termination_hooks(self, group: str) -> Mapping[str, float]:
        if self._clock() >= self._hooks.get(group, (0.0,))[0]:
            with explained("autoscaling:DescribeLifecycleHooks", group):
                answer = self._autoscaling.describe_lifecycle_hooks(AutoScalingGroupName=group)
            hooks = answer.get("LifecycleHooks", [])
            self._hooks[group] = (self._clock() + self.price_seconds, read.termination_hooks(hooks))
        return self._hooks[group][1]

    # Control

    def take_over(self) -> None:
        """Suspend AZRebalance and protect new instances; note the cluster and the former settings in tags.

        Raises:
            NotOursError: a group belongs to another cluster; nothing was changed.
        """
        groups, _ = self._describe()
        if not self._seize:
            for group in groups.values():
                refuse(group, self._owner, ruling=False)
        self._seize = False  # only once: another cluster may take the groups later
        for name, group in groups.items():
            tags = tags_of(group)
            if self._owner and tags.get(OWNER_TAG) != self._owner:
                self.tag(name, OWNER_TAG, self._owner)
            # otherwise a former autoscaler could not restore them, and its note is still valid
            if RULED_TAG not in tags:
                self.tag(name, RULED_TAG, _before(group))
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
        self._rules = True

    def hand_back(self) -> None:
        """Restore what `take_over` changed, except for groups that another cluster has taken.

        Busy nodes stay protected.
        """
        self._rules = False
        failed: list[ProviderError] = []
        for name, group in self._describe()[0].items():
            tags = tags_of(group)
            ours = [tag(name, key, tags[key]) for key in (RULED_TAG, OWNER_TAG) if key in tags]
            if not ours or another(group, self._owner):
                continue
            try:
                self._hand_back_one(name, tags.get(RULED_TAG, ""), ours)
            except ProviderError as error:  # the other groups are handed back all the same
                failed.append(error)
        if failed:
            raise failed[0]

    def _hand_back_one(self, name: str, before: str, tags: list[dict[str, object]]) -> None:
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
            self._autoscaling.delete_tags(Tags=tags)

    def tag(self, group: str, key: str, value: str) -> None:
        """Set a tag of an auto-scaling group."""
        with explained("autoscaling:CreateOrUpdateTags", group):
            self._autoscaling.create_or_update_tags(Tags=[tag(group, key, value)])


def _settled(instance: Instance) -> bool:
    """Return whether SetInstanceProtection is possible: not while an instance starts or leaves."""
    return instance.state is InstanceState.RUNNING


def _suspended(group: read.Answer) -> bool:
    return any(process["ProcessName"] == "AZRebalance" for process in group.get("SuspendedProcesses", []))


def _before(group: read.Answer) -> str:
    """Return what `hand_back` has to restore, joined by plus signs."""
    parts = [] if _suspended(group) else ["rebalance"]
    parts += [] if group.get("NewInstancesProtectedFromScaleIn", False) else ["unprotected"]
    return "+".join(parts) or "nothing"
