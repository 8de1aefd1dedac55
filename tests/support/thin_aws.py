"""What moto does not do, or does wrong, in as few lines as will do: hooks that wait, limits, failures.

`AutoScaling` wraps a client of moto's. It knows which processes and instances there are, holds
terminated instances in Terminating:Wait while their group has a termination hook, takes heartbeats and
completions, enforces Min and Max, refuses what the credentials do not allow, and tells of launches that
failed for want of capacity.

`Pricing` is a price list with the entries that a test gives it; moto's fails.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

from botocore.exceptions import ClientError


def client_error(code: str, message: str, operation: str = "Operation") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, operation)


PROCESSES = {
    *("Launch", "Terminate", "AddToLoadBalancer", "AlarmNotification", "AZRebalance", "HealthCheck"),
    *("InstanceRefresh", "ReplaceUnhealthy", "ScheduledActions"),
}


class AutoScaling:
    """Everything that is not said here is moto's answer."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.waiting: dict[str, dict[str, Any]] = {}  # instance → its entry, in Terminating:Wait
        self.heartbeats: list[str] = []
        self.denied: set[str] = set()  # operations, in snake case
        self.failures: dict[str, str] = {}  # group → why its launches fail
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._client, name)
        if not callable(attribute) or name in ("get_paginator", "can_paginate"):
            return attribute

        def call(**arguments: Any) -> Any:
            self._check(name)
            return attribute(**arguments)

        return call

    def _check(self, name: str) -> None:
        self.calls.append(name)
        if name in self.denied:
            raise client_error("AccessDenied", f"not authorized to perform {name}", name)

    def get_paginator(self, name: str) -> Any:
        self._check(name)
        return _Paginator(self, name)

    def describe_auto_scaling_groups(self, **arguments: Any) -> Any:
        self._check("describe_auto_scaling_groups")
        answer = self._client.describe_auto_scaling_groups(**arguments)
        for group in answer["AutoScalingGroups"]:
            name = group["AutoScalingGroupName"]
            group["Instances"] += [e for e in self.waiting.values() if e["Group"] == name]
        return answer

    def set_desired_capacity(self, **arguments: Any) -> Any:
        self._check("set_desired_capacity")
        group = self._group(arguments["AutoScalingGroupName"])
        wanted = arguments["DesiredCapacity"]
        for bound, bad in (("MinSize", wanted < group["MinSize"]), ("MaxSize", wanted > group["MaxSize"])):
            if bad:
                message = f"New SetDesiredCapacity value {wanted} is beyond {bound} value {group[bound]}"
                raise client_error("ValidationError", message, "SetDesiredCapacity")
        return self._client.set_desired_capacity(**arguments)

    def terminate_instance_in_auto_scaling_group(self, **arguments: Any) -> Any:
        self._check("terminate_instance_in_auto_scaling_group")
        identifier = arguments["InstanceId"]
        found = self._client.describe_auto_scaling_instances(InstanceIds=[identifier])["AutoScalingInstances"]
        if not found:
            raise client_error("ValidationError", f"Instance Id not found - No managed instance {identifier}")
        group = self._group(found[0]["AutoScalingGroupName"])
        if arguments["ShouldDecrementDesiredCapacity"] and group["DesiredCapacity"] <= group["MinSize"]:
            message = "Currently, desiredSize equals minSize."
            raise client_error("ValidationError", message, "TerminateInstanceInAutoScalingGroup")
        entry = next(i for i in group["Instances"] if i["InstanceId"] == identifier)
        answer = self._client.terminate_instance_in_auto_scaling_group(**arguments)
        name = group["AutoScalingGroupName"]
        if self._client.describe_lifecycle_hooks(AutoScalingGroupName=name)["LifecycleHooks"]:
            self.waiting[identifier] = {**entry, "LifecycleState": "Terminating:Wait", "Group": name}
        return answer

    def record_lifecycle_action_heartbeat(self, **arguments: Any) -> Any:
        self._check("record_lifecycle_action_heartbeat")
        self._waits(arguments["InstanceId"])
        self.heartbeats.append(arguments["InstanceId"])
        return {}

    def complete_lifecycle_action(self, **arguments: Any) -> Any:
        self._check("complete_lifecycle_action")
        self._waits(arguments["InstanceId"])
        assert arguments["LifecycleActionResult"] in ("CONTINUE", "ABANDON")
        del self.waiting[arguments["InstanceId"]]
        return {}

    def suspend_processes(self, **arguments: Any) -> Any:
        return self._processes("suspend_processes", arguments)

    def resume_processes(self, **arguments: Any) -> Any:
        return self._processes("resume_processes", arguments)

    def _processes(self, operation: str, arguments: dict[str, Any]) -> Any:
        self._check(operation)
        if set(arguments["ScalingProcesses"]) - PROCESSES:
            raise client_error("ValidationError", f"no such process: {arguments['ScalingProcesses']}")
        return getattr(self._client, operation)(**arguments)

    def set_instance_protection(self, **arguments: Any) -> Any:
        self._check("set_instance_protection")
        group = self._group(arguments["AutoScalingGroupName"])
        there = {entry["InstanceId"] for entry in group["Instances"]}
        if set(arguments["InstanceIds"]) - there:
            raise client_error("ValidationError", "The instance is not part of the Auto Scaling group")
        return self._client.set_instance_protection(**arguments)

    def describe_scaling_activities(self, **arguments: Any) -> Any:
        self._check("describe_scaling_activities")
        message = self.failures.get(arguments["AutoScalingGroupName"])
        if message is None:
            return {"Activities": []}
        return {
            "Activities": [
                {
                    "Description": f"Launching a new EC2 instance.  Status Reason: {message}",
                    "StatusCode": "Failed",
                    "StatusMessage": message,
                    "StartTime": datetime(2026, 11, 21, tzinfo=timezone.utc),
                }
            ]
        }

    def _waits(self, instance: str) -> None:
        if instance not in self.waiting:
            raise client_error(
                "ValidationError", f"No active Lifecycle Action found with instance ID {instance}"
            )

    def _group(self, name: str) -> Any:
        return self._client.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"][0]


class _Paginator:
    def __init__(self, owner: AutoScaling, name: str) -> None:
        self._owner = owner
        self._name = name

    def paginate(self, **arguments: Any) -> Any:
        yield getattr(self._owner, self._name)(**arguments)


class Pricing:
    """A price list.

    Attributes:
        prices: Instance type or type of a volume → US dollars, as AWS writes them.
        fault: What every call raises; None: it answers.
        asked: The types that were asked for.
        filters: Those of the last call.
    """

    def __init__(self, **prices: str) -> None:
        self.prices = {name.replace("_", "."): price for name, price in prices.items()}
        self.fault: Exception | None = None
        self.asked: list[str] = []
        self.filters: dict[str, str] = {}

    def get_products(self, ServiceCode: str, Filters: list[dict[str, str]]) -> dict[str, Any]:
        assert ServiceCode == "AmazonEC2"
        assert {one["Type"] for one in Filters} == {"TERM_MATCH"}
        self.filters = {one["Field"]: one["Value"] for one in Filters}
        kind = self.filters.get("instanceType") or self.filters["volumeApiName"]
        self.asked.append(kind)
        if self.fault is not None:
            raise self.fault
        found = [json.dumps(product(self.prices[kind]))] if kind in self.prices else []
        return {"FormatVersion": "aws_v1", "PriceList": found}


def product(usd: str, unit: str = "Hrs") -> dict[str, Any]:
    """An entry of the price list with one on-demand price, and nothing that is not needed."""
    dimension = {"unit": unit, "beginRange": "0", "endRange": "Inf", "pricePerUnit": {"USD": usd}}
    term = {"priceDimensions": {"SKU.JRTCKXETXF.6YS6EN2CT7": dimension}, "offerTermCode": "JRTCKXETXF"}
    return {"serviceCode": "AmazonEC2", "terms": {"OnDemand": {"SKU.JRTCKXETXF": term}}}
