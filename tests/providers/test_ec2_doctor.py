from __future__ import annotations

from typing import Any

import pytest
from moto_process import Moto, make_group
from thin_aws import AutoScaling

from adaptdl_elastic.autoscaler.providers.ec2 import connect
from adaptdl_elastic.autoscaler.providers.ec2_doctor import Check, check_aws


def failing(checks: list[Check]) -> list[str]:
    return [f"{check.name}: {check.detail}" for check in checks if not check.ok]


def test_all_is_well_and_nothing_is_changed(moto: Moto) -> None:
    make_group(moto, "workers", desired=1)
    url = moto.client("sqs").create_queue(QueueName="notices")["QueueUrl"]
    client = moto.client("autoscaling")
    before = client.describe_auto_scaling_groups()["AutoScalingGroups"]
    checks = check_aws(["workers"], queue_url=url)
    assert failing(checks) == []
    assert any("0 to 4 nodes, 1 wanted" in check.detail for check in checks)
    assert client.describe_auto_scaling_groups()["AutoScalingGroups"] == before


def test_each_missing_right_is_named(moto: Moto) -> None:
    make_group(moto, "workers")
    thin = AutoScaling(moto.client("autoscaling"))
    thin.denied = {"set_desired_capacity", "create_or_update_tags", "describe_lifecycle_hooks"}

    def to(service: str, region: str | None, profile: str | None) -> Any:
        return thin if service == "autoscaling" else connect(service, region, profile)

    found = failing(check_aws(["workers"], connect_to=to))
    assert len(found) == 3
    for action in ("SetDesiredCapacity", "CreateOrUpdateTags", "DescribeLifecycleHooks"):
        assert any(f"no permission for autoscaling:{action} on workers" in text for text in found)


def test_what_is_wrong_with_the_groups_is_named(moto: Moto) -> None:
    make_group(moto, "closed", high=0)
    make_group(moto, "upside-down", low=3, high=1, desired=1)
    found = " / ".join(failing(check_aws(["closed", "upside-down", "absent"])))
    assert "its Max is 0" in found
    assert "its Min 3 is above its Max 1" in found
    assert "no auto-scaling group 'absent' in eu-central-1" in found


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
