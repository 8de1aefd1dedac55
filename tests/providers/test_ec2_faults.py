"""AWS answers late, twice, wrongly or not at all; people change the groups behind our back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore.exceptions import ReadTimeoutError
from botocore.parsers import ResponseParserError
from moto_process import IMAGE, REGION, Moto, make_group, make_hook
from thin_aws import AutoScaling, client_error

from adaptdl_elastic.autoscaler.providers.base import (
    InstanceState,
    ProviderError,
    SignalKind,
    TryLaterError,
    UnknownPoolError,
)
from adaptdl_elastic.autoscaler.providers.ec2.notice_queue import parse_event
from adaptdl_elastic.autoscaler.providers.ec2.provider import RULED_TAG, Ec2Provider

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]

ZONE = f"{REGION}a"
PRICES = {"g5.xlarge": 1.0, "g5.12xlarge": 4.0}
WARNING = "EC2 Spot Instance Interruption Warning"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Wrapped:
    """A client of moto's with some calls replaced."""

    def __init__(self, client: Any, **calls: Any) -> None:
        self._client = client
        self.__dict__.update(calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def provider(moto: Moto, *groups: str, **more: Any) -> tuple[Ec2Provider, AutoScaling]:
    thin = AutoScaling(moto.client("autoscaling"))
    clients = {"autoscaling": thin, **more.pop("clients", {})}
    return Ec2Provider(groups or ("workers",), PRICES, clients=clients, **more), thin


def notice(instance: str, time: str = "2026-11-21T04:00:00Z") -> str:
    detail = {"instance-id": instance, "instance-action": "terminate"}
    return json.dumps({"detail-type": WARNING, "time": time, "detail": detail})


def always(error: Exception) -> Any:
    def call(**arguments: object) -> None:
        raise error

    return call


def test_activities_that_can_not_be_read_are_a_warning(moto: Moto) -> None:
    make_group(moto, "workers", desired=1)
    ours, thin = provider(moto)
    thin.describe_scaling_activities = always(ReadTimeoutError(endpoint_url="aws"))  # type: ignore[method-assign]
    now = ours.capacity()
    assert len(now.instances) == 1
    assert "DescribeScalingActivities" in now.warnings[0]


def test_an_answer_that_is_none_is_tried_later(moto: Moto) -> None:
    make_group(moto, "workers")
    ours, thin = provider(moto)
    thin.set_desired_capacity = always(ResponseParserError("invalid XML received\n<html>"))  # type: ignore[method-assign]
    with pytest.raises(TryLaterError, match=r"not an answer of AWS: invalid XML received$"):
        ours.request("workers", 1)


# -- the queue


@pytest.mark.parametrize(
    "body", ["[" * 50_000, "null", "1e999", '"x"', "{}", '{"detail": {"instance-id": 1}}']
)
def test_no_message_is_poison(moto: Moto, body: str) -> None:
    make_group(moto, "workers", desired=1, spot=True)
    sqs, url = moto.client("sqs"), moto.queue()
    ours, _ = provider(moto, queue_url=url)
    member = ours.capacity().instances[0].id
    for text in (body, notice(member), body):
        sqs.send_message(QueueUrl=url, MessageBody=text)
    assert [signal.instance for signal in ours.signals()] == [member]
    left = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert left["ApproximateNumberOfMessages"] == left["ApproximateNumberOfMessagesNotVisible"] == "0"


@pytest.mark.parametrize("time", ["soon", "", "99999-01-01T00:00:00Z"])
def test_a_notice_with_an_unreadable_time_is_believed(time: str) -> None:
    signal = parse_event(notice("i-1", time))
    assert signal is not None
    assert (signal.kind, signal.instance, signal.deadline) == (SignalKind.INTERRUPTION, "i-1", None)


@pytest.mark.essential
def test_a_notice_counts_though_its_message_can_not_be_deleted(moto: Moto) -> None:
    make_group(moto, "workers", desired=1, spot=True)
    sqs, url = moto.client("sqs"), moto.queue()
    denied = Wrapped(sqs, delete_message_batch=always(client_error("AccessDenied", "no")))
    ours, _ = provider(moto, queue_url=url, clients={"sqs": denied})
    member = ours.capacity().instances[0].id
    sqs.send_message(QueueUrl=url, MessageBody=notice(member))
    assert [signal.instance for signal in ours.signals()] == [member]
    assert any("no permission for sqs:DeleteMessage" in text for text in ours.capacity().warnings)


def test_notices_read_before_the_queue_failed_count(moto: Moto) -> None:
    make_group(moto, "workers", desired=1, spot=True)
    sqs, url = moto.client("sqs"), moto.queue()
    answers: list[Any] = [sqs.receive_message, always(ReadTimeoutError(endpoint_url="aws"))]
    failing = Wrapped(sqs, receive_message=lambda **arguments: answers.pop(0)(**arguments))
    ours, _ = provider(moto, queue_url=url, clients={"sqs": failing})
    member = ours.capacity().instances[0].id
    sqs.send_message(QueueUrl=url, MessageBody=notice(member))
    assert [signal.instance for signal in ours.signals()] == [member]
    assert any("sqs:ReceiveMessage" in text for text in ours.capacity().warnings)


# -- late, and twice


def test_an_instance_that_is_released_and_still_shown_is_not_released_again(moto: Moto) -> None:
    """Twice would lower the desired capacity twice."""
    make_group(moto, "workers", desired=3)
    clock = Clock()
    ours, thin = provider(moto, clock=clock)
    chosen = ours.capacity().instances[0].id
    late = thin.describe_auto_scaling_groups(AutoScalingGroupNames=["workers"])
    thin.describe_auto_scaling_groups = lambda **arguments: late  # type: ignore[method-assign]
    ours.release(chosen)
    ours.release(chosen)
    assert thin.calls.count("terminate_instance_in_auto_scaling_group") == 1
    assert moto.group()["DesiredCapacity"] == 2
    clock.now += 61.0
    thin.terminate_instance_in_auto_scaling_group = always(client_error("Throttling", "slow"))  # type: ignore[method-assign]
    with pytest.raises(TryLaterError):  # nothing has come of it for so long: it is said again
        ours.release(chosen)


def test_an_instance_waits_in_one_hook_of_two_and_may_have_left_it(moto: Moto) -> None:
    make_group(moto, "workers", desired=2)
    for hook in ("first", "second"):
        make_hook(moto, hook)
    ours, thin = provider(moto)
    leaving = ours.capacity().instances[0].id
    ours.release(leaving)
    ours.hold(leaving)
    for _ in range(2):
        ours.let_go(leaving)
    ours.hold(leaving)
    assert ours.capacity().instance(leaving) is None
    thin.denied = {"complete_lifecycle_action"}
    with pytest.raises(ProviderError, match="autoscaling:CompleteLifecycleAction"):
        ours.let_go(leaving)


# -- changed behind our back


def test_one_of_two_groups_is_deleted(moto: Moto) -> None:
    make_group(moto, "first", desired=1)
    make_group(moto, "second", desired=1)
    ours, _ = provider(moto, "first", "second")
    with ours:
        ours.capacity()
        moto.client("autoscaling").delete_auto_scaling_group(AutoScalingGroupName="first", ForceDelete=True)
        now = ours.capacity()
        assert [pool.name for pool in now.pools] == ["second"]
        assert "'first' has been deleted" in now.warnings[0]
        with pytest.raises(UnknownPoolError, match="deleted"):
            ours.request("first", 1)
        ours.request("second", 2)
    after = moto.group("second")
    assert after["SuspendedProcesses"] == []
    assert RULED_TAG not in {tag["Key"] for tag in after["Tags"]}


def test_the_last_group_is_deleted(moto: Moto) -> None:
    make_group(moto, "workers")
    ours, _ = provider(moto)
    ours.capacity()
    moto.client("autoscaling").delete_auto_scaling_group(AutoScalingGroupName="workers", ForceDelete=True)
    with pytest.raises(UnknownPoolError, match="no auto-scaling group is left: workers"):
        ours.capacity()


def test_a_group_that_can_not_be_handed_back_does_not_keep_the_others(moto: Moto) -> None:
    make_group(moto, "first")
    make_group(moto, "second")
    ours, thin = provider(moto, "first", "second")
    ours.take_over()
    resume = thin.resume_processes

    def refuse(**arguments: Any) -> Any:
        if arguments["AutoScalingGroupName"] == "first":
            raise client_error("AccessDenied", "no")
        return resume(**arguments)

    thin.resume_processes = refuse
    with pytest.raises(ProviderError, match="autoscaling:ResumeProcesses on first"):
        ours.hand_back()
    assert moto.group("second")["SuspendedProcesses"] == []


def test_a_template_that_moves_behind_its_pointer_is_read_again(moto: Moto) -> None:
    make_group(moto, "workers")  # points to $Latest
    clock = Clock()
    ours, _ = provider(moto, clock=clock)
    assert ours.capacity().pool("workers").instance_type == "g5.xlarge"
    moto.client("ec2").create_launch_template_version(
        LaunchTemplateName="workers", LaunchTemplateData={"ImageId": IMAGE, "InstanceType": "g5.12xlarge"}
    )
    clock.now += ours.price_seconds
    pool = ours.capacity().pool("workers")
    assert (pool.instance_type, pool.hourly_price, pool.slots) == ("g5.12xlarge", 4.0, 4)


# -- prices


def test_spot_prices_of_a_moment_ago_serve_while_new_ones_can_not_be_read(moto: Moto) -> None:
    make_group(moto, "workers", spot=True)
    clock = Clock()
    answers = iter(
        [
            lambda: {("g5.xlarge", ZONE): ((0.0, 0.3),)},
            always(ProviderError("ec2:DescribeSpotPriceHistory: RequestLimitExceeded")),
            lambda: {("g5.xlarge", ZONE): ((0.0, 0.3), (1.0, 0.4))},
        ]
    )
    ours, _ = provider(moto, clock=clock, spot_prices=lambda: next(answers)())
    assert ours.capacity().pool("workers").hourly_price == 0.3
    clock.now += ours.price_seconds
    for _ in range(2):
        now = ours.capacity()
        assert now.pool("workers").hourly_price == 0.3
        assert "RequestLimitExceeded; spot prices are those of some minutes ago" in now.warnings[0]
    clock.now += 30.0
    now = ours.capacity()
    assert now.pool("workers").hourly_price == 0.4
    assert now.warnings == ()


def test_prices_that_can_not_be_read_at_all_are_an_error(moto: Moto) -> None:
    make_group(moto, "workers", spot=True)
    ours, _ = provider(moto, spot_prices=always(ProviderError("no right to read prices")))
    with pytest.raises(ProviderError, match="no right to read prices"):
        ours.capacity()


def test_an_empty_price_history_is_said(moto: Moto) -> None:
    make_group(moto, "workers", spot=True)
    ours, _ = provider(moto, spot_prices=dict)
    now = ours.capacity()
    assert now.pool("workers").hourly_price == 1.0
    assert f"EC2 tells no spot price of g5.xlarge in {ZONE}" in now.warnings[0]


@pytest.mark.essential
def test_a_type_that_is_not_sold_in_a_zone(moto: Moto) -> None:
    """Its price elsewhere will do: no table of on-demand prices is needed for a group on spot."""
    mixed = {"OnDemandBaseCapacity": 0, "OnDemandPercentageAboveBaseCapacity": 0}
    make_group(moto, "workers", types=("g5.xlarge", "p4d.24xlarge"), mixed=mixed)
    prices = {("g5.xlarge", ZONE): ((0.0, 0.3),), ("p4d.24xlarge", f"{REGION}b"): ((0.0, 9.0),)}
    ours, _ = provider(moto, spot_prices=lambda: prices)
    assert ours.capacity().pool("workers").hourly_price == 0.3
    ours, _ = provider(moto, spot_prices=lambda: {("g5.xlarge", ZONE): ((0.0, 0.3),)})
    with pytest.raises(ProviderError, match=r"--price p4d.24xlarge=PRICE"):
        ours.capacity()


def test_standby_is_out_of_service(moto: Moto) -> None:
    make_group(moto, "workers", desired=2)
    ours, _ = provider(moto)
    chosen = ours.capacity().instances[0].id
    moto.client("autoscaling").enter_standby(
        AutoScalingGroupName="workers", InstanceIds=[chosen], ShouldDecrementDesiredCapacity=True
    )
    assert [i.state for i in ours.capacity().instances if i.id == chosen] == [InstanceState.LEAVING]
