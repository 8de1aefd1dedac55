"""Find every stack that this program has made in an account and region, say what it costs, and take it down.

A stack is ours if its tag `adaptdl-elastic:stack` has its own name, as `adaptdl cloud up` writes it.
Nothing else is touched: what belongs to a stack is read from CloudFormation, never guessed from names.

CloudFormation cannot delete a group whose instances are protected, and an autoscaler would buy again what is
taken away. So a stack is emptied first: the bounds of its groups are set to zero, which the autoscaler
respects, and its instances are terminated through their groups. Their agents see that, and save within the
time of the termination hook.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adaptdl_elastic.autoscaler.providers.base import ProviderError, TryLaterError, UnknownInstanceError
from adaptdl_elastic.autoscaler.providers.ec2.errors import explained
from adaptdl_elastic.autoscaler.providers.ec2.prices import PriceList, read_spot_prices
from adaptdl_elastic.autoscaler.providers.ec2.provider import connect

STACK_TAG = "adaptdl-elastic:stack"
"""The tag of a stack that this program has made; its value is the stack's name."""

CERTIFICATES = ("ca.pem", "node.pem", "node-key.pem")
"""Names of the parameters under /adaptdl/STACK/ that the head writes and CloudFormation does not know."""

_PER_CALL = 100  # most instances or types in a filter of one call
_GONE = ("shutting-down", "terminated")


@dataclass(frozen=True)
class Machine:
    """A running instance of a stack.

    Attributes:
        id: the instance.
        type: its type.
        spot: it is a spot instance.
        price: of an hour, without its disk; None: not known.
    """

    id: str
    type: str
    spot: bool
    price: float | None


@dataclass(frozen=True)
class Stack:
    """A stack of ours.

    Attributes:
        name: its name.
        identifier: its ARN, which stays valid when the stack is deleted.
        status: as CloudFormation says it, e.g. CREATE_COMPLETE.
        machines: its running instances, the head included.
        groups: its auto-scaling groups.
        checkpoints: where its checkpoints are, which stay.
        protected: CloudFormation is told not to delete it.
    """

    name: str
    identifier: str
    status: str
    machines: tuple[Machine, ...] = ()
    groups: tuple[str, ...] = ()
    checkpoints: str = ""
    protected: bool = False

    @property
    def hourly_cost(self) -> float:
        """The sum of the known prices of an hour."""
        return sum(machine.price or 0.0 for machine in self.machines)


class Stacks:
    """The stacks of one account and region.

    Args:
        region: AWS region; None: as boto3 finds it.
        profile: AWS profile; None: as boto3 finds it.
        clients: service → boto3 client, instead of new ones.
        clock: monotonic seconds.
        wait: called with the seconds between two looks.
    """

    interval = 5.0  # between two looks, in seconds

    def __init__(
        self,
        region: str | None = None,
        profile: str | None = None,
        clients: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        given = dict(clients or {})
        self._cloudformation, self._autoscaling, self._ec2, self._ssm = (
            given.get(service) or connect(service, region, profile)
            for service in ("cloudformation", "autoscaling", "ec2", "ssm")
        )
        pricing = given.get("pricing") or connect("pricing", PriceList.home, profile, retries=1)
        self._price_list = PriceList(pricing, self.region, clock)
        self._clock, self._wait = clock, wait

    @property
    def region(self) -> str:
        """The region that was looked at."""
        return str(self._cloudformation.meta.region_name)

    # Reading

    def find(self) -> tuple[Stack, ...]:
        """Return all stacks of ours, by name.

        Raises:
            ProviderError: the account cannot be read.
        """
        with explained("cloudformation:DescribeStacks"):
            pages = self._cloudformation.get_paginator("describe_stacks").paginate()
            ours = [answer for page in pages for answer in page["Stacks"] if is_ours(answer)]
        return tuple(sorted((self._read(answer) for answer in ours), key=lambda stack: stack.name))

    def _read(self, answer: Mapping[str, Any]) -> Stack:
        name = str(answer["StackName"])
        with explained("cloudformation:ListStackResources", name):
            pages = self._cloudformation.get_paginator("list_stack_resources").paginate(
                StackName=answer["StackId"]
            )
            resources = [one for page in pages for one in page["StackResourceSummaries"]]
        there = [one for one in resources if one["ResourceStatus"] != "DELETE_COMPLETE"]

        def of_type(kind: str) -> tuple[str, ...]:
            these = (one for one in there if one["ResourceType"] == kind)
            return tuple(str(one["PhysicalResourceId"]) for one in these if one.get("PhysicalResourceId"))

        groups = of_type("AWS::AutoScaling::AutoScalingGroup")
        members = [one["InstanceId"] for group in self._describe(groups) for one in group["Instances"]]
        parameters = {
            one["ParameterKey"]: one.get("ParameterValue", "") for one in answer.get("Parameters", [])
        }
        machines = self._machines([*of_type("AWS::EC2::Instance"), *members], self._table(parameters))
        return Stack(
            name=name,
            identifier=str(answer["StackId"]),
            status=str(answer["StackStatus"]),
            machines=machines,
            groups=groups,
            checkpoints=f"s3://{bucket}/{name}/checkpoints" if (bucket := parameters.get("Bucket")) else "",
            protected=bool(answer.get("EnableTerminationProtection")),
        )

    def _table(self, parameters: Mapping[str, str]) -> dict[str, float]:
        """Return the prices of on-demand types, as the stack's parameters say; 0 says nothing."""
        types = [parameters[key] for key in ("InstanceType", "SecondType") if parameters.get(key)]
        said = float(parameters.get("OnDemandPrice") or 0)
        return dict.fromkeys(types, said) if said else {}

    def _machines(self, instances: Sequence[str], table: Mapping[str, float]) -> tuple[Machine, ...]:
        found = []
        for some in _chunks(instances):
            with explained("ec2:DescribeInstances"):
                pages = self._ec2.get_paginator("describe_instances").paginate(
                    Filters=[{"Name": "instance-id", "Values": some}]
                )
                found += [one for page in pages for kept in page["Reservations"] for one in kept["Instances"]]
        running = [one for one in found if one["State"]["Name"] not in _GONE]
        kinds = sorted({one["InstanceType"] for one in running if one.get("InstanceLifecycle") == "spot"})
        history = read_spot_prices(self._ec2, kinds, 0.0) if kinds else {}
        spot = {place: changes[-1][1] for place, changes in history.items()}
        prices = {**table, **self._price_list.of({str(one["InstanceType"]) for one in running})}
        return tuple(_machine(one, prices, spot) for one in running)

    def _describe(self, groups: Sequence[str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for some in _chunks(groups):  # no names at all would mean every group of the account
            with explained("autoscaling:DescribeAutoScalingGroups", ", ".join(some)):
                pages = self._autoscaling.get_paginator("describe_auto_scaling_groups").paginate(
                    AutoScalingGroupNames=some
                )
                found += [group for page in pages for group in page["AutoScalingGroups"]]
        return found

    # Acting

    def empty(self, stack: Stack, patience: float) -> bool:
        """End the instances of a stack's groups and see that no others come; return whether none is left.

        Args:
            stack: the stack.
            patience: seconds to wait until the last instance has left its group.

        Raises:
            ProviderError: a right is missing, or AWS cannot be reached.
        """
        there = [str(group["AutoScalingGroupName"]) for group in self._describe(stack.groups)]
        for group in there:
            with explained("autoscaling:UpdateAutoScalingGroup", group):
                self._autoscaling.update_auto_scaling_group(
                    AutoScalingGroupName=group, MinSize=0, MaxSize=0, DesiredCapacity=0
                )
        end = self._clock() + patience
        while True:
            members = [one for group in self._describe(there) for one in group["Instances"]]
            for member in members:
                if not str(member["LifecycleState"]).startswith("Terminat"):
                    self._terminate(str(member["InstanceId"]))
            if not members or self._clock() >= end:
                return not members
            self._wait(self.interval)

    def _terminate(self, instance: str) -> None:
        """Terminate a member, protected or not; one that is busy or gone is looked at again later."""
        try:
            with explained("autoscaling:TerminateInstanceInAutoScalingGroup", instance):
                # the desired capacity is zero already, and lowering it would be refused
                self._autoscaling.terminate_instance_in_auto_scaling_group(
                    InstanceId=instance, ShouldDecrementDesiredCapacity=False
                )
        except (TryLaterError, UnknownInstanceError):
            return

    def delete(self, stack: Stack, patience: float) -> None:
        """Delete a stack and the certificates of its nodes, and wait until it is gone.

        Args:
            stack: the stack; `empty` comes first.
            patience: seconds to wait for CloudFormation.

        Raises:
            ProviderError: a right is missing, the stack could not be deleted, or that takes longer.
        """
        with explained("cloudformation:DeleteStack", stack.name):
            self._cloudformation.delete_stack(StackName=stack.identifier)
        end, before = self._clock() + patience, stack.status
        while True:
            found = self._look(stack.identifier)
            status = str(found["StackStatus"])
            if status == "DELETE_COMPLETE":
                break
            if status == "DELETE_FAILED" != before:  # the first look may still show an earlier failure
                why = found.get("StackStatusReason") or "its events in the console say why"
                raise ProviderError(f"stack {stack.name} could not be deleted: {why}")
            if self._clock() >= end:
                late = f"stack {stack.name} is still {status} after {patience:.0f} s"
                raise ProviderError(f"{late}: look at its events in the console")
            before = ""
            self._wait(self.interval)
        self.forget_certificates(stack.name)

    def forget_certificates(self, stack: str) -> None:
        """Delete what the head of a stack has written to SSM; what does not exist is no error."""
        with explained("ssm:DeleteParameters", f"/adaptdl/{stack}/"):
            self._ssm.delete_parameters(Names=[f"/adaptdl/{stack}/{name}" for name in CERTIFICATES])

    def _look(self, stack: str) -> dict[str, Any]:
        """Return a stack as CloudFormation describes it; by its identifier also one that is deleted."""
        with explained("cloudformation:DescribeStacks", stack):
            return dict(self._cloudformation.describe_stacks(StackName=stack)["Stacks"][0])


def is_ours(answer: Mapping[str, Any]) -> bool:
    """Return whether a stack in an answer of DescribeStacks has our tag with its own name."""
    tags = {tag["Key"]: tag["Value"] for tag in answer.get("Tags", [])}
    return tags.get(STACK_TAG) == answer["StackName"] and "ParentId" not in answer


def _machine(
    one: Mapping[str, Any], table: Mapping[str, float], spot: Mapping[tuple[str, str], float]
) -> Machine:
    kind, zone = str(one["InstanceType"]), str(one["Placement"]["AvailabilityZone"])
    is_spot = one.get("InstanceLifecycle") == "spot"
    price = spot.get((kind, zone), table.get(kind)) if is_spot else table.get(kind)
    return Machine(str(one["InstanceId"]), kind, is_spot, price)


def _chunks(names: Sequence[str]) -> Iterator[list[str]]:
    for first in range(0, len(names), _PER_CALL):
        yield list(names[first : first + _PER_CALL])
