"""The CloudFormation example: what linters say, and that it agrees with the code."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cloud_template import TEMPLATE, UnknownNameError, group_tags, load_template
from cloud_template import user_data as rendered
from commands import ended

from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings

ROOT = Path(__file__).resolve().parents[2]
PROVIDERS = ROOT / "autoscaler" / "providers"
ACTION = re.compile(r"\b(?:autoscaling|cloudformation|ec2|pricing|sqs|ssm):[A-Z][A-Za-z]+\b")
# they run on a person's machine, never on the head
UP, DOWN = PROVIDERS / "ec2" / "stack_up.py", PROVIDERS / "ec2" / "stacks.py"


@pytest.fixture(scope="module")
def template() -> dict[str, Any]:
    return load_template()


def user_data(template: dict[str, Any], name: str) -> str:
    """The script, with something in the place of every substitution."""
    data = template["Resources"][name]["Properties"]["LaunchTemplateData"]["UserData"]
    text = data["Fn::Base64"]["Sub"][0]
    return re.sub(r"\$\{[A-Za-z:]+\}", "value", text)


@pytest.mark.processes
def test_cfn_lint_accepts_it() -> None:
    done = ended(
        [Path(sys.executable).with_name("cfn-lint"), "--non-zero-exit-code", "informational", TEMPLATE]
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("name", ["HeadTemplate", "NodeTemplate"])
def test_user_data_passes_shellcheck_and_fits(template: dict[str, Any], name: str, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.sh"
    script.write_text(user_data(template, name))
    assert script.stat().st_size < 16 * 1024  # EC2's limit
    _shellcheck(script)


def _shellcheck(script: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "--shell=bash", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["HeadTemplate", "NodeTemplate"])
def test_the_python_and_the_units_inside_are_whole(template: dict[str, Any], name: str) -> None:
    text = user_data(template, name)
    for word in re.findall(r"<<'?([A-Z]+)'?\n", text):
        assert f"\n{word}\n" in text, word
    for code in re.findall(r"<<'(?:PUBLISH|FETCH)'\n(.*?)\n(?:PUBLISH|FETCH)\n", text, re.DOTALL):
        compile(code, name, "exec")
    for unit in re.findall(r"<<UNIT\n(.*?)\nUNIT\n", text, re.DOTALL):
        assert all(section in unit for section in ("[Unit]", "[Service]", "[Install]", "ExecStart="))


@pytest.mark.parametrize("name", ["HeadTemplate", "NodeTemplate"])
def test_a_reference_without_a_value_is_refused(name: str) -> None:
    """The harness of the three machines would otherwise boot with a gap in the user data."""
    with pytest.raises(UnknownNameError, match="no value for"):
        rendered(name, {"AWS::Region": "eu-west-1"})
    with pytest.raises(UnknownNameError, match="the template has no Jobs"):
        rendered(name, {"Jobs": "train"})


def test_a_boot_ends_before_its_waiters_give_up(template: dict[str, Any]) -> None:
    """CloudFormation waits for the head, the autoscaler for a node; a kill may take 30 s more."""
    limits = {
        name: int(re.findall(r"^boot_seconds=(\d+)$", user_data(template, name), re.MULTILINE)[0])
        for name in ("HeadTemplate", "NodeTemplate")
    }
    assert limits["HeadTemplate"] + 60 < int(template["Resources"]["HeadServes"]["Properties"]["Timeout"])
    assert limits["NodeTemplate"] + 60 < ScalingSettings().boot_timeout


def test_commands_inside_have_the_options_they_use(template: dict[str, Any]) -> None:
    from adaptdl_elastic.autoscaler.commands.autoscale import autoscale

    known = {option for parameter in autoscale.params for option in parameter.opts}
    known |= {"--region", "--profile", "--queue-url"}  # the provider's own
    line = re.search(r"adaptdl autoscale (.*?)\nRestart", user_data(template, "HeadTemplate"), re.DOTALL)
    assert line is not None
    used = set(re.findall(r"--[a-z-]+", line.group(1)))
    assert used
    assert used <= known


@pytest.mark.processes
def test_a_node_watches_whether_it_is_accounted_for(template: dict[str, Any]) -> None:
    """The unit as the shell writes it, and as systemd reads it."""
    from adaptdl_elastic.agent.machine.node_end import parse_options

    text = user_data(template, "NodeTemplate")
    written = re.search(r"> (\S+/adaptdl-node-end.service <<UNIT\n.*?\nUNIT\n)", text, re.DOTALL)
    assert written is not None
    assert text.index("/opt/adaptdl/bin/pip install") < written.start() < text.index("fetch.py")
    script = "silence=3600 job=train\ncat " + written[1].partition(" ")[2]
    unit = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout
    (command,) = re.findall(r"^ExecStart=(.*)$", unit.replace("\\\n", " "), re.MULTILINE)
    program, dash_m, module, *arguments = shlex.split(command)
    assert (program, dash_m) == ("/opt/adaptdl/bin/python", "-m")
    assert module == "adaptdl_elastic.agent.machine.node_end"
    # systemd reads a quote only at the beginning of a word
    assert not re.search(r"[^ ]'[^ ]", command.replace(" '", " "))
    options = parse_options(arguments, {"ADAPTDL_ETCD": "https://10.0.0.1:2379"})
    assert (options.after, options.stop) == (3600.0, "/usr/bin/systemctl stop adaptdl@train")


def policy_actions(template: dict[str, Any]) -> set[str]:
    policies = template["Resources"]["HeadRole"]["Properties"]["Policies"]
    (autoscaler,) = (p for p in policies if p["PolicyName"] == "autoscaler")
    found: set[str] = set()
    for statement in autoscaler["PolicyDocument"]["Statement"]:
        found |= set(statement["Action"])
    return found


def actions_in_code() -> set[str]:
    """What the head calls, by the names that its errors say."""
    found: set[str] = set()
    for source in set(PROVIDERS.rglob("*.py")) - {UP, DOWN}:
        found |= set(ACTION.findall(source.read_text()))
    calls = re.findall(
        r"self\._(autoscaling|ec2|_?sqs)\.([a-z_]+)\(", (PROVIDERS / "ec2" / "provider.py").read_text()
    )
    for service, call in calls:
        if call != "get_paginator":
            found.add(f"{service}:{''.join(part.capitalize() for part in call.split('_'))}")
    return found | {"sqs:DeleteMessage"}  # DeleteMessageBatch needs this one


def test_the_role_may_do_what_the_code_does_and_nothing_else(template: dict[str, Any]) -> None:
    assert policy_actions(template) - {"sqs:GetQueueAttributes"} == actions_in_code() - {
        "sqs:GetQueueAttributes"
    }


def statements(template: dict[str, Any], role: str) -> list[tuple[set[str], list[str]]]:
    """The actions and resources of each statement of a role."""
    properties = template["Resources"][role]["Properties"]
    assert "ManagedPolicyArns" not in properties, "policies of others change, and allow more than is needed"
    found = []
    for policy in properties["Policies"]:
        for one in policy["PolicyDocument"]["Statement"]:
            actions = {one["Action"]} if isinstance(one["Action"], str) else set(one["Action"])
            resources = one["Resource"] if isinstance(one["Resource"], list) else [one["Resource"]]
            texts = [str(*part.values()) if isinstance(part, dict) else str(part) for part in resources]
            found.append((actions, texts))
    return found


SESSION = {"ssm:UpdateInstanceInformation"} | {
    f"ssmmessages:{action}Channel" for action in ("CreateControl", "CreateData", "OpenControl", "OpenData")
}
"""What AWS names as the least for Session Manager; IAM knows no resources for these."""


@pytest.mark.parametrize("role", ["HeadRole", "NodeRole"])
def test_a_role_reaches_nothing_of_another_stack(template: dict[str, Any], role: str) -> None:
    groups = [template["Resources"][group]["Properties"] for group in ("SpotGroup", "OnDemandGroup")]
    names = [group["AutoScalingGroupName"]["Sub"] for group in groups]
    for actions, resources in statements(template, role):
        if resources == ["*"]:
            looks = {action for action in actions if ":Describe" in action} | {"pricing:GetProducts"}
            assert actions in (SESSION, looks)
            continue
        assert not any("*" in action for action in actions)
        services = {action.partition(":")[0] for action in actions}
        assert len(services) == 1
        if services == {"autoscaling"}:
            assert [one.rpartition("/")[2] for one in resources] == names, "NAME-* would match NAME-2-spot"
        elif services == {"ssm"}:
            assert [one.partition(":parameter/")[2] for one in resources] == ["adaptdl/${AWS::StackName}/*"]
        elif services == {"s3"} and actions != {"s3:ListBucket"}:
            # checkpoints are beside the secret of their job
            own = ("/${AWS::StackName}/", "/data/")
            assert all(one.partition("${Bucket}")[2].startswith(own) for one in resources)
        else:
            assert services <= {"s3", "sqs"}


def test_a_node_may_end_nodes_of_its_own_stack_and_nothing_else_of_ec2(template: dict[str, Any]) -> None:
    allowed = set().union(*(actions for actions, _ in statements(template, "NodeRole")))
    assert {one for one in allowed if one.startswith(("ec2:", "autoscaling:"))} == {
        "autoscaling:TerminateInstanceInAutoScalingGroup"
    }


def test_the_head_cannot_be_reached_from_outside_and_has_a_way_out(template: dict[str, Any]) -> None:
    """An interface that is made before its instance gets no public address from its subnet."""
    resources = template["Resources"]
    joined = resources["HeadAddressAssociation"]
    assert joined["Properties"]["NetworkInterfaceId"] == {"Ref": "HeadInterface"}
    assert joined["Condition"] == resources["HeadAddress"]["Condition"] == "PublicHead"
    public = template["Conditions"]["PublicHead"]["Or"]
    assert public == [{"Condition": "OwnNetwork"}, {"Equals": [{"Ref": "HeadIsPublic"}, "yes"]}]
    # the head waits for these by naming them
    named = json.dumps(resources["Head"]["Properties"]["Tags"])
    assert "HeadAddressAssociation" in named
    assert "RoutesA" in named
    assert resources["RoutesA"]["DependsOn"] == resources["RoutesB"]["DependsOn"] == "WayOut"
    # what has a public address is deleted before the way out
    for name in ("HeadAddress", "SpotGroup", "OnDemandGroup"):
        assert "RoutesA" in json.dumps(resources[name]["Properties"]["Tags"])
    assert all(resources[name]["Properties"]["MapPublicIpOnLaunch"] for name in ("SubnetA", "SubnetB"))
    (way_in,) = (one for one in resources.values() if one["Type"] == "AWS::EC2::SecurityGroupIngress")
    assert way_in["Properties"]["SourceSecurityGroupId"] == {"Ref": "ClusterGroup"}


@pytest.mark.parametrize("group", ["SpotGroup", "OnDemandGroup"])
def test_prices_and_limits_are_tags_of_the_groups_and_no_part_of_the_head(
    template: dict[str, Any], group: str
) -> None:
    values = {"AWS::StackName": "s", "MaxNodes": "12", "OnDemandPrice": "0.5", "MaxJobCost": "7.5"}
    tags = group_tags(group, values)
    assert (
        tags["adaptdl-elastic:settings"]
        == "max-nodes=12 max-hourly-cost=10 max-job-cost=7.5 boot-timeout=1200"
    )
    assert tags["adaptdl-elastic:prices"] == "g5.xlarge=0.5 g6.xlarge=0.5"
    # without a price AWS's price list is asked
    assert group_tags(group, {"AWS::StackName": "s"})["adaptdl-elastic:prices"] == ""
    for name in ("MaxNodes", "OnDemandPrice", "InstanceType", "MaxHourlyCost", "MaxJobCost", "Code"):
        assert f"${{{name}}}" not in json.dumps(template["Resources"]["HeadTemplate"])


def test_no_bucket_is_left_behind_by_a_stack_that_fails(template: dict[str, Any]) -> None:
    types = {one["Type"] for one in template["Resources"].values()}
    assert "AWS::S3::Bucket" not in types


def test_machines_and_disks_are_parameters_that_the_page_names(template: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "howto" / "ec2.md").read_text()
    for name, default in {"HeadType": "t3.small", "HeadDiskSize": 16, "NodeDiskSize": 100}.items():
        assert template["Parameters"][name]["Default"] == default
        assert f"`{name}` ({default}" in page
    for name, kind, size in (
        ("HeadTemplate", "HeadType", "HeadDiskSize"),
        ("NodeTemplate", "InstanceType", "NodeDiskSize"),
    ):
        machine = template["Resources"][name]["Properties"]["LaunchTemplateData"]
        assert machine["InstanceType"] == {"Ref": kind}
        assert [disk["Ebs"]["VolumeSize"] for disk in machine["BlockDeviceMappings"]] == [{"Ref": size}]


def policies_on_the_page() -> list[set[str]]:
    page = (ROOT / "docs" / "howto" / "ec2.md").read_text()
    found = []
    for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL):
        statements = json.loads(block)["Statement"]
        found.append({action for statement in statements for action in statement["Action"]})
    return found


def test_the_policy_on_the_page_is_the_templates(template: dict[str, Any]) -> None:
    assert policies_on_the_page()[0] == policy_actions(template)


def test_the_page_names_the_actions_of_cloud_down() -> None:
    page = (ROOT / "docs" / "howto" / "ec2.md").read_text()
    (sentence,) = re.findall(r"`adaptdl cloud down` needs\s(.*?)\.\s", page, re.DOTALL)
    known = set(ACTION.findall(sentence))
    used = set(ACTION.findall(DOWN.read_text() + DOWN.with_name("prices.py").read_text()))
    assert used <= known
    # what CloudFormation does in the name of the person who deletes
    assert known - used == {"ec2:TerminateInstances", "autoscaling:DeleteAutoScalingGroup"}


def test_the_page_names_the_actions_of_cloud_up() -> None:
    page = (ROOT / "docs" / "howto" / "ec2.md").read_text()
    (sentence,) = re.findall(r"`adaptdl cloud up` needs\s(.*?)\.\s", page, re.DOTALL)
    known = set(re.findall(r"\b[a-z0-9]+:[A-Z][A-Za-z]+\b", sentence))
    used = set(re.findall(r"\b[a-z0-9]+:[A-Z][A-Za-z]+\b", UP.read_text()))
    # it looks at a stack as `cloud down` does
    used |= {"cloudformation:DescribeStacks"} & set(ACTION.findall(DOWN.read_text()))
    assert known == used


@pytest.mark.parametrize("page", ["docs/howto/several-nodes.md", "autoscaler/providers/ec2/stack.yaml"])
def test_no_etcd_of_one_member_opens_a_port_for_others(page: str) -> None:
    """etcd asks its peers for no password, and port 2380 of loopback is its default."""
    text = (ROOT / page).read_text(encoding="utf-8")
    units = re.findall(r"^ *WorkingDirectory=(\S+)\n *ExecStart=/usr/bin/etcd ((?:.*\\\n)*.*)", text, re.M)
    assert len(units) == text.count("ExecStart=/usr/bin/etcd ") == 1
    for folder, options in units:
        assert folder == "/var/lib/etcd"
        assert "--listen-peer-urls=unix://peer:1 " in options
