"""The whole decision on moto, where Describe shows a terminated instance as before for one more look."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from moto_process import Moto, make_group
from scaling_world import waiting

from adaptdl_elastic.autoscaler.providers.ec2.provider import Ec2Provider
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.autoscaler.scaling.scaling_types import (
    Drain,
    Memory,
    NodeUse,
    Observation,
    Release,
    Request,
)
from adaptdl_elastic.autoscaler.scaling.step import step

pytestmark = pytest.mark.processes


class Pages:
    """A paginator that lets somebody change its pages."""

    def __init__(self, paginator: Any, change: Any) -> None:
        self._paginator, self._change = paginator, change

    def paginate(self, **arguments: Any) -> Iterator[Any]:
        for page in self._paginator.paginate(**arguments):
            self._change(page)
            yield page


class Late:
    """Both of moto's clients: the instances that were terminated are in service for `looks` looks more."""

    def __init__(self, moto: Moto, looks: int) -> None:
        self._looks = looks
        self._ghosts: dict[str, tuple[dict[str, Any], int]] = {}
        moto = Moto(moto.endpoint)  # its clients are changed
        self.autoscaling = self._client(moto.client("autoscaling"), self._add)
        self.autoscaling.terminate_instance_in_auto_scaling_group = self._terminate
        self.ec2 = self._client(moto.client("ec2"), self._revive)

    def looked(self) -> None:
        self._ghosts = {name: (entry, left - 1) for name, (entry, left) in self._ghosts.items() if left > 1}

    def _client(self, client: Any, change: Any) -> Any:
        true = client.get_paginator
        kinds = ("describe_auto_scaling_groups", "describe_instances")
        client.get_paginator = lambda name: Pages(true(name), change) if name in kinds else true(name)
        return client

    def _terminate(self, **arguments: Any) -> Any:
        identifier = arguments["InstanceId"]
        client: Any = self.autoscaling
        (group,) = client.describe_auto_scaling_groups()["AutoScalingGroups"]
        (entry,) = (i for i in group["Instances"] if i["InstanceId"] == identifier)
        self._ghosts[identifier] = (entry, self._looks)
        return type(client).terminate_instance_in_auto_scaling_group(client, **arguments)

    def _add(self, page: dict[str, Any]) -> None:
        for group in page["AutoScalingGroups"]:
            there = {i["InstanceId"] for i in group["Instances"]}
            group["Instances"] += [entry for name, (entry, _) in self._ghosts.items() if name not in there]

    def _revive(self, page: dict[str, Any]) -> None:
        for reservation in page["Reservations"]:
            for instance in reservation["Instances"]:
                if instance["InstanceId"] in self._ghosts:
                    instance["State"] = {"Name": "running", "Code": 16}


def test_a_late_describe_begins_no_circle_of_buying_and_selling(moto: Moto) -> None:
    make_group(moto, "workers", high=10)
    late, now = Late(moto, looks=2), 0.0
    clients = {"autoscaling": late.autoscaling, "ec2": late.ec2}
    provider = Ec2Provider(
        ["workers"], {"g5.xlarge": 1.0}, clients=clients, clock=lambda: now, spot_prices=lambda: {}
    )
    memory, draining, met = Memory(), set[str](), set[str]()
    asked: list[int] = []
    released = set[str]()
    for look in range(70):
        now += 5.0
        capacity = provider.capacity()
        met |= {i.id for i in capacity.instances}
        nodes = {i.id: NodeUse(f"n-{i.id}", {}, draining=i.id in draining) for i in capacity.instances}
        jobs = (waiting(replicas=3),) if look < 10 else ()
        decision = step(Observation(1000.0 + now, capacity, nodes, jobs), memory, ScalingSettings())
        memory = decision.memory
        late.looked()
        for action in decision.actions:
            if isinstance(action, Request):
                provider.request(action.pool, action.desired)
                asked.append(action.desired)
            elif isinstance(action, Release):
                provider.release(action.instance, action.replace)
                released.add(action.instance)
            elif isinstance(action, Drain):
                draining.add(action.instance)
    assert asked == [3]
    assert len(met) == 3
    assert released == met
    (pool,) = provider.capacity().pools
    assert pool.desired == 0
