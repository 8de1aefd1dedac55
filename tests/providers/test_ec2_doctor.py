from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore import xform_name
from moto_process import Moto, make_group
from thin_aws import AutoScaling, client_error

from adaptdl_elastic.autoscaler.providers.ec2.account_checks import Check, check_aws
from adaptdl_elastic.autoscaler.providers.ec2.provider import connect

pytestmark = pytest.mark.processes


def failing(checks: list[Check]) -> list[str]:
    return [f"{check.name}: {check.detail}" for check in checks if not check.ok]


def thin_clients(moto: Moto) -> tuple[AutoScaling, Callable[..., Any]]:
    thin = AutoScaling(moto.client("autoscaling"))
    return thin, lambda service, *where: thin if service == "autoscaling" else connect(service, *where)


def test_all_is_well_and_nothing_is_changed(moto: Moto) -> None:
    make_group(moto, "workers", desired=1)
    sqs, url = moto.client("sqs"), moto.queue()
    sqs.send_message(QueueUrl=url, MessageBody="for the autoscaler")
    client = moto.client("autoscaling")
    before = client.describe_auto_scaling_groups()["AutoScalingGroups"]
    _, to = thin_clients(moto)
    checks = check_aws(["workers"], queue_url=url, connect_to=to)
    assert failing(checks) == []
    assert any("0 to 4 nodes, 1 wanted" in check.detail for check in checks)
    assert client.describe_auto_scaling_groups()["AutoScalingGroups"] == before
    assert len(sqs.receive_message(QueueUrl=url)["Messages"]) == 1


ACTIONS = [
    *("CreateOrUpdateTags", "DeleteTags", "UpdateAutoScalingGroup", "DescribePolicies"),
    *("DescribeScalingActivities", "DescribeLifecycleHooks", "SuspendProcesses", "ResumeProcesses"),
    *("SetInstanceProtection", "RecordLifecycleActionHeartbeat", "CompleteLifecycleAction"),
]


def test_each_missing_right_is_named(moto: Moto) -> None:
    make_group(moto, "workers")
    thin, to = thin_clients(moto)
    thin.denied = {xform_name(action) for action in ACTIONS}
    found = failing(check_aws(["workers"], connect_to=to))
    assert len(found) == len(ACTIONS)
    for action in ACTIONS:
        assert any(f"no permission for autoscaling:{action} on workers" in text for text in found)


@pytest.mark.parametrize("action", ["ReceiveMessage", "DeleteMessage"])
def test_rights_on_the_queue(moto: Moto, action: str) -> None:
    sqs, url = moto.client("sqs"), moto.queue()

    def refuse(**arguments: object) -> None:
        raise client_error("AccessDenied", "no")

    class Denied:
        def __getattr__(self, name: str) -> Any:
            return refuse if name == xform_name(action) else getattr(sqs, name)

    def to(service: str, *where: str | None) -> Any:
        return Denied() if service == "sqs" else connect(service, *where)

    (found,) = failing(check_aws([], queue_url=url, connect_to=to))
    assert f"no permission for sqs:{action}" in found


def test_the_policy_in_the_docs_is_all_that_is_tried() -> None:
    text = (Path(__file__).parents[2] / "docs" / "howto" / "ec2.md").read_text()
    policy = json.loads(text.split("```json")[1].split("```")[0])
    allowed = {action for statement in policy["Statement"] for action in statement["Action"]}
    assert {f"autoscaling:{action}" for action in ACTIONS} <= allowed
    assert "autoscaling:TerminateInstanceInAutoScalingGroup" in allowed


def test_the_doctor_names_the_faults_of_the_groups(moto: Moto) -> None:
    make_group(moto, "closed", high=0)
    found = " / ".join(failing(check_aws(["closed", "absent"])))
    assert "its Max is 0" in found
    assert "no auto-scaling group 'absent' in eu-central-1" in found


def test_a_concurrent_change_of_the_group_is_not_undone(moto: Moto) -> None:
    make_group(moto, "workers", desired=1)
    client = moto.client("autoscaling")

    class Busy(AutoScaling):
        """Somebody else changes the group as soon as it has been read."""

        def describe_auto_scaling_groups(self, **given: Any) -> Any:
            answer = client.describe_auto_scaling_groups(**given)
            client.update_auto_scaling_group(
                AutoScalingGroupName="workers", DesiredCapacity=3, NewInstancesProtectedFromScaleIn=True
            )
            return answer

    busy = Busy(client)
    checks = check_aws(["workers"], connect_to=lambda s, *at: busy if s == "autoscaling" else connect(s, *at))
    assert failing(checks) == []
    (group,) = client.describe_auto_scaling_groups()["AutoScalingGroups"]
    assert (group["DesiredCapacity"], group["NewInstancesProtectedFromScaleIn"]) == (3, True)
    assert not [check for check in checks if "SetDesiredCapacity" in check.name]


def test_others_that_decide_a_groups_size_are_named(moto: Moto) -> None:
    make_group(moto, "workers")
    moto.client("autoscaling").put_scaling_policy(
        AutoScalingGroupName="workers",
        PolicyName="on-cpu",
        PolicyType="SimpleScaling",
        AdjustmentType="ChangeInCapacity",
        ScalingAdjustment=1,
    )
    _, to = thin_clients(moto)
    (found,) = failing(check_aws(["workers"], connect_to=to))
    assert "scaling policies of its own (on-cpu)" in found


def test_no_credentials_is_one_finding(moto: Moto, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    (check,) = check_aws(["workers"])
    assert not check.ok
    assert "AWS_PROFILE" in check.detail


def test_a_queue_that_is_not_there(moto: Moto) -> None:
    checks = check_aws([], queue_url=f"{moto.endpoint}/123456789012/none")
    assert any("sqs:GetQueueAttributes" in text for text in failing(checks))
