"""What EC2 reports of instances that have ended, for the bill."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from adaptdl_elastic.autoscaler.providers.base import InstanceState
from adaptdl_elastic.autoscaler.providers.ec2.responses import Kind, Prices, instances_of

LAUNCH = datetime(2026, 11, 26, 12, 0, 0, tzinfo=timezone.utc)
CHANGES = ((0.0, 0.3), (1e9, 0.4))


def read(state: str, reason: str, lifecycle: str = "Terminated") -> Any:
    entry = {"InstanceId": "i-1", "LifecycleState": lifecycle}
    detail = {
        "InstanceId": "i-1",
        "InstanceType": "g5.xlarge",
        "InstanceLifecycle": "spot",
        "Placement": {"AvailabilityZone": "a"},
        "LaunchTime": LAUNCH,
        "State": {"Name": state},
        "StateTransitionReason": reason,
    }
    group = {"AutoScalingGroupName": "workers", "Instances": [entry]}
    prices = Prices({}, {("g5.xlarge", "a"): CHANGES})
    return instances_of(group, Kind(("g5.xlarge",)), {"i-1": detail}, prices, {})


@pytest.mark.parametrize(
    ("reason", "seconds"),
    [
        ("User initiated (2026-11-26 12:10:05 GMT)", 605.0),
        ("User initiated (2026-11-26 12:10:05 UTC)", 605.0),
        ("User initiated (2026-11-26 12:00:07 GMT)", 60.0),
        ("Server.SpotInstanceTermination: Spot instance termination", None),
        ("", None),
    ],
)
def test_until_when_an_instance_is_paid_for(reason: str, seconds: float | None) -> None:
    there, (ended,) = read("terminated", reason)
    assert there == ()
    assert ended.ended == (0.0 if seconds is None else (LAUNCH + timedelta(seconds=seconds)).timestamp())
    assert (ended.launched, ended.price_changes, ended.zone) == (LAUNCH.timestamp(), CHANGES, "a")


def test_an_instance_that_shuts_down_in_its_group_is_there_and_no_longer_paid_for() -> None:
    (there,), ended = read("shutting-down", "User initiated (2026-11-26 12:10:05 GMT)", "Terminating")
    assert ended == ()
    assert there.state is InstanceState.LEAVING
    assert there.ended == LAUNCH.timestamp() + 605.0


def test_an_instance_that_runs_on_outside_its_group_is_not_among_the_ended_ones() -> None:
    assert read("running", "", "Detached") == ((), ())
