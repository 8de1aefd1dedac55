from __future__ import annotations

import json
import re
from typing import Any

import boto3
import pytest
from botocore.config import Config
from moto_process import REGION, Moto, make_group, make_hook
from thin_aws import AutoScaling, client_error

from adaptdl_elastic.autoscaler.providers.base import (
    InstanceState,
    NoPermissionError,
    ProviderError,
    SignalKind,
    TryLaterError,
    UnknownInstanceError,
    UnknownPoolError,
)
from adaptdl_elastic.autoscaler.providers.ec2.provider import (
    PRICES_TAG,
    RULED_TAG,
    SETTINGS_TAG,
    Ec2Provider,
)

pytestmark = pytest.mark.processes

PRICES = {"g5.xlarge": 1.0, "g5.12xlarge": 5.0}


def provider(moto: Moto, *groups: str, **more: Any) -> Ec2Provider:
    return Ec2Provider(groups or ("workers",), PRICES, **more)


def with_thin_fake(moto: Moto, *groups: str, **more: Any) -> tuple[Ec2Provider, AutoScaling]:
    thin = AutoScaling(moto.client("autoscaling"))
    return provider(moto, *groups, clients={"autoscaling": thin}, **more), thin


def test_grows_from_zero_and_sees_its_instances(moto: Moto) -> None:
    make_group(moto, "workers")
    ours = provider(moto)
    pool = ours.capacity().pool("workers")
    assert (pool.desired, pool.minimum, pool.maximum, pool.slots) == (0, 0, 4, 1)
    assert (pool.hourly_price, pool.preemptible, pool.instance_type) == (1.0, False, "g5.xlarge")
    ours.request("workers", 2)
    ours.request("workers", 2)  # twice is once
    now = ours.capacity()
    assert now.pool("workers").desired == 2
    assert [i.state for i in now.instances] == [InstanceState.RUNNING] * 2
    assert all(i.id.startswith("i-") and i.zone == f"{REGION}a" and i.launched > 0 for i in now.instances)


def test_prices_and_settings_are_tags_that_may_change_at_any_time(moto: Moto) -> None:
    make_group(moto, "workers", types=("g6.xlarge",))
    ours = provider(moto)
    with pytest.raises(ProviderError, match=r"no price is known for g6\.xlarge"):
        ours.capacity()
    for price, most in (("0.5", "3"), ("0.7", "4")):
        ours.tag("workers", PRICES_TAG, f"g6.xlarge={price} g5.xlarge=9")
        ours.tag("workers", SETTINGS_TAG, f"max-nodes={most} max-job-cost=")
        now = ours.capacity()
        assert now.pool("workers").hourly_price == float(price)
        assert now.settings == (f"max-nodes={most}", "max-job-cost=")
    # a tag that somebody has mistyped does not keep nodes from being given back
    ours.tag("workers", PRICES_TAG, "g6.xlarge=0.7 g5.xlarge=1,006")
    (warning,) = (one for one in ours.capacity().warnings if PRICES_TAG in one)
    assert "'1,006' is not a price per hour" in warning


def test_slots_are_the_gpus_of_the_type(moto: Moto) -> None:
    make_group(moto, "workers", types=("g5.12xlarge",), desired=1)
    assert provider(moto).capacity().instances[0].slots == 4
    assert provider(moto, slots=2).capacity().pool("workers").slots == 2


def test_the_chosen_instance_goes_and_is_not_replaced(moto: Moto) -> None:
    make_group(moto, "workers", desired=3)
    ours = provider(moto)
    chosen = ours.capacity().instances[1].id
    ours.release(chosen)
    ours.release(chosen)  # late, and twice
    after = ours.capacity()
    assert after.pool("workers").desired == 2
    assert chosen not in {i.id for i in after.instances if i.state is not InstanceState.LEAVING}


def test_a_replacement_takes_the_place_of_a_broken_one(moto: Moto) -> None:
    make_group(moto, "workers", desired=1)
    ours = provider(moto)
    broken = ours.capacity().instances[0].id
    ours.release(broken, replace=True)
    after = ours.capacity()
    assert after.pool("workers").desired == 1
    assert [i.id for i in after.instances if i.state is InstanceState.RUNNING] != [broken]


def test_lowering_takes_back_only_what_has_not_come(moto: Moto) -> None:
    make_group(moto, "workers", desired=2)
    ours = provider(moto)
    ours.capacity()
    ours.request("workers", 0)
    after = ours.capacity()
    assert after.pool("workers").desired == 2
    assert len(after.instances) == 2


@pytest.mark.parametrize("desired", [-1, 5])
def test_never_beyond_min_and_max(moto: Moto, desired: int) -> None:
    make_group(moto, "workers")
    with pytest.raises(ProviderError, match="Min 0 and Max 4"):
        provider(moto).request("workers", desired)


def test_at_its_minimum_a_group_says_so(moto: Moto) -> None:
    make_group(moto, "workers", low=1, desired=1)
    ours, _ = with_thin_fake(moto)
    with pytest.raises(ProviderError, match="minSize"):
        ours.release(ours.capacity().instances[0].id)


def test_spot_prices_and_terms_come_from_what_the_group_launches(moto: Moto) -> None:
    zone, mixed = f"{REGION}a", {"OnDemandBaseCapacity": 1, "OnDemandPercentageAboveBaseCapacity": 0}
    prices = {("g5.xlarge", zone): ((0.0, 0.35),), ("g5.12xlarge", zone): ((0.0, 1.5),)}
    make_group(moto, "workers", types=("g5.12xlarge", "g5.xlarge"), mixed=mixed)
    ours = provider(moto, spot_prices=lambda: prices)
    first = ours.capacity().pool("workers")
    assert (first.preemptible, first.hourly_price, first.slots) == (False, 1.0, 1)
    ours.request("workers", 1)
    second = ours.capacity().pool("workers")
    assert (second.preemptible, second.hourly_price) == (True, 0.35)


def test_spot_price_history_is_read(moto: Moto) -> None:
    make_group(moto, "workers", spot=True)
    pool = provider(moto).capacity().pool("workers")
    assert pool.preemptible
    assert pool.hourly_price == pytest.approx(0.00001)  # what moto says of every type


def test_ruling_is_undone_even_after_a_crash(moto: Moto) -> None:
    make_group(moto, "workers", desired=1)
    first = provider(moto)
    first.take_over()  # and dies
    with provider(moto):
        ruled = moto.group()
        assert [p["ProcessName"] for p in ruled["SuspendedProcesses"]] == ["AZRebalance"]
        assert ruled["NewInstancesProtectedFromScaleIn"]
    after = moto.group()
    assert after["SuspendedProcesses"] == []
    assert not after["NewInstancesProtectedFromScaleIn"]
    assert RULED_TAG not in {tag["Key"] for tag in after["Tags"]}


def test_processes_that_a_person_suspended_stay_suspended(moto: Moto) -> None:
    make_group(moto, "workers", NewInstancesProtectedFromScaleIn=True)
    moto.client("autoscaling").suspend_processes(
        AutoScalingGroupName="workers", ScalingProcesses=["AZRebalance"]
    )
    with provider(moto):
        pass
    after = moto.group()
    assert [p["ProcessName"] for p in after["SuspendedProcesses"]] == ["AZRebalance"]
    assert after["NewInstancesProtectedFromScaleIn"]


def test_protection_is_set_once(moto: Moto) -> None:
    make_group(moto, "workers", desired=2)
    ours, thin = with_thin_fake(moto)
    first, second = (i.id for i in ours.capacity().instances)
    ours.protect([first], True)
    now = {i.id: i.protected for i in ours.capacity().instances}
    assert now == {first: True, second: False}
    ours.protect([first], True)
    assert thin.calls.count("set_instance_protection") == 1


def test_a_hook_is_kept_waiting_and_completed(moto: Moto) -> None:
    make_group(moto, "workers", desired=2)
    make_hook(moto, "drain")
    ours, thin = with_thin_fake(moto)
    leaving = ours.capacity().instances[0].id
    ours.release(leaving)
    held = ours.capacity().instance(leaving)
    assert held is not None
    assert (held.state, held.held) == (InstanceState.LEAVING, True)
    ours.hold(leaving)
    assert thin.heartbeats == [leaving]
    ours.let_go(leaving)
    assert ours.capacity().instance(leaving) is None


MADE: list[tuple[dict[str, Any] | None, dict[str, str], type[ProviderError], str]] = [
    (None, {}, UnknownPoolError, f"no auto-scaling group 'workers' in {REGION}"),
    ({}, {"region": "us-west-2"}, UnknownPoolError, "us-west-2"),
    ({}, {"profile": "nobody"}, ProviderError, "--profile"),
    ({}, {"queue_url": "ENDPOINT/123456789012/none"}, ProviderError, "check --queue-url"),
    ({"types": ("p4d.24xlarge",)}, {}, ProviderError, "--price p4d.24xlarge=PRICE"),
    # moto lets it pass; AWS does not
    ({"low": 3, "high": 2, "desired": 2}, {}, ProviderError, "Min 3 and Max 2"),
    ({"mixed": {"OnDemandBaseCapacity": 0}, "weight": "2"}, {}, ProviderError, "WeightedCapacity"),
]


@pytest.mark.parametrize(("group", "given", "kind", "said"), MADE)
def test_a_group_or_setting_that_cannot_be_used_is_refused_with_the_remedy(
    moto: Moto, group: dict[str, Any] | None, given: dict[str, str], kind: type[ProviderError], said: str
) -> None:
    if group is not None:
        make_group(moto, "workers", **group)
    more = {name: value.replace("ENDPOINT", moto.endpoint) for name, value in given.items()}

    def used() -> None:
        ours = provider(moto, **more)
        ours.capacity()
        ours.signals()

    with pytest.raises(kind, match=re.escape(said)):
        used()


def test_an_instance_of_another_group_is_not_released(moto: Moto) -> None:
    make_group(moto, "workers", desired=1)
    make_group(moto, "theirs", desired=1)
    stranger = moto.group("theirs")["Instances"][0]["InstanceId"]
    for unknown in (stranger, "i-00000000000000000", "box"):
        with pytest.raises(UnknownInstanceError, match="not an instance of workers"):
            provider(moto).release(unknown)
    assert len(moto.group("theirs")["Instances"]) == 1


def test_no_permission_names_the_action(moto: Moto) -> None:
    make_group(moto, "workers")
    ours, thin = with_thin_fake(moto)
    thin.denied = {"set_desired_capacity"}
    with pytest.raises(NoPermissionError, match="autoscaling:SetDesiredCapacity on workers"):
        ours.request("workers", 1)


def test_no_credentials(moto: Moto, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(NoPermissionError, match="AWS_PROFILE"):
        provider(moto).capacity()


def test_no_region(moto: Moto, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(ProviderError, match="AWS_REGION"):
        provider(moto)


def test_why_a_launch_failed_is_told(moto: Moto) -> None:
    make_group(moto, "workers")
    ours, thin = with_thin_fake(moto)
    thin.failures["workers"] = "We currently do not have sufficient g5.xlarge capacity"
    pool = ours.capacity().pool("workers")
    assert "sufficient g5.xlarge capacity" in pool.trouble
    assert pool.trouble_since > 0
    thin.denied = {"describe_scaling_activities"}
    now = ours.capacity()
    assert now.pool("workers").trouble == ""
    assert "autoscaling:DescribeScalingActivities" in now.warnings[0]


@pytest.mark.parametrize(
    "code",
    [
        *("LimitExceeded", "VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded"),
        *("InsufficientInstanceCapacity", "Throttling", "RequestLimitExceeded", "ScalingActivityInProgress"),
    ],
)
def test_quotas_capacity_and_throttling_are_tried_later(moto: Moto, code: str) -> None:
    make_group(moto, "workers")
    ours, thin = with_thin_fake(moto)
    ours.capacity()

    def refuse(**arguments: object) -> None:
        raise client_error(code, "no more of that", "SetDesiredCapacity")

    thin.set_desired_capacity = refuse  # type: ignore[method-assign]
    with pytest.raises(TryLaterError, match=rf"autoscaling:SetDesiredCapacity on workers: {code}"):
        ours.request("workers", 2)


def test_a_group_that_rebalances_is_known_as_such(moto: Moto) -> None:
    make_group(moto, "workers", spot=True)
    make_group(moto, "early", spot=True, CapacityRebalance=True)
    ours = provider(moto, "workers", "early")
    assert {p.name: p.replaces_at_risk for p in ours.capacity().pools} == {"workers": False, "early": True}


def test_an_unreachable_endpoint_is_said(moto: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fast = Config(retries={"max_attempts": 1}, connect_timeout=1, read_timeout=1)
    client = boto3.client("autoscaling", config=fast)
    with pytest.raises(ProviderError, match="cannot be reached"):
        provider(moto, clients={"autoscaling": client}).capacity()


def test_the_queue_brings_notices_about_our_instances(moto: Moto) -> None:
    make_group(moto, "workers", desired=1, spot=True)
    sqs, url = moto.client("sqs"), moto.queue()
    ours = provider(moto, queue_url=url)
    member = ours.capacity().instances[0].id
    stamp = "2026-11-21T04:00:00Z"

    def event(kind: str, **detail: str) -> str:
        return json.dumps({"detail-type": kind, "source": "aws.ec2", "time": stamp, "detail": detail})

    warning = "EC2 Spot Instance Interruption Warning"
    bodies = [
        event(warning, **{"instance-id": member, "instance-action": "terminate"}),
        event(warning, **{"instance-id": "i-somebody", "instance-action": "terminate"}),
        event("EC2 Instance Rebalance Recommendation", **{"instance-id": member}),
        event("EC2 Instance State-change Notification", **{"instance-id": member, "state": "running"}),
        event(warning),
        "not json",
        "[]",
    ]
    for body in bodies:
        sqs.send_message(QueueUrl=url, MessageBody=body)
    told = ours.signals()
    assert {signal.kind for signal in told} == {SignalKind.INTERRUPTION, SignalKind.REBALANCE}
    assert {signal.instance for signal in told} == {member}
    end = next(s.deadline for s in told if s.kind is SignalKind.INTERRUPTION)
    assert end == pytest.approx(1795233720.0)
    assert ours.signals() == ()


def test_an_instance_that_has_ended_is_reported_with_its_launch_and_its_end(moto: Moto) -> None:
    """moto takes the tag of the group away at the end, so the instance must have been seen before."""
    make_group(moto, "workers", desired=1)
    ours = provider(moto)
    (running,) = ours.capacity().instances
    assert (running.ended, ours.capacity().ended) == (None, ())
    ours.release(running.id)
    for _ in range(3):
        now = ours.capacity()
        assert now.instances == ()
        (ended,) = now.ended
        assert (ended.id, ended.pool, ended.launched) == (running.id, "workers", running.launched)
        assert ended.ended == running.launched + 60.0


def test_an_instance_that_came_and_went_between_two_looks_is_reported(moto: Moto) -> None:
    make_group(moto, "workers", desired=1)
    (member,) = moto.group()["Instances"]
    ec2 = moto.client("ec2")
    ec2.terminate_instances(InstanceIds=[member["InstanceId"]])
    tag = {"Key": "aws:autoscaling:groupName", "Value": "workers"}
    ec2.create_tags(Resources=[member["InstanceId"]], Tags=[tag])
    assert member["InstanceId"] in {i.id for i in provider(moto).capacity().ended}
